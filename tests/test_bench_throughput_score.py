"""Judging the time model: pairs, regret and the clock against a count by hand, the command, and today's figures."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import published
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memcalc.bench.throughput import run
from memcalc.bench.throughput.knobs import knobs_of
from memcalc.bench.throughput.plans import Run
from memcalc.bench.throughput.score import Contest, Scored, contests, score, summarise
from memcalc.cli.app import app
from memcalc.throughput import step_time
from tests.published_speeds import known, run_with, scored, table, timing


def _row(name: str, measured: float | None, predicted: float | None, error: float | None = None) -> Scored:
    empty = Run(row=timing(id=name), plan=None, hardware=None, place=None, assumptions=(), lacks=())
    return Scored(run=empty, measured=measured, predicted=predicted, error=error)


times = st.one_of(st.none(), st.integers(80, 125).map(float))


@given(st.lists(st.tuples(times, times), min_size=1, max_size=7))
def test_pairs_and_regret_as_counted_by_hand(values: list[tuple[float | None, float | None]]) -> None:
    group = Contest(name="g", rows=tuple(_row(str(i), *pair) for i, pair in enumerate(values)))
    both = [(m, p) for m, p in values if m is not None and p is not None]
    differ = [(a, b) for a, b in combinations(both, 2) if max(a[0], b[0]) >= 1.05 * min(a[0], b[0])]
    right = sum((a[0] < b[0] and a[1] < b[1]) or (a[0] > b[0] and a[1] > b[1]) for a, b in differ)
    assert len(group.pairs) == len(differ)
    assert sum(pair.right for pair in group.pairs) == right
    if len(both) < 2:
        assert group.regret is None
        return
    least = min(p for _, p in both)
    best = min(m for m, _ in values if m is not None)
    worst_of_chosen = max(m for m, p in both if p == least)
    assert group.regret == worst_of_chosen / best - 1 >= 0


def test_a_summary_by_hand() -> None:
    groups = [
        Contest(name="a", rows=(_row("1", 10, 1), _row("2", 12, 2), _row("3", 10.2, 3))),  # 3 pairs, one a tie
        Contest(name="b", rows=(_row("4", 10, 2), _row("5", 11, 1))),
        Contest(name="c", rows=(_row("6", 10, 2), _row("7", None, 1))),
    ]
    alone = [_row("8", 1, 1, 0.1), _row("9", 1, 1, -0.3), _row("10", 1, 1, None)]
    assert summarise(groups, alone).to_dict() == {
        "groups": 2,
        "pairs": 3,
        "pairs_right_pct": 33.33,
        "median_regret_pct": 5.0,
        "p90_regret_pct": 9.0,
        "mfu_median_error_pct": 20.0,
    }
    assert summarise([]).to_dict() == dict.fromkeys(summarise([]).to_dict(), None) | {"groups": 0, "pairs": 0}


@pytest.mark.parametrize(
    ("metric", "value"),
    [("step_s", 2.0), ("step_ms", 2000.0), ("it_per_s", 0.5), ("samples_per_s", 32.0), ("tokens_per_s", 65536.0),
     ("tokens_per_s_per_gpu", 8192.0)],
)  # fmt: skip
def test_one_speed_in_any_metric_is_one_error(metric: str, value: float) -> None:
    """64 samples of 2048 tokens on 8 GPUs in 2 s."""
    run_ = run_with(metric=metric, value=str(value))
    assert run_.plan is not None
    found, seconds = score(run_), step_time(run_.plan, run_.hardware)
    assert found.error == pytest.approx(2.0 / seconds.total - 1)
    assert found.predicted == (seconds.total if "step" in metric or "it" in metric else seconds.seconds_per_sample)


def test_an_epoch_has_an_order_but_no_clock() -> None:
    found = score(run_with(metric="epoch_min", value="3"))
    assert (found.measured, found.error) == (180.0, None)
    assert found.predicted is not None
    out = score(run_with(metric="OOM", value=""))
    assert (out.measured, out.error, out.compares) == (None, None, False)


def test_what_differs_between_two_plans() -> None:
    base = run_with().plan
    for cells, knobs in (
        ({}, ()),
        ({"micro_batch_per_gpu": "4", "grad_accum": "2"}, ("micro batch",)),
        ({"strategy": "fsdp_shard_grad_op8"}, ("strategy",)),
        ({"strategy": "fsdp_full_shard4+tp2", "global_batch": ""}, ("layout",)),
        ({"activation_checkpointing": "full", "compile": "yes"}, ("checkpointing", "compile")),
        ({"offload": "cpu"}, ("offload",)),
    ):
        assert knobs_of(base, run_with(**cells).plan) == knobs
    assert knobs_of(base, None) == ()


def test_groups_are_judged_by_their_worst_row() -> None:
    rows = [score(run_with(id=str(i), group="g", notes=f"tier {tier}; cmp=strict")) for i, tier in enumerate("ABC")]
    groups = contests(rows)
    assert not run.judged(groups[0], "strict", ("A", "B"))
    assert run.judged(groups[0], "strict", ("A", "B", "C"))
    assert not run.judged(groups[0], "per_token", ("A", "B", "C"))


def test_most_strict_rows_can_be_said() -> None:
    strict = [row for row in scored() if row.run.row.comparison == "strict" and row.run.row.tier in "AB"]
    assert sum(row.run.plan is not None for row in strict) >= 0.9 * len(strict)


def test_halves_and_knobs_add_up() -> None:
    found = table()
    halves = [found.half(half) for half in run.HALVES]
    assert sum(half.pairs for half in halves) == found.summary.pairs
    assert sum(half.pairs_right for half in halves) == found.summary.pairs_right
    assert sum(half.groups for half in halves) == found.summary.groups
    assert sum(line.summary.pairs for line in run.by_source(found)) == found.summary.pairs
    for knob in run.by_knob(found.judged):
        assert 0 <= knob.alone_right <= knob.right <= knob.pairs <= found.summary.pairs
        assert knob.alone <= knob.pairs


def _invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *words])
    return done.exit_code, done.output if done.exit_code else done.stdout  # how far it is stands on stderr


def _small(tmp_path: Path) -> str:
    """Three groups of the table, in a file."""
    names = [name for name in known() if name.startswith(("titan-03", "simu-01", "hs-01"))]
    columns = list(next(iter(known().values())).cells)
    file = tmp_path / "speeds.csv"
    lines = [",".join(columns)]
    lines += [",".join(f'"{known()[name][column]}"' for column in columns) for name in names]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def test_json_of_the_command(tmp_path: Path) -> None:
    code, text = _invoke("--throughput", _small(tmp_path), "--format", "json")
    assert code == 0
    found = json.loads(text)
    assert list(found["summary"]) == [
        "groups", "pairs", "pairs_right_pct", "median_regret_pct", "p90_regret_pct", "mfu_median_error_pct",
    ]  # fmt: skip
    assert set(found["halves"]) == {"calibration", "never used"}
    assert [line["half"] for line in found["range"]] == ["calibration", "never used"]
    assert sum(line["rows"] for line in found["range"]) > 3
    assert found["summary"]["groups"] == sum(group["regret_pct"] is not None for group in found["groups"])
    assert found["summary"]["pairs"] == sum(group["pairs"] for group in found["groups"])
    for group in found["groups"]:
        assert group["chosen"] in [row["id"] for row in group["rows"]] + [None]
        for row in group["rows"]:
            assert (row["predicted"] is None) == (row["skipped"] is not None)


def test_tables_of_the_command(tmp_path: Path) -> None:
    file = _small(tmp_path)
    code, text = _invoke("--throughput", file, "--worst", "2")
    assert code == 0
    assert all(
        words in text for words in ("never used", "calibration", "what differs", "regret", "MooreThreads/SimuMax")
    )
    code, text = _invoke("--throughput", file, "--format", "csv")
    assert code == 0
    assert text.splitlines()[0] == "group,id,metric,value,measured,predicted,error %,skipped"
    assert len(text.splitlines()) == 1 + sum(name.startswith(("titan-03", "simu-01", "hs-01")) for name in known())
    code, text = _invoke("--throughput", file, "--cmp", "per_token", "--format", "markdown")
    assert code == 0
    assert "| calibration" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cmp", "strict"), "add --throughput"),
        (("--throughput", "--use", "score"), "no column 'use'"),
        (("--throughput", "--cmp", "sometimes"), "unknown comparison 'sometimes'"),
        (("--throughput", "--source", "nobody"), "none of the"),
        (("--throughput", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], says: str) -> None:
    code, text = _invoke(*words)
    assert code == 2
    assert says in text
    assert "Traceback" not in text


def test_the_order_of_published_runs_is_not_lost() -> None:
    """Today's figures, rounded to the worse side; the goals are 85 %, 5 %, 15 % and 15 %."""
    found = table().summary
    assert found.pairs >= 228
    assert (found.pairs_right_pct or 0) >= 86.8
    assert (found.median_regret_pct, found.p90_regret_pct or 99) <= (0.0, 6.5)
    assert (found.mfu_median_error_pct or 99) <= 8
    unseen = table().half("never used")
    assert unseen.groups >= 18
    assert (unseen.pairs_right_pct or 0) >= 89
    assert (unseen.p90_regret_pct or 0.0) <= 1
    assert (table("per_token").summary.pairs_right_pct or 0) >= 90


def test_the_page_shows_todays_tables() -> None:
    text = published.SPEEDS.read_text(encoding="utf-8")
    assert published.refreshed_speeds(text) == text, "run `make docs`"
