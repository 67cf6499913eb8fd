"""One row for each ``model_type``, and what reading a file with it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.hf.keys import Key, Values
from memcalc.hf.names import Named, Names, renamed
from memcalc.models import FAMILIES, Model

__all__ = ["HfModel", "ModelType"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelType:
    """How a config.json of one ``model_type`` is read.

    Facts are of transformers/models/<model_type>/configuration_*.py and modeling_*.py.
    """

    name: str
    config: str
    """The configuration class."""
    blocks: tuple[str, ...] = ()
    """Classes of the repeated blocks, which FSDP files name (``_no_split_modules`` and the layers of modeling_*.py); empty
    where parts of their own have them."""
    heads: tuple[str, ...]
    """Classes whose module is counted, the usual one first; ``architectures`` in the file chooses."""
    keys: Mapping[str, Key]
    """What is read, by a name of its own: that of the Model's field where there is one."""
    fields: Callable[[Values, str], dict[str, Any]]
    """Fields of the Model from what was read, and the class that was chosen. Raises InputError."""
    names: Callable[[Model], Names]
    """The ledger's weights as the module of transformers has them."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Keys that hold a config of their own, with the ``model_type`` it has when it says none; read, each is a Model among
    the values."""
    written: Callable[[Values], dict[str, str]] = lambda values: {}
    """How transformers' code is written, in fields of a plan's ``implementation``."""
    notes: Callable[[Values], list[str]] = lambda values: []
    """What of the file is left aside or taken for granted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A model of a config.json."""

    model: Model
    row: ModelType
    head: str
    """The class of transformers that is counted."""
    written: Mapping[str, str] = field(default_factory=dict)
    """How its code is written, in fields of a plan's ``implementation``."""

    def weights(self) -> list[Named]:
        """Every parameter once, by the name and the shape it has in transformers' module."""
        return renamed(FAMILIES[self.model.family].weights(self.model), self.row.names(self.model))

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in FAMILIES[self.model.family].weights(self.model))
