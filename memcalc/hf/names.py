"""The same tensors under two names: a ledger's weights, as a module of transformers has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from memcalc.spec import Weight

__all__ = ["Named", "Names", "renamed"]

Names = Mapping[str, str]
"""Of a weight or the module it belongs to, what transformers calls it; ``#`` stands for the number of a block or expert,
unless the name is there with its own.

A name that ends in ``.T`` has the matrix transposed (``Conv1D`` of transformers is a linear layer that does). Where the
number of an expert goes away, the experts' matrices are stacked; where several names become one, they are put together
along their rows.
"""
Named = tuple[str, tuple[int, ...]]
"""A parameter as ``named_parameters()`` of transformers' module gives it: name and shape."""


def renamed(weights: Iterable[Weight], names: Names) -> list[Named]:
    """What transformers calls these weights, each once, in the order in which the first part of each comes.

    >>> expert = [Weight(f"layers.0.experts.{e}.{part}.weight", (8, 4)) for e in range(3) for part in ("gate", "up")]
    >>> names = {f"layers.#.experts.#.{part}.weight": "model.layers.#.gate_up" for part in ("gate", "up")}
    >>> renamed(expert, names), renamed([Weight("fc.weight", (8, 4))], {"fc": "c_fc.T"})
    ([('model.layers.0.gate_up', (3, 16, 4))], [('c_fc.weight', (4, 8))])
    """
    parts: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    stacked: set[str] = set()
    for weight in weights:
        said = {weight.name, weight.name.rsplit(".", 1)[0]} & names.keys()
        template = weight.name if said else re.sub(r"(?<=\.)\d+(?=\.)", "#", weight.name)
        target, transposed = _target(template, names)
        numbers = [] if said else re.findall(r"(?<=\.)\d+(?=\.)", weight.name)
        name = target
        for number in numbers[: target.count("#")]:
            name = name.replace("#", number, 1)
        if target.count("#") < len(numbers):
            stacked.add(name)
        shape = weight.shape[::-1] if transposed else weight.shape
        parts.setdefault(name, {}).setdefault(template, []).append(shape)
    return [(name, _together(list(each.values()), name in stacked)) for name, each in parts.items()]


def _target(template: str, names: Names) -> tuple[str, bool]:
    """The name in transformers, and whether the tensor is transposed there."""
    if template in names:
        return names[template].removesuffix(".T"), names[template].endswith(".T")
    module, leaf = template.rsplit(".", 1)
    target = names[module]
    return f"{target.removesuffix('.T')}.{leaf}", target.endswith(".T")


def _together(parts: list[list[tuple[int, ...]]], stacked: bool) -> tuple[int, ...]:
    """The shape of one tensor made of several kinds, each of one shape and, where stacked, as many of each."""
    rows = sum(shapes[0][0] for shapes in parts)
    shape = (rows, *parts[0][0][1:])
    return (len(parts[0]), *shape) if stacked else shape
