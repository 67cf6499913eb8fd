"""What a verdict is to be read with: it is said where it matters, and nowhere else."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner

from memcalc.adapters import Adapter
from memcalc.cli.app import app
from memcalc.fsdp import Fsdp
from memcalc.hints import (
    CLOSE_SAID,
    FROZEN_MOST_PCT,
    close,
    frozen,
    hints,
    machine_host,
    whole_gradients,
)
from memcalc.ledger import peaks
from memcalc.models import MODELS
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.ui.answers import Running

PLAN = Plan(
    model=MODELS["gpt2-tiny"],
    tokens=64,
    micro_batch=1,
    ranks=4,
    strategy="fsdp-full-shard",
    precision="amp-bf16",
    gpu="t4",
)
LORA = replace(PLAN, ranks=1, strategy="single", adapter=Adapter(kind="lora"))


def said(*words: str) -> str:
    return CliRunner().invoke(app, words).output


@pytest.mark.parametrize("strategy", ["fsdp-full-shard", "fsdp-shard-grad-op"])
def test_whole_gradients_are_said_where_the_ledger_keeps_them(strategy: str) -> None:
    several = replace(PLAN, strategy=strategy, accumulation=4)
    cured = replace(several, fsdp=Fsdp(sync_every_micro_batch=True))
    assert "--sync-every-micro-batch" in whole_gradients(several)
    assert peaks(cured, [1]) < peaks(several, [1])
    for plan in (cured, replace(several, accumulation=1), replace(several, strategy="ddp")):
        assert whole_gradients(plan) == ""


def test_a_verdict_says_the_cure_only_where_it_does_not_fit() -> None:
    several = replace(PLAN, accumulation=4)
    for verdict in ("tight", "does-not-fit"):
        assert hints(several, verdict, high=5, limit=4) == [whole_gradients(several)]
    assert hints(several, "fits", high=1, limit=4) == hints(several, "unknown", high=5, limit=4) == []


def test_what_is_left_is_pointed_out_unless_some_was_asked_for() -> None:
    assert close(19, 1000) and not close(20, 1000)
    assert hints(PLAN, "fits", high=981, limit=1000) == [CLOSE_SAID]
    assert hints(PLAN, "fits", high=980, limit=1000) == hints(PLAN, "fits", high=981, limit=1000, keep_free=1) == []


def test_frozen_weights_want_room_for_what_published_readings_were_above() -> None:
    assert frozen(PLAN) == frozen(replace(LORA, device="cpu", gpu=None)) == ""
    limit = 100 + FROZEN_MOST_PCT
    assert hints(LORA, "fits", high=100, limit=limit) == []
    (line,) = hints(LORA, "fits", high=101, limit=limit)
    assert line.startswith(frozen(LORA)) and "--keep-free 20%" in line
    assert 100 * (100 + FROZEN_MOST_PCT) <= 125 * 100, "--keep-free 20% leaves a quarter more"


def test_host_memory_is_that_of_a_machine() -> None:
    plan = replace(PLAN, ranks=6, nodes=2, offload=Offload(optimizer="cpu", parameters="cpu"))
    assert machine_host(plan, 1000) == "3 ranks of a machine: 3 kB (2.93 KiB) of host memory"
    assert machine_host(replace(plan, offload=Offload()), 1000) == ""
    words = "gpt2-tiny --gpus 6 --nodes 2 --strategy fsdp-full-shard --offload-optimizer cpu --offload-parameters cpu --gpu t4"
    table = said("estimate", *words.split(), "--format", "csv").splitlines()
    (host,) = (int(line.split(",")[-1]) for line in table if ",host (" in line.replace('"', ""))
    (together,) = (line for line in table if "host of the 3 ranks of a machine together" in line)
    assert together.endswith(f",{3 * host},{3 * host}")
    assert machine_host(plan, host) in said("check", *words.split())


def test_check_says_what_it_checked() -> None:
    words = ["gpt2-tiny", "--gpu", "t4", "--batch-size", "3", "--format"]
    found = json.loads(said("check", *words, "json"))
    names = ["model", "precision", "strategy", "ranks", "nodes", "micro_batch", "accumulation"]
    assert [found[name] for name in names] == ["gpt2-tiny", "fp32", "single", 1, 1, 3, 1]
    assert list(found)[: len(names)] == said("check", *words, "csv").splitlines()[0].split(",")[: len(names)] == names


@pytest.mark.parametrize("job", ["gpt2-xl --gpu rtx-2080", "--params 70b --adam --gpus 2 --gpu t4"])
def test_an_estimate_that_does_not_fit_says_the_search_in_the_same_words(job: str) -> None:
    begins = "  a plan that does fit is looked for by: "
    how = "" if "--params" in job else " --checkpointing full --batch-size 64"
    (line,) = (line for line in said("estimate", *f"{job}{how}".split()).splitlines() if line.startswith(begins))
    typed = shlex.split(line.removeprefix(begins))
    assert typed[:2] == ["memcalc", "recommend"]
    assert set(typed[2:]) - {str(70 * 10**9)} == set(job.split()) - {"70b"}


@pytest.mark.parametrize(("headroom", "kept", "said_of"), [(1, 0, "; 2: "), (1, 5, ""), (900, 0, "")])
def test_the_page_points_at_recommended_plans_that_leave_little(
    monkeypatch: pytest.MonkeyPatch, headroom: int, kept: int, said_of: str
) -> None:
    each = {
        "plan": json.loads(replace(PLAN, ranks=1, strategy="single").to_json()),
        "peak_bytes": 1,
        "reason": "one rank",
    }
    plans = [{**each, "headroom_bytes": 900}, {**each, "headroom_bytes": headroom}]
    answer = json.dumps({"tried": 2, "capacity_bytes": 1000, "keep_free_bytes": kept, "plans": plans})
    monkeypatch.setattr(Running, "_run", lambda *_: (answer, ""))
    text = json.loads(Running().choices("model=gpt2-tiny&gpu=t4"))["said"]
    assert text.endswith(f"{said_of}{CLOSE_SAID}" if said_of else "of the fastest")
