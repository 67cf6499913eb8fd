"""What the tests of launch files share: a file written into a folder, settled, and as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.configs import Settled, apply, read, settle
from memcalc.models import MODELS
from memcalc.plan import Plan


def file(folder: Path, text: str) -> Path:
    path = folder / ("ds.json" if text.startswith("{") else "run.yaml")
    path.write_text(text)
    return path


def settled(folder: Path, text: str, model: str = "gpt2", **options: Any) -> Settled:
    scale = {name: options.pop(name) for name in ("scale", "gpus") if name in options}
    said = {name.replace("__", "."): value for name, value in options.items()}
    return settle(read(file(folder, text)), said, MODELS[model], **scale)


def planned(folder: Path, text: str, model: str = "gpt2", **options: Any) -> Plan:
    found = settled(folder, text, model, **options)
    plan: Plan = apply(Plan(model=MODELS[model], tokens=64, micro_batch=1), found.fields)
    return plan
