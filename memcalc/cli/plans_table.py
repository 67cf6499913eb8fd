"""``memcalc recommend``: the table of its plans, as wide as a terminal has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memcalc.tables import render
from memcalc.units import format_both, format_bytes

if TYPE_CHECKING:
    from memcalc.plan import Plan
    from memcalc.recommend import Choice

__all__ = ["also", "checkpointing", "clock", "hours", "knobs", "plans_table", "times_known"]

Columns = dict[str, list[object]]

_LEFT_OUT = ("also", "MFU", "headroom", "tokens/s")
"""What goes first where a terminal is still too narrow: it stands in the sentences below, or follows from the rest."""
_SAID = ("ranks", "precision")
"""What the first line says of the first plan."""


def plans_table(plans: Sequence[Choice], tokens: int, format: str, room: int | None) -> tuple[str, list[str]]:
    """The plans in columns, and the names of those that were left out, as few as it takes to fit into ``room`` columns of a
    terminal (None: endless)."""
    found = whole = _columns(plans, tokens)
    for found in [whole] if room is None else _narrower(whole, plans):
        text = render(list(zip(*found.values(), strict=True)), list(found), format)
        if room is None or max(map(len, text.splitlines())) <= room:
            break
    return text, [name for name in _LEFT_OUT if name in whole and name not in found]


def _narrower(found: Columns, plans: Sequence[Choice]) -> Iterator[Columns]:
    """The same, and less and less wide."""
    yield found
    found = found | {
        "peak": [format_bytes(c.peak) for c in plans],
        "headroom": [format_bytes(c.headroom) for c in plans],
    }
    yield found
    times = [f" x {c.plan.accumulation}" * (c.plan.accumulation > 1) for c in plans]
    batches: list[object] = [f"{c.plan.micro_batch or '-'}{more}" for c, more in zip(plans, times, strict=True)]
    found = {
        "batch" if name == "micro batch" else name: cells for name, cells in found.items() if name != "accumulation"
    }
    found["batch"] = batches
    yield found
    found = {name: cells for name, cells in found.items() if name not in _SAID or len(set(cells)) > 1}
    yield found
    for each in _LEFT_OUT:
        found = {name: cells for name, cells in found.items() if name != each}
        yield found


def _columns(plans: Sequence[Choice], tokens: int) -> Columns:
    """Everything that is shown of the plans, by the name of its column."""
    rows: list[dict[str, object]] = [
        {
            "": number,
            **knobs(c.plan),
            "also": also(c.plan),
            "peak": format_both(c.peak),
            "headroom": format_both(c.headroom),
            "step": _step(c),
            "tokens/s": f"{c.time.tokens_per_second:,.0f}" if c.plan.tokens else "-",
            "MFU": f"{c.time.mfu:.0%}" if c.plan.device == "cuda" else "-",
            "speed": f"{c.speed:.2f}",
            "GPU-hours": hours(c, tokens) if tokens else "-",
        }
        for number, c in enumerate(plans, 1)
    ]
    found = {name: [row[name] for row in rows] for name in rows[0]}
    unknown = [] if times_known(plans[0].plan) else ["step", "tokens/s", "MFU", "GPU-hours"]
    absent = [*unknown, *([] if tokens else ["GPU-hours"])]
    return {name: cells for name, cells in found.items() if name not in absent}


def times_known(plan: Plan) -> bool:
    """Whether seconds are said: of a card, or of CPU cores that were measured here; else they say which plan is faster."""
    from memcalc.coefficients import own_calibration

    own = own_calibration()
    return plan.device == "cuda" or (own is not None and own.is_of("cpu", None))


def clock(choice: Choice, tokens: int = 0) -> dict[str, float | None]:
    """What follows from seconds, for machines to read: None where no seconds are said (``times_known``).

    ``tokens`` of training, if any, give GPU-hours.
    """
    time, known = choice.time, times_known(choice.plan)
    found: dict[str, float | None] = {
        "seconds_per_step_low": time.low,
        "seconds_per_step": time.total,
        "seconds_per_step_high": time.high,
        "tokens_per_second": time.tokens_per_second if choice.plan.tokens else None,
        "mfu": time.mfu if choice.plan.device == "cuda" else None,
    }
    if tokens:
        low, high = choice.gpu_hours(tokens)
        found |= {"gpu_hours_low": low, "gpu_hours_high": high}
    return {name: value if known else None for name, value in found.items()}


def hours(choice: Choice, tokens: int) -> str:
    """GPU-hours of so many tokens, as wide a range as that of a step."""
    return " to ".join(dict.fromkeys(f"{each:,.0f}" for each in choice.gpu_hours(tokens)))


def knobs(plan: Plan) -> dict[str, object]:
    """What was chosen, by the name of its column."""
    return {
        "strategy": plan.strategy,
        "ranks": plan.ranks,
        "checkpointing": checkpointing(plan),
        "precision": plan.precision,
        "micro batch": plan.micro_batch or None,
        "accumulation": plan.accumulation,
    }


def checkpointing(plan: Plan) -> str:
    """Which blocks are checkpointed, as ``--checkpointing`` says it, or that it is selective."""
    if plan.checkpoint_every and plan.checkpointing.policy != "recompute-all":
        return "selective"
    return ("none", "full")[plan.checkpoint_every] if plan.checkpoint_every < 2 else f"every-{plan.checkpoint_every}"


def also(plan: Plan) -> str:
    """What else is not as usual, in the words of the options."""
    layout = plan.layout
    said = [
        f"tp {layout.tensor}" * (layout.tensor > 1),
        f"pp {layout.pipeline}" * (layout.pipeline > 1),
        f"{plan.fsdp.replicas} copies" * (plan.fsdp.replicas > 1),
        "fused" * (plan.optimizer_kind == "fused"),
        "chunked loss" * plan.loss.chunk_head,
        "sync every micro batch" * (plan.strategy_row.gathers and plan.fsdp.sync_every_micro_batch),
        "offload" * plan.offload.on,
        "estimated only" * bool(plan.untrained),
    ]
    return ", ".join(filter(None, said)) or "-"


def _step(c: Choice) -> str:
    """Seconds of a step as a range, in a unit that suits it.

    >>> from types import SimpleNamespace
    >>> _step(SimpleNamespace(time=SimpleNamespace(low=0.0523, high=0.081)))
    '52.3 to 81 ms'
    """
    if c.time.high < 1:
        return f"{c.time.low * 1e3:.3g} to {c.time.high * 1e3:.3g} ms"
    return f"{c.time.low:.3g} to {c.time.high:.3g} s"
