"""BERT with its masked-language-model head on the tape, nearly line by line ``trainers/models/bert.py`` (Devlin et al. 2019)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.cross_entropy import head
from memcalc.graph import Tensor
from memcalc.models.checks import full_heads, head_is_tied, heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family, all_pairs, every_token
from memcalc.models.vit import first_place
from memcalc.positions import positions as learned
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["BERT"]

_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "ffn", "vocab", "context", "types")
    heads_divide(model)
    full_heads(model)
    if not model.classes:
        head_is_tied(model, True)
    reads_tokens(model, plan)


def weights(model: Model) -> list[Weight]:
    """Three tables, 16 tensors a block and the head, whose matrix is the word table; or a pooler and a classifier.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["bert-base"]))
    109514298
    """
    h, f = model.hidden, model.ffn
    rows = (model.vocab, model.context, model.types)
    found = [Weight(f"embeddings.{name}.weight", (count, h)) for name, count in zip(_TABLES, rows, strict=True)]
    found += _pair("embeddings.LayerNorm", (h,))
    for layer in range(model.layers):
        block = f"layer.{layer}"
        for name, shape in (
            ("attention.query", (h, h)), ("attention.key", (h, h)), ("attention.value", (h, h)),
            ("attention.dense", (h, h)), ("attention.LayerNorm", (h,)),
            ("intermediate", (f, h)), ("output", (h, f)), ("LayerNorm", (h,)),
        ):  # fmt: skip
            found += _pair(f"{block}.{name}", shape, block)
    if model.classes:
        return [*found, *_pair("pooler", (h, h), HEAD), *_pair("classifier", (model.classes, h), HEAD)]
    found.append(Weight("predictions.bias", (model.vocab,), HEAD))
    return [*found, *_pair("predictions.dense", (h, h), HEAD), *_pair("predictions.LayerNorm", (h,), HEAD)]


def _pair(name: str, shape: tuple[int, ...], group: str = "root") -> list[Weight]:
    return [Weight(f"{name}.weight", shape, group), Weight(f"{name}.bias", shape[:1], group)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Positions and types are looked up; the word table is, too, but it is the head as well."""
    if weight.name in ("pooler.weight", "classifier.weight"):
        return 1
    looked_up = _TABLES if model.classes else _TABLES[1:]
    found = weight.name.removeprefix("embeddings.").removesuffix(".weight") in looked_up
    return 0 if found else every_token(model, tokens, weight)


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    words = ops.embedding(t, ids, "embeddings.word_embeddings")
    types = Tensor(t.allocate("token types", ids.shape, "int64", "temporary"), ids.shape, "int64", None)
    segments = ops.embedding(t, types, "embeddings.token_type_embeddings")
    x = ops.add(t, words, segments, "embeddings with types")
    del words, types, segments
    x = ops.add(t, x, learned(t, "embeddings.position_embeddings", plan.tokens), "embeddings")
    x = norms.layer_norm(t, x, "embeddings.LayerNorm")
    return ops.dropout(t, x, "embedding dropout", plan.dropout)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"layer.{layer}", partial(block, t, plan, f"layer.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    if plan.model.classes:  # transformers/models/bert/modeling_bert.py, BertForSequenceClassification
        x = ops.relu(t, ops.linear(t, first_place(t, x), "pooler"), "pooler.tanh")
        return ops.linear(t, ops.dropout(t, x, "pooler.dropout", plan.dropout), "classifier")
    x = norms.layer_norm(
        t, ops.pointwise(t, ops.linear(t, x, "predictions.dense"), "predictions.gelu"), "predictions.LayerNorm"
    )
    return head(t, plan, x, "predictions", weight="embeddings.word_embeddings.weight")


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    x = attention(t, plan, x, f"{name}.attention")
    y = ops.pointwise(t, ops.linear(t, x, f"{name}.intermediate"), f"{name}.gelu")
    y = ops.dropout(t, ops.linear(t, y, f"{name}.output"), f"{name}.dropout", plan.dropout)
    return norms.layer_norm(t, ops.add(t, x, y, f"{name}.residual"), f"{name}.LayerNorm")


def attention(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    q, k, v = (ops.linear(t, x, f"{name}.{part}") for part in ("query", "key", "value"))
    wide = plan.implementation.softmax == "float32"
    y = attend(
        t, q, k, v, name, kind=plan.kernel, heads=plan.model.heads, dropout=plan.dropout, causal=False, wide=wide
    )
    del q, k, v
    y = ops.dropout(t, ops.linear(t, y, f"{name}.dense"), f"{name}.dropout", plan.dropout)
    return norms.layer_norm(t, ops.add(t, x, y, f"{name}.residual"), f"{name}.LayerNorm")


BERT = Family(
    name="bert",
    summary="BERT: LayerNorm after each residual, separate Q, K and V, GELU, masked-word head tied to the embedding",
    reads="tokens",
    check=check,
    weights=weights,
    objective="masked",
    untrained=lambda model: "a BERT that classifies" if model.classes else "",
    rows=rows,
    pairs=all_pairs,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
