"""Runs of which only the outcome is known: what their columns say, and how they are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memcalc.bench.boundary import REACHES, outcomes, states
from memcalc.bench.rows import COLUMNS, MESSAGE, read_rows
from memcalc.bench.run import score
from memcalc.bench.score import Score
from memcalc.bench.words import say
from memcalc.cli.app import app
from memcalc.errors import FileError
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from tests.published_rows import GPT2, LLAMA, facts, lacks_of, plan_of, row_of, text_of

OOM = {"metric": "OOM", "value_gib": ""}
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "tokens", "said"),
    [
        ("<=512", 512, "length 512: a run's fullest batch is as long as its cap"),
        ("64+64", 128, "length 128: 64+64, a prompt and its answer"),
        ("910 (inferred; cap 1800)", 910, "length 910: inferred; cap 1800"),
        ("512", 512, ""),
    ],
)
def test_lengths_that_are_more_than_a_number(text: str, tokens: int, said: str) -> None:
    found = say(row_of(**OOM, seq_len=text))
    assert found.plan is not None
    assert found.plan.tokens == tokens
    assert not said or said in found.assumptions


def test_a_cap_is_no_length_of_a_reading() -> None:
    """The moment of a reading may have had a shorter batch; lengths that are no number stay unsaid."""
    assert lacks_of(seq_len="<=512") == ["seq len is '<=512', not a number"]
    assert lacks_of(**OOM, seq_len="256x256 px") == ["seq len is '256x256 px', not a number"]


@given(st.text(max_size=20))
def test_any_text_is_a_length_or_a_lack(text: str) -> None:
    found = say(row_of(**OOM, seq_len=text))
    assert (found.plan is None) == bool(found.lacks)


def test_states_are_weights_gradients_and_moments_and_nothing_else() -> None:
    """16 B a parameter in float32 with Adam, exactly, where nothing is rounded to blocks."""
    plan = Plan(model=MODELS["gpt2"], tokens=64, micro_batch=1, device="cpu", optimizer_kind="for-loop")
    timeline = ledger(plan)
    counters = 4 * len(plan.family.weights(plan.model))
    masks = sum(delta for name, delta in held(plan).items() if "mask" in name)
    assert states(timeline) - masks - counters == 16 * 124439808
    assert states(timeline) < timeline.peak().bytes


def held(plan: Plan) -> dict[str, int]:
    """Parameters and buffers by name."""
    timeline = ledger(plan)
    kind = timeline.category == 0
    pairs = zip(timeline.ident[kind].tolist(), timeline.delta[kind].tolist(), strict=True)
    return {timeline.names[ident]: delta for ident, delta in pairs if delta > 0}


def test_the_message_is_held_against_the_peak() -> None:
    """The row's own numbers: capacity decides the verdict, allocated and tried are a bound of the peak."""
    cells = OOM | {"tried_gib": "0.5", "allocated_gib": "10", "capacity_gib": "11.0", "seq_len": "64"}
    peak = estimate(plan_of(**cells)).peak.bytes / GIB
    found = score(row_of(**cells))
    assert (found.needed_gib, found.verdict, found.state_bound) == (10.5, "fits", False)
    assert found.allocated_gib == pytest.approx(peak, abs=1e-4)
    small = score(row_of(**cells | {"capacity_gib": "1.0"}))
    tiny = score(row_of(**cells | {"capacity_gib": "0.5"}))
    assert (small.verdict, small.state_bound) == ("does-not-fit", False)
    assert (tiny.verdict, tiny.state_bound) == ("does-not-fit", True)
    assert score(row_of(**cells | {"allocated_gib": ""})).needed_gib is None
    assert score(row_of(**cells | {"metric": "fits"})).needed_gib is None


def test_between_the_least_and_the_most_a_card_may_have_it_is_tight() -> None:
    """Cards sold as 24 GB leave 22.03 to 23.98 GiB: 22.4 GiB and a context fit for sure on none and on some perhaps."""
    cells = OOM | {"gpu_type": "24 GB card (type not stated)", "gpu_gib": "24", "seq_len": "64"}
    verdicts = [score(row_of(LLAMA, **cells | {"optimizer": "SGD", "layers": str(n), "n_params": ""})).verdict for n in (8, 27, 32)]  # fmt: skip
    assert verdicts == ["fits", "tight", "does-not-fit"]


def made(metric: str, verdict: str, needed: float | None = None, allocated: float = 9.7, bound: bool = False) -> Score:
    return Score(
        id="x", metric=metric, measured_gib=None, verdict=verdict, needed_gib=needed, allocated_gib=allocated,
        state_bound=bound,
    )  # fmt: skip


def test_counts_by_hand() -> None:
    rows = [
        made("OOM", "does-not-fit", bound=True), made("OOM", "tight"), made("OOM", "fits"), made("OOM", "unknown"),
        made("OOM", "does-not-fit", needed=10.0), made("OOM", "does-not-fit", needed=10.1),
        made("fits", "fits"), made("fits", "tight"), made("fits", "does-not-fit"),
        Score(id="s", metric="OOM", measured_gib=None, skipped="LoRA"), made("nvidia-smi", "fits"),
    ]  # fmt: skip
    found = outcomes(rows)
    assert found is not None
    assert found.to_dict() == {
        "state_bound": 1, "open_ooms": 5, "open_refused": 3, "fitted": 3, "fitted_accepted": 2,
        "messages": 2, "messages_reached": 1,
    }  # fmt: skip
    assert outcomes([made("nvidia-smi", "fits"), rows[-2]]) is None


def test_outcomes_of_published_runs_are_not_lost() -> None:
    """The bars of all such reports: 9 of 10 open ones refused, 9 of 10 that fitted accepted, no message above the peak."""
    found = outcomes(facts()[1])
    assert found is not None
    assert found.open_refused >= 0.9 * found.open_ooms > 0
    assert found.fitted_accepted >= 0.9 * found.fitted > 0
    low = [each.id for each in facts()[1] if (each.allocated_gib or 0) < REACHES * (each.needed_gib or 0)]
    assert low == []
    assert found.messages_reached == found.messages > 0


def test_the_command_shows_them(tmp_path: Path) -> None:
    file = tmp_path / "oom.csv"
    rows = [GPT2 | OOM | {"tried_gib": "0.1", "allocated_gib": "1.0", "capacity_gib": "1.5"}, GPT2 | {"id": "v"}]
    file.write_text(text_of(*rows, columns=(*COLUMNS, *MESSAGE)))
    done = json.loads(CliRunner().invoke(app, ["bench", str(file), "--format", "json"]).stdout)
    assert done["boundary"]["open_refused"] == done["boundary"]["messages_reached"] == 1
    assert [("needed_gib" in row) for row in done["rows"]] == [True, False]
    lines = [" ".join(line.split()) for line in CliRunner().invoke(app, ["bench", str(file)]).stdout.splitlines()]
    assert "out of memory otherwise: said does-not-fit or tight 1 1" in lines


def test_a_message_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "oom.csv"
    file.write_text(text_of(GPT2 | OOM | {"tried_gib": "2 MiB"}, columns=(*COLUMNS, *MESSAGE)))
    with pytest.raises(FileError, match="line 2: tried_gib '2 MiB' must be a number of GiB above 0"):
        read_rows(file)
