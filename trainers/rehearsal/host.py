"""Tensors that a module makes in the host's memory while it trains on a GPU: a rehearsal has one device for both.

Only what is said in Python tells them apart: a tensor made without a device, or on "cpu", is the host's. It is the
GPU's from the moment it is moved, or used together with a tensor there, as nothing but moving allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainers.rehearsal import private

__all__ = ["HostMade", "of_host"]

_FACTORIES = {
    getattr(torch, name)
    for name in (
        "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
        "zeros",
    )
}  # fmt: skip
_MOVES = {Tensor.to, Tensor.cuda, Tensor.type_as}


class HostMade(TorchFunctionMode):
    """Enter it around a rehearsal; ``active`` says whether code of the module runs, ``claim`` counts a tensor on the GPU."""

    def __init__(self, active: Callable[[], bool], claim: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.active, self.claim, self.making = active, claim, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") in (None, "cpu") and self.active():
            self.making = True
            try:
                return func(*args, **kwargs)
            finally:
                self.making = False
        found = func(*args, **kwargs)
        if func in _MOVES and isinstance(found, Tensor) and (func is not Tensor.to or _leads_away(args[1:], kwargs)):
            self.claim(found)
        return found


def _leads_away(args: Any, kwargs: Any) -> bool:
    """Whether ``Tensor.to`` was given a device, or another tensor, whose device it is; not the word "cpu"."""
    places = [*args, kwargs.get("device"), kwargs.get("other")]
    said = [place for place in places if isinstance(place, torch.device | Tensor | int | str)]
    return any(place != "cpu" for place in said if isinstance(place, str)) or any(
        not isinstance(place, bool | str) for place in said
    )


def of_host(known: dict[int, Any], args: Any, kwargs: Any) -> tuple[bool, list[Tensor]]:
    """Whether what an operation makes is the host's, and which tensors of the host it uses beside ones of the GPU.

    ``known`` are the storages of the host by identity. A single number may lie anywhere.
    """
    given = [private.local(tensor) for tensor in private.tensors((args, kwargs))]
    there = [tensor for tensor in given if id(tensor.untyped_storage()) in known]
    if len(there) == len(given):
        return bool(given), []
    return False, [tensor for tensor in there if tensor.ndim]
