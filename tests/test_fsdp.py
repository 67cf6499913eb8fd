"""FSDP in its forms, replicas, offload, and nn.DataParallel: what a real run on CPUs cannot show, or shows too slowly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memcalc.adapters import Adapter
from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.fsdp import Fsdp
from memcalc.host import host_tensors
from memcalc.ledger import ledger
from memcalc.loss import Loss
from memcalc.models import MODELS, Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.timeline import Timeline

PLAN = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, strategy="fsdp-full-shard", ranks=8, precision="amp-bf16")
COUNT = sum(weight.numel for weight in PLAN.weights)
ONE = replace(PLAN, fsdp=Fsdp(version="1"))


def test_replicas_hold_what_as_many_ranks_as_one_of_them_has_would_hold() -> None:
    hybrid = replace(PLAN, strategy="fsdp-hybrid-shard", fsdp=Fsdp(replicas=2))
    assert hybrid.shards == 4
    assert ledger(hybrid).peak() == ledger(replace(PLAN, ranks=4)).peak()
    hybrid = replace(hybrid, tokens=8)
    low = replace(hybrid, fsdp=Fsdp(replicas=2, reduce_dtype="compute"))
    alone = replace(PLAN, ranks=4, tokens=8, fsdp=Fsdp(reduce_dtype="compute"))
    # In another dtype than the shards' the all-reduced gradient of every unit stays until backward is done.
    assert 0 < ledger(low).peak().bytes - ledger(alone).peak().bytes <= 2 * COUNT // 4
    with pytest.raises(PlanError, match="8 ranks do not divide over 3 replicas"):
        replace(hybrid, fsdp=Fsdp(replicas=3))


def test_replicas_are_nodes_unless_said() -> None:
    assert replace(PLAN, strategy="fsdp-hybrid-shard", ranks=16, nodes=4).shards == 4


def test_a_separate_root_gathers_the_embeddings_for_their_own_pass_only() -> None:
    whole = replace(PLAN, model=MODELS["llama-2-7b"], tokens=8, precision="bf16", optimizer="sgd", checkpoint_every=1)
    apart = replace(whole, fsdp=Fsdp(separate_root=True))
    embeddings, block = 32000 * 4096 * 2, (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) * 2
    # At the fullest point, within the last block's backward, the embeddings are not there, and the head is no more.
    saved = ledger(whole).peak().by_moment["backward"] - ledger(apart).peak().by_moment["backward"]
    assert embeddings <= saved <= 2 * embeddings + block
    together, own = ([name for name in ledger(plan).names if name.endswith(" gather")] for plan in (whole, apart))
    assert {*own} - {*together} == {"embeddings gather", "head gather"} and {*together} - {*own} == {"root gather"}
    with pytest.raises(PlanError, match="separate root"):
        replace(PLAN, fsdp=Fsdp(separate_root=True))  # GPT-2's head is its embeddings


def test_embeddings_and_head_of_a_known_size_are_the_roots() -> None:
    size = Model(name="size", family="size", parameters=100_000, layers=4, vocab=100, hidden=200)
    plan = replace(ONE, model=size, tokens=0, precision="fp32", ranks=2, optimizer="sgd")
    timeline = ledger(plan)
    (root,) = [i for i, name in enumerate(timeline.names) if name == "root gather"]
    assert timeline.delta[timeline.ident == root].max() == -(-4 * 2 * 100 * 200 // 512) * 512
    assert sum(weight.numel for weight in plan.weights) == 100_000


def test_fsdp_1_makes_no_second_copy_of_what_it_gathers() -> None:
    two, one = (ledger(plan).peak().by_moment["forward"] for plan in (PLAN, ONE))
    assert two > one


def test_prefetching_backward_gathers_one_unit_more() -> None:
    low = replace(ONE, precision="bf16", optimizer="sgd", checkpoint_every=1)
    peaks = {
        how: ledger(replace(low, fsdp=Fsdp(version="1", backward_prefetch=how))).peak().by_moment["backward"]
        for how in ("pre", "post", "none")
    }
    assert peaks["none"] <= peaks["post"] <= peaks["pre"]


def test_accumulated_gradients_stay_whole_unless_they_are_reduced_each_time() -> None:
    plan = replace(ONE, accumulation=2)
    each = replace(plan, fsdp=Fsdp(version="1", sync_every_micro_batch=True))
    saved = ledger(plan).peak().bytes - ledger(each).peak().bytes
    assert saved > 2 * COUNT * 0.7


@pytest.mark.parametrize("version", ["1", "2"])
def test_offloaded_shards_gradients_and_states_are_on_the_host(version: str) -> None:
    plan = replace(PLAN, fsdp=Fsdp(version=version), offload=Offload(optimizer="cpu", parameters="cpu"))
    peak = ledger(plan).peak()
    assert peak.by_category["parameters"] == peak.by_category["optimizer"] == 0
    sizes = sum(tensor.size for tensor in host_tensors(plan))
    assert sizes == pytest.approx(16 * COUNT / 8, rel=0.001)
    assert estimate(plan).host > sizes
    # FSDP 1 lets go of the device's shards of gradients when backward is done, FSDP 2 as they are copied.
    timeline = ledger(plan)
    shards = [name.endswith("shards gradient") for name in timeline.names]
    alive = np.cumsum(np.where(np.array(shards)[timeline.ident], timeline.delta, 0)).max()
    assert (alive > 0.99 * 4 * COUNT / 8) == (version == "1")


def test_data_parallel_gathers_outputs_on_the_first_gpu() -> None:
    plan = replace(PLAN, strategy="data-parallel", ranks=4, precision="fp32")
    one = replace(plan, strategy="single", ranks=1)
    more = ledger(plan).peak().by_moment["loss"] - ledger(one).peak().by_moment["loss"]
    logits = 4 * 1024 * 50257
    # Logits and log-softmax of four instead of one; the replica's own logits go once they are gathered.
    assert more == pytest.approx((3 + 3) * logits, rel=0.01)
    # Sums of gradients stand beside the replica's own.
    after = ledger(replace(plan, micro_batch=1, tokens=1)).peak()
    assert after.by_category["gradients"] == pytest.approx(8 * COUNT, rel=0.01)


def test_frozen_weights_accumulate_nothing() -> None:
    """A law found gradients of frozen weights, which no reduction ever took away."""
    plan = Plan(
        model=MODELS["gpt2-tiny"], strategy="fsdp-shard-grad-op", ranks=2, precision="amp-bf16", micro_batch=1,
        accumulation=2, tokens=8, adapter=Adapter(kind="lora", rank=1, targets="query-value"),
    )  # fmt: skip
    summed = {name for name in ledger(plan).names if name.endswith("accumulated gradient")}
    assert summed and all("lora_" in name for name in summed)


LORA = Plan(
    model=MODELS["llama-2-7b"], tokens=512, micro_batch=1, strategy="fsdp-full-shard", ranks=8, precision="bf16",
    checkpoint_every=1, reentrant=True, fsdp=Fsdp(version="1"),
    adapter=Adapter(kind="lora", rank=8, dtype="float32", autocast=True, input_gradients=True),
)  # fmt: skip


def test_frozen_units_of_fsdp_1_get_no_gradient_and_hold_reentrant_inputs() -> None:
    """At the end of backward inputs and gradients of all blocks are there."""
    found = ledger(LORA)
    assert {name for name in found.names if "flat gradient" in name} == {
        f"layers.{i} adapters flat gradient" for i in range(32)
    }
    assert held_at_the_peak(LORA) == (33, 31), "and the output of the block run again"
    assert held_at_the_peak(replace(LORA, strategy="single", ranks=1, fsdp=Fsdp())) == (33, 0), (
        "at the start of backward"
    )


def held_at_the_peak(plan: Plan) -> tuple[int, int]:
    """Inputs of blocks alive when backward is at its fullest, and gradients of such inputs."""
    found = ledger(replace(plan, tokens=4096, loss=Loss(form="fused-linear")))
    until = int(np.argmax(found.live())) + 1
    alive = np.bincount(found.ident[:until], np.sign(found.delta[:until])) > 0
    names = [found.names[ident] for ident in np.flatnonzero(alive)]
    inputs = sum(name.endswith(("residual_2 output", "embed_tokens output")) for name in names)
    return inputs, sum(name == "sum of gradients" for name in names)


def test_one_unit_of_frozen_and_trained_weights_gets_a_gradient_of_all() -> None:
    mixed = replace(LORA, fsdp=Fsdp(version="1", adapter_units=False), adapter=Adapter(kind="lora", rank=8))
    found = ledger(mixed)
    flat = next(size for name, size in zip(found.names, sizes(found), strict=True) if name == "layers.3 flat gradient")
    assert flat >= 2 * sum(weight.numel for weight in mixed.weights if weight.group == "layers.3")
    with pytest.raises(PlanError, match="one dtype"):
        replace(mixed, adapter=LORA.adapter)
    with pytest.raises(PlanError, match="quantised"):
        replace(mixed, adapter=replace(mixed.adapter, quantize="nf4"))
    with pytest.raises(PlanError, match="--no-orig-params"):
        replace(mixed, fsdp=replace(mixed.fsdp, original_parameters=False))


def test_quantised_weights_are_gathered_as_they_are_packed() -> None:
    packed = replace(LORA, adapter=replace(LORA.adapter, quantize="nf4"))
    found = ledger(packed)
    size = dict(zip(found.names, sizes(found), strict=True))["layers.3 gather"]
    matrices = sum(w.numel for w in packed.weights if w.group == "layers.3" and w.dtype == "nf4")
    assert size == pytest.approx(matrices / 2, rel=0.01)


def sizes(timeline: Timeline) -> list[int]:
    """Bytes of each name."""
    found = np.zeros(len(timeline.names), dtype=np.int64)
    np.maximum.at(found, timeline.ident, timeline.delta)
    return [int(size) for size in found]


def test_gloo_copies_while_the_cast_shards_stand() -> None:
    """foreach_all_gather, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: its list ``all_gather_inputs`` holds
    them until it returns. A real run on two CPUs of llama-tiny, 32 tokens, bfloat16 reduced too: 1.378 MiB."""
    plan = Plan(
        model=MODELS["llama-tiny"], tokens=32, micro_batch=1, strategy="fsdp-full-shard", ranks=2, device="cpu",
        precision="amp-bf16", optimizer_kind="for-loop", fsdp=Fsdp(reduce_dtype="compute"),
    )  # fmt: skip
    timeline = ledger(plan)
    assert round(timeline.peak().bytes / 2**20, 3) == 1.378
    alive: set[int] = set()
    for ident, delta in zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True):
        if timeline.names[ident] == "layers.1 gather copy in gloo" and delta > 0:
            assert any(timeline.names[other].endswith("cast shard") for other in alive)
        (alive.add if delta > 0 else alive.discard)(ident)


def test_a_gather_outlives_the_copy_out_of_the_next() -> None:
    """FSDPParamGroup.wait_for_unshard still has the one before in a local variable while it copies out."""
    timeline = ledger(replace(PLAN, tokens=8))
    names = [timeline.names[ident] for ident in timeline.ident]
    copied = names.index("h.1.attn.c_attn.weight gathered")
    assert timeline.delta[copied] > 0
    for unit in ("h.0", "h.1"):
        events = [index for index, name in enumerate(names) if name == f"{unit} gather"]
        assert events[0] < copied < events[1], unit


@pytest.mark.parametrize("name", ["vit-base-16", "resnet-50", "mlp-tiny"])
def test_what_is_no_token_is_cast_for_the_root(name: str) -> None:
    """MixedPrecisionPolicy.cast_forward_inputs: images too, so that all that follows is in 16 bits."""
    plan = replace(PLAN, model=MODELS[name], tokens=0, micro_batch=2)
    timeline = ledger(plan)
    (cast,) = {ident for ident, name in enumerate(timeline.names) if name == "inputs as bfloat16"}
    assert timeline.delta[timeline.ident == cast].max() == -(-2 * 2 * plan.model.features // 512) * 512
