"""Small random config.json files of every ``model_type``, as people write them: keys left out, null, or spelled otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests import drawn_encoders

__all__ = ["configs"]

Draw = Callable[[st.SearchStrategy[Any]], Any]
Config = dict[str, Any]

ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu", "gelu_pytorch_tanh")


def sometimes(draw: Draw, **keys: st.SearchStrategy[Any] | Any) -> Config:
    """Each key or not; a list is chosen from."""
    found = {}
    for key, values in keys.items():
        if draw(st.booleans()):
            found[key] = draw(st.sampled_from(values))
    return found


def llama_sizes(draw: Draw) -> Config:
    """Sizes under Llama's names, and a head's width that divides."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    return {
        "hidden_size": heads * draw(st.sampled_from([4, 8])), "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(3, 60)), "max_position_embeddings": draw(st.sampled_from([8, 16, 33])),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def llama(draw: Draw) -> Config:
    config = {**llama_sizes(draw), **sometimes(draw, head_dim=[None, 2, 6], attention_bias=[True, False])}
    if draw(st.booleans()):
        config = without(config, "num_key_value_heads") | sometimes(draw, num_key_value_heads=[None])
    return {**config, **sometimes(draw, mlp_bias=[True], tie_word_embeddings=[True, False], hidden_act=ACTIVATIONS)}


def mistral(draw: Draw) -> Config:
    keys = sometimes(draw, head_dim=[None, 2, 6], tie_word_embeddings=[True], sliding_window=[None, 4])
    return {**llama_sizes(draw), **keys}


def qwen2(draw: Draw) -> Config:
    return {
        **llama_sizes(draw),
        **sometimes(draw, head_dim=[2, 6], tie_word_embeddings=[True, False], use_sliding_window=[False]),
    }


def qwen3(draw: Draw) -> Config:
    return {**llama_sizes(draw), **sometimes(draw, head_dim=[2, 6], attention_bias=[True], tie_word_embeddings=[True])}


def gemma(draw: Draw) -> Config:
    return {**llama_sizes(draw), **sometimes(draw, head_dim=[2, 6], attention_bias=[True], tie_word_embeddings=[False])}


def gemma2(draw: Draw) -> Config:
    caps = sometimes(draw, attn_logit_softcapping=[None, 20.0], final_logit_softcapping=[None, 10.0])
    return {**gemma(draw), **caps}


def phi(draw: Draw) -> Config:
    config = {**llama_sizes(draw), **sometimes(draw, qk_layernorm=[True], partial_rotary_factor=[0.5, 1.0])}
    return {**config, **sometimes(draw, tie_word_embeddings=[True], hidden_act=["gelu_new", "relu"])}


def phi3(draw: Draw) -> Config:
    return {**llama_sizes(draw), **sometimes(draw, tie_word_embeddings=[True], num_key_value_heads=[1])}


def gpt2_sizes(draw: Draw) -> Config:
    """Sizes under GPT-2's names, or under those its class maps to them."""
    heads = draw(st.sampled_from([1, 2, 3]))
    sizes = {
        "n_embd": heads * draw(st.sampled_from([4, 8])), "n_layer": draw(st.integers(1, 3)), "n_head": heads,
        "n_positions": draw(st.sampled_from([8, 16, 33])), "vocab_size": draw(st.integers(3, 60)),
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    others = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }  # fmt: skip
    return {others.get(key, key) if draw(st.booleans()) else key: value for key, value in sizes.items()}


def gpt2(draw: Draw) -> Config:
    keys = sometimes(draw, n_inner=[None, 7, 40], tie_word_embeddings=[True, False], activation_function=ACTIVATIONS)
    return {**gpt2_sizes(draw), **keys}


def gptj(draw: Draw) -> Config:
    return {**gpt2_sizes(draw), "rotary_dim": 4, **sometimes(draw, n_inner=[None, 7], tie_word_embeddings=[False])}


def gpt_bigcode(draw: Draw) -> Config:
    return {
        **gpt2_sizes(draw),
        **sometimes(draw, n_inner=[None, 7], multi_query=[True, False], tie_word_embeddings=[False]),
    }


def gpt_neo(draw: Draw) -> Config:
    sizes, pairs = (
        without(llama_sizes(draw), "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
        draw(st.integers(1, 2)),
    )
    layers = {"num_layers": 2 * pairs, "attention_types": [[["global", "local"], pairs]]}
    return {**sizes, **layers, **sometimes(draw, intermediate_size=[None, 7], tie_word_embeddings=[False])}


def gpt_neox(draw: Draw) -> Config:
    keys = sometimes(
        draw, rotary_pct=[0.5, 1.0], use_parallel_residual=[False], attention_bias=[False], tie_word_embeddings=[True]
    )
    return {**without(llama_sizes(draw), "num_key_value_heads"), **keys}


def falcon(draw: Draw) -> Config:
    sizes = llama_sizes(draw)
    kv_heads, new = sizes.pop("num_key_value_heads"), draw(st.booleans())
    keys = sometimes(draw, alibi=[True, False], bias=[True], ffn_hidden_size=[None, 7], tie_word_embeddings=[False])
    if new:
        keys |= {
            "new_decoder_architecture": True,
            "num_kv_heads": kv_heads,
            **sometimes(draw, num_ln_in_parallel_attn=[None, 1, 2]),
        }
    else:
        keys |= sometimes(draw, multi_query=[True, False], parallel_attn=[True, False])
    return {**without(sizes, "intermediate_size"), **keys}


def opt(draw: Draw) -> Config:
    sizes = without(llama_sizes(draw), "num_key_value_heads", "intermediate_size")
    keys = sometimes(draw, ffn_dim=[7], enable_bias=[False], do_layer_norm_before=[False], tie_word_embeddings=[False])
    return {**sizes, **keys, **sometimes(draw, word_embed_proj_dim=[None, 5])}


def bloom(draw: Draw) -> Config:
    sizes = without(gpt2_sizes(draw), "n_positions", "max_position_embeddings", "n_embd", "hidden_size")
    heads = sizes.get("n_head") or sizes["num_attention_heads"]
    width = draw(st.sampled_from(["hidden_size", "n_embed"]))
    return {**sizes, width: heads * 4, "seq_length": 16, **sometimes(draw, tie_word_embeddings=[False])}


def granite(draw: Draw) -> Config:
    return {
        **llama_sizes(draw),
        **sometimes(draw, head_dim=[2, 6], attention_bias=[True], mlp_bias=[True], tie_word_embeddings=[True, False]),
    }


def starcoder2(draw: Draw) -> Config:
    return {**llama_sizes(draw), **sometimes(draw, head_dim=[2, 6], use_bias=[False], tie_word_embeddings=[False])}


def mpt(draw: Draw) -> Config:
    heads = draw(st.sampled_from([1, 2, 3]))
    sizes = {
        draw(st.sampled_from(["d_model", "hidden_size"])): heads * 4, "n_heads": heads, "n_layers": draw(st.integers(1, 3)),
        "max_seq_len": 16, "vocab_size": draw(st.integers(3, 60)),
    }  # fmt: skip
    return {**sizes, **sometimes(draw, expansion_ratio=[2], tie_word_embeddings=[False])}


def mixtral(draw: Draw) -> Config:
    experts = draw(st.integers(1, 4))
    spelled = draw(st.sampled_from(["num_local_experts", "num_experts"]))
    chosen = {spelled: experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    return {**llama_sizes(draw), **chosen, **sometimes(draw, head_dim=[None, 6], tie_word_embeddings=[True])}


def qwen_moe(draw: Draw) -> Config:
    experts = draw(st.integers(1, 4))
    chosen = {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts)), "moe_intermediate_size": 5}
    places = sometimes(draw, mlp_only_layers=[None, [], [0], [1, 7]], decoder_sparse_step=[1, 2])
    return {**llama_sizes(draw), **chosen, **places, **sometimes(draw, head_dim=[2, 6], tie_word_embeddings=[True])}


def qwen2_moe(draw: Draw) -> Config:
    return {**qwen_moe(draw), "shared_expert_intermediate_size": 9, **sometimes(draw, qkv_bias=[False])}


def qwen3_moe(draw: Draw) -> Config:
    return {**qwen_moe(draw), **sometimes(draw, attention_bias=[True, False])}


def deepseek(draw: Draw) -> Config:
    experts = draw(st.sampled_from([2, 4]))
    widths = {
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": draw(st.sampled_from([5, 10])),
        "kv_lora_rank": 7,
    }
    chosen = {
        "n_routed_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts)), "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 5, "q_lora_rank": draw(st.sampled_from([None, 11])), "num_key_value_heads": None,
    }  # fmt: skip
    others = sometimes(draw, n_shared_experts=[1, 2], first_k_dense_replace=[0, 1, 9], attention_bias=[True])
    return {**llama_sizes(draw), **widths, **chosen, **others, **sometimes(draw, tie_word_embeddings=[True])}


_MAKERS: dict[str, Callable[[Draw], Config]] = {
    **drawn_encoders.MAKERS,
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma": gemma, "gemma2": gemma2,
    "gemma3_text": gemma2, "phi": phi, "phi3": phi3, "gpt2": gpt2, "gptj": gptj, "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo, "gpt_neox": gpt_neox, "falcon": falcon, "opt": opt, "bloom": bloom, "mixtral": mixtral,
    "granite": granite, "smollm3": granite, "starcoder2": starcoder2, "mpt": mpt,
    "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe, "deepseek_v2": deepseek, "deepseek_v3": deepseek,
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, model_type: str) -> Config:
    """A config of one ``model_type`` that transformers takes."""
    return {"model_type": model_type, **_MAKERS[model_type](draw)}
