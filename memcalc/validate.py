"""Many small plans run for real on this machine's CPUs, each held against its estimate.

One torchrun call per world size runs all plans of that size one after the other (``trainers/matrix.py``),
so that a plan costs about a second and not a start of torch. oneDNN is off in these runs, but for
convolutional families: its scratch memory for 16-bit products depends on the CPU and is no part of the model.
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
from memcalc.models import FAMILIES, MODELS
from memcalc.plan import Plan
from memcalc.run_folder import prepare
from memcalc.supervise import supervise
from memcalc.training import Training

__all__ = ["CHECKPOINTING", "TOLERANCE", "WORLDS", "Result", "loss_problems", "matrix", "validate"]

TOLERANCE = 1.0
"""Percent of the measured allocated peak."""
LOSS_DIGITS = 4
"""fp32 losses of one model agree to so many decimals, whatever the strategy."""

GLOBAL_BATCH = {"tokens": 8, "features": 256, "images": 32}
"""Samples per step by what a model reads; enough that activations weigh as much as model states."""
MODEL_NAMES = ("mlp-tiny", "gpt2-tiny", "llama-tiny")
STRATEGY_NAMES = ("single", "ddp", "fsdp-full-shard", "fsdp-shard-grad-op", "zero-1")
WORLDS = (1, 2, 4)
CHECKPOINTING = {"none": 0, "full": 1}
STEPS = 5
"""Of which the first is not steady. The more steps, the surer is what a meter says about threads it does not see."""


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
    """The plans by name. Quick leaves out those with two of: bfloat16, checkpointing, 4 ranks.

    The global batch is the same for all plans of a model, so that their losses can be compared.

    >>> len(matrix(quick=True)), len(matrix(quick=False))
    (57, 108)
    """
    plans = {}
    for model, strategy, ranks, precision, (checkpointing, every) in product(
        models, strategies, worlds, ("fp32", "bf16"), CHECKPOINTING.items()
    ):
        if (strategy == "single") != (ranks == 1):
            continue
        if quick and (precision == "bf16") + (every > 0) + (ranks > 2) > 1:
            continue
        spec = MODELS[model]
        reads = FAMILIES[spec.family].reads
        name = f"{spec.name}.{strategy}.{ranks}.{precision}.{checkpointing}"
        plans[name] = Plan(
            model=spec,
            strategy=strategy,
            ranks=ranks,
            precision=precision,
            micro_batch=GLOBAL_BATCH[reads] // ranks,
            tokens=spec.context,
            checkpoint_every=every,
            device="cpu",
        )
    return plans


def validate(
    plans: dict[str, Plan], *, out: Path, tolerance: float = TOLERANCE, show: Callable[[Result], None]
) -> list[Result]:
    """Run every plan, and ``show`` each as soon as it is done. Leaves a run's folder for each in ``out``.

    Raises RunError when torch is missing, FileError when ``out`` is in use; a plan that fails is a Result with a problem.
    """
    require_torch()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out} is not an empty folder; give another one")
    plans = {name: replace(plan, torch=installed_torch() or plan.torch) for name, plan in plans.items()}
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        show(result)

    for ranks in sorted({plan.ranks for plan in plans.values()}):
        waiting = {name: plan for name, plan in plans.items() if plan.ranks == ranks}
        while waiting:
            code = _run(waiting, ranks, out, lambda name, plan: add(judge(name, plan, out / name, tolerance)))
            if waiting:  # the first of them failed and took the job with it; the others get another one
                name = next(iter(waiting))
                plan = waiting.pop(name)
                add(Result(name=name, plan=plan, comparison=None, problem=str(failure(plan, out / name, code))))
    return results


def _run(waiting: dict[str, Plan], ranks: int, out: Path, done: Callable[[str, Plan], None]) -> int:
    """One torchrun call for all plans; each that is done is taken out of ``waiting``."""
    for name, plan in waiting.items():
        prepare(plan, Training(steps=STEPS, measure_steps=STEPS), out / name)

    def line(text: str) -> None:
        word, _, name = text.partition(" ")
        if word == "done" and name in waiting:
            done(name, waiting.pop(name))

    folders = [str(out / name) for name in waiting]
    return supervise(
        command(ranks, "trainers.matrix", "--steps", str(STEPS), *folders),
        environment=environment(os.environ),
        errors=out / next(iter(waiting)) / "logs" / "torchrun.log",
        show=line,
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
