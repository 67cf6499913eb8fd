"""memcalc: how much memory a training run takes, before it runs.

>>> import memcalc
>>> plan = memcalc.Plan(model=memcalc.MODELS["gpt2"], tokens=1024, micro_batch=8)
>>> plan.global_batch
8

Names are imported when they are first used, so that ``import memcalc`` costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.compare import compare as compare
    from memcalc.errors import FileError, InputError, MemcalcError, PlanError, RunError, UnknownNameError
    from memcalc.estimate import Estimate
    from memcalc.estimate import estimate as estimate
    from memcalc.hardware import GPUS
    from memcalc.models import MODELS, Model
    from memcalc.optimizers import OPTIMIZERS
    from memcalc.plan import Plan
    from memcalc.precision import PRECISIONS
    from memcalc.recommend import recommend as recommend
    from memcalc.strategies import STRATEGIES
    from memcalc.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "GPUS", "MODELS", "OPTIMIZERS", "PRECISIONS", "STRATEGIES",
    "Estimate", "FileError", "InputError", "MemcalcError", "Model", "Plan", "PlanError", "RunError",
    "Timeline", "UnknownNameError", "__version__", "compare", "estimate", "recommend",
]  # fmt: skip

_HOME = {
    "compare": ("compare",),
    "errors": ("FileError", "InputError", "MemcalcError", "PlanError", "RunError", "UnknownNameError"),
    "estimate": ("Estimate", "estimate"),
    "hardware": ("GPUS",),
    "models": ("MODELS", "Model"),
    "optimizers": ("OPTIMIZERS",),
    "plan": ("Plan",),
    "precision": ("PRECISIONS",),
    "recommend": ("recommend",),
    "strategies": ("STRATEGIES",),
    "timeline": ("Timeline",),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"memcalc.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """``memcalc.estimate`` is the function, also after the submodule of the same name was imported.

    The import system sets a loaded submodule as an attribute of its package, which would otherwise make
    the meaning of ``memcalc.estimate`` depend on what was imported before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
