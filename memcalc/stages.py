"""Pipeline stages: which blocks, and which weights outside of blocks, one rank of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memcalc.layout import Layout
from memcalc.plan import Plan
from memcalc.spec import HEAD, ROOT, Weight

__all__ = ["Stage", "Stretch", "placed", "split", "stage", "stage_weights", "telling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive blocks ``start`` to ``stop`` (excluded), with the embedding, with the head and the loss, or neither."""

    start: int
    stop: int
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One rank of a pipeline: its place, and its stretches of layers in order."""

    index: int
    of: int
    chunks: tuple[Stretch, ...]

    @property
    def first(self) -> bool:
        return self.chunks[0].first

    @property
    def last(self) -> bool:
        return self.chunks[-1].last

    @property
    def blocks(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def split(blocks: int, parts: int, ends: bool = False, first: int = 0, last: int = 0) -> list[int]:
    """Blocks of each part in order; earlier parts have one more where it does not divide.

    ``first`` and ``last`` are given (Megatron-LM's ``--decoder-first-pipeline-num-layers``) unless they are 0.

    ``ends``: embedding and head count as a block each (DeepSpeed's ``type:transformer|embedding``; Megatron-LM's
    ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``).

    >>> split(10, 4), split(10, 4, ends=True), split(70, 12, ends=True)[:2], split(12, 4, first=2, last=2)
    ([3, 3, 2, 2], [2, 3, 3, 2], [5, 6], [2, 4, 4, 2])
    """
    if first or last:
        middle = parts - bool(first) - bool(last)
        return (
            [first] * bool(first) + split(blocks - first - last, middle) + [last] * bool(last)
            if middle
            else [first, last]
        )
    each, more = divmod(blocks + 2 * ends, parts)
    sizes = [each + (part < more) for part in range(parts)]
    if ends:
        sizes[0] -= 1
        sizes[-1] -= 1
    return sizes


def stage(plan: Plan, index: int) -> Stage:
    """One rank of the plan's pipeline; without one, stage 0 is everything."""
    return placed(plan.model.blocks, plan.layout, index)


def placed(blocks: int, layout: Layout, index: int) -> Stage:
    """The same of so many blocks."""
    parts = layout.pipeline * layout.chunks
    sizes = split(
        max(blocks, 1), parts, layout.ends, layout.first_layers, layout.last_layers
    )  # what is known by its size alone is one block
    starts = [sum(sizes[:part]) for part in range(parts)]
    return Stage(
        index=index,
        of=layout.pipeline,
        chunks=tuple(
            Stretch(start=starts[part], stop=starts[part] + sizes[part], first=part == 0, last=part == parts - 1)
            for part in range(index, parts, layout.pipeline)
        ),
    )


def telling(plan: Plan) -> list[Stage]:
    """The stages one of which is the fullest: first, last, and of those between that have as many blocks the first,
    because no later one has more micro batches in flight. Where blocks differ, all."""
    stages = [stage(plan, index) for index in range(plan.layout.pipeline)]
    if plan.model.widths:
        return stages
    between: dict[int, Stage] = {}
    for each in stages[1:-1]:
        between.setdefault(each.blocks, each)
    return [stages[0], *between.values(), *stages[1:][-1:]]


def stage_weights(weights: Sequence[Weight], part: Stage, tied: bool, *, module: bool = False) -> list[Weight]:
    """The weights of one stage. A head that is the token table has its own copy of it on the last stage.

    The token table is the first weight of every family that ties them; ``module``: all that stands before the blocks
    comes with it.
    """
    if part.of == 1:
        return list(weights)
    blocks = list(dict.fromkeys(weight.group for weight in weights if weight.group not in (ROOT, HEAD)))
    here = {name for chunk in part.chunks for name in blocks[chunk.start : chunk.stop]}
    here |= {ROOT} if part.first else set()
    here |= {HEAD} if part.last else set()
    found = [weight for weight in weights if weight.group in here]
    return found if part.first or not (part.last and tied) else [*_tied(weights, module), *found]


def _tied(weights: Sequence[Weight], module: bool) -> list[Weight]:
    return [weight for weight in weights if weight.group == ROOT] if module else [weights[0]]
