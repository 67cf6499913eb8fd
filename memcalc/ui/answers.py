"""What the page shows, as JSON: an estimate with its figure, the plans that are recommended, and what there is to choose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any
from urllib.parse import parse_qsl, urlencode

import click
import numpy as np

from memcalc.choosing import TIE
from memcalc.cli.plans_table import also as knobs_beside
from memcalc.cli.unsaid import unsaid
from memcalc.errors import InputError
from memcalc.estimate import Estimate, estimate
from memcalc.hardware import GPUS
from memcalc.hints import CLOSE_SAID, close
from memcalc.launch import environment
from memcalc.ledger import skeletons
from memcalc.models import FAMILIES, MODELS
from memcalc.offload import PLACES
from memcalc.optimizers import OPTIMIZERS
from memcalc.palette import ORDER
from memcalc.pictures.step import step
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES
from memcalc.timeline import CATEGORIES, MOMENTS, Skeleton, Timeline
from memcalc.ui.words import Asked, OwnConfig, asked, plan_of, query_of
from memcalc.units import format_both, format_bytes, format_count

__all__ = ["Running", "catalog", "estimate_json", "picture", "why"]

COLUMNS = 240
"""Columns of the timeline's figure."""

PATIENCE = 120
"""Seconds that a recommendation may take."""

_one_at_a_time = Lock()
"""Two estimates at once would each take twice as long: Python runs one thread at a time."""


def estimate_json(query: str, config: OwnConfig | None = None) -> str:
    """What ``memcalc estimate … --format json`` prints, to the byte."""
    return json.dumps(_estimated(asked(query, config=config)).to_dict(), indent=2) + "\n"


def _estimated(words: Asked) -> Estimate:
    plan = plan_of(words)
    with _one_at_a_time:
        return estimate(plan, played=_played(replace(plan, micro_batch=min(plan.micro_batch, 1))))


@lru_cache(maxsize=2)
def _played(plan: Plan) -> dict[int, Skeleton]:
    """The ledger of a plan but for its micro batch, so that a slider that moves it plays nothing again."""
    return skeletons(plan)


def picture(query: str, config: OwnConfig | None = None) -> str:
    """The estimate, and all that the page draws of it."""
    words = asked(query, config=config)
    found = _estimated(words)
    plan, model = found.plan, found.plan.model
    figure = step(found, COLUMNS)
    return json.dumps({
        "estimate": found.to_dict(),
        "command": words.command("estimate"),
        "model": {
            "name": model.name,
            "parameters": format_count(sum(weight.numel for weight in plan.weights)),
            "trained": format_count(found.parameters) if plan.adapter.freezes else "",
            "reads": FAMILIES[model.family].reads,
            "context": model.context - model.position_offset,
            "blocks": model.blocks,
        },
        "unsaid": " ".join(unsaid(words.words, plan)),
        "verdict": _verdict(found, figure.capacity),
        "said": {
            "peak": format_both(found.peak.bytes),
            "reserved": _span(found.reserved.low, found.reserved.high),
            "device": _span(found.device.low, found.device.high),
            "host": format_both(found.host),
            "capacity": None if figure.capacity is None else format_both(figure.capacity),
        },
        "capacity": figure.capacity,
        "bars": [{"moment": moment, "bytes": held} for moment, held in _by_moment(found.timeline)],
        "figure": {
            "text": figure.text(),
            "phases": [{"moment": each.moment, "left": each.left, "right": each.right} for each in figure.layers.phases],
            "held": {name: figure.of(name).tolist() for name in figure.categories},
            "names": figure.layers.names,
            "moments": figure.layers.moments,
            "peak": figure.layers.peak,
        },
    })  # fmt: skip


def _verdict(found: Estimate, capacity: int | None) -> dict[str, str]:
    """``state`` for the colour, ``text`` for people."""
    words = {
        "fits": "Fits on",
        "tight": "May fit on",
        "does-not-fit": "Does not fit on",
        "unknown": "It is not known whether it fits on",
    }
    if found.plan.device == "cpu":
        return {"state": found.verdict, "text": "It runs on CPU cores: memcalc check says whether it fits in RAM"}
    card = "a GPU: none is chosen" if capacity is None else str(found.plan.gpu)
    return {"state": found.verdict, "text": f"{words[found.verdict]} {card}"}


def _span(low: int, high: int) -> str:
    return " to ".join(dict.fromkeys((format_bytes(low), format_bytes(high))))


def _by_moment(timeline: Timeline) -> Iterator[tuple[str, dict[str, int]]]:
    """The fullest point of each moment, its first instant included, by category; only categories that hold anything."""
    live = timeline.live()
    before = np.concatenate(([0], live[:-1]))
    for index, moment in enumerate(MOMENTS):
        here = np.flatnonzero(timeline.moment == index)
        if not len(here):
            continue
        last = int(here[np.argmax(live[here])]) if live[here].max() >= before[here[0]] else int(here[0]) - 1
        held = np.bincount(timeline.category[: last + 1], timeline.delta[: last + 1], minlength=len(CATEGORIES))
        yield moment, {name: size for name in ORDER if (size := int(held[CATEGORIES.index(name)]))}


def catalog() -> str:
    """Everything there is to choose from."""

    def summaries(rows: Any) -> list[dict[str, str]]:
        return [{"name": row.name, "summary": row.summary} for row in rows.values()]

    return json.dumps({
        "models": [
            {"name": row.name, "family": row.family, "reads": FAMILIES[row.family].reads, "summary": FAMILIES[row.family].summary}
            for row in MODELS.values()
        ],
        "gpus": [{"name": row.name, "summary": format_bytes(row.usable_bytes, binary=True)} for row in GPUS.values()],
        "strategies": summaries(STRATEGIES),
        "precisions": summaries(PRECISIONS),
        "optimizers": [{"name": name, "summary": ""} for name in OPTIMIZERS],
        "places": [{"name": name, "summary": ""} for name in PLACES],
        "order": ORDER,
        "aliases": {row.kind: row.aliases for row in (MODELS, GPUS, STRATEGIES, PRECISIONS, OPTIMIZERS)},
    })  # fmt: skip


def why(plan: Plan, reason: str) -> str:
    """A plan's reason, with what the table has no column for, and who cannot train it."""
    also = [] if (said := knobs_beside(plan)) == "-" else [said]
    untrained = [f"memcalc cannot train {plan.untrained}"] if plan.untrained else []
    return "; ".join([*also, *untrained, reason])


def _recommend() -> click.Command:
    from memcalc.cli.recommend import command

    return command


class Running:
    """Recommendations, each by a ``memcalc recommend`` of its own, so that they do not slow a slider down."""

    def __init__(self, most: int = 2) -> None:
        self._free, self._running = Semaphore(most), set[subprocess.Popen[str]]()

    def recommend_json(self, query: str, config: OwnConfig | None = None) -> str:
        """What ``memcalc recommend … --format json`` prints, to the byte."""
        return self._run(query, config)[0]

    def choices(self, query: str, config: OwnConfig | None = None) -> str:
        """The recommendation; with each plan the query that says it, and what the command said beside it."""
        text, beside = self._run(query, config)
        found = json.loads(text)
        known = {"model", "params", "layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "context", "classes",
                 "input-shape", "sample-size", "activation-per-layer"}  # fmt: skip
        model = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name in known]
        rows = []
        for each in found["plans"]:
            plan = Plan.from_dict(each["plan"])
            rows.append({
                **{name: value for name, value in each.items() if name != "plan"},
                "plan": each["plan"],
                "query": urlencode(query_of(plan, model)),
                "why": why(plan, each["reason"]),
                "peak": format_bytes(each["peak_bytes"]),
                "headroom": format_bytes(each["headroom_bytes"]),
            })  # fmt: skip
        command = asked(query, _recommend(), config).command("recommend")
        said = f"{format_count(found['tried'])} plans tried; the first is the simplest within {TIE:.0%} of the fastest"
        few = [
            str(number)
            for number, each in enumerate(found["plans"], 1)
            if each["plan"]["device"] == "cuda" and close(each["headroom_bytes"], found["capacity_bytes"])
        ]
        said += f"; {', '.join(few)}: {CLOSE_SAID}" * (bool(few) and not found["keep_free_bytes"])
        return json.dumps({"plans": rows, "said": said if rows else beside, "command": command})

    def stop(self) -> None:
        """End what still runs."""
        for process in list(self._running):
            process.kill()

    def _run(self, query: str, config: OwnConfig | None) -> tuple[str, str]:
        """Standard output and what stood on standard error; raises InputError with the latter for bad input."""
        found = asked(query, _recommend(), config)  # refuses here what cannot be asked, without a process
        with tempfile.TemporaryDirectory(prefix="memcalc-ui-") as folder:
            if config is not None:
                (Path(folder) / config.name).mkdir()
                (Path(folder) / config.path).write_text(config.text, encoding="utf-8")
            with self._free:
                return self._finished([*found.arguments, "--format", "json"], Path(folder))

    def _finished(self, arguments: list[str], folder: Path) -> tuple[str, str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "memcalc", "recommend", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env=environment(os.environ),
        )  # fmt: skip
        self._running.add(process)
        try:
            text, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise InputError(f"no recommendation within {PATIENCE} s; fix more of the choices") from None
        finally:
            self._running.discard(process)
        line = said.strip().removeprefix("memcalc: ")
        if process.returncode not in (0, 1) or not text:  # 1 says that no plan fits, with those that were tried
            raise InputError(line.replace(" (see memcalc recommend --help)", "") or "the recommendation was stopped")
        return text, line
