"""GPT-2 and BERT of four layers as transformers has them, for the tests."""

from __future__ import annotations

from typing import Any


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(num_hidden_layers=4))


def lora() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
