"""What ``memcalc calibrate`` measures, on one rank and for real, and under torchrun."""

from __future__ import annotations

import pytest
import torch

from memcalc.calibrate.machine import coefficients, measure
from trainers import speeds


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "WIDTHS", {"cpu": (32, 64)})
    monkeypatch.setattr(speeds, "COPIED", {"cpu": 2**20})
    monkeypatch.setattr(speeds, "TRIES", 2)


def test_one_rank_measures_products_copies_and_operations(quick: None) -> None:
    said: list[str] = []
    found = speeds.measure(torch.device("cpu"), said.append)
    assert [(each["dtype"], each["width"]) for each in found["products"]] == [
        (dtype, width) for dtype in ("float32", "bfloat16") for width in (32, 64)
    ]
    assert all(each["flops"] > 1e6 for each in found["products"])
    assert found["copy"] > 1e7
    assert 1e-8 < found["operation"] < 1e-2
    assert found["reduced"] == []
    assert len(said) == 6
    values = coefficients(found)
    assert set(values) == {"cpu-core-flops", "cpu-memory-bandwidth", "cpu-launch-seconds"}


def test_two_ranks_under_torchrun() -> None:
    said: list[str] = []
    found = measure("cpu", 2, said.append)
    assert found["ranks"] == 2
    assert [each["bytes"] for each in found["reduced"]] == list(speeds.REDUCED)
    assert coefficients(found)["cpu-link"] > 1e6
    assert any("all-reduce" in line for line in said)
