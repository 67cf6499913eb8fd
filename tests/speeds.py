"""What the tests of step times share: plans, their seconds, and times by the table's own coefficients."""

from __future__ import annotations

from dataclasses import replace

from memcalc.coefficient_table import COEFFICIENTS
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.rank_hardware import hardware_of
from memcalc.throughput import StepTime, step_time

GPT2 = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
EIGHT = replace(GPT2, ranks=8, strategy="ddp")


def seconds(plan: Plan, **changes: object) -> float:
    """Predicted seconds per sample of a plan with some fields changed."""
    return step_time(replace(plan, **changes)).seconds_per_sample  # type: ignore[arg-type]


PLAIN = {name: row.value for name, row in COEFFICIENTS.items()} | {"attention-efficiency": 1.0}
"""The table's own values, whatever was fitted; attention as fast as other products."""


def counted(plan: Plan, **changes: object) -> tuple[StepTime, float]:
    """Times by the table's values, without a fixed time for collectives, and the FLOP/s of wide products."""
    changed = replace(plan, **changes)  # type: ignore[arg-type]
    hardware = replace(hardware_of(changed, PLAIN), hops=0.0)
    wide = hardware.float32_efficiency if changed.precision_row.compute == "float32" else hardware.efficiency
    return step_time(changed, hardware, PLAIN), hardware.flops[changed.precision_row.compute] * wide


def total(plan: Plan, **changes: object) -> float:
    return step_time(replace(plan, **changes), coefficients=PLAIN).total  # type: ignore[arg-type]


LLAMA = Plan(model=MODELS["llama-3-8b"], tokens=4096, micro_batch=1, accumulation=8, ranks=8, strategy="ddp",
             precision="bf16", gpu="h100-80gb")  # fmt: skip
