"""Many small plans run for real on this machine's CPUs, each held against its estimate.

One torchrun call per world size runs all plans of that size one after the other (``trainers/matrix.py``),
so that a plan costs about a second and not a start of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from memcalc.compare import Comparison, compare_run
from memcalc.errors import FileError, MemcalcError
from memcalc.failure import failure
from memcalc.launch import command, environment, installed_torch, require_torch
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.supervise import supervise

__all__ = ["CHECKPOINTING", "TOLERANCE", "WORLDS", "Result", "loss_problems", "matrix", "validate"]

TOLERANCE = 1.0
"""Percent of the measured allocated peak."""
LOSS_DIGITS = 4
"""fp32 losses of one model agree to so many decimals, whatever the strategy."""

GLOBAL_BATCH = 8
MODEL_NAMES = ("mlp-tiny", "gpt2-tiny", "llama-tiny")
STRATEGY_NAMES = ("single", "ddp", "fsdp-full-shard", "fsdp-shard-grad-op", "zero-1")
WORLDS = (1, 2, 4)
CHECKPOINTING = {"none": 0, "full": 1}
STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One plan after its run: the comparison, or why there is none."""

    name: str
    plan: Plan
    comparison: Comparison | None
    problem: str | None
    """What is wrong, in a few words; None when all is within tolerance."""

    @property
    def losses(self) -> tuple[float | None, ...]:
        return () if self.comparison is None else tuple(self.comparison.measurement.losses)


def matrix(
    *,
    quick: bool,
    models: Sequence[str] = MODEL_NAMES,
    strategies: Sequence[str] = STRATEGY_NAMES,
    worlds: Sequence[int] = WORLDS,
) -> dict[str, Plan]:
    """The plans by name. Quick leaves out 4 ranks, and bfloat16 together with checkpointing.

    The global batch is the same for all plans, so that their losses can be compared.

    >>> len(matrix(quick=True)), len(matrix(quick=False))
    (45, 108)
    """
    plans = {}
    for model, strategy, ranks, precision, (checkpointing, every) in product(
        models, strategies, worlds, ("fp32", "bf16"), CHECKPOINTING.items()
    ):
        if (strategy == "single") != (ranks == 1) or (quick and (ranks > 2 or (precision == "bf16" and every))):
            continue
        spec = MODELS[model]
        name = f"{spec.name}.{strategy}.{ranks}.{precision}.{checkpointing}"
        plans[name] = Plan(
            model=spec,
            strategy=strategy,
            ranks=ranks,
            precision=precision,
            micro_batch=GLOBAL_BATCH // ranks,
            tokens=spec.context,
            checkpoint_every=every,
            device="cpu",
        )
    return plans


def validate(
    plans: dict[str, Plan], *, out: Path, tolerance: float = TOLERANCE, show: Callable[[Result], None]
) -> list[Result]:
    """Run every plan, and ``show`` each as soon as it is done. Leaves plans, logs and measurements in ``out``.

    Raises RunError when torch is missing; a plan that fails is a Result with a problem.
    """
    require_torch()
    plans = {name: replace(plan, torch=installed_torch() or plan.torch) for name, plan in plans.items()}
    results: list[Result] = []
    for ranks in sorted({plan.ranks for plan in plans.values()}):
        batch = {name: plan for name, plan in plans.items() if plan.ranks == ranks}
        waiting = dict(batch)

        def done(line: str, waiting: dict[str, Plan] = waiting) -> None:
            word, _, name = line.partition(" ")
            if word == "done" and name in waiting:
                results.append(judge(name, waiting.pop(name), out / "runs" / name, tolerance))
                show(results[-1])

        code = _run(batch, ranks, out, done)
        for name, plan in waiting.items():
            reason = str(failure(plan, out, code or 1))
            results.append(Result(name=name, plan=plan, comparison=None, problem=reason))
            show(results[-1])
    return results


def _run(plans: dict[str, Plan], ranks: int, out: Path, done: Callable[[str], None]) -> int:
    folder = out / f"plans-{ranks}"
    try:
        for path in (folder, out / "runs", out / "logs"):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {(error.strerror or str(error)).lower()}") from None
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    return supervise(
        command(ranks, "trainers.matrix", str(folder), str(out / "runs"), "--steps", str(STEPS)),
        environment=environment(os.environ),
        errors=out / "logs" / "torchrun.log",
        show=done,
    )


def judge(name: str, plan: Plan, folder: Path, tolerance: float) -> Result:
    """Hold one finished run against its estimate."""
    try:
        comparison = compare_run(folder)
    except MemcalcError as error:
        return Result(name=name, plan=plan, comparison=None, problem=str(error))
    return Result(name=name, plan=plan, comparison=comparison, problem=_problem(comparison, tolerance))


def _problem(comparison: Comparison, tolerance: float) -> str | None:
    percent = comparison.peak.error_percent
    if percent is None or abs(percent) > tolerance:
        return f"peak off by more than {tolerance:g} %"
    return None if comparison.states_equal() else "parameters, gradients or optimizer states not equal"


def loss_problems(results: Iterable[Result]) -> list[str]:
    """One line for each fp32 run whose losses are not those of the first fp32 run of the same model."""
    first: dict[str, Result] = {}
    lines = []
    for result in results:
        if result.plan.precision != "fp32" or not result.losses:
            continue
        reference = first.setdefault(result.plan.model.name, result)
        if not _same(reference.losses, result.losses):
            lines.append(
                f"{result.name}: losses {_text(result.losses)}, but {reference.name} has {_text(reference.losses)}"
            )
    return lines


def _same(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    near = 0.5 * 10**-LOSS_DIGITS
    return len(a) == len(b) and all(
        x is not None and y is not None and abs(x - y) <= near for x, y in zip(a, b, strict=True)
    )


def _text(losses: Sequence[float | None]) -> str:
    return " ".join("nan" if loss is None else f"{loss:.{LOSS_DIGITS}f}" for loss in losses)
