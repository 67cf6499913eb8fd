"""The same tensors under two names: a ledger's weights, as a module of transformers has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from memcalc.spec import Weight

__all__ = ["Named", "Names", "renamed"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Names = Mapping[str, str]
"""Of a weight or the module it belongs to, what transformers calls it; ``#`` stands for the number of a block, unless the
name is there with its own.

A name that ends in ``.T`` has its matrix transposed (``Conv1D`` of transformers is a linear layer that does).
"""
Named = tuple[str, tuple[int, ...]]
"""A parameter as ``named_parameters()`` of transformers' module gives it: name and shape."""


def renamed(weights: Iterable[Weight], names: Names) -> list[Named]:
    """What transformers calls these weights, in their order.

    >>> renamed([Weight("h.7.fc.weight", (8, 4)), Weight("h.7.fc.bias", (8,))], {"h.#.fc": "transformer.h.#.c_fc.T"})
    [('transformer.h.7.c_fc.weight', (4, 8)), ('transformer.h.7.c_fc.bias', (8,))]
    """
    found = []
    for weight in weights:
        target, leaf = _target(weight.name, names)
        shape = weight.shape[::-1] if target.endswith(".T") else weight.shape
        found.append((target.removesuffix(".T") + leaf, shape))
    return found


def _target(name: str, names: Names) -> tuple[str, str]:
    """The name in transformers of a weight, or of its module and what follows; a weight without one is a KeyError."""
    module, _, leaf = name.rpartition(".")
    for said, rest in ((name, ""), (module, f".{leaf}")):
        if said in names:
            return names[said], rest
        template = _NUMBER.sub("#", said)
        if template in names:
            target = names[template]
            for number in _NUMBER.findall(said):
                target = target.replace("#", number, 1)
            return target, rest
    raise KeyError(name)
