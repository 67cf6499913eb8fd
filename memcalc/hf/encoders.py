"""BERT and its relatives, one row a ``model_type``: RoBERTa, DistilBERT, ELECTRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import activation, activation_notes, as_written
from memcalc.hf.keys import Key, Values, chance, count, flag, text
from memcalc.hf.names import Names
from memcalc.hf.record import ModelType
from memcalc.spec import Model

__all__ = ["ENCODERS"]

# What stands on top, by the end of the class's name; with classes the blank head says one a sequence.
_TOPS = {
    "ForMaskedLM": "", "ForSequenceClassification": "", "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "spans",
}  # fmt: skip


def _heads(brand: str, **tops: str) -> dict[str, str]:
    """Classes of a brand, the usual one first, with what the ledger calls their head."""
    return {f"{brand}{ending}": top for ending, top in {**_TOPS, **tops}.items()}


def _sizes(layers: int, hidden: int, heads: int, ffn: int, vocab: int, act: str = "hidden_act") -> dict[str, Key]:
    return {
        "vocab": count("vocab_size", vocab),
        "hidden": count("hidden_size", hidden),
        "layers": count("num_hidden_layers", layers, most=10**4),
        "heads": count("num_attention_heads", heads),
        "ffn": count("intermediate_size", ffn),
        "context": count("max_position_embeddings", 512),
        "types": count("type_vocab_size", 2),
        "act": text(act, "gelu"),
        "dropout": chance("hidden_dropout_prob", 0.1),
        "dropout_attention": chance("attention_probs_dropout_prob", 0.1),
        "cross_attention": flag("add_cross_attention", False),
        "tied": flag("tie_word_embeddings", True),
    }


def _fields(heads: Mapping[str, str], **fields: Any) -> Callable[[Values, str], dict[str, Any]]:
    def made(values: Values, head: str) -> dict[str, Any]:
        if values.get("cross_attention"):
            raise PlanError("add_cross_attention is true; a BERT that reads an encoder is not known")
        if not values["tied"]:
            raise PlanError("tie_word_embeddings is false; a BERT with two word tables is not known")
        if values.get("positions", "absolute") != "absolute":
            raise PlanError(f"position_embedding_type is {values['positions']}; only absolute ones are known")
        numbers = ("vocab", "hidden", "layers", "heads", "ffn", "context", "types")
        found = {name: values[name] for name in numbers if name in values}
        found |= {"family": "bert", "kv_heads": values["heads"], "tied": True, "head": heads[head]}
        found |= {"classes": values.get("labels", 0), **fields}
        if activation(values["act"]) == "relu":
            found["activation"] = "relu"
        return found

    return made


def _notes(values: Values) -> list[str]:
    return activation_notes(values)


_OTHERWISE = {"positions": text("position_embedding_type", "absolute")}
_BERT = _heads("Bert", ForPreTraining="pretraining", Model="pooled")
_ROBERTA = _heads("Roberta", Model="pooled")
_DISTILBERT = _heads("DistilBert", Model="bare")
_ELECTRA = _heads("Electra", ForPreTraining="replaced", Model="bare")


def _inside(prefix: str) -> Names:
    """Tables and blocks of BERT, RoBERTa and ELECTRA."""
    block = f"{prefix}encoder.layer.#"
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    return {
        **{f"embeddings.{name}": f"{prefix}embeddings.{name}" for name in tables},
        **{f"layer.#.attention.{name}": f"{block}.attention.self.{name}" for name in ("query", "key", "value")},
        **{f"layer.#.attention.{name}": f"{block}.attention.output.{name}" for name in ("dense", "LayerNorm")},
        "layer.#.intermediate": f"{block}.intermediate.dense",
        "layer.#.output": f"{block}.output.dense",
        "layer.#.LayerNorm": f"{block}.output.LayerNorm",
        "embeddings_project": f"{prefix}embeddings_project",
        "pooler": f"{prefix}pooler.dense",
    }


def _prefix(model: Model, brand: str) -> str:
    """A bare model has no attribute that holds it."""
    return "" if model.head in ("pooled", "bare") else f"{brand}."


def _classifier(model: Model) -> dict[str, str]:
    return {"classifier": "qa_outputs" if model.head == "spans" else "classifier"}


def _bert(model: Model) -> Names:
    return {
        **_inside(_prefix(model, "bert")),
        **_classifier(model),
        "predictions": "cls.predictions",
        "predictions.dense": "cls.predictions.transform.dense",
        "predictions.LayerNorm": "cls.predictions.transform.LayerNorm",
        "seq_relationship": "cls.seq_relationship",
    }


def _dense_classifier(model: Model) -> dict[str, str]:
    """A class a sequence, through a layer of the head's own in the place of a pooler."""
    if not model.answers_once or not model.classes:
        return _classifier(model)
    return {"pooler": "classifier.dense", "classifier": "classifier.out_proj"}


def _roberta(model: Model) -> Names:
    words = {
        "predictions": "lm_head",
        "predictions.dense": "lm_head.dense",
        "predictions.LayerNorm": "lm_head.layer_norm",
    }
    return {**_inside(_prefix(model, "roberta")), **_dense_classifier(model), **words}


def _electra(model: Model) -> Names:
    words = "discriminator_predictions" if model.head == "replaced" else "generator_predictions"
    return {
        **_inside(_prefix(model, "electra")),
        **_dense_classifier(model),
        "predictions": "generator_lm_head",
        "predictions.dense": f"{words}.dense",
        "predictions.LayerNorm": f"{words}.LayerNorm",
        "replaced": f"{words}.dense_prediction",
    }


def _distilbert(model: Model) -> Names:
    prefix = _prefix(model, "distilbert")
    block, attended = f"{prefix}transformer.layer.#", {"query": "q", "key": "k", "value": "v", "dense": "out"}
    tables = ("word_embeddings", "position_embeddings", "LayerNorm")
    return {
        **{f"embeddings.{name}": f"{prefix}embeddings.{name}" for name in tables},
        **{f"layer.#.attention.{name}": f"{block}.attention.{part}_lin" for name, part in attended.items()},
        "layer.#.attention.LayerNorm": f"{block}.sa_layer_norm",
        "layer.#.intermediate": f"{block}.ffn.lin1",
        "layer.#.output": f"{block}.ffn.lin2",
        "layer.#.LayerNorm": f"{block}.output_layer_norm",
        **_classifier(model),
        "pooler": "pre_classifier",
        "predictions": "vocab_projector",
        "predictions.dense": "vocab_transform",
        "predictions.LayerNorm": "vocab_layer_norm",
    }


def _roberta_fields(values: Values, head: str) -> dict[str, Any]:
    """Positions are counted from the row after that of padding."""
    return _fields(_ROBERTA, position_offset=values["padding"] + 1)(values, head)


def _electra_fields(values: Values, head: str) -> dict[str, Any]:
    narrow = values["embedding"]
    return _fields(_ELECTRA, embedding_dim=0 if narrow == values["hidden"] else narrow)(values, head)


ENCODERS = [
    ModelType(
        name="bert",
        config="BertConfig",
        blocks=("BertLayer",),
        heads=tuple(_BERT),
        keys={**_sizes(12, 768, 12, 3072, 30522), **_OTHERWISE},
        fields=_fields(_BERT),
        names=_bert,
        written=as_written(softmax=""),
        notes=_notes,
    ),
    ModelType(
        name="roberta",
        config="RobertaConfig",
        blocks=("RobertaLayer",),
        heads=tuple(_ROBERTA),
        keys={**_sizes(12, 768, 12, 3072, 50265), "padding": count("pad_token_id", 1, least=0), **_OTHERWISE},
        fields=_roberta_fields,
        names=_roberta,
        written=as_written(softmax=""),
        notes=_notes,
    ),
    ModelType(
        name="distilbert",
        config="DistilBertConfig",
        blocks=("TransformerBlock",),
        heads=tuple(_DISTILBERT),
        keys={
            "vocab": count("vocab_size", 30522),
            "hidden": count("dim hidden_size", 768),
            "layers": count("n_layers num_hidden_layers", 6, most=10**4),
            "heads": count("n_heads num_attention_heads", 12),
            "ffn": count("hidden_dim", 3072),
            "context": count("max_position_embeddings", 512),
            "act": text("activation", "gelu"),
            "dropout": chance("dropout", 0.1),
            "dropout_attention": chance("attention_dropout", 0.1),
            "tied": flag("tie_word_embeddings", True),
        },
        fields=_fields(_DISTILBERT),
        names=_distilbert,
        written=as_written(softmax=""),
        notes=_notes,
    ),
    ModelType(
        name="electra",
        config="ElectraConfig",
        blocks=("ElectraLayer",),
        heads=tuple(_ELECTRA),
        keys={**_sizes(12, 256, 4, 1024, 30522), "embedding": count("embedding_size", 128), **_OTHERWISE},
        fields=_electra_fields,
        names=_electra,
        written=as_written(softmax=""),
        notes=_notes,
    ),
]
