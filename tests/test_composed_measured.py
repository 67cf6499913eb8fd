"""Peaks that torch 2.13 and DeepSpeed 0.19.8 had on the CPU with gloo, by the profiler's memory events, to the byte or two.

The runs are those of tests/trainers/test_matrix.py on a larger model: 2 or 4 ranks, 3 steps, AdamW, fp32.
"""

from __future__ import annotations

import pytest

from memcalc.deepspeed import DeepSpeed
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.models import Model
from memcalc.offload import Offload
from memcalc.plan import Plan

SIZES = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 1000, "context": 128}
LLAMA = Model(name="llama-of-4", family="llama", kv_heads=2, ffn=384, **SIZES)  # type: ignore[arg-type]
GPT2 = Model(name="gpt2-of-4", family="gpt2", kv_heads=4, ffn=512, tied=True, **SIZES)  # type: ignore[arg-type]
SMALL = DeepSpeed(reduce_bucket_size=200_000, prefetch_bucket_size=100_000, persistence_threshold=1000)


def plan(model: Model, ranks: int, accumulation: int = 1, **fields: object) -> Plan:
    layout = fields.get("layout", Layout())
    assert isinstance(layout, Layout)
    micro_batch = 8 // (ranks // layout.model_parallel) // accumulation
    return Plan(
        model=model, tokens=128, micro_batch=micro_batch, accumulation=accumulation, device="cpu", ranks=ranks, torch="2.13",
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


TWO, FSDP = Layout(pipeline=2), {"strategy": "fsdp-full-shard"}
# By pipeline stage.
MEASURED = {
    "gpipe": (plan(LLAMA, 2, 4, layout=Layout(pipeline=2, schedule="gpipe")), [30_509_148, 40_296_088]),
    "1f1b": (plan(LLAMA, 2, 4, layout=TWO), [21_168_208, 18_930_792]),
    "interleaved": (
        plan(LLAMA, 2, 4, layout=Layout(pipeline=2, schedule="interleaved", chunks=2)),
        [25_729_104, 23_589_992],
    ),
    "1f1b of 4": (plan(LLAMA, 4, 8, layout=Layout(pipeline=4)), [12_107_840, 8_975_420, 7_563_324, 9_397_864]),
    "tied": (plan(GPT2, 2, 4, layout=TWO), [18_799_212, 17_508_484]),
    "ddp": (plan(GPT2, 4, 4, layout=TWO, strategy="ddp"), [16_023_164, 15_051_924]),
    "fsdp": (plan(LLAMA, 4, 4, layout=TWO, **FSDP), [14_141_520, 11_732_840]),
    "fsdp grad op": (plan(GPT2, 4, 4, layout=TWO, strategy="fsdp-shard-grad-op"), [12_777_580, 11_903_108]),
    "tensor": (plan(LLAMA, 4, 4, layout=Layout(pipeline=2, tensor=2)), [12_920_928, 12_790_904]),
    "fsdp with tensor": (plan(LLAMA, 4, layout=Layout(tensor=2), **FSDP), [24_808_888]),
    "grad op with tensor": (plan(LLAMA, 4, 2, layout=Layout(tensor=2), strategy="fsdp-shard-grad-op"), [18_166_700]),
    "fsdp 1": (plan(GPT2, 2, fsdp=Fsdp(version="1"), **FSDP), [29_729_452]),
    "deepspeed-0": (plan(GPT2, 2, strategy="deepspeed-0"), [34_777_308]),
    "deepspeed-1": (plan(GPT2, 2, strategy="deepspeed-1", deepspeed=SMALL), [32_901_656]),
    "deepspeed-2": (plan(GPT2, 2, 2, strategy="deepspeed-2", deepspeed=SMALL), [23_254_044]),
    "deepspeed-3": (plan(GPT2, 2, strategy="deepspeed-3", deepspeed=SMALL), [37_454_109]),
    "deepspeed-2 offload": (
        plan(GPT2, 2, strategy="deepspeed-2", deepspeed=SMALL, offload=Offload(optimizer="cpu")),
        [37_676_568],
    ),
    "deepspeed-3 offload": (
        plan(GPT2, 2, strategy="deepspeed-3", deepspeed=SMALL, offload=Offload(optimizer="cpu", parameters="cpu")),
        [39_330_585],
    ),
    "deepspeed-2 bf16": (plan(GPT2, 2, strategy="deepspeed-2", deepspeed=SMALL, precision="bf16-master"), [22_357_016]),
}


@pytest.mark.parametrize("name", MEASURED)
def test_every_stage_holds_what_was_measured(name: str) -> None:
    """To 4 in 10 000: masks of embeddings under tensor parallel come and go one by one, and are counted as one."""
    each, measured = MEASURED[name]
    assert [ledger(each, stage).steady().bytes for stage in range(len(measured))] == pytest.approx(measured, rel=4e-4)
