"""What the tests of launching share: small plans, a launch, a launch that is refused, and files of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from memcalc import launch as launch_module
from memcalc.checkpoints import COMPLETE, INDEX, Marker
from memcalc.errors import MemcalcError
from memcalc.launch import launch
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.training import Training

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=32, micro_batch=1, device="cpu")
TWO = replace(PLAN, strategy="ddp", ranks=2)


def marker(step: int, plan: Plan = PLAN) -> Marker:
    return Marker(step=step, losses=[None] * step, scaler={}, model=plan.model, optimizer=plan.optimizer)


def saves(step: int) -> str:
    """Lines of a stub that leave a complete checkpoint, as far as launch looks at it."""
    text = json.dumps(asdict(marker(step)))
    return (
        f"step = out / 'checkpoints' / 'step-{step}'; step.mkdir(parents=True); (step / '{INDEX}').touch()\n"
        f"(step / '{COMPLETE}').write_text({text!r})\n"
    )


def run(plan: Plan, out: Path, lines: list[str] | None = None, **options: object) -> launch_module.Run:
    show = (lines if lines is not None else []).append
    return launch(plan, out=out, training=Training(**options), show=show, grace_seconds=2.0)  # type: ignore[arg-type]


def refused(plan: Plan, out: Path, message: str, kind: type[MemcalcError], *, resume: bool = False) -> None:
    """The launch is refused with one line, and the folder is as it was."""
    before = sorted(out.rglob("*")) if out.is_dir() else out.exists()
    with pytest.raises(kind, match=message) as caught:
        run(plan, out, resume=resume)
    assert "\n" not in str(caught.value)
    assert (sorted(out.rglob("*")) if out.is_dir() else out.exists()) == before


def write(out: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("before")


def checkpoint(out: Path, step: int) -> None:
    """A complete checkpoint, as far as launch looks at it."""
    write(out, (f"checkpoints/step-{step}/{INDEX}",))
    marker(step).save(out / "checkpoints" / f"step-{step}")
