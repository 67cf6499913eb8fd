"""Megatron's GPT on the tape (Shoeybi et al. 2019, Korthikanti et al. 2022): fused kernels, one QKV matrix, dropout.

Sources: NVIDIA/Megatron-LM megatron/core/models/gpt/gpt_model.py and megatron/core/transformer; of before 2023,
bigscience-workshop/Megatron-DeepSpeed megatron/model. Options are fields of the Model: RMSNorm, rotary positions, SwiGLU,
a LayerNorm of the embedding (BLOOM), no biases, a head of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as fused_attention
from memcalc.errors import PlanError, UnknownNameError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.megatron import bias_dropout_add, bias_gelu, bias_swiglu, core_attention, own_tokens, reordered
from memcalc.models.checks import heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family, every_token
from memcalc.positions import rotary, rotary_tables
from memcalc.recorder import Storage
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape
from memcalc.tensor_parallel import column
from memcalc.tensor_parallel import leave as leave_products
from memcalc.vocab_parallel import embedding

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["FIELDS", "MEGATRON"]

FIELDS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "tied", "biases", "norm", "positions",
    "embedding_norm", "gated",
)  # fmt: skip

_WORDS = {"norm": ("", "layer", "rms"), "positions": ("", "learned", "rotary", "alibi")}
_BIASES = ("qkv", "out", "mlp")


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context")
    heads_divide(model)
    for field, known in _WORDS.items():
        if getattr(model, field) not in known:
            raise UnknownNameError(f"model {model.name}: {field}", getattr(model, field), known[1:])
    for part in model.biases:
        if part not in _BIASES:
            raise UnknownNameError(f"model {model.name}: bias", part, _BIASES)
    reads_tokens(model, plan)
    if plan.precision_row.autocast:
        raise PlanError(f"{plan.precision}: Megatron's weights have the dtype it computes in; take bf16-master or fp32")
    if plan.attention in ("math", "efficient"):
        raise PlanError(
            f"attention {plan.attention}: Megatron has flash and its own unfused kernels; take flash or eager"
        )
    if plan.attention == "flash" and model.positions == "alibi":
        raise PlanError(f"attention flash: {model.name} adds a bias by distance to its scores; take --attention eager")


def weights(model: Model) -> list[Weight]:
    """Twelve tensors a block with biases and LayerNorm, and the token table, which is the head where it is tied.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["megatron-1.3b"]))
    1315723264
    """
    found = table_weights(model)
    for layer in range(model.layers):
        found += block_weights(model, f"layers.{layer}")
    found += norm_weights(model, "final_layernorm", HEAD)
    return found if model.tied else [*found, Weight("output_layer.weight", (model.vocab, model.hidden), HEAD)]


def table_weights(model: Model) -> list[Weight]:
    h = model.hidden
    found = [Weight("word_embeddings.weight", (model.vocab, h))]
    if model.positions in ("", "learned"):
        found.append(Weight("position_embeddings.weight", (model.context, h)))
    if model.embedding_norm:
        found += [Weight("word_embeddings.norm.weight", (h,)), Weight("word_embeddings.norm.bias", (h,))]
    return found


def block_weights(model: Model, block: str, *, cross: bool = False) -> list[Weight]:
    """One block; ``cross``: with attention to what the encoder made."""
    h, width, kv = model.hidden, model.heads * model.head_width, model.kv_heads * model.head_width
    found = norm_weights(model, f"{block}.input_layernorm", block)
    found += _linear(model, f"{block}.self_attention.query_key_value", (width + 2 * kv, h), block, "qkv")
    found += _linear(model, f"{block}.self_attention.dense", (h, width), block, "out")
    found += norm_weights(model, f"{block}.post_attention_layernorm", block)
    if cross:
        found += _linear(model, f"{block}.cross_attention.query", (width, h), block, "qkv")
        found += _linear(model, f"{block}.cross_attention.key_value", (2 * kv, h), block, "qkv")
        found += _linear(model, f"{block}.cross_attention.dense", (h, width), block, "out")
        found += norm_weights(model, f"{block}.post_cross_layernorm", block)
    found += _linear(model, f"{block}.mlp.dense_h_to_4h", (model.ffn * (1 + model.gated), h), block, "mlp")
    return found + _linear(model, f"{block}.mlp.dense_4h_to_h", (h, model.ffn), block, "mlp")


def _linear(model: Model, name: str, shape: tuple[int, int], group: str, part: str) -> list[Weight]:
    found = [Weight(f"{name}.weight", shape, group)]
    return [*found, Weight(f"{name}.bias", shape[:1], group)] if part in model.biases else found


def norm_weights(model: Model, name: str, group: str) -> list[Weight]:
    found = [Weight(f"{name}.weight", (model.hidden,), group)]
    return found if model.norm == "rms" else [*found, Weight(f"{name}.bias", (model.hidden,), group)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Positions are looked up; the token table is, too, but where it is tied it is the head as well."""
    looked_up = weight.name.startswith("position") or (weight.name.startswith("word") and not model.tied)
    return 0 if looked_up else every_token(model, tokens, weight)


# transformer_engine/pytorch/cpp_extensions/gemm.py, get_cublas_workspace_size_bytes: from compute capability 9 on, before.
ENGINE_WORKSPACE, ENGINE_WORKSPACE_BEFORE = 33_554_432, 4_194_304


def buffers(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    """Transformer Engine takes a workspace for its products, once."""
    gpu = plan.gpu_row
    if plan.implementation.megatron != "transformer-engine" or gpu is None or gpu.capability is None:
        return []
    size = ENGINE_WORKSPACE if gpu.capability >= (9, 0) else ENGINE_WORKSPACE_BEFORE
    return [("Transformer Engine's workspace", (size,), "uint8")]


def standing(t: Tape, plan: Plan) -> list[Storage]:
    """The core's own attention makes its scores in one tensor that is never freed."""
    if plan.implementation.megatron != "core" or plan.kernel == "flash":
        return []
    shape = (plan.model.heads, plan.tokens, plan.tokens)
    return [t.allocate("scores made before", shape, t.weight_dtype, "buffers")]


def beside(t: Tape, plan: Plan) -> list[Storage]:
    """The mask of every sample, which the core's data loader makes (--create-attention-mask-in-dataloader)."""
    if plan.implementation.megatron == "auto":
        return []
    return [t.allocate("attention mask", (plan.tokens, plan.tokens), "bool", "inputs")]


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    """Words and positions; the same table serves encoder and decoder of a T5."""
    model = plan.model
    x = embedding(t, ids, "word_embeddings")
    if model.positions in ("rotary", "alibi") and not model.embedding_norm:
        x = leave_products(t, reordered(t, x, "embeddings, tokens first"), "word_embeddings")
        return ops.dropout(t, x, "embedding dropout", plan.dropout)
    if model.embedding_norm:
        x = norms.layer_norm(t, x, "word_embeddings.norm")
    if model.positions in ("", "learned"):
        places = Tensor(t.allocate("position ids", ids.shape, "int64", "inputs"), ids.shape, "int64", None)
        x = ops.add(t, x, ops.embedding(t, places, "position_embeddings"), "embeddings")
    x = own_tokens(t, reordered(t, x, "embeddings, tokens first"), "embeddings")
    return ops.dropout(t, x, "embedding dropout", plan.dropout)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    rotated = plan.model.positions == "rotary"
    tables = rotary_tables(t, plan.tokens, plan.model.head_width) if rotated else []
    names = [f"layers.{layer}" for layer in range(plan.model.layers)]
    return [(name, partial(block, t, plan, tables, name)) for name in names]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    x = norm(t, plan, x, "final_layernorm")
    return column(t, x, "output_layer", "word_embeddings.weight" if plan.model.tied else None)


def norm(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    return norms.rms_norm(t, x, name) if plan.model.norm == "rms" else norms.layer_norm(t, x, name)


def block(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    normed = norm(t, plan, x, f"{name}.input_layernorm")
    attended = attention(t, plan, tables, normed, f"{name}.self_attention")
    after = t.weights.get(f"{name}.self_attention.dense.bias")
    x = bias_dropout_add(t, attended, x, f"{name}.residual_1", after, plan.dropout)
    normed = norm(t, plan, x, f"{name}.post_attention_layernorm")
    y = mlp(t, plan, normed, f"{name}.mlp")
    after = t.weights.get(f"{name}.mlp.dense_4h_to_h.bias")
    return bias_dropout_add(t, y, x, f"{name}.residual_2", after, plan.dropout)


def attention(t: Tape, plan: Plan, tables: list[Storage], x: Tensor, name: str) -> Tensor:
    model = plan.model
    widths = [heads * model.head_width for heads in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = split(t, column(t, x, f"{name}.query_key_value"), widths, f"{name} query, key and value")
    if tables:
        q, k = (rotary(t, part, f"{name}.{letter}_rotary", tables) for part, letter in ((q, "q"), (k, "k")))
    return attend(t, plan, q, k, v, name)


def attend(t: Tape, plan: Plan, q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """Attention of what the products made, and the product after it."""
    model = plan.model
    if plan.kernel == "flash":
        x = fused_attention(t, q, k, v, name, kind="flash", heads=model.heads, dropout=plan.dropout)
    else:
        anew = plan.implementation.megatron != "core"
        run = partial(
            core_attention, t, name=name, heads=model.heads, head=model.head_width, dropout=plan.dropout, anew=anew
        )
        x = t.core(run, q, k, v) if t.core is not None else run(q, k, v)
    del q, k, v
    return leave_products(t, ops.linear(t, x, f"{name}.dense", bias=False), f"{name}.dense")


def split(t: Tape, x: Tensor, widths: list[int], name: str) -> list[Tensor]:
    """Views of one product; their gradients are put together."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, "temporary")]

    node = t.node([ops.edge(x)], backward, outputs=len(widths))
    return [Tensor(x.storage, (shape[0], width), dtype, node, slot) for slot, width in enumerate(widths)]


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    x = column(t, x, f"{name}.dense_h_to_4h", bias=False)
    activation = bias_swiglu if plan.model.gated else bias_gelu
    x = activation(t, x, f"{name}.activation", t.weights.get(f"{name}.dense_h_to_4h.bias"))
    return leave_products(t, ops.linear(t, x, f"{name}.dense_4h_to_h", bias=False), f"{name}.dense_4h_to_h")


MEGATRON = Family(
    name="megatron",
    untrained=lambda model: "models of the family megatron",
    summary="Megatron's GPT: fused bias, GELU, dropout and softmax; by options RMSNorm, rotary positions, SwiGLU, BLOOM's norm",
    reads="tokens",
    divides="megatron",
    fields=FIELDS,
    check=check,
    buffers=buffers,
    standing=standing,
    beside=beside,
    weights=weights,
    rows=rows,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
