"""Figures: no column loses the peak, text keeps its width, and edges are exact."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memcalc.estimate import Estimate, estimate
from memcalc.measurement import RankMeasurement
from memcalc.models import MODELS
from memcalc.palette import LETTER
from memcalc.pictures import mpl
from memcalc.pictures.bars import sweep_text
from memcalc.pictures.layers import curve, layers, phases
from memcalc.pictures.page.timeline import timeline
from memcalc.pictures.step import of_rank, of_timeline, step
from memcalc.pictures.sweep import sweep
from memcalc.pictures.text import inner, step_text
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from memcalc.units import format_bytes
from tests.pictured import TINY, timelines
from tests.plans import plans

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def tiny() -> Estimate:
    return estimate(TINY)


@given(timelines(), st.integers(1, 120))
def test_the_peak_is_in_a_column_and_every_column_is_a_state_of_the_step(line: Timeline, columns: int) -> None:
    found, peak, live = layers(line, columns), line.peak(), line.live()
    assert found.total.max() == found.total[found.peak] == peak.bytes
    assert [found.held[CATEGORIES.index(name), found.peak] for name in CATEGORIES] == [*peak.by_category.values()]
    assert (found.total == live[found.event]).all() and (found.held >= 0).all()
    assert (np.diff(found.event) >= 0).all() or "start" in found.moments
    assert found.phases[0].left == 0 and abs(found.phases[-1].right - 1) < 1e-9
    assert all(a.right == b.left and a.stop == b.first for a, b in zip(found.phases, found.phases[1:], strict=False))


@given(timelines(), st.integers(1, 120))
def test_a_timeline_laid_over_itself_is_itself(line: Timeline, columns: int) -> None:
    if any(phase.moment in ("init", "resume") for phase in phases(line)):
        return
    over = curve(line, line, columns)
    assert over is not None and (over == layers(line, columns).total).all()


def test_what_comes_before_the_step_is_left_out_of_a_curve() -> None:
    first = estimate(replace(TINY, device="cpu", optimizer_kind="for-loop")).timeline
    init = np.full(1, MOMENTS.index("init"), np.int8)
    whole = Timeline(
        names=first.names, ident=np.insert(first.ident, 0, 0), category=np.insert(first.category, 0, 0),
        moment=np.concatenate([init, first.moment]), delta=np.insert(first.delta, 0, 0),
    )  # fmt: skip
    over = curve(first, whole, 50)
    assert over is not None and over[0] == -1 and over.max() == first.peak().bytes
    assert curve(whole, first, 50) is None, "a step with other phases has no curve"


@pytest.mark.parametrize("scratch", [0, 1, 8])
def test_where_the_peak_is_read_stands_the_others_peak_though_it_has_more_scratch(tiny: Estimate, scratch: int) -> None:
    """As a report opens: at the estimate's peak, one event of which another source may be some columns off."""
    line, columns = tiny.timeline, 2000
    top = int(np.argmax(line.live()))
    first, count = len(line.names), 2 * scratch
    ident = np.repeat(np.arange(first, first + scratch), 2)
    other = Timeline(
        names=(*line.names, *(f"scratch {index}" for index in range(scratch))),
        ident=np.insert(line.ident, top, ident),
        category=np.insert(line.category, top, np.full(count, CATEGORIES.index("temporary"))),
        moment=np.insert(line.moment, top, np.full(count, line.moment[top])),
        delta=np.insert(line.delta, top, np.tile([1, -1], scratch)),
    )
    over = curve(other, line, columns)
    assert over is not None and over[layers(line, columns).peak] == other.peak().bytes == tiny.peak.bytes


def test_a_step_of_nothing_is_drawn(tmp_path: Path, tiny: Estimate) -> None:
    nothing = Timeline(
        names=(), ident=np.zeros(0, np.int64), category=np.zeros(0, np.int8), moment=np.zeros(0, np.int8),
        delta=np.zeros(0, np.int64),
    )  # fmt: skip
    figure = step(replace(tiny, timeline=nothing, peak=nothing.peak()), 40)
    assert step_text(figure, 52).startswith("\033[1mpeak 0 B")
    mpl.save_step(figure, tmp_path / "nothing.svg")
    assert (tmp_path / "nothing.svg").read_text().startswith("<?xml")


@given(st.integers(40, 200), st.integers(1, 30), st.sampled_from([None, "t4", "a100-80gb", "b200"]))
@example(40, 1, "t4")
@settings(max_examples=25)
def test_text_keeps_its_width_and_shows_the_peak(width: int, height: int, gpu: str | None) -> None:
    found = estimate(replace(TINY, gpu=gpu))
    figure = step(found, inner(width))
    text = step_text(figure, width, height)
    plain = re.sub("\033\\[[0-9;]*m", "", text).splitlines()
    body = plain[3 : 3 + height]
    assert all(len(line) <= width for line in body)
    column = [line[12 + figure.layers.peak : 13 + figure.layers.peak] for line in body]
    last = [letter for letter in column if letter in LETTER.values()]
    assert last, "nothing is drawn where the peak is"
    assert plain[3 + height][12 + figure.layers.peak] == "^"
    if gpu is None:
        assert column[0] in LETTER.values(), "without a card the peak reaches the top"
    coloured = step_text(figure, width, height, colours=True)
    assert re.sub("\033\\[[0-9;]*m", "", coloured) == re.sub("\033\\[[0-9;]*m", "", text)


@given(plans(), st.integers(20, 400))
@settings(max_examples=25)
def test_any_plan_can_be_drawn(plan: Plan, columns: int) -> None:
    """Pipelines, whole models before sharding, models known by their size: each has a figure, an SVG and words."""
    figure = step(estimate(plan), columns)
    peak = figure.estimate.peak
    assert figure.layers.total[figure.layers.peak] == peak.bytes <= figure.largest <= figure.top
    assert step_text(figure, columns + 12).count("\n") > 20
    svg = timeline(figure)
    assert svg.count("<polygon") == len(figure.categories) and "nan" not in svg
    assert format_bytes(peak.bytes) in figure.text() and figure.text() in html.unescape(svg)


def test_a_capacity_far_above_is_named_and_one_near_is_drawn() -> None:
    """gpt2 in a micro batch of 8 takes 17 GB: more than a t4 has, and a tenth of a b200."""
    plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8)
    near, far = (step(estimate(replace(plan, gpu=name)), 60) for name in ("t4", "b200"))
    assert near.near and near.top >= near.estimate.peak.bytes and "=====" in step_text(near, 72)
    assert not far.near and far.top == far.estimate.peak.bytes and "far above" in step_text(far, 72)


def test_a_measurement_without_a_timeline_is_shown_by_moment(tmp_path: Path, tiny: Estimate) -> None:
    rank = RankMeasurement(
        rank=0, instrument="counters", moment="backward", allocated_peak=123_000_000, by_moment={"backward": 123_000_000},
        parameters=1, gradients=1, optimizer=1,
    )  # fmt: skip
    figure = step(tiny, 60, (of_rank(tiny, rank, 60),))
    assert "measured: peak 123 MB" in step_text(figure, 72)
    assert "Measured: 123 MB (117.302 MiB), known by moment only." in figure.text()
    mpl.save_step(figure, tmp_path / "m.png")
    with_one = of_timeline(tiny, tiny.timeline, 60)
    assert with_one.live is not None and "o rehearsal" in step_text(step(tiny, 60, (with_one,)), 72)


def test_accumulation_says_how_many_micro_batches_are_drawn() -> None:
    figure = step(estimate(replace(TINY, accumulation=10)), 80)
    assert figure.drawn == "3 of 10 micro batches are drawn; the others are as these are"
    assert figure.drawn in step_text(figure, 92) and figure.drawn in figure.text()
    assert step(estimate(replace(TINY, accumulation=2)), 80).drawn == ""


@pytest.mark.parametrize(("against", "base"), [
    ("micro-batch", Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, gpu="t4", ranks=2, strategy="ddp")),
    ("seq-len", Plan(model=MODELS["llama-3.2-1b"], tokens=512, micro_batch=1, gpu="rtx-4090", precision="bf16")),
])  # fmt: skip
def test_the_edge_is_exact(against: str, base: Plan) -> None:
    """The value fits for sure and the next one does not."""
    line = sweep(base, against).lines[0]
    assert line.edge is not None and line.points[0].value < line.edge < line.points[-1].value
    field = {"micro-batch": "micro_batch", "seq-len": "tokens"}[against]
    at, after = (estimate(replace(base, **{field: line.edge + more})) for more in (0, 1))  # type: ignore[arg-type]
    assert (at.verdict, after.verdict != "fits") == ("fits", True)


def test_against_gpus_the_edge_is_the_fewest() -> None:
    base = Plan(model=MODELS["gpt2-xl"], tokens=1024, micro_batch=1, gpu="rtx-4090", precision="amp-bf16")
    made = sweep(base, "gpus", ["fsdp-full-shard", "single"], values=[1, 2, 4])
    sharded, single = made.lines
    assert [point.verdict for point in sharded.points] == ["does-not-fit", "fits", "fits"]
    assert made.edge(sharded) == "fits from 2 GPUs on" and made.edge(single) == "none of these fits for sure"
    assert single.left_out.startswith("single, gpus 2: strategy single runs on 1 rank")
    text = sweep_text(made, 80)
    assert all(len(line) <= 80 for line in text.splitlines()) and "does-not-fit" in text


def test_a_name_is_no_markup(tmp_path: Path, tiny: Estimate) -> None:
    """Neither mathematics to matplotlib, nor XML, nor control sequences."""
    name = "$\\frac{1}{0}$ <b>&\x1b[31m \u4e2d"
    model = replace(TINY.model, name=name)
    figure = step(replace(tiny, plan=replace(TINY, model=model)), 60)
    mpl.save_step(figure, tmp_path / "n.svg")
    assert "<b>" not in (tmp_path / "n.svg").read_text() and "\x1b" not in (tmp_path / "n.svg").read_text()
    assert "\x1b[31m" not in step_text(figure, 72)


def test_csv_has_every_event(run: Run, tiny: Estimate) -> None:
    rows = list(
        csv.DictReader(
            io.StringIO(run("plot", "gpt2-tiny", "--seq-len", "64", "--batch-size", "2", "--format", "csv").output)
        )
    )
    assert len(rows) == len(tiny.timeline.delta)
    assert max(int(row["allocated_bytes"]) for row in rows) == tiny.peak.bytes
    assert sum(int(row["bytes"]) for row in rows) == int(rows[-1]["allocated_bytes"])
