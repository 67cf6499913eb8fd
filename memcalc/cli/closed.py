"""What ``--without`` closes and another option asks for cannot both be: said instead of letting one of them win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memcalc.errors import InputError
from memcalc.search import GROUPS, strategy_names
from memcalc.strategies import STRATEGIES

__all__ = ["check_closed"]


@dataclass(frozen=True, slots=True)
class _Asks:
    """An option whose value may ask for a choice."""

    option: str
    key: str
    """Its name among the words that were typed."""
    asks: Callable[[Any], bool]
    spelled: Callable[[Any], str] = str


def _checkpointing(value: int) -> str:
    return "full" if value == 1 else f"every-{value}"


_SELECTIVE = (
    _Asks("--checkpoint-policy", "checkpointing__policy", lambda value: value != "recompute-all"),
    _Asks("--checkpoint-one-in", "checkpointing__one_in", lambda value: value > 1),
)
_ASKED: Mapping[str, tuple[_Asks, ...]] = {
    "tensor-parallel": (_Asks("--tensor-parallel", "layout__tensor", lambda value: value > 1),),
    "pipeline-parallel": (_Asks("--pipeline-parallel", "layout__pipeline", lambda value: value > 1),),
    "checkpointing": (
        _Asks("--checkpointing", "checkpoint_every", lambda value: value > 0, _checkpointing),
        _Asks("--reentrant", "reentrant", bool, lambda value: ""),
        *_SELECTIVE,
    ),
    "selective": _SELECTIVE,
    "every-n": (_Asks("--checkpointing", "checkpoint_every", lambda value: value > 1, _checkpointing),),
    "fused": (_Asks("--optimizer-kind", "optimizer_kind", lambda value: value == "fused"),),
    "chunked-loss": (_Asks("--loss-chunks", "loss__chunks", lambda value: value > 0),),
    "sync-every-micro-batch": (
        _Asks("--sync-every-micro-batch", "fsdp__sync_every_micro_batch", bool, lambda value: ""),
    ),
    "offload": (
        _Asks("--offload-optimizer", "offload__optimizer", lambda value: value != "none"),
        _Asks("--offload-parameters", "offload__parameters", lambda value: value != "none"),
    ),
}
"""By the names of ``memcalc.search.WITHOUT``."""


def check_closed(typed: Mapping[str, Any], only: Sequence[str] | None, without: Sequence[str]) -> None:
    """Raises InputError for a choice that is closed and asked for.

    >>> check_closed({"checkpoint_every": 2}, None, ["every-n"])
    Traceback (most recent call last):
    memcalc.errors.InputError: --without every-n and --checkpointing every-2 contradict each other; leave one out
    """
    for name in without:
        for each in _ASKED.get(name, ()):
            if each.key in typed and each.asks(typed[each.key]):
                raise _contradict(name, f"{each.option} {each.spelled(typed[each.key])}".rstrip())
        if name in STRATEGIES:
            named = [word for word in only or () if word in STRATEGIES]
            if STRATEGIES[name].name in {STRATEGIES[word].name for word in named}:
                raise _contradict(name, f"--only {','.join(only or ())}")
        if (name in STRATEGIES or name in GROUPS) and typed.get("strategy") in strategy_names([name]):
            raise _contradict(name, f"--strategy {typed['strategy']}")


def _contradict(name: str, other: str) -> InputError:
    return InputError(f"--without {name} and {other} contradict each other; leave one out")
