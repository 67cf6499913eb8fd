"""Finding and calling the user's own code: a factory that returns a module, a callable that returns a batch.

Nothing here runs unless the user has named it, and it runs in a process that does nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from memcalc.errors import FileError, InputError, MemcalcError, UnknownNameError

__all__ = ["CodeError", "build_for_real", "build_on_meta", "call", "find", "retie"]


class CodeError(InputError):
    """The user's own code failed; its traceback has been printed."""


@cache
def find(name: str) -> Callable[..., Any]:
    """The callable behind ``package.file:name``, ``path/file.py:name`` or ``path/config.json``. Raises MemcalcError."""
    if name.endswith(".json"):
        from trainers.transformers_config import from_config

        return from_config(Path(name))
    where, _, attribute = name.rpartition(":")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise UnknownNameError(f"name in {where}", part, known)
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        raise InputError(f"{name} is a module already; name a function that returns one")
    if not callable(found):
        raise InputError(f"{name} is {_a(found)}, which cannot be called; name a function that returns a module")
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        near = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        nearest = UnknownNameError("file", path.name, near).nearest
        raise FileError(f"{path} does not exist" + (f"; did you mean {nearest!r}?" if nearest else ""))
    sys.path.insert(0, str(path.parent))  # what stands beside it, it may import
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    _run(lambda: specification.loader.exec_module(module), f"{path} cannot be imported")  # type: ignore[union-attr]
    return module


def _module(name: str) -> ModuleType:
    """Imported from where the user stands, or from what is installed."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:  # of a package above it, or of something that package imports
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            traceback.print_exc()
            raise CodeError(f"{name} cannot be imported: {_line(error)}") from None
        missing = True
    except BaseException as error:
        traceback.print_exc()
        raise CodeError(f"{name} cannot be imported: {_line(error)}") from None
    if missing:
        here = Path(*name.split(".")[:-1])
        known = [path.stem for path in here.glob("*.py") if path.stem != "__init__"]
        near = UnknownNameError("module", name.split(".")[-1], known)
        raise FileError(f"module {name} is neither in {Path.cwd()} nor installed: {near}")
    return _run(lambda: importlib.import_module(name), f"{name} cannot be imported")


def call(name: str, *arguments: object) -> Any:
    """What the named callable returns. Raises MemcalcError, with whatever it raises in one line."""
    function = find(name)
    return _run(lambda: function(*arguments), f"{name} failed")


def _run(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except MemcalcError:
        raise
    except SystemExit as error:
        traceback.print_exc()
        raise CodeError(f"{what}: it called exit({'' if error.code is None else error.code})") from None
    except BaseException as error:
        traceback.print_exc()
        raise CodeError(f"{what}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}{': ' if text else ''}{text[:200]}"


def _a(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def build_on_meta(name: str) -> nn.Module:
    """The module without memory where its code allows that, else built for real and its weights moved to meta."""
    try:
        with torch.device("meta"):
            module = _checked(name, call(name))
        if all(tensor.device.type != "meta" for _, _, tensor in plain_tensors(module)):
            return module
    except CodeError:
        print(f"memcalc: {name} cannot be built on meta, see above; it is built for real", file=sys.stderr)
    module = build_for_real(name, seed=0)
    groups = shared(module)
    module.to("meta")
    retie(module, groups)
    return module


def build_for_real(name: str, seed: int) -> nn.Module:
    """The module with the values its code gives it, the same on every rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return _checked(name, call(name))


def _checked(name: str, module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError(f"{name} returned {_a(module)}, not an nn.Module")
    for weight, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(
                f"{name}: the shape of {weight} is known only after a forward pass; let the factory run one, or give it a shape"
            )
    return module


def plain_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Tensors that are neither parameters nor buffers, and that ``module.to`` leaves where they are."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield part, name, value


Ties = list[list[tuple[nn.Module, str]]]


def shared(module: nn.Module) -> Ties:
    """Where one parameter stands in several places: the places, for each such parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    return [found for found in places.values() if len(found) > 1]


def retie(module: nn.Module, ties: Ties) -> None:
    """Share again what ``module.to`` and ``to_empty`` gave each place of its own."""
    for (first, name), *others in ties:
        for part, other in others:
            setattr(part, other, getattr(first, name))
