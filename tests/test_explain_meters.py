"""What the meters of a GPU say when read together; the numbers are people's own, from public reports."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.hardware import GPUS
from memcalc.meters import explain

MIB, GIB = 2**20, 2**30
READING = st.none() | st.integers(1000, 200 * GIB)


def output(*words: str) -> str:
    result = CliRunner().invoke(app, ["explain-meters", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_active_next_to_allocated_is_not_worth_a_word() -> None:
    assert not any("active" in note for note in explain(allocated=100 * MIB, active=109 * MIB).notes)


def test_the_card_narrows_what_is_outside() -> None:
    """1000 MiB are context and NCCL on an A100, but too much where NCCL goes over PCIe."""
    on = {
        name: explain(reserved=GIB, device=GIB + 1000 * MIB, gpu=GPUS[name]).notes[-1] for name in ("a100-80gb", "l4")
    }
    assert "on a100-80gb" in on["a100-80gb"] and "0.51 to 0.64 GiB" in on["a100-80gb"]
    assert "0.02 to 0.28 GiB on l4" in on["l4"] and "other processes" in on["l4"]


@pytest.mark.parametrize(
    ("readings", "line"),
    [
        ({"reserved": 3 * GIB, "device": 2 * GIB}, "device 2.147 GB (2 GiB) is less than reserved 3.221 GB (3 GiB)"),
        ({"allocated": 3 * GIB, "reserved": 2 * GIB}, "reserved 2.147 GB (2 GiB) is less than allocated"),
        ({"allocated": 3 * GIB, "device": 2 * GIB}, "is less than allocated"),
        ({"allocated": 3 * GIB, "active": 2 * GIB}, "active 2.147 GB (2 GiB) is less than allocated"),
        ({"allocated": GIB}, "give at least two"),
        ({}, "give at least two"),
        ({"reserved": 20 * GIB, "device": 30 * GIB, "gpu": GPUS["t4"]}, "more than torch can use of t4"),
        ({"reserved": 10 * GIB, "device": 17 * GIB, "gpu": GPUS["t4"]}, "more than there is on t4, of which torch"),
    ],
)
def test_what_cannot_be_true_is_refused_in_one_line(readings: dict[str, int], line: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(**readings)  # type: ignore[arg-type]
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@given(READING, READING, READING, READING)
def test_the_parts_add_up_to_the_largest_meter(
    allocated: int | None, active: int | None, reserved: int | None, device: int | None
) -> None:
    read = [meter for meter in (allocated, active, reserved, device) if meter is not None]
    if len(read) < 2 or read != sorted(read):
        with pytest.raises(InputError):
            explain(allocated=allocated, active=active, reserved=reserved, device=device)
        return
    found = explain(allocated=allocated, active=active, reserved=reserved, device=device)
    assert sum(part.bytes for part in found.parts) == read[-1]
    assert all(part.bytes >= 0 for part in found.parts)


def test_a_full_card_shows_more_than_torch_can_use() -> None:
    """A T4 without ECC has 16384 MiB by nvidia-smi."""
    assert explain(reserved=10 * GIB, device=16384 * MIB, gpu=GPUS["t4"]).total == "device"


def test_every_format() -> None:
    words = ("--allocated", "10GiB", "--reserved", "12GiB", "--device", "13GiB", "--gpu", "a100-80gb")
    found = json.loads(output(*words, "--format", "json"))
    assert [part["bytes"] for part in found["parts"]] == [10 * GIB, 2 * GIB, GIB]
    assert found["total"] == "device" and len(found["notes"]) == 2
    assert output(*words, "--format", "csv").splitlines()[2].startswith("cache,2147483648,")
    assert "| cache" in output(*words, "--format", "markdown")
    assert "100.0 %" in output(*words)


def test_the_command_refuses_in_one_line() -> None:
    result = CliRunner().invoke(app, ["explain-meters", "--reserved", "3GiB", "--device", "2GiB"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("memcalc: device")
