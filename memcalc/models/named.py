"""Named models. Each row is a published configuration, or a small one for tests and demonstrations."""

from __future__ import annotations

from typing import Any

from memcalc.catalog import Catalog
from memcalc.models.relatives import RELATIVES
from memcalc.spec import Model

__all__ = ["MODELS"]


def _gpt2(name: str, layers: int, hidden: int, heads: int, vocab: int = 50257, context: int = 1024) -> Model:
    return Model(
        name=name, family="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, vocab=vocab, context=context, tied=True,
    )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int) -> Model:
    return Model(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        ffn=ffn, vocab=vocab, context=context,
    )  # fmt: skip


def _moe(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    experts: int,
    top_k: int,
    shared_ffn: int = 0,
    **fields: Any,
) -> Model:
    return Model(
        name=name, family="moe", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        context=context, experts=experts, top_k=top_k, shared_ffn=shared_ffn, **fields,
    )  # fmt: skip


def _bert(name: str, layers: int, hidden: int, heads: int, vocab: int = 30522, context: int = 512) -> Model:
    return Model(
        name=name, family="bert", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, vocab=vocab, context=context, types=2, tied=True,
    )  # fmt: skip


def _vit(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    patch: int,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
) -> Model:
    return Model(
        name=name, family="vit", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        image=image, channels=channels, patch=patch, features=channels * image**2, classes=classes,
    )  # fmt: skip


def _resnet(
    name: str, stages: tuple[int, ...], *, bottleneck: bool, width: int = 64, image: int = 224, classes: int = 1000
) -> Model:
    return Model(
        name=name, family="resnet", stages=stages, bottleneck=bottleneck, hidden=width, image=image, channels=3,
        features=3 * image**2, classes=classes,
    )  # fmt: skip


def _t5(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    gated: bool,
    vocab: int = 32128,
    context: int = 512,
    head_dim: int = 0,
) -> Model:
    return Model(
        name=name, family="t5", layers=layers, decoder_layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=ffn, vocab=vocab, context=context, buckets=32, gated=gated, tied=not gated, head_dim=head_dim,
    )  # fmt: skip


def _megatron(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 50257,
    context: int = 2048,
    positions: str = "learned",
    embedding_norm: bool = False,
) -> Model:
    return Model(
        name=name, family="megatron", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocab=vocab, context=context, biases=("qkv", "out", "mlp"), tied=True, positions=positions,
        embedding_norm=embedding_norm,
    )  # fmt: skip


def _mlp(name: str, layers: int, width: int, classes: int) -> Model:
    return Model(name=name, family="mlp", layers=layers, hidden=width, features=width, classes=classes)


MODELS: Catalog[Model] = Catalog(
    "model",
    [
        # Radford et al. 2019, table 2; config.json of the published checkpoints.
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        # Sanh et al. 2019 (DistilBERT), the same recipe applied to GPT-2; config.json of distilgpt2.
        _gpt2("distilgpt2", 6, 768, 12),
        # Touvron et al. 2023 (Llama 2), table 1; config.json of the published checkpoints.
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        # Grattafiori et al. 2024 (Llama 3), table 3; config.json of the published checkpoints.
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 131072),
        # Others of the same architecture. Zhang et al. 2024 (TinyLlama); Jiang et al. 2023 (Mistral 7B), config.json of
        # v0.2, the first without sliding windows; Roziere et al. 2023 (Code Llama).
        _llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000, 2048),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 32768),
        _llama("codellama-34b", 48, 8192, 64, 8, 22016, 32000, 16384),
        *RELATIVES,
        # Jiang et al. 2024 (Mixtral), table 1; config.json of the published checkpoints.
        _moe("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768, experts=8, top_k=2),
        _moe("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32000, 65536, experts=8, top_k=2),
        # Yang et al. 2025 (Qwen 3), table 2; config.json of the published checkpoint.
        _moe("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, 40960, 128, 8, qk_norm=True, head_dim=128),
        # Devlin et al. 2019, section 3; config.json of the published checkpoints (BertForMaskedLM).
        _bert("bert-base", 12, 768, 12),
        _bert("bert-large", 24, 1024, 16),
        # Dosovitskiy et al. 2021, table 1, and Touvron et al. 2021 (DeiT), table 1, for the two small ones; 1000 classes.
        _vit("vit-tiny-16", 12, 192, 3, 16),
        _vit("vit-small-16", 12, 384, 6, 16),
        _vit("vit-base-16", 12, 768, 12, 16),
        _vit("vit-large-16", 24, 1024, 16, 16),
        _vit("vit-huge-14", 32, 1280, 16, 14),
        # Raffel et al. 2020, section 3.7, and Chung et al. 2022 (Flan, of T5 1.1); config.json of the published checkpoints.
        _t5("t5-small", 6, 512, 8, 2048, gated=False),
        _t5("t5-base", 12, 768, 12, 3072, gated=False),
        _t5("t5-large", 24, 1024, 16, 4096, gated=False),
        _t5("flan-t5-base", 12, 768, 12, 2048, gated=True),
        _t5("flan-t5-large", 24, 1024, 16, 2816, gated=True),
        _t5("flan-t5-xl", 24, 2048, 32, 5120, gated=True),
        _t5("t5-3b", 24, 1024, 32, 16384, gated=False, head_dim=128),
        _t5("flan-t5-xxl", 24, 4096, 64, 10240, gated=True),
        # Korthikanti et al. 2022, table 3; bigscience-workshop/bigscience experiments/tr3m-1B3.md; BigScience 2022 (BLOOM).
        _megatron("megatron-1.3b", 24, 2048, 16),
        _megatron("megatron-22b", 48, 6144, 64),
        _megatron("megatron-175b", 96, 12288, 96),
        _megatron("megatron-530b", 105, 20480, 128),
        _megatron("megatron-1t", 128, 25600, 160),
        _megatron("bloom-176b", 70, 14336, 112, vocab=250880, positions="alibi", embedding_norm=True),
        # He et al. 2016, table 1.
        _resnet("resnet-18", (2, 2, 2, 2), bottleneck=False),
        _resnet("resnet-34", (3, 4, 6, 3), bottleneck=False),
        _resnet("resnet-50", (3, 4, 6, 3), bottleneck=True),
        _resnet("resnet-101", (3, 4, 23, 3), bottleneck=True),
        _resnet("resnet-152", (3, 8, 36, 3), bottleneck=True),
        # Small ones that train on two CPU cores. 256 is the number of bytes, so they read plain text.
        _gpt2("gpt2-small-text", 6, 256, 8, vocab=256, context=256),
        _gpt2("gpt2-tiny", 2, 64, 4, vocab=256, context=128),
        _llama("llama-tiny", 2, 64, 4, 2, 192, 256, 128),
        _bert("bert-tiny", 2, 64, 4, vocab=257, context=128),
        _vit("vit-tiny", 2, 64, 4, 8, image=32, classes=10),
        _moe("moe-tiny", 2, 64, 4, 2, 96, 256, 128, experts=4, top_k=2),
        _resnet("resnet-tiny", (1, 1, 1), bottleneck=False, width=16, image=32, classes=10),
        _t5("t5-tiny", 2, 64, 4, 128, gated=False, vocab=256, context=64),
        _mlp("mlp", 5, 1024, 10),
        _mlp("mlp-tiny", 4, 256, 10),
    ],
)
