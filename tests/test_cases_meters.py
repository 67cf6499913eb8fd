"""Public reports about units and about reading meters: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import pytest

from memcalc.estimate import estimate, verdict
from memcalc.hardware import GPUS
from memcalc.ledger import ledger
from memcalc.meters import explain
from memcalc.plan import Plan
from memcalc.reserved import Range
from memcalc.units import format_both, format_bytes, parse_bytes
from tests.figures import GIB, MIB, sized, trained


def test_c21_reserved_far_above_allocated_is_no_error_of_an_estimate() -> None:
    """pytorch issue 124260: Llama-2-70B in float32 on 8 cards holds 33.494 GiB in tensors and 59.779 in all right after
    wrapping. One layer of 202,383,360 parameters shows as 0.758 GiB, which is 4 B each."""
    found = explain(allocated=round(33.494 * GIB), reserved=round(59.779 * GIB))
    assert {part.name: round(part.bytes / GIB, 3) for part in found.parts} == {"tensors": 33.494, "cache": 26.285}
    assert any("1.78 times allocated" in note and "expandable_segments:True" in note for note in found.notes)
    layer = ledger(Plan(model=sized(202_383_360))).at_moment("start", "parameters")
    assert layer / GIB == pytest.approx(0.754, abs=0.0005)


def test_c22_active_far_above_allocated_is_memory_that_waits_for_a_stream() -> None:
    """pytorch/torchtitan issue 735: peak allocated 18,561 MiB, peak active 25,765 MiB."""
    found = explain(allocated=18561 * MIB, active=25765 * MIB)
    assert {part.name: part.bytes // MIB for part in found.parts} == {"tensors": 18561, "waiting": 7204}
    assert any("active is 1.39 times allocated" in note and "AVOID_RECORD_STREAMS=1" in note for note in found.notes)


def test_c41_83_gb_fit_a_card_of_80_gib() -> None:
    """meta-pytorch/torchtune issue 1346: 83 GB were reported on a card of 80: 77.30 GiB, and 80 GiB are 85.90 GB."""
    assert format_both(83 * 10**9) == "83 GB (77.3 GiB)"
    assert format_both(80 * GIB) == "85.899 GB (80 GiB)"
    assert parse_bytes("83GB") < parse_bytes("80GiB")
    plan = trained("gpt2", tokens=64, gpu="a100-80gb")
    card = GPUS["a100-80gb"]
    for size, said in ((83 * 10**9, "fits"), (86 * 10**9, "does-not-fit")):
        assert verdict(plan, Range(low=size, point=size, high=size), card) == said


def test_c41_a_host_of_16_gb_has_14_9_gib() -> None:
    """nomic-ai/gpt4all issue 1685."""
    assert format_bytes(16 * 10**9, binary=True) == "14.901 GiB"


@pytest.mark.parametrize(("outside", "says"), [(200, "less than one context"), (320, "a CUDA context takes;"), (1006, "one NCCL"), (2000, "other processes")])  # fmt: skip
def test_c52_outside_torch_is_held_against_context_and_nccl(outside: int, says: str) -> None:
    """pytorch issue 28394: 1008 MB in nvidia-smi with 2 MB cached, where another library took 320 MB."""
    found = explain(reserved=2 * MIB, device=(2 + outside) * MIB)
    assert found.parts[-1].name == "outside torch" and found.parts[-1].bytes == outside * MIB
    assert any(says in note for note in found.notes)


def test_c52_the_context_is_never_in_the_allocated_peak() -> None:
    """pytorch issues 107667 and 37250: a context of about 300 MiB, beside what torch holds."""
    found = estimate(trained("gpt2", tokens=64, gpu="a100-80gb"))
    assert found.device.low - found.reserved.low == GPUS["a100-80gb"].context.low == 256 * MIB
    assert sum(found.peak.by_category.values()) == found.peak.bytes <= found.reserved.low


def test_c53_memory_now_is_not_the_peak() -> None:
    """karpathy/nanoGPT issue 618: allocated now 2.47, reserved 16.69."""
    found = explain(allocated=round(2.47 * GIB), reserved=round(16.69 * GIB))
    assert "max_memory_allocated (the peak), not with memory_allocated (now)" in found.notes[0]
    assert "6.76 times allocated" in found.notes[1] and "memory_allocated() now?" in found.notes[1]
    assert len(explain(allocated=10 * GIB, reserved=13 * GIB).notes) == 1
