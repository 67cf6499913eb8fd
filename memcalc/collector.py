"""Python's cyclic garbage collector, stopped while many objects are made that all live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection within; reference counts free what has no cycles, as ever.

    The collector looks through all live objects again and again while their number grows, which for a model of thousands of
    layers takes longer than to play it.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
