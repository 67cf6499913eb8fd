"""Named Hypothesis strategies for models of every family, small enough that a ledger takes milliseconds."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from memcalc.models import MODELS, Model

__all__ = [
    "berts",
    "clips",
    "decoders",
    "gpt2s",
    "latents",
    "llamas",
    "megatrons",
    "mlps",
    "models",
    "moes",
    "named_models",
    "resnets",
    "shaped_models",
    "sizes",
    "t5s",
    "token_models",
    "vits",
    "whispers",
]


@st.composite
def gpt2s(draw: st.DrawFn, max_layers: int = 3) -> Model:
    """GPT-2 models of up to ``max_layers`` blocks."""
    heads = draw(st.sampled_from([1, 2, 4]))
    hidden = heads * draw(st.sampled_from([8, 16, 24]))
    return Model(
        name="drawn-gpt2", family="gpt2", layers=draw(st.integers(1, max_layers)), hidden=hidden, heads=heads,
        kv_heads=heads, ffn=draw(st.integers(1, 4 * hidden)), vocab=draw(st.integers(2, 300)),
        context=draw(st.sampled_from([8, 16, 33])), tied=True,
    )  # fmt: skip


@st.composite
def llamas(draw: st.DrawFn, max_layers: int = 3) -> Model:
    """Llama models of up to ``max_layers`` blocks, with grouped queries or without, and its relatives."""
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return Model(
        name="drawn-llama", family="llama", layers=draw(st.integers(1, max_layers)),
        hidden=heads * draw(st.sampled_from([8, 16, 24])), heads=heads, kv_heads=kv_heads,
        ffn=draw(st.integers(1, 200)), vocab=draw(st.integers(2, 300)), context=draw(st.sampled_from([8, 16, 33])),
        head_dim=draw(st.sampled_from([0, 10])), biases=draw(st.sampled_from([(), ("qkv",)])),
        fused_qkv=draw(st.booleans()), qk_norm=draw(st.booleans()), tied=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def decoders(draw: st.DrawFn, max_layers: int = 2) -> Model:
    """Every option of the family decoder."""
    model = draw(llamas(max_layers))
    positions = draw(st.sampled_from(["", "rotary", "learned", "alibi"]))
    side_by_side = draw(st.integers(0, 2))
    norm = draw(st.sampled_from(["", "rms", "layer"]))
    parts = st.sets(st.sampled_from(["qkv", "out", "mlp", "head", *["norm"] * (norm == "layer")]))
    gated = draw(st.booleans())
    after = draw(st.sampled_from(["", "post_norm", "norm_after"])) if not side_by_side else ""
    return dataclasses.replace(
        model, name="drawn-decoder", family="decoder", norm=norm,
        activation=draw(st.sampled_from(["", "silu", "gelu", "relu"])), gated=gated, positions=positions,
        rotary_dim=draw(st.sampled_from([0, 4])), side_by_side=side_by_side, biases=tuple(sorted(draw(parts))),
        post_norm=after == "post_norm", norm_after=after == "norm_after", embedding_norm=draw(st.booleans()),
        fused_gate_up=gated and draw(st.booleans()), embedding_dim=draw(st.sampled_from([0, 0, 12])),
        head_major=draw(st.booleans()),
        scaled=tuple(sorted(draw(st.sets(st.sampled_from(["embedding", "residual", "logits"]))))),
        capped=tuple(sorted(draw(st.sets(st.sampled_from(["attention", "logits"]))))),
    )  # fmt: skip


@st.composite
def berts(draw: st.DrawFn, max_layers: int = 3) -> Model:
    """BERT models of up to ``max_layers`` blocks, with each head, and its relatives."""
    model = draw(gpt2s(max_layers))
    types, classes = draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 5]))
    heads = ["", "tokens", "spans"] if classes else ["", "", "pretraining", "replaced", "pooled", "bare"]
    offset = draw(st.sampled_from([0, 2]))
    return dataclasses.replace(
        model, name="drawn-bert", family="bert", types=types, classes=classes, head=draw(st.sampled_from(heads)),
        position_offset=offset, context=model.context + offset, embedding_dim=draw(st.sampled_from([0, 0, 7])),
    )  # fmt: skip


@st.composite
def moes(draw: st.DrawFn, max_layers: int = 2) -> Model:
    """Llama with a mixture of up to five experts, a shared one or none, dense blocks, and latent attention or its own."""
    experts, shared_ffn = draw(st.integers(1, 5)), draw(st.sampled_from([0, 7, 64]))
    model = draw(st.one_of(llamas(max_layers), latents(max_layers)))
    dense = draw(st.sampled_from([(), (), (0,), (1, 5)]))
    return dataclasses.replace(
        model, name="drawn-moe", family="moe", experts=experts, top_k=draw(st.integers(1, experts)),
        shared_ffn=shared_ffn, shared_gate=bool(shared_ffn) and draw(st.booleans()), dense_layers=dense,
        dense_ffn=50 * bool(dense), wide_router=draw(st.booleans()), stacked=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def latents(draw: st.DrawFn, max_layers: int = 2) -> Model:
    """Decoders with latent attention, whose values are as wide as keys or not."""
    heads = draw(st.sampled_from([1, 2, 4]))
    return Model(
        name="drawn-latent", family="decoder", layers=draw(st.integers(1, max_layers)), hidden=draw(st.integers(4, 60)),
        heads=heads, kv_heads=heads, ffn=draw(st.integers(1, 99)), vocab=draw(st.integers(2, 300)),
        context=draw(st.sampled_from([8, 16, 33])), head_dim=draw(st.sampled_from([10, 16])), rotary_dim=4,
        value_dim=draw(st.sampled_from([5, 10, 16])), q_lora=draw(st.sampled_from([0, 9])), kv_lora=draw(st.integers(1, 20)),
        biases=draw(st.sampled_from([(), ("qkv", "out")])), tied=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def vits(draw: st.DrawFn, max_layers: int = 3) -> Model:
    """Vision Transformers of up to ``max_layers`` blocks and 17 places."""
    heads, patch, channels = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    image = patch * draw(st.integers(1, 4))
    return Model(
        name="drawn-vit", family="vit", layers=draw(st.integers(1, max_layers)), hidden=heads * draw(st.integers(2, 24)),
        heads=heads, kv_heads=heads, ffn=draw(st.integers(1, 99)), image=image, channels=channels, patch=patch,
        features=channels * image**2, classes=draw(st.integers(1, 20)), separate_qkv=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def clips(draw: st.DrawFn) -> Model:
    """CLIP's vision tower."""
    model = draw(vits())
    activation = draw(st.sampled_from(["quick_gelu", "gelu", "relu"]))
    return dataclasses.replace(
        model, name="drawn-clip", family="clip", classes=0, head="pooled", separate_qkv=False, activation=activation
    )


@st.composite
def whispers(draw: st.DrawFn) -> Model:
    """Whisper and mBART with two encoder blocks, and heads and widths of each side's own."""
    heads, family = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["whisper", "mbart"]))
    offset, hears = 2 * (family == "mbart"), family == "whisper"
    return Model(
        name=f"drawn-{family}", family=family, layers=2, decoder_layers=draw(st.integers(1, 2)),
        hidden=heads * draw(st.sampled_from([8, 16])), heads=heads, decoder_heads=draw(st.sampled_from([0, 2 * heads])),
        ffn=draw(st.integers(1, 99)), decoder_ffn=draw(st.sampled_from([0, 9])), vocab=draw(st.integers(2, 300)),
        context=draw(st.sampled_from([8, 16])) + offset, position_offset=offset, tied=draw(st.booleans()),
        channels=4 * hears, encoder_tokens=draw(st.sampled_from([8, 20])) * hears, embedding_norm=not hears, norm_after=not hears and draw(st.booleans()),
        scaled=draw(st.sampled_from([(), ("embedding",)])),
    )  # fmt: skip


@st.composite
def t5s(draw: st.DrawFn) -> Model:
    """T5 with two encoder blocks, so that checkpoints of one or two divide them, and one or two decoder blocks."""
    heads = draw(st.sampled_from([1, 2, 4]))
    return Model(
        name="drawn-t5", family="t5", layers=2, decoder_layers=draw(st.integers(1, 2)),
        hidden=heads * draw(st.sampled_from([8, 16])), heads=heads, kv_heads=heads, ffn=draw(st.integers(1, 99)),
        vocab=draw(st.integers(2, 300)), context=draw(st.sampled_from([8, 16, 33])), buckets=draw(st.integers(2, 32)),
        gated=draw(st.booleans()), tied=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def resnets(draw: st.DrawFn) -> Model:
    """ResNets of up to three stages, basic or bottleneck."""
    image = draw(st.sampled_from([1, 8, 15]))
    return Model(
        name="drawn-resnet", family="resnet", stages=tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))),
        bottleneck=draw(st.booleans()), hidden=draw(st.integers(1, 12)), image=image, channels=3, features=3 * image**2,
        classes=draw(st.integers(1, 20)),
    )  # fmt: skip


@st.composite
def mlps(draw: st.DrawFn, max_layers: int = 4) -> Model:
    """Layers of equal width, or each of its own, with any activation."""
    layers = draw(st.integers(1, max_layers))
    widths = st.lists(st.integers(1, 300), min_size=layers, max_size=layers).map(tuple)
    return Model(
        name="drawn-mlp", family="mlp", layers=layers, hidden=draw(st.integers(1, 300)),
        features=draw(st.integers(1, 300)), classes=draw(st.integers(1, 20)), batch_norm=draw(st.booleans()),
        widths=draw(st.one_of(st.just(()), widths)),
        activation=draw(st.sampled_from(["", "tanh", "gelu", "elu", "leaky_relu", "identity"])),
    )  # fmt: skip


@st.composite
def sizes(draw: st.DrawFn) -> Model:
    """Models known by their size alone, with or without a shape."""
    layers = draw(st.integers(0, 5))
    return Model(
        name="drawn-size", family="size", parameters=draw(st.integers(10, 10**10)), layers=layers,
        features=draw(st.sampled_from([0, 7, 3072])),
        layer_bytes=draw(st.sampled_from([0, 1000, 64_000])) if layers else 0,
    )  # fmt: skip


@st.composite
def megatrons(draw: st.DrawFn, max_layers: int = 2) -> Model:
    """Megatron's GPT with every option, and heads and widths that 2 and 4 divide."""
    kv_heads = draw(st.sampled_from([2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    return Model(
        name="drawn-megatron", family="megatron", layers=draw(st.integers(1, max_layers)),
        hidden=heads * draw(st.sampled_from([8, 16])), heads=heads, kv_heads=kv_heads, ffn=4 * draw(st.integers(1, 50)),
        vocab=draw(st.integers(2, 300)), context=draw(st.sampled_from([8, 16, 32])), tied=draw(st.booleans()),
        gated=draw(st.booleans()), norm=draw(st.sampled_from(["", "layer", "rms"])),
        positions=draw(st.sampled_from(["", "learned", "rotary", "alibi"])), embedding_norm=draw(st.booleans()),
        biases=draw(st.sampled_from([(), ("qkv",), ("qkv", "out", "mlp")])),
    )  # fmt: skip


def token_models() -> st.SearchStrategy[Model]:
    """Models that read tokens."""
    return st.one_of(gpt2s(), llamas(), decoders(), latents(), berts(), moes())


def shaped_models() -> st.SearchStrategy[Model]:
    """Models whose every tensor is known."""
    return st.one_of(token_models(), t5s(), whispers(), vits(), clips(), resnets(), mlps())


def models() -> st.SearchStrategy[Model]:
    """Models of every family."""
    return st.one_of(shaped_models(), sizes())


def named_models() -> st.SearchStrategy[Model]:
    """The models of the catalog."""
    return st.sampled_from(list(MODELS.values()))
