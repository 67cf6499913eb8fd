"""The repeated parts of a module of the user's own: units of sharding and of activation checkpoints."""

from __future__ import annotations

from collections import Counter

from torch import nn

from memcalc.errors import InputError, UnknownNameError
from memcalc.spec import ROOT

__all__ = ["candidates", "group_of", "module_of", "unit_names"]


def unit_names(module: nn.Module, wrap: str = "") -> list[str]:
    """Names of the modules that are units: of the class named, else of those its author says are not to be split
    (``_no_split_modules`` of transformers), else the members of its outermost ``nn.ModuleList``s.

    Several classes have commas between them. Raises InputError, with the classes there are, for one that is not.

    >>> unit_names(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])))
    ['1.0']
    """
    named = [(name, part) for name, part in module.named_modules() if name and _owns(part)]
    if wrap:
        classes = [each.strip() for each in wrap.split(",")]
        known = candidates(module)
        for each in classes:
            if each not in known:
                counted = [f"{name} ({count})" for name, count in known.items()]
                nearest = UnknownNameError("", each, known).nearest
                hint = f"did you mean {nearest!r}? " if nearest else ""
                raise InputError(f"--wrap {each}: no module is of that class; {hint}there are: {', '.join(counted)}")
        return [name for name, part in named if type(part).__name__ in classes]
    whole = {each for part in module.modules() for each in getattr(part, "_no_split_modules", None) or ()}
    found = [name for name, part in named if type(part).__name__ in whole]
    if found:
        return found
    lists: list[str] = []
    for name, part in named:
        if isinstance(part, nn.ModuleList) and not any(f"{name}.".startswith(f"{outer}.") for outer in lists):
            lists.append(name)
    return [name for name, _ in named if name.rpartition(".")[0] in lists]


def candidates(module: nn.Module) -> dict[str, int]:
    """Classes of modules that could be units, and how many of each there are: those that own weights and are called.

    >>> candidates(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    {'Sequential': 1, 'Linear': 2}
    """
    parts = [part for name, part in module.named_modules() if name and _owns(part)]
    kinds = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return dict(Counter(type(part).__name__ for part in parts if not isinstance(part, kinds)))


def _owns(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def group_of(weight: str, units: list[str]) -> str:
    """The group of a weight: its innermost unit, as a name with a dot in it, or the root.

    >>> group_of("layers.1.fc.weight", ["layers.0", "layers.1"]), group_of("enc.weight", ["enc"]), group_of("a", [])
    ('layers.1', 'self.enc', 'root')
    """
    owners = [unit for unit in units if weight.startswith(f"{unit}.")]
    owner = max(owners, key=len, default="")
    return owner and (owner if "." in owner else f"self.{owner}") or ROOT


def module_of(model: nn.Module, group: str) -> nn.Module:
    """The module behind a group of weights."""
    try:
        return model.get_submodule(group)
    except AttributeError:
        return model.get_submodule(group.removeprefix("self."))
