"""Rehearsals from the torch-free half: the process of their own, its failures, and who is taken after them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.cli.rehearse import _Shown
from memcalc.compute import Compute
from memcalc.confirmation import confirmations
from memcalc.errors import FileError, MemcalcError, RunError
from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.measurement import RankMeasurement
from memcalc.models import MODELS
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.recommend import recommend
from memcalc.rehearsal import Rehearsal, rehearse, run_apart, stage_of_rank, unrehearsed, usual_rank
from memcalc.timeline import Timeline

TINY = Plan(model=MODELS["gpt2-tiny"], tokens=32, micro_batch=2, device="cpu")


@pytest.fixture(autouse=True)
def torch_counts_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.rehearsal.require_torch", lambda: None)


def stub(deed: str, timeout: float = 60) -> RankMeasurement:
    plan = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, name=deed))
    return run_apart(plan, module="tests.rehearsal_stub", timeout=timeout)


@pytest.mark.parametrize(
    ("deed", "kind", "said"),
    [
        ("raise", RunError, "the layers do not fit together"),
        ("die", RunError, "the rehearsal ended with exit code 7"),
        ("nonsense", FileError, "the rehearsal's answer is not valid JSON"),
        ("noise", RunError, "the rehearsal ended with exit code 1: 'xxxx"),
        ("nothing", RunError, "the rehearsal ended with exit code 0"),
    ],
)
def test_a_failure_is_one_short_line(deed: str, kind: type[MemcalcError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        stub(deed)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


def test_a_rehearsal_that_hangs_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=r"stopped after 0\.5 s"):
        stub("sleep", timeout=0.5)
    assert time.monotonic() - started < 300  # it would sleep 600
    with pytest.raises(ChildProcessError):  # this process has no child of that name left to wait for
        os.kill(stub_child(), 0)


def stub_child() -> int:
    """A process of the stub that this one started. Raises ChildProcessError when there is none."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            mine = int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if mine and b"rehearsal_stub" in status.with_name("cmdline").read_bytes():
                return int(status.parent.name)
    raise ChildProcessError("none")


def test_what_cannot_be_trained_is_the_ledgers_and_says_so() -> None:
    plan = dataclasses.replace(TINY, strategy="deepspeed-2", ranks=4, precision="bf16-master", device="cuda")
    found = rehearse(plan)
    assert found.source == "ledger" and found.measurement is None
    assert found.peak == estimate(plan).steady
    assert "DeepSpeed's engine needs tensors that have values" in found.remarks[0]
    with pytest.raises(RunError, match="this plan cannot be rehearsed"):
        rehearse(plan, allow_ledger=False)


def answer(plan: Plan, factor: float = 1.0) -> RankMeasurement:
    """What a rehearsal would say that sees ``factor`` times what the ledger does."""
    formulas = ledger(plan)
    timeline = Timeline(
        names=formulas.names, ident=formulas.ident, category=formulas.category, moment=formulas.moment,
        delta=(formulas.delta * factor).astype(np.int64) // 512 * 512,
    )  # fmt: skip
    peak = timeline.steady()
    return RankMeasurement(
        rank=0, instrument="a stub", moment=peak.moment, allocated_peak=peak.bytes, by_moment=peak.by_moment,
        parameters=0, gradients=0, optimizer=0, init_peak=0, timeline=timeline,
    )  # fmt: skip


def test_workspaces_are_the_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs in a rehearsal on fake tensors; with real ones they are there already."""
    plan = dataclasses.replace(TINY, device="cuda", gpu="h100-80gb")
    bare = dataclasses.replace(plan, gpu=None)
    monkeypatch.setattr("memcalc.rehearsal.run_apart", lambda plan, **words: answer(bare))
    found = rehearse(plan)
    assert found.peak.bytes == estimate(plan).steady.bytes
    assert "67,108,864 B" in found.remarks[0]
    assert rehearse(plan, device="cuda").peak.bytes == estimate(bare).steady.bytes


JOB = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=2, strategy="ddp", gpu="t4", precision="amp-fp16")


def rehearsed(plan: Plan, factor: float) -> Rehearsal:
    measured = answer(plan, factor)
    assert measured.timeline is not None
    found = estimate(plan)
    return Rehearsal(
        plan=plan, rank=0, timeline=measured.timeline, peak=measured.timeline.steady(), reserved=found.reserved,
        device=found.device, verdict="fits", source="rehearsal", remarks=(), measurement=measured, seconds=0.1,
    )  # fmt: skip


def test_a_plan_that_does_not_fit_by_its_rehearsal_makes_way() -> None:
    found = recommend(JOB, top=3)
    assert len(found.plans) >= 2
    first = found.plans[0].plan
    said = list(confirmations(found, lambda plan: rehearsed(plan, 2.0 if plan == first else 1.0)))
    assert [each.fits for each in said] == [False, True]
    assert said[-1].choice == found.plans[1]
    assert said[0].peak > said[0].choice.peak and said[0].needed > said[0].limit


def test_the_first_that_fits_ends_the_search() -> None:
    found = recommend(JOB, top=3)
    (only,) = confirmations(found, lambda plan: rehearsed(plan, 1.0))
    assert only.fits and only.choice == found.plans[0]


@pytest.fixture
def halls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rehearsals answer at once; ``factor`` by name of a strategy, 1 where nothing is said."""
    told = SimpleNamespace(factor={})
    monkeypatch.setattr(
        "memcalc.rehearsal.run_apart", lambda plan, **words: answer(plan, told.factor.get(plan.strategy, 1.0))
    )
    return told


def command(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


RECOMMEND = ("recommend", "gpt2", "--gpus", "2", "--gpu", "t4", "--top", "3", "--rehearse")


def test_recommend_says_both_numbers(halls: SimpleNamespace) -> None:
    code, out, err = command(*RECOMMEND)
    assert code == 0 and "rehearses" in err
    assert "1: its rehearsal takes" in out and "(ledger " in out and "and fits" in out


def test_recommend_takes_the_next(halls: SimpleNamespace, tmp_path: Path) -> None:
    first = recommend(dataclasses.replace(JOB, precision="amp-fp16"), top=1).plans[0].plan.strategy
    halls.factor[first] = 3.0
    code, out, _ = command(*RECOMMEND, "--format", "json", "--save-plan", str(tmp_path / "plan.json"))
    said = json.loads(out)
    assert code == 0
    assert [each["fits"] for each in said["rehearsals"]] == [False] * (len(said["rehearsals"]) - 1) + [True]
    assert len(said["rehearsals"]) > 1 and said["rehearsals"][0]["peak_bytes"] > said["plans"][0]["peak_bytes"]
    taken = said["plans"][len(said["rehearsals"]) - 1]["plan"]
    assert json.loads((tmp_path / "plan.json").read_text()) == taken


def test_recommend_ends_with_1_when_no_rehearsal_fits(halls: SimpleNamespace) -> None:
    halls.factor.update(dict.fromkeys(("ddp", "zero-1", "fsdp-shard-grad-op", "fsdp-full-shard", "fsdp-no-shard"), 9.0))
    code, _, err = command(*RECOMMEND)
    assert code == 1 and "by their rehearsals none of the" in err


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_every_format_has_both_columns(halls: SimpleNamespace, format: str) -> None:
    code, out, err = command("rehearse", "gpt2-tiny", "--batch-size", "2", "--gpu", "t4", "--format", format)
    assert code == 0, err
    assert "ledger" in out and "rehearsal" in out and "backward" in out
    if format == "json":
        rows = {(row["group"], row["what"]): row for row in json.loads(out)["bytes"]}
        # The stub already has the workspaces of the card in its timeline, which the answer adds once more.
        peak = rows["allocated", "peak"]
        assert peak["rehearsal"] - peak["ledger"] == 2 * 8_519_680


def test_a_saved_plan_may_stand_in_the_models_place(halls: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TINY.save(path)
    code, out, err = command("rehearse", str(path), "--format", "json")
    assert code == 0, err
    assert Plan.from_dict(json.loads(out)["plan"]) == TINY
    for words, said in (
        ((str(path), "--gpus", "2"), "says the whole plan; leave out --gpus"),
        ((str(path), "--plan", str(path)), "two plans"),
        ((str(path), "--rank", "1"), "--rank 1 is none of the plan's 1"),
        ((str(tmp_path / "nothing.json"),), "does not exist"),
        (("gpt2-tiny", "--run", str(tmp_path)), "leave out MODEL"),
        (("--run", str(tmp_path)), "holds no run"),
        ((), "give a model"),
    ):
        code, _, err = command("rehearse", *words)
        assert code == 2 and said in err and len(err.splitlines()) == 1, (words, err)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"strategy": "data-parallel", "ranks": 2}, "one process"),
        ({"strategy": "fsdp-full-shard", "ranks": 2, "offload": Offload(optimizer="cpu", parameters="cpu")}, "nowhere"),
        ({"compute": Compute(compile=True)}, "memcalc cannot train what is compiled"),
        ({"model": MODELS["megatron-1.3b"], "tokens": 2048}, "memcalc cannot train"),
        ({"strategy": "fsdp-full-shard", "ranks": 2}, ""),
    ],
    ids=str,
)
def test_what_cannot_be_rehearsed_says_why(fields: dict[str, object], said: str) -> None:
    why = unrehearsed(dataclasses.replace(TINY, device="cuda", **fields))  # type: ignore[arg-type]
    assert said in why and bool(why) == bool(said)


def test_the_rank_of_a_pipeline_is_one_of_its_fullest_stage() -> None:
    layout = Layout(pipeline=2, tensor=2)
    plan = Plan(
        model=MODELS["llama-tiny"], tokens=32, micro_batch=1, ranks=8, strategy="fsdp-full-shard", layout=layout
    )
    assert [stage_of_rank(plan, rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stage_of_rank(plan, usual_rank(plan)) == estimate(plan).stage
    assert usual_rank(TINY) == 0


def test_where_only_the_replay_fails_what_is_allocated_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(TINY, device="cuda")
    measured = answer(plan)
    assert measured.timeline is not None
    step = measured.timeline
    twice = dataclasses.replace(step, ident=np.where(step.delta > 0, 0, step.ident))
    monkeypatch.setattr(
        "memcalc.rehearsal.run_apart", lambda plan, **words: dataclasses.replace(measured, timeline=twice)
    )
    shown = CliRunner().invoke(
        app, ["rehearse", "gpt2-tiny", "--seq-len", "32", "--micro-batch", "2"], catch_exceptions=False
    )
    assert shown.exit_code == 0, shown.output
    assert (
        "allocated" in shown.stdout and "reserved and device are left out: the rehearsed step cannot be" in shown.stdout
    )
    found = rehearse(plan)
    assert found.reserved is None and found.device is None and found.verdict == "unknown"


def test_equal_bytes_under_other_names_are_no_difference() -> None:
    """A whole gradient before it is sharded: the ledger's gradient is the rehearsal's temporary."""
    found = estimate(dataclasses.replace(TINY, device="cuda"))
    peak = found.steady
    moved = {
        **peak.by_category,
        "gradients": peak.by_category["gradients"] + 10**6,
        "temporary": peak.by_category["temporary"] - 10**6,
    }

    def shown(by_category: dict[str, int]) -> str:
        rehearsal = Rehearsal(
            plan=found.plan, rank=0, timeline=found.timeline, peak=dataclasses.replace(peak, by_category=by_category),
            reserved=None, device=None, verdict="unknown", source="rehearsal", remarks=(), measurement=None, seconds=1.0,
        )  # fmt: skip
        return _Shown(found, rehearsal, None).text("table")

    assert "other names" not in shown(peak.by_category)
    assert shown(moved).count("other names") == 3  # two rows, and the sentence that says what it means
    assert "gradients, activations, temporary together are 0.00 % off" in shown(moved)
    fewer = {**peak.by_category, "temporary": peak.by_category["temporary"] - 10**6}
    assert "other names" not in shown(fewer)  # bytes that are missing are a difference
