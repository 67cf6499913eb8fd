"""Frozen weights, adapters, quantised weights and what selective checkpoints keep, against numbers from their sources."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from tests.laws import kept_activations

LLAMA = MODELS["llama-2-7b"]
LORA = Adapter(kind="lora", rank=8, targets="query-value")


def plan(**changes: Any) -> Plan:
    return Plan(model=LLAMA, tokens=512, micro_batch=1, precision="bf16", **changes)


def held(plan: Plan, category: str) -> int:
    """Bytes of a category at the peak; states are there at any time."""
    return ledger(plan).peak().by_category[category]


def kept(plan: Plan) -> int:
    """Activation bytes at the end of the forward pass."""
    return kept_activations(ledger(plan))


@pytest.mark.parametrize(
    ("targets", "rank", "count"),
    [
        # litgpt, tutorials/resource-tables.md: Llama 2 7B, r = 8 on query and value.
        ("query-value", 8, 4_194_304),
        ("attention", 16, 16_777_216),
        # Unsloth's and PEFT's figure for Llama-2-7B with r = 16 on all linear layers.
        ("all-linear", 16, 39_976_960),
        ("q_proj, v_proj", 8, 4_194_304),
    ],
)
def test_trainable_parameters(targets: str, rank: int, count: int) -> None:
    assert estimate(plan(adapter=Adapter(kind="lora", rank=rank, targets=targets))).parameters == count


def test_full_fine_tuning_in_bfloat16_takes_ten_bytes_a_parameter() -> None:
    # fms-acceleration, scripts/benchmarks/refs: weights, gradients, two moments, and foreach's root of one of them.
    peak = ledger(plan()).peak()
    parts = [peak.by_category[name] for name in ("parameters", "gradients", "optimizer")]
    count = estimate(plan()).parameters
    assert [round(part / count, 2) for part in parts] == [2, 2, 4]
    assert peak.by_moment["step"] / count == pytest.approx(10, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_full_fine_tuning_takes_twenty_bytes_a_parameter_over_the_ranks(ranks: int) -> None:
    # accelerate keeps float32 shards under mixed precision: 4 + 4 + 8, and foreach's root of 4.
    shared = dataclasses.replace(plan(), strategy="fsdp-full-shard", precision="amp-bf16", ranks=ranks)
    count = estimate(shared).parameters
    assert ledger(shared).peak().by_moment["step"] * ranks / count == pytest.approx(20, abs=0.05)


def test_only_adapters_have_gradients_and_states() -> None:
    peak = ledger(plan(adapter=LORA, optimizer="adam")).peak()
    count = estimate(plan(adapter=LORA)).parameters
    assert peak.by_category["optimizer"] == 2 * 2 * count
    assert peak.by_category["parameters"] == 2 * (6_738_415_616 + count)


def test_float32_adapters_keep_float32_states_and_a_float32_input_each() -> None:
    own, like = (plan(adapter=dataclasses.replace(LORA, dtype=dtype)) for dtype in ("float32", "weights"))
    assert held(own, "optimizer") == 2 * held(like, "optimizer")
    # Each of two layers in each of 32 blocks keeps a copy of its own; like the weights, both keep the same input.
    more = kept(own) - kept(like)
    assert more == pytest.approx(32 * 512 * 4096 * (2 * 4 - 2), rel=0.01)


def test_frozen_layers_do_not_keep_their_input() -> None:
    # MLP: the product of gate and up feeds the last layer alone, so that without a gradient of its weight it is freed.
    assert kept(plan()) - kept(plan(adapter=LORA)) > 32 * 512 * 11008 * 2


def test_what_stands_before_the_first_adapter_keeps_nothing() -> None:
    closed = plan(adapter=dataclasses.replace(LORA, targets="down_proj"))
    opened = plan(adapter=dataclasses.replace(LORA, targets="down_proj", input_gradients=True))
    assert kept(closed) < kept(opened)


@pytest.mark.parametrize(
    ("quantize", "bits"),
    # QLoRA (Dettmers et al. 2023, section 3): 0.5 bit for the scales, 0.127 with double quantisation.
    [("nf4", 4.5), ("nf4-double", 4.127), ("int8", 8.0), ("gptq", 4.156)],
)
def test_bits_of_a_quantised_parameter(quantize: str, bits: float) -> None:
    quantised = plan(adapter=dataclasses.replace(LORA, quantize=quantize))
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * (6_738_415_616 - linear) + 2 * estimate(quantised).parameters
    assert 8 * (held(quantised, "parameters") - rest) / linear == pytest.approx(bits, abs=0.02)


def test_a_quantised_weight_is_unpacked_for_its_products_only() -> None:
    names = [
        name for name in ledger(plan(adapter=dataclasses.replace(LORA, quantize="nf4"))).names if "unpacked" in name
    ]
    assert (
        len(names) == 2 * 7 * 32 - 3
    )  # not in backward of what stands before the first adapter: k, and the others' inputs


def test_old_bitsandbytes_keeps_the_input() -> None:
    new = plan(adapter=dataclasses.replace(LORA, quantize="nf4"))
    old = plan(adapter=dataclasses.replace(LORA, quantize="nf4", quantized_saves_input=True))
    # What feeds o_proj and the products that feed down_proj are kept for nothing else; the first block has all, too.
    assert kept(old) - kept(new) >= 32 * 512 * 11008 * 2


def test_a_selective_checkpoint_keeps_every_second_product_and_attention() -> None:
    policy = Checkpointing(policy="matrix-products")
    full = plan(checkpoint_every=1)
    # torchtitan's policy: q, v, gate and down of seven products; attention's output and float32 logsumexp per head.
    outputs = 512 * ((3 * 4096 + 11008 + 4096) * 2 + 32 * 4)
    # The last product's output is kept by nobody else; it is counted in the block after it.
    assert kept(dataclasses.replace(full, checkpointing=policy)) - kept(full) == 32 * outputs


def test_one_block_in_two_is_checkpointed() -> None:
    half = kept(plan(checkpoint_every=1, checkpointing=Checkpointing(one_in=2)))
    assert half == pytest.approx((kept(plan(checkpoint_every=1)) + kept(plan())) / 2, rel=0.01)


def test_checkpointed_attention_keeps_no_scores() -> None:
    eager = plan(attention="eager")
    core = dataclasses.replace(eager, checkpoint_every=1, checkpointing=Checkpointing(policy="core-attention"))
    # The probabilities of 32 heads in 32 blocks.
    assert kept(eager) - kept(core) == 32 * 32 * 512**2 * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": Adapter(quantize="nf4")}, "quantised weights (nf4) cannot be trained; take --adapter lora"),
        ({"adapter": Adapter(kind="lora", targets="c_attn")}, "adapter targets 'c_attn' name no linear layer; there are: down_proj,"),
        ({"adapter": Adapter(kind="lora", dropout=1.0)}, "adapter dropout 1.0 must be at least 0 and below 1"),
        ({"checkpointing": Checkpointing(one_in=2)}, "checkpointing is off"),
        ({"checkpointing": Checkpointing(one_in=2), "checkpoint_every": 1, "reentrant": True}, "not reentrant"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**changes)
    assert said in str(caught.value)


def test_what_the_trainers_cannot_do_is_said() -> None:
    assert plan(adapter=LORA).untrained == ""
    assert plan(adapter=dataclasses.replace(LORA, quantize="nf4")).untrained == "quantised weights (nf4)"
    assert plan(adapter=Adapter(kind="adapter-v2")).untrained == "with adapter-v2"


def test_lora_put_in_place_by_index_copy_keeps_two_thirds_of_its_outputs() -> None:
    """litgpt/lora.py, zero_pad: for queries and values of one fused product, in every block but the first nothing else."""
    plan = Plan(
        model=MODELS["gpt2"], tokens=64, micro_batch=1, precision="bf16",
        adapter=Adapter(kind="lora", rank=4, targets="c_attn"),
    )  # fmt: skip
    placed = dataclasses.replace(plan, adapter=dataclasses.replace(plan.adapter, scattered=True))
    more = ledger(placed).peak().by_category["activations"] - ledger(plan).peak().by_category["activations"]
    assert more == 12 * 64 * 2 * 768 * 2


def test_fused_lora_keeps_no_input_of_the_last_layer_of_an_mlp() -> None:
    lora = Adapter(kind="lora", rank=4, targets="down_proj", fused=True)
    plan = Plan(model=MODELS["llama-tiny"], tokens=64, micro_batch=1, precision="bf16", adapter=lora)
    plain = dataclasses.replace(plan, adapter=dataclasses.replace(lora, fused=False))
    assert not any(".lora_A output" in name for name in ledger(plan).names)
    assert ledger(plan).peak().by_category["activations"] < ledger(plain).peak().by_category["activations"]
    with pytest.raises(PlanError, match="no dropout"):
        dataclasses.replace(plan, adapter=dataclasses.replace(lora, dropout=0.1))


def test_what_has_no_adapter_is_trained_only_beside_plain_lora() -> None:
    with pytest.raises(PlanError, match="trained only beside"):
        Plan(
            model=MODELS["gpt2"], tokens=8, micro_batch=1, precision="bf16",
            adapter=Adapter(kind="lora", quantize="nf4", trains_rest=True),
        )  # fmt: skip
