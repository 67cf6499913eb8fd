"""What the tests of launching share: small plans, a launch, a launch that is refused, and files of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memcalc import launch as launch_module
from memcalc.errors import MemcalcError
from memcalc.launch import launch
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.run_folder import COMPLETE
from memcalc.training import Training

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=32, micro_batch=1, device="cpu")
TWO = replace(PLAN, strategy="ddp", ranks=2)

CHECKPOINT = (
    "step = out / 'checkpoints' / 'step-{step}'; step.mkdir(parents=True); (step / '" + COMPLETE + "').write_text('')\n"
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
    write(out, (f"checkpoints/step-{step}/{COMPLETE}",))
