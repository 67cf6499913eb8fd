"""What the tests of the trainers leave as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A rank that joins in this process flushes numbers close to zero, which other tests draw."""
    yield
    torch.set_flush_denormal(False)
