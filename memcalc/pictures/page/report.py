"""The whole page: what is known of a plan or a run, in one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

import memcalc
from memcalc.compare import Comparison
from memcalc.errors import InputError
from memcalc.named_code import code_options
from memcalc.palette import DARK, LIGHT
from memcalc.pictures.page import sections
from memcalc.pictures.page.html import Html, element
from memcalc.pictures.page.timeline import style
from memcalc.pictures.step import Step
from memcalc.plan import Plan
from memcalc.recommend import Recommendation, recommend
from memcalc.search import search

__all__ = ["Report", "alternatives", "page"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """What stands on the page. The same of it gives the same page, to the byte."""

    figure: Step
    run: Comparison | None
    tensors: Sequence[sections.Tensor]
    alternatives: Recommendation | str
    """Or why there are none, in a sentence."""
    command: str
    """What makes this page again."""


def alternatives(plan: Plan, ram: int = 0) -> Recommendation | str:
    """Plans of the same job that fit: model, ranks, precision and samples a step stay. ``ram`` is what a CPU run may share."""
    if plan.device == "cuda" and plan.gpu is None:
        return "To see what else would fit, name a card with --gpu."
    if plan.device == "cpu" and not ram:
        return "This machine does not say how much RAM it has."
    try:
        job = search(
            plan,
            capacity=ram or None,
            precisions=[plan.precision],
            checkpoints=sorted({0, 1, plan.checkpoint_every}) if plan.model.blocks else [0],
            global_batch=plan.global_batch or None,
        )
        return recommend(job)
    except InputError as error:
        return f"Not searched: {error}."


def page(report: Report) -> str:
    """The page as HTML text."""
    figure = report.figure
    css, js = _style(figure), _file("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    plan = figure.estimate.plan
    parts = [
        sections.meters(figure),
        sections.the_step(figure),
        *([] if report.run is None else [sections.measured(report.run)]),
        sections.breakdown(figure.estimate),
        sections.tensors(report.tensors),
        sections.alternatives(report.alternatives),
        sections.assumptions(figure.estimate),
        sections.reproduce(report.command, plan.to_json(), memcalc.__version__, _commands(plan)),
    ]
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{plan.model.name}: memory of a training step"),
        element("style", Html(css)),
    ]
    body = element("body", sections.head(figure, report.run), element("main", *parts), element("script", Html(js)))
    return "<!doctype html>\n" + element("html", element("head", *head), body, lang="en") + "\n"


def _commands(plan: Plan) -> list[str]:
    """What else can be done with the plan's file."""
    code = f" {shlex.join(words)}" if (words := code_options(plan)) else ""
    said = [f"memcalc estimate --plan plan.json{code} --explain"]
    return (
        said if plan.untrained or plan.model.family == "size" else [*said, f"memcalc launch plan.json{code} --out run"]
    )


def _style(figure: Step) -> str:
    colours = {**LIGHT._asdict(), **{f"dark_{name}": colour for name, colour in DARK._asdict().items()}}
    return Template(_file("page.css")).substitute(colours) + style(figure)


def _file(name: str) -> str:
    return files("memcalc.pictures.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a Content-Security-Policy names an inline style or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
