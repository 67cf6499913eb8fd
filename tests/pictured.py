"""What the tests of figures share: a small plan, and timelines drawn at random."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

TINY = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Allocations and frees in any order of moments; at most one free for each allocation."""
    count = draw(st.integers(1, 30))
    sizes = draw(st.lists(st.integers(1, 10**12), min_size=count, max_size=count))
    frees = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    events = [(ident, size) for ident, size in enumerate(sizes)]
    for ident in frees:
        first = next(i for i, (name, delta) in enumerate(events) if name == ident and delta > 0)
        events.insert(draw(st.integers(first + 1, len(events))), (ident, -sizes[ident]))
    kinds = draw(st.lists(st.integers(0, len(CATEGORIES) - 1), min_size=count, max_size=count))
    when = draw(st.lists(st.integers(0, len(MOMENTS) - 1), min_size=len(events), max_size=len(events)))
    ident = np.array([name for name, _ in events], dtype=np.int64)
    return Timeline(
        names=tuple(f"t{i}" for i in range(count)),
        ident=ident,
        category=np.array(kinds, dtype=np.int8)[ident],
        moment=np.array(when if draw(st.booleans()) else sorted(when), dtype=np.int8),
        delta=np.array([delta for _, delta in events], dtype=np.int64),
    )
