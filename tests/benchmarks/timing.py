"""Two or more sides of one question, timed turn by turn in one run, so that both meet the same machine."""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["interleave", "options", "ratio", "report"]


def options(description: str, rounds: int) -> Namespace:
    """``--rounds``, ``--small`` and ``--json``, which every benchmark takes."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each side has its turn")
    parser.add_argument("--small", action="store_true", help="a small problem, not warmed up: only to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def interleave(sides: Mapping[str, Callable[[], Any]], rounds: int, *, cold: bool = False) -> dict[str, list[float]]:
    """Seconds of each call, or what the call returns where that is a float: seconds of the part that matters.

    The side that goes first changes from round to round; one round before warms up, unless ``cold``.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(int(cold), rounds + 1):
        order = list(sides)[:: 1 if turn % 2 else -1]
        for name in order:
            start = time.perf_counter()
            said = sides[name]()
            if turn:
                taken[name].append(said if isinstance(said, float) else time.perf_counter() - start)
    return taken


def ratio(taken: Mapping[str, list[float]], side: str, base: str) -> float:
    """Median of ``side`` over median of ``base``.

    >>> ratio({"a": [3.0, 1.0, 2.0], "b": [1.0, 1.0, 9.0]}, "a", "b")
    2.0
    """
    return statistics.median(taken[side]) / statistics.median(taken[base])


def report(taken: Mapping[str, list[float]], *, as_json: bool, **facts: Any) -> None:
    """Medians in milliseconds, then whatever else is to be said."""
    medians = {name: round(statistics.median(values) * 1000, 3) for name, values in taken.items()}
    if as_json:
        print(json.dumps({"median_ms": medians, "rounds": len(next(iter(taken.values()))), **facts}))
        return
    for name, median in medians.items():
        print(f"{name:<28} {median:>10.1f} ms")
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<28} {value:>10}")
    sys.stdout.flush()
