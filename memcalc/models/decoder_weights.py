"""Every weight of a transformer that says the next token, by the options of its Model."""

from __future__ import annotations

from memcalc.spec import HEAD, Model, Weight

__all__ = ["gated", "weights"]


def gated(model: Model) -> bool:
    """Only the family decoder has MLPs that are not."""
    return model.gated or model.family != "decoder"


def weights(model: Model) -> list[Weight]:
    """In the order of the published modules.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["qwen2.5-0.5b"]))
    494032768
    """
    h, table = model.hidden, model.embedding_dim or model.hidden
    found = [Weight("embed_tokens.weight", (model.vocab, table))]
    if model.embedding_dim:
        found.append(Weight("project_in.weight", (h, table)))
    if model.positions == "learned":
        found.append(Weight("embed_positions.weight", (model.context, h)))
    if model.embedding_norm:
        found += _norm(model, "embed_norm", "root")
    for layer in range(model.layers):
        found += _block(model, f"layers.{layer}")
    if not model.norm_after:
        found += _norm(model, "norm", HEAD)
    if model.embedding_dim:
        found.append(Weight("project_out.weight", (table, h), HEAD))
    if not model.tied:
        found += _linear(model, "lm_head", (model.vocab, table), HEAD, "head")
    elif "head" in model.biases:
        found.append(Weight("lm_head.bias", (model.vocab,), HEAD))
    return found


def _block(model: Model, block: str) -> list[Weight]:
    h, f = model.hidden, model.ffn
    found = _norm(model, f"{block}.input_layernorm", block) + _attention(model, block)
    if model.post_norm:
        found += _norm(model, f"{block}.self_attn_norm", block)
    if model.side_by_side != 1:
        found += _norm(model, f"{block}.post_attention_layernorm", block)
    inside = {"gate_up_proj": 2 * f} if model.fused_gate_up else {"gate_proj": f, "up_proj": f}
    for name, rows in (inside if gated(model) else {"up_proj": f}).items():
        found += _linear(model, f"{block}.mlp.{name}", (rows, h), block, "mlp")
    found += _linear(model, f"{block}.mlp.down_proj", (h, f), block, "mlp")
    return found + (_norm(model, f"{block}.mlp_norm", block) if model.post_norm else [])


def _attention(model: Model, block: str) -> list[Weight]:
    if model.kv_lora:
        return _latent(model, block)
    h, width, name = model.hidden, model.head_width, f"{block}.self_attn"
    q, kv = model.heads * width, model.kv_heads * width
    parts = {"qkv_proj": q + 2 * kv} if model.fused_qkv else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    found = []
    for part, rows in parts.items():
        found += _linear(model, f"{name}.{part}", (rows, h), block, "qkv")
    found += _linear(model, f"{name}.o_proj", (h, q), block, "out")
    for part in "qk" if model.qk_norm else "":
        found += _norm(model, f"{name}.{part}_norm", block, width)
    return found


def _latent(model: Model, block: str) -> list[Weight]:
    """Queries, keys and values through narrow widths (transformers/models/deepseek_v3/modeling_deepseek_v3.py)."""
    h, width, name = model.hidden, model.head_width, f"{block}.self_attn"
    found, into = [], h
    if model.q_lora:
        found += _linear(model, f"{name}.q_a_proj", (model.q_lora, h), block, "qkv")
        found.append(Weight(f"{name}.q_a_layernorm.weight", (model.q_lora,), block))
        into = model.q_lora
    found.append(
        Weight(f"{name}.{'q_b_proj' if model.q_lora else 'q_proj'}.weight", (model.heads * width, into), block)
    )
    found += _linear(model, f"{name}.kv_a_proj_with_mqa", (model.kv_lora + model.rotary_dim, h), block, "qkv")
    found.append(Weight(f"{name}.kv_a_layernorm.weight", (model.kv_lora,), block))
    pairs = model.heads * (width - model.rotary_dim + model.value_dim)
    found.append(Weight(f"{name}.kv_b_proj.weight", (pairs, model.kv_lora), block))
    return found + _linear(model, f"{name}.o_proj", (h, model.heads * model.value_dim), block, "out")


def _linear(model: Model, name: str, shape: tuple[int, int], group: str, part: str) -> list[Weight]:
    found = [Weight(f"{name}.weight", shape, group)]
    return [*found, Weight(f"{name}.bias", shape[:1], group)] if part in model.biases else found


def _norm(model: Model, name: str, group: str, width: int = 0) -> list[Weight]:
    found = [Weight(f"{name}.weight", (width or model.hidden,), group)]
    return [*found, Weight(f"{name}.bias", (width or model.hidden,), group)] if "norm" in model.biases else found
