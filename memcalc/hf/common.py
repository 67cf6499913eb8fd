"""Keys, names and words that rows of several model types share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.errors import PlanError, UnknownNameError
from memcalc.hf.keys import Derived, Key, Values, count
from memcalc.spec import Model

__all__ = [
    "AS_HEADS", "EVEN_WIDTH", "EVERYWHERE", "FOUR_TIMES", "LLAMA", "activation", "activation_notes", "as_written", "biases",
    "decoder_fields", "gpt_fields", "gpt_sizes", "rotated", "sizes",
]  # fmt: skip

AS_HEADS = Derived(said="num_attention_heads", of=lambda values: values["heads"])
EVEN_WIDTH = Derived(
    said="hidden_size / num_attention_heads", of=lambda values: max(values["hidden"] // values["heads"], 1)
)
FOUR_TIMES = Derived(said="4 times the width", of=lambda values: 4 * values["hidden"])
EVERYWHERE = ("qkv", "out", "mlp", "norm")

LLAMA = {
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    **{
        f"layers.#.{part}": f"model.layers.#.{part}"
        for part in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj",
            "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "mlp.gate_proj",
            "mlp.up_proj", "mlp.gate_up_proj", "mlp.down_proj",
        )
    },
}  # fmt: skip
"""Names of transformers' Llama, and of all whose code was copied from it."""


def gpt_sizes(names: str, hidden: int, layers: int, heads: int, vocab: int, context: int) -> dict[str, Key]:
    """Sizes under their names for width, layers, heads and positions; keys and values are of every head."""
    width, depth, across, positions = names.split(",")
    return {
        "hidden": count(width, hidden),
        "layers": count(depth, layers, most=10**4),
        "heads": count(across, heads),
        "vocab": count("vocab_size", vocab),
        "context": count(positions, context),
    }


def sizes(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    ffn: int,
    vocab: int,
    context: int,
    *,
    kv_null: Any = AS_HEADS,
) -> dict[str, Key]:
    """The numbers of a decoder under Llama's names, with a class's defaults."""
    return {
        "hidden": count("hidden_size", hidden),
        "layers": count("num_hidden_layers", layers, most=10**4),
        "heads": count("num_attention_heads", heads),
        "kv_heads": count("num_key_value_heads", kv_heads, kv_null),
        "ffn": count("intermediate_size", ffn),
        "vocab": count("vocab_size", vocab),
        "context": count("max_position_embeddings", context),
    }


_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu", "gelu_python": "gelu", "gelu_accurate": "gelu", "quick_gelu": "gelu",
}  # fmt: skip
"""transformers/activations.py, ACT2FN: which of the ledger's operations each is."""
_IN_PYTHON = ("gelu_new", "gelu_fast", "gelu_python", "gelu_accurate", "quick_gelu")


def activation(name: str) -> str:
    """The ledger's word for an activation function. Raises UnknownNameError."""
    if name not in _ACTIVATIONS:
        raise UnknownNameError("activation function", name, _ACTIVATIONS)
    return _ACTIVATIONS[name]


def as_written(norm: str = "", softmax: str = "float32") -> Callable[[Values], dict[str, str]]:
    """How a decoder's code is written in transformers: its RMSNorm, the softmax where attention is written out, its GELU.

    >>> as_written("python")({"act": "gelu_new"})
    {'norm': 'python', 'softmax': 'float32', 'gelu': 'python'}
    """

    def written(values: Values) -> dict[str, str]:
        gelu = "python" if values.get("act") in _IN_PYTHON else ""
        said = {"norm": norm, "softmax": softmax, "gelu": gelu}
        return {field: form for field, form in said.items() if form}

    return written


def activation_notes(values: Values) -> list[str]:
    """transformers writes some activations out in Python, which keeps more than one kernel."""
    if values["act"] not in _IN_PYTHON:
        return []
    return [f"{values['act']} is written out in transformers' Python; --gelu python counts what that keeps"]


def biases(values: Values, **parts: str) -> tuple[str, ...]:
    """Parts with a bias: each keyword is a flag that was read, and its value the parts it switches on.

    >>> biases({"attention_bias": True, "mlp_bias": False}, attention_bias="qkv out", mlp_bias="mlp")
    ('qkv', 'out')
    """
    return tuple(part for name, said in parts.items() if values[name] for part in said.split())


def rotated(values: Values) -> int:
    """Elements of a head that rotary positions turn, in pairs; 0 where it is all of them."""
    width = values.get("head_dim") or values["hidden"] // values["heads"]
    turned = 2 * -(-int(width * values["rotary_share"]) // 2)
    return 0 if turned == width else turned


def decoder_fields(values: Values, **fields: Any) -> dict[str, Any]:
    """Fields of a Llama or one of its relatives: what was read under the name of a field, and those given.

    The family is ``llama`` where that has all it needs, because it can be trained; else ``decoder``.
    """
    known = [field for field in Model.__dataclass_fields__ if field in values]
    found = {field: values[field] for field in known} | {"activation": activation(values["act"])} | fields
    for name in ("heads", "kv_heads"):
        if found[name] > found["hidden"] * 1000:
            raise PlanError(f"{name} {found[name]} are more than a width of {found['hidden']} can have")
    if "head_dim" in values["derived"] and found["heads"] * found["head_dim"] == found["hidden"]:
        found["head_dim"] = 0
    plain = found["activation"] == "silu" and set(found.get("biases", ())) <= {"qkv"}
    others = ("norm", "positions", "rotary_dim", "side_by_side", "post_norm", "embedding_norm", "scaled", "capped",
              "fused_gate_up", "head_major", "norm_after", "embedding_dim", "kv_lora")  # fmt: skip
    if plain and found.get("gated", True) and not any(found.get(field) for field in others):
        return {**found, "family": "llama", "gated": False, "activation": ""}
    return {"family": "decoder", **found}


def gpt_fields(values: Values, **fields: Any) -> dict[str, Any]:
    """The same of one whose every head has keys and values, if nothing else is said."""
    return decoder_fields(values, **{"kv_heads": values["heads"], **fields})
