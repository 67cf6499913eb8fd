"""Named relatives of Llama and GPT: published config.json files, said in fields of the families llama and decoder."""

from __future__ import annotations

from typing import Any

from memcalc.spec import Model

__all__ = ["ARCHITECTURES", "RELATIVES"]

EVERYWHERE = ("qkv", "out", "mlp", "norm")


def _of(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, **fields: Any
) -> Model:
    return Model(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, context=context,
        **{"family": "decoder", **fields},
    )  # fmt: skip


_LLAMA = {"family": "llama"}
_QWEN2 = {"family": "llama", "biases": ("qkv",)}
_QWEN3 = {"family": "llama", "qk_norm": True, "head_dim": 128}
_GEMMA = {"gated": True, "activation": "gelu", "tied": True, "scaled": ("embedding",), "head_dim": 256}
_GEMMA2 = {**_GEMMA, "post_norm": True, "capped": ("attention", "logits")}
_GRANITE = {"gated": True, "tied": True, "scaled": ("embedding", "residual", "logits")}
_NEOX = {"norm": "layer", "activation": "gelu", "biases": EVERYWHERE, "side_by_side": 2, "fused_qkv": True}
_PHI = {
    "norm": "layer", "activation": "gelu", "biases": (*EVERYWHERE, "head"), "side_by_side": 1, "rotary_dim": 32,
}  # fmt: skip
_FALCON = {"norm": "layer", "activation": "gelu", "biases": ("norm",), "fused_qkv": True, "tied": True}
_OPT = {"norm": "layer", "activation": "relu", "biases": EVERYWHERE, "positions": "learned", "tied": True}
_BLOOM = {
    "norm": "layer", "activation": "gelu", "biases": EVERYWHERE, "positions": "alibi", "tied": True, "fused_qkv": True,
    "embedding_norm": True,
}  # fmt: skip
_MPT = {"norm": "layer", "activation": "gelu", "positions": "alibi", "tied": True, "fused_qkv": True}
_STARCODER = {
    "norm": "layer", "activation": "gelu", "biases": EVERYWHERE, "positions": "learned", "tied": True, "fused_qkv": True,
}  # fmt: skip

_INTERNLM = {"gated": True, "biases": ("qkv", "out")}
_CHATGLM2 = {"gated": True, "biases": ("qkv",), "fused_qkv": True}
_GPT_J = {"norm": "layer", "activation": "gelu", "biases": ("mlp", "head", "norm"), "side_by_side": 1, "rotary_dim": 64}
_GPT_NEO = {
    "norm": "layer",
    "activation": "gelu",
    "biases": ("out", "mlp", "norm"),
    "positions": "learned",
    "tied": True,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-fused": {**_LLAMA, "fused_qkv": True},
    "mixtral": {"family": "moe", "experts": 8, "top_k": 2},
    "qwen3-moe": {"family": "moe", "qk_norm": True, "head_dim": 128, "experts": 128, "top_k": 8},
    "qwen": {**_QWEN2, "fused_qkv": True},
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "internlm": {"family": "decoder", **_INTERNLM},
    "chatglm2": {"family": "decoder", **_CHATGLM2, "rotary_share": 0.5},
    "gemma": {"family": "decoder", **_GEMMA},
    "gemma2": {"family": "decoder", **_GEMMA2},
    "gemma2-27b": {"family": "decoder", **_GEMMA2, "head_dim": 128},
    "granite": {"family": "decoder", **_GRANITE},
    "neox": {"family": "decoder", **_NEOX, "rotary_share": 0.25},
    "phi": {"family": "decoder", **_PHI},
    "falcon": {"family": "decoder", **_FALCON, "side_by_side": 1},
    "falcon-two-norms": {"family": "decoder", **_FALCON, "side_by_side": 2},
    "gpt-j": {"family": "decoder", **_GPT_J},
    "gpt-neo": {"family": "decoder", **_GPT_NEO},
    "gpt2": {"family": "gpt2", "tied": True},
    "opt": {"family": "decoder", **_OPT, "more_positions": 2},
    "bloom": {"family": "decoder", **_BLOOM},
    "mpt": {"family": "decoder", **_MPT},
    "starcoder": {"family": "decoder", **_STARCODER},
}
"""What the models of a kind have in common; ``rotary_share`` of a head is rotated, and a table of positions may have
``more_positions`` than tokens."""

RELATIVES = [
    # Grattafiori et al. 2024 (Llama 3.2 of the same report's models), Abdin et al. 2024 (Phi-3 mini).
    _of("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 131072, **_LLAMA, tied=True),
    _of("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, 131072, **_LLAMA, tied=True),
    _of("phi-3-mini", 32, 3072, 32, 32, 8192, 32064, 4096, **_LLAMA, fused_qkv=True),
    # Yang et al. 2024 (Qwen 2.5), Yang et al. 2025 (Qwen 3).
    _of("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, 32768, **_QWEN2, tied=True),
    _of("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, 32768, **_QWEN2, tied=True),
    _of("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 131072, **_QWEN2),
    _of("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 131072, **_QWEN2),
    _of("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, 131072, **_QWEN2),
    _of("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, 40960, **_QWEN3, tied=True),
    _of("qwen3-4b", 36, 2560, 32, 8, 9728, 151936, 40960, **_QWEN3, tied=True),
    _of("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 40960, **_QWEN3),
    _of("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, 40960, **_QWEN3),
    # Mesnard et al. 2024 (Gemma); Riviere et al. 2024 (Gemma 2).
    _of("gemma-2b", 18, 2048, 8, 1, 16384, 256000, 8192, **_GEMMA),
    _of("gemma-7b", 28, 3072, 16, 16, 24576, 256000, 8192, **_GEMMA),
    _of("gemma-2-2b", 26, 2304, 8, 4, 9216, 256000, 8192, **_GEMMA2),
    _of("gemma-2-9b", 42, 3584, 16, 8, 14336, 256000, 8192, **_GEMMA2),
    _of("gemma-2-27b", 46, 4608, 32, 16, 36864, 256000, 8192, **{**_GEMMA2, "head_dim": 128}),
    # Shen et al. 2024 (PowerLM), of Granite's architecture.
    _of("powerlm-3b", 40, 2304, 36, 36, 9216, 49152, 4096, **_GRANITE),
    # Black et al. 2022 (GPT-NeoX-20B), Biderman et al. 2023 (Pythia, table 1), Wang and Komatsuzaki 2021 (GPT-J).
    _of("gpt-neox-20b", 44, 6144, 64, 64, 24576, 50432, 2048, **_NEOX, rotary_dim=24),
    _of("pythia-160m", 12, 768, 12, 12, 3072, 50304, 2048, **_NEOX, rotary_dim=16),
    _of("pythia-410m", 24, 1024, 16, 16, 4096, 50304, 2048, **_NEOX, rotary_dim=16),
    _of("pythia-1b", 16, 2048, 8, 8, 8192, 50304, 2048, **_NEOX, rotary_dim=64),
    _of("pythia-2.8b", 32, 2560, 32, 32, 10240, 50304, 2048, **_NEOX, rotary_dim=20),
    _of("pythia-6.9b", 32, 4096, 32, 32, 16384, 50432, 2048, **_NEOX, rotary_dim=32),
    _of("pythia-12b", 36, 5120, 40, 40, 20480, 50688, 2048, **_NEOX, rotary_dim=32),
    _of("gpt-j-6b", 28, 4096, 16, 16, 16384, 50400, 2048, **_GPT_J),
    # Li et al. 2023 (phi-1.5), and phi-2's config.json.
    _of("phi-1.5", 24, 2048, 32, 32, 8192, 51200, 2048, **_PHI),
    _of("phi-2", 32, 2560, 32, 32, 10240, 51200, 2048, **_PHI),
    # Almazrouei et al. 2023 (Falcon).
    _of("falcon-7b", 32, 4544, 71, 1, 18176, 65024, 2048, **_FALCON, side_by_side=1),
    _of("falcon-40b", 60, 8192, 128, 8, 32768, 65024, 2048, **_FALCON, side_by_side=2),
    # Zhang et al. 2022 (OPT; its table of positions has two rows more than tokens), Scao et al. 2022 (BLOOM), MosaicML
    # 2023 (MPT), Li et al. 2023 (StarCoder).
    _of("opt-125m", 12, 768, 12, 12, 3072, 50272, 2050, **_OPT),
    _of("opt-1.3b", 24, 2048, 32, 32, 8192, 50272, 2050, **_OPT),
    _of("opt-6.7b", 32, 4096, 32, 32, 16384, 50272, 2050, **_OPT),
    _of("opt-13b", 40, 5120, 40, 40, 20480, 50272, 2050, **_OPT),
    _of("bloom-560m", 24, 1024, 16, 16, 4096, 250880, 2048, **_BLOOM),
    _of("bloom-7b1", 30, 4096, 32, 32, 16384, 250880, 2048, **_BLOOM),
    _of("mpt-7b", 32, 4096, 32, 32, 16384, 50432, 2048, **_MPT),
    _of("starcoder", 40, 6144, 48, 1, 24576, 49152, 8192, **_STARCODER),
]  # fmt: skip
