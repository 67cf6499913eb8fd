"""What the tests of the trainers leave as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memcalc import data
from tests.trainers.runs import EVALUATED


@pytest.fixture(autouse=True)
def how_torch_computes() -> Iterator[None]:
    """A rank that joins in this process flushes numbers close to zero, which other tests draw, and may put oneDNN away."""
    onednn = torch.backends.mkldnn.set_flags(_fp32_precision=None)
    yield
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.set_flags(*onednn)


@pytest.fixture(autouse=True, scope="package")
def few_are_evaluated() -> Iterator[None]:
    """As in the runs that ``runs.run`` starts, against which those in this process are held."""
    before, data.EVALUATED = data.EVALUATED, EVALUATED
    yield
    data.EVALUATED = before
