"""BERT on the tape, nearly line by line ``trainers/models/bert.py`` (Devlin et al. 2019), and its relatives.

RoBERTa has one token type and leaves its first positions out, DistilBERT has no types and no pooler, ELECTRA has tables
of a width of their own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.cross_entropy import head
from memcalc.errors import PlanError, UnknownNameError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models.checks import activation_is, full_heads, head_is_tied, heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family, all_pairs, every_token
from memcalc.models.vit import first_place
from memcalc.positions import positions as learned
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["BERT"]

TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
HEADS = ("", "pretraining", "tokens", "spans", "replaced", "pooled", "bare")
"""Of transformers/models/bert/modeling_bert.py: BertForMaskedLM or, with classes, BertForSequenceClassification;
BertForPreTraining, BertForTokenClassification, BertForQuestionAnswering; ElectraForPreTraining, which says which tokens
were replaced; BertModel with its pooler, and without."""
_OF_TOKENS = ("tokens", "spans")


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "ffn", "vocab", "context")
    heads_divide(model)
    full_heads(model)
    if model.head not in HEADS:
        raise UnknownNameError(f"model {model.name}: head", model.head, [head for head in HEADS if head])
    if model.classes and model.head not in ("", *_OF_TOKENS):
        raise PlanError(f"model {model.name}: {model.classes} classes, but its head is {model.head}")
    if model.head in _OF_TOKENS:
        positive(model, "classes")
    if model.says_words:
        head_is_tied(model, True)
    activation_is(model, "gelu", "relu")
    reads_tokens(model, plan)


def weights(model: Model) -> list[Weight]:
    """Three tables, 16 tensors a block and the head, whose matrix is the word table; or a pooler and a classifier.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["bert-base"]))
    109514298
    """
    h, f = model.hidden, model.ffn
    narrow = model.embedding_dim or h
    rows = (model.vocab, model.context, model.types)
    found = [Weight(f"embeddings.{name}.weight", (n, narrow)) for name, n in zip(TABLES, rows, strict=True) if n]
    found += _pair("embeddings.LayerNorm", (narrow,))
    if narrow != h:
        found += _pair("embeddings_project", (h, narrow))
    for layer in range(model.layers):
        block = f"layer.{layer}"
        for name, shape in (
            ("attention.query", (h, h)), ("attention.key", (h, h)), ("attention.value", (h, h)),
            ("attention.dense", (h, h)), ("attention.LayerNorm", (h,)),
            ("intermediate", (f, h)), ("output", (h, f)), ("LayerNorm", (h,)),
        ):  # fmt: skip
            found += _pair(f"{block}.{name}", shape, block)
    return [*found, *_head(model, narrow)]


def _head(model: Model, narrow: int) -> list[Weight]:
    h = model.hidden
    pooler = _pair("pooler", (h, h), HEAD)
    if model.head in ("pooled", "bare"):
        return pooler if model.head == "pooled" else []
    if model.classes:
        classifier = _pair("classifier", (model.classes, h), HEAD)
        return classifier if model.head in _OF_TOKENS else [*pooler, *classifier]
    if model.head == "replaced":
        return _pair("predictions.dense", (h, h), HEAD) + _pair("replaced", (1, h), HEAD)
    words = [Weight("predictions.bias", (model.vocab,), HEAD), *_pair("predictions.dense", (narrow, h), HEAD)]
    words += _pair("predictions.LayerNorm", (narrow,), HEAD)
    return words if not model.head else [*pooler, *words, *_pair("seq_relationship", (2, h), HEAD)]


def _pair(name: str, shape: tuple[int, ...], group: str = "root") -> list[Weight]:
    return [Weight(f"{name}.weight", shape, group), Weight(f"{name}.bias", shape[:1], group)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Positions and types are looked up; the word table is, too, but it may be the head as well."""
    if weight.name in ("pooler.weight", "seq_relationship.weight"):
        return 1
    if weight.name == "classifier.weight" and model.head not in _OF_TOKENS:
        return 1
    looked_up = TABLES[1:] if model.says_words else TABLES
    found = weight.name.removeprefix("embeddings.").removesuffix(".weight") in looked_up
    return 0 if found else every_token(model, tokens, weight)


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    x = ops.embedding(t, ids, "embeddings.word_embeddings")
    if plan.model.types:
        types = Tensor(t.allocate("token types", ids.shape, "int64", "temporary"), ids.shape, "int64", None)
        segments = ops.embedding(t, types, "embeddings.token_type_embeddings")
        x = ops.add(t, x, segments, "embeddings with types")
        del types, segments
    x = ops.add(t, x, _positions(t, plan, ids), "embeddings")
    x = norms.layer_norm(t, x, "embeddings.LayerNorm")
    x = ops.dropout(t, x, "embedding dropout", plan.dropout)
    return ops.linear(t, x, "embeddings_project") if "embeddings_project.weight" in t.weights else x


def _positions(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    """One row for the batch; RoBERTa counts the places of each sample, because padding has none."""
    if not plan.model.position_offset:
        return learned(t, "embeddings.position_embeddings", plan.tokens)
    places = Tensor(t.allocate("positions", ids.shape, "int64", "temporary"), ids.shape, "int64", None)
    return ops.embedding(t, places, "embeddings.position_embeddings")


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"layer.{layer}", partial(block, t, plan, f"layer.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    kind = plan.model.head
    if kind == "bare":
        return first_place(t, x)
    if kind == "replaced":
        x = ops.linear(t, x, "predictions.dense")
        return ops.linear(t, activation(t, plan, x, "predictions.gelu"), "replaced")
    if kind in _OF_TOKENS:
        return ops.linear(t, ops.dropout(t, x, "classifier.dropout", plan.dropout), "classifier")
    if plan.model.says_words and not kind:
        return words(t, plan, x)
    y = ops.relu(t, ops.linear(t, first_place(t, x), "pooler"), "pooler.tanh")
    if kind == "pooled":
        return y
    if kind == "pretraining":
        return _with_next_sentence(t, words(t, plan, x), ops.linear(t, y, "seq_relationship"))
    return ops.linear(t, ops.dropout(t, y, "pooler.dropout", plan.dropout), "classifier")


def words(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    """Scores of the vocabulary."""
    x = activation(t, plan, ops.linear(t, x, "predictions.dense"), "predictions.gelu")
    x = norms.layer_norm(t, x, "predictions.LayerNorm")
    return head(t, plan, x, "predictions", weight="embeddings.word_embeddings.weight")


def _with_next_sentence(t: Tape, logits: Tensor, scores: Tensor) -> Tensor:
    """The loss is a sum of both; its part of the two scores of a sequence is that small that only their gradient counts."""
    shape, dtype = scores.shape, scores.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0], t.allocate("next sentence gradient", shape, dtype, "temporary")]

    node = t.node([ops.edge(logits), ops.edge(scores)], backward)
    return Tensor(logits.storage, logits.shape, logits.dtype, node)


def activation(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    if plan.model.activation == "relu":
        return ops.relu(t, x, name)
    return ops.gelu(t, x, name, plan.implementation.gelu)


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    x = attention(t, plan, x, f"{name}.attention")
    y = activation(t, plan, ops.linear(t, x, f"{name}.intermediate"), f"{name}.gelu")
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


def _untrained(model: Model) -> str:
    if model.classes:
        return "a BERT that classifies"
    if model.head:
        return f"a BERT whose head is {model.head}"
    relative = model.embedding_dim or not model.types or model.position_offset or model.activation == "relu"
    return "relatives of BERT" if relative else ""


BERT = Family(
    name="bert",
    summary="BERT: LayerNorm after each residual, separate Q, K and V, GELU, masked-word head tied to the embedding",
    reads="tokens",
    fields=(
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "context",
        "position_offset",
        "types",
        "tied",
        "embedding_dim",
        "activation",
        "head",
        "classes",
    ),  # fmt: skip
    check=check,
    weights=weights,
    objective="masked",
    untrained=_untrained,
    rows=rows,
    pairs=all_pairs,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
