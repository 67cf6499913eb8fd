"""The text of an estimate: a table of its sizes, and a table of the tensors alive at its peak."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from memcalc.assumptions import activations_known, undivided
from memcalc.estimate import Estimate, holding_gpus, usable_bytes
from memcalc.hints import machine_host, per_machine, whole_gradients
from memcalc.ledger import skeleton
from memcalc.plan import Plan
from memcalc.tables import coloured, columns, folded, heading, printable, render
from memcalc.timeline import BEFORE, CATEGORIES, MOMENTS, Skeleton, Timeline
from memcalc.units import format_both, format_bytes, format_count, things

__all__ = ["explanation", "summary"]

Row = tuple[str, str, int, int]
"""Group, what, and the least and most bytes it can be."""

_METERS = {
    "allocated": "allocated (torch.cuda.max_memory_allocated)",
    "reserved": "reserved (torch.cuda.max_memory_reserved)",
    "device": "device (what nvidia-smi shows)",
    "host": "host (its counted buffers, not all its RAM)",
}
_ON_CPU = {
    "allocated": "allocated (all tensors)",
    "reserved": "reserved (the same: the CPU has no caching allocator)",
    "device": "device (the same: no GPU)",
    "host": "host (RAM of the tensors)",
}
_NAMED = 4
"""Cards that are named of those that hold a plan."""
_STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


def summary(found: Estimate, format: str, *, whole: bool = False, unsaid: Sequence[str] = ()) -> str:
    """The whole estimate as a table, Markdown or CSV (the last in plain bytes and without the remarks).

    Below it stands what was ``unsaid`` and what could make it wrong; what else it takes for granted is only counted unless
    ``whole``.
    """
    rows = list(_rows(found))
    if format == "csv":
        return render(rows, ["group", "what", "low_bytes", "high_bytes"], "csv")
    last = ""
    cells = []
    for group, what, low, high in rows:
        cells.append((group if group != last else "", what, _range(low, high), _range(low, high, binary=True)))
        last = group
    table = render(cells, ["", "on the fullest rank", "decimal", "binary"], format)
    mark = "- " if format == "markdown" else "  "
    verdict = printable(_verdict(found))
    remarks = [mark + (verdict if format == "markdown" else coloured(verdict, found.verdict))]
    cure = whole_gradients(found.plan) if found.verdict in ("tight", "does-not-fit") else ""
    lines = [*filter(None, [cure]), *_cards(found), *unsaid, *found.doubts, *(found.taken if whole else _folded(found))]
    remarks += [folded(printable(line), mark, columns() if format == "table" else None) for line in lines]
    return "\n".join([_title(found, format), "", table, "", *remarks])


def _title(found: Estimate, format: str) -> str:
    plan, peak = found.plan, found.peak
    degrees = ("tensor", "context", "pipeline", "expert")
    divided = [f"{name} {degree}" for name in degrees if (degree := getattr(plan.layout, name)) > 1]
    layout = f" ({', '.join(divided)})" if divided else ""
    machines = f" of {plan.nodes} machines" * (plan.nodes > 1)
    world = f"{plan.strategy} on {plan.ranks} rank{'s' if plan.ranks > 1 else ''}{machines}{layout}"
    recipe = f"{plan.precision}, {plan.optimizer} ({plan.optimizer_kind}), {world}"
    count = _parameters(found)
    what = f"{plan.model.name if plan.model.name == count else f'{plan.model.name}: {count}'}, {recipe}"
    first = printable(f"peak {format_both(peak.bytes)} in the moment {peak.moment}")
    title = f"**{first}**" if format == "markdown" else heading(first)
    return "\n".join([title, printable(what), *map(printable, _batch(plan))])


def _folded(found: Estimate) -> list[str]:
    many = len(found.taken)
    return [f"{many} more sentences say what is taken for granted: --assumptions"] if many else []


def _batch(plan: Plan) -> list[str]:
    """How many samples a step takes, and how long they are; nothing for a model known by its size alone."""
    if not plan.micro_batch:
        return []
    parts = [f"micro batch {plan.micro_batch}"]
    if plan.accumulation > 1:
        parts.append(f"accumulation {plan.accumulation}")
    if plan.data_parallel > 1:
        parts.append(things(plan.data_parallel, "rank"))
    samples = f"{plan.global_batch} sample{'s' * (plan.global_batch > 1)} a step"
    each = f", {things(plan.tokens, 'token')} each" if plan.tokens else ""
    return [f"{' × '.join(parts)} = {samples}{each}"]


def _parameters(found: Estimate) -> str:
    every = sum(weight.numel for weight in found.plan.weights)
    if every == found.parameters:
        return f"{format_count(found.parameters)} parameters"
    how = f" ({found.plan.adapter.kind})" if found.plan.adapter.freezes else ""
    return f"{format_count(found.parameters)} of {format_count(every)} parameters trained{how}"


def _rows(found: Estimate) -> Iterator[Row]:
    held = {what: _held_before_step(found.timeline, category) for category, what in _STATES.items()}
    for what, size in held.items():
        yield "model states", what, size, size
    yield "model states", "model states in all", sum(held.values()), sum(held.values())
    for category in ("activations", "inputs", "communication"):
        most = max(found.timeline.at_moment(moment, category) for moment in MOMENTS)
        if most:
            yield "on top, at most", category, most, most
    if kept := found.timeline.at_moment("step", "workspaces"):
        yield "on top, at most", "cuBLAS workspaces, kept from the first product on", kept, kept
    in_step = found.timeline.at_moment("step", "temporary")
    if in_step:
        what = "temporary list" if found.plan.optimizer_kind == "foreach" else "temporaries"
        yield "on top, at most", f"{what} in the optimizer step ({found.plan.optimizer_kind})", in_step, in_step
    for category, size in found.peak.by_category.items():
        if size:
            yield f"at the peak ({found.peak.moment})", category, size, size
    yield f"at the peak ({found.peak.moment})", "peak", found.peak.bytes, found.peak.bytes
    for moment, size in found.peak.by_moment.items():
        yield "by moment", moment, size, size
    meters = _ON_CPU if found.plan.device == "cpu" else _METERS
    yield "meters", meters["allocated"], found.peak.bytes, found.peak.bytes
    if found.peak.moment in BEFORE:
        yield "meters", "allocated, from the first step on", found.steady.bytes, found.steady.bytes
    yield "meters", meters["reserved"], found.reserved.low, found.reserved.high
    yield "meters", meters["device"], found.device.low, found.device.high
    yield "meters", meters["host"], found.host, found.host
    if machine_host(found.plan, found.host):
        each = per_machine(found.plan)
        together = each * found.host
        yield "meters", f"host of the {each} rank{'s' * (each > 1)} of a machine together", together, together


def _held_before_step(step: Timeline, category: str) -> int:
    """Bytes of one category when the optimizer is about to step: all gradients are there, and only once."""
    in_step = np.flatnonzero(step.moment == MOMENTS.index("step"))
    before = slice(0, int(in_step[0]) if len(in_step) else len(step.delta))
    return int(step.delta[before][step.category[before] == CATEGORIES.index(category)].sum())


def _range(low: int, high: int, *, binary: bool = False) -> str:
    ends = dict.fromkeys((format_bytes(low, binary=binary), format_bytes(high, binary=binary)))
    return " to ".join(ends)


def _verdict(found: Estimate) -> str:
    gpu = found.plan.gpu_row
    if gpu is None:
        return f"verdict: {found.verdict}"
    return (
        f"verdict: {found.verdict} on {gpu.name}, of which torch can use {format_both(usable_bytes(found.plan, gpu))}"
    )


def _cards(found: Estimate) -> list[str]:
    if found.plan.device != "cuda" or found.plan.gpu or not found.whole:
        return []
    cards = holding_gpus(found.plan, found.reserved)
    sure = [gpu.name for gpu, for_sure in cards if for_sure]
    perhaps = [gpu.name for gpu, for_sure in cards if not for_sure]
    known = activations_known(found.plan) or bool(found.plan.model.module.factory)  # a rehearsal counted a module's
    far = " as far as it is counted" * (not known) + ", even undivided" * bool(undivided(found.plan))
    lines = [f"GPUs that hold it{far}: {_few(sure) or 'none of the catalog'}"]
    return [*lines, f"GPUs that perhaps hold it: {_few(perhaps)}"] if perhaps else lines


def _few(names: list[str]) -> str:
    """The smallest, and how many there are besides."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} larger" if more > 0 else "")


def explanation(plan: Plan, format: str, rehearsal: Timeline | None = None) -> str:
    """Each tensor alive at the peak with its formula; those of equal blocks together, largest first.

    Those of a ``rehearsal`` have a size and the operation that made them, and no formula.
    """
    bones = skeleton(plan)
    step = bones.at(plan.micro_batch) if rehearsal is None else rehearsal
    made = step.delta > 0
    sizes = dict(zip(step.ident[made].tolist(), step.delta[made].tolist(), strict=True))
    kinds = dict(zip(step.ident[made].tolist(), step.category[made].tolist(), strict=True))
    groups: dict[tuple[str, str, str], list[int]] = {}
    for ident in _alive(step):
        formula = _formula(bones, ident, plan.micro_batch) if rehearsal is None else f"{sizes[ident]} B"
        key = _pattern(step.names[ident]), CATEGORIES[kinds[ident]], formula
        groups.setdefault(key, []).append(int(sizes[ident]))
    lines = sorted(((*key, len(group), sum(group)) for key, group in groups.items()), key=lambda line: -line[4])
    if format in ("csv", "json"):
        return render(lines, ["name", "category", "formula", "count", "bytes"], format)
    cells = [(*line[:4], format_bytes(line[4]), format_bytes(line[4], binary=True)) for line in lines]
    count, total = sum(line[3] for line in lines), sum(line[4] for line in lines)
    cells.append(("all of it", "", "", count, format_bytes(total), format_bytes(total, binary=True)))
    return render(cells, ["alive at the peak", "category", "each", "count", "together", "binary"], format)


def _alive(step: Timeline) -> list[int]:
    """What is allocated at the first of the fullest points, in order of allocation."""
    live = step.live()
    if not len(live):
        return []
    upto = slice(0, int(np.argmax(live)) + 1)
    balance = np.bincount(step.ident[upto], weights=np.sign(step.delta[upto]), minlength=len(step.names))
    return [int(ident) for ident in np.flatnonzero(balance > 0)]


def _pattern(name: str) -> str:
    """Names of equal blocks alike: ``h.3.ln_1.weight`` is ``h.*.ln_1.weight``."""
    return re.sub(r"\.\d+(?![\w])", ".*", name)


def _formula(bones: Skeleton, ident: int, micro_batch: int) -> str:
    shape, itemsize, batched = bones.shapes[ident]
    if itemsize == 1 and len(shape) == 1 and not batched:
        return f"{shape[0]} B"
    factors = (micro_batch, *shape) if batched else shape
    return " × ".join([*map(str, factors), f"{itemsize} B"])
