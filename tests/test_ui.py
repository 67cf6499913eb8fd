"""``memcalc ui`` without a browser: the same answers as the command line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.errors import InputError, MemcalcError
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES
from memcalc.ui.answers import why
from memcalc.ui.server import Server
from memcalc.ui.words import asked, plan_of, query_of
from tests.serving import ask, served

LLAMA = json.dumps({
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
}).encode()  # fmt: skip

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as running:
        yield running


@pytest.mark.parametrize(
    "query",
    [
        "model=gpt2-tiny",
        "model=gpt2&batch-size=8&precision=amp-bf16&gpu=a100-80gb",
        "model=vit-tiny-16&gpus=4&strategy=fsdp-full-shard&checkpointing=every-2&gpu=H100",
        "params=7b&adam=&precision=bf16",
        "model=gpt2-tiny&gpus=2&strategy=deepspeed-3&precision=bf16-master&offload-optimizer=cpu&keep-gradients=",
        "tensor-parallel=2&gpus=2&model=gpt2-tiny&dropout=0.1&layers=3",
    ],
)
def test_an_estimate_is_that_of_the_command_line_to_the_byte(server: Server, run: Run, query: str) -> None:
    answer, text = ask(server, f"/api/estimate?{query}")
    assert answer.status == 200, text
    done = run("estimate", *asked(query).arguments, "--format", "json")
    assert text == done.stdout
    assert len(json.loads(text)["assumptions"]) > 2
    shown = json.loads(ask(server, f"/api/picture?{query}")[1])
    assert shown["estimate"] == json.loads(text)
    assert run(*shown["command"].split()[1:], "--format", "json").stdout == text


def test_a_config_that_is_sent_is_estimated_as_its_file(server: Server, run: Run) -> None:
    Path("my-llama").mkdir()
    Path("my-llama/config.json").write_bytes(LLAMA)
    answer, text = ask(server, "/api/estimate?seq-len=32&config-name=my-llama&gpu=t4", "POST", LLAMA)
    assert answer.status == 200, text
    assert text == run("estimate", "my-llama/config.json", "--seq-len", "32", "--gpu", "t4", "--format", "json").stdout


@pytest.mark.parametrize(
    "body", [b"{", b"[1]", b'{"model_type": "lama"}', b"\xff", b'{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_config_that_is_none_is_refused_as_its_file(server: Server, run: Run, body: bytes) -> None:
    answer, text = ask(server, "/api/estimate?config-name=mine", "POST", body)
    said = json.loads(text)["error"]
    assert answer.status == 400
    assert said.startswith("mine/config.json") and "\n" not in said
    if body.startswith(b'{"model_type": "llama"'):
        Path("mine").mkdir()
        Path("mine/config.json").write_bytes(body)
        assert run("estimate", "mine/config.json").stderr == f"memcalc: {said}\n"


def test_a_recommendation_is_that_of_the_command_line_to_the_byte(server: Server, run: Run) -> None:
    query = "gpu=t4&gpus=2&config-name=my-llama&seq-len=32"
    Path("my-llama").mkdir()
    Path("my-llama/config.json").write_bytes(LLAMA)
    words = ("my-llama/config.json", "--gpu", "t4", "--gpus", "2", "--seq-len", "32")
    assert (
        ask(server, f"/api/recommend?{query}", "POST", LLAMA)[1] == run("recommend", *words, "--format", "json").stdout
    )


def test_a_recommended_plan_can_be_taken_over(server: Server) -> None:
    found = json.loads(ask(server, "/api/choices?model=gpt2-tiny&gpu=t4&gpus=2")[1])
    assert found["command"] == "memcalc recommend gpt2-tiny --gpu t4 --gpus 2"
    assert found["plans"]
    for row in found["plans"]:
        assert plan_of(asked(row["query"])) == Plan.from_dict(row["plan"])
        assert row["why"].endswith(row["reason"])
        assert row["runnable"] and "estimated only" not in row["why"]


def test_a_plan_that_memcalc_cannot_train_says_so() -> None:
    words = "model=llama-tiny&adapter=lora&quantize=nf4-double&precision=bf16"
    assert why(plan_of(asked(words)), "it fits") == (
        "estimated only; memcalc cannot train quantised weights (nf4-double); it fits"
    )


def test_where_nothing_fits_the_command_s_line_is_told(server: Server) -> None:
    found = json.loads(ask(server, "/api/choices?params=70b&gpu=t4")[1])
    assert found["plans"] == []
    assert found["said"].startswith("nothing fits; the closest is ")


DRAWN = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["gpt2-tiny", "vit-tiny-16", "llama-3-8b"]),
        "gpus": st.sampled_from(["1", "2", "8"]),
        "gpu": st.sampled_from(["t4", "h100"]),
    },
    optional={
        "strategy": st.sampled_from(sorted(STRATEGIES)),
        "precision": st.sampled_from(["fp32", "amp-bf16", "bf16-master"]),
        "batch-size": st.sampled_from(["1", "3"]),
        "accumulation": st.sampled_from(["1", "4"]),
        "checkpointing": st.sampled_from(["none", "full", "every-2"]),
        "checkpoint-policy": st.sampled_from(["recompute-all", "matrix-products"]),
        "optimizer": st.sampled_from(["adam", "sgd", "adafactor"]),
        "optimizer-kind": st.sampled_from(["foreach", "fused", "for-loop"]),
        "offload-optimizer": st.sampled_from(["none", "cpu"]),
        "no-pin-memory": st.just(""),
        "bucket-views": st.just(""),
        "keep-gradients": st.just(""),
        "tensor-parallel": st.sampled_from(["1", "2"]),
        "seq-len": st.sampled_from(["64", "128"]),
    },
)


@settings(max_examples=60)
@given(DRAWN)
def test_a_plan_s_query_says_that_plan(drawn: dict[str, str]) -> None:
    try:
        plan = plan_of(asked("&".join(f"{name}={value}" for name, value in drawn.items())))
    except MemcalcError:
        return
    said = query_of(plan, [("model", drawn["model"])])
    assert plan_of(asked("&".join(f"{name}={value}" for name, value in said))) == plan
    assert len(dict(said)) == len(said)


@pytest.mark.parametrize(
    "query",
    [
        "model=gpt2-tiny&gpus=2&strategy=fsdp-full-shard&accumulation=2",
        "model=gpt2-tiny&batch-size=3&optimizer=sgd",  # whose update allocates nothing, so that it is fullest at first
        "model=gpt2-tiny&batch-size=2&optimizer=sgd",
    ],
)
def test_what_is_drawn_adds_up(server: Server, query: str) -> None:
    shown, found = json.loads(ask(server, f"/api/picture?{query}")[1]), estimate(plan_of(asked(query)))
    assert {bar["moment"]: sum(bar["bytes"].values()) for bar in shown["bars"]} == found.peak.by_moment
    at_peak = {name: sizes[shown["figure"]["peak"]] for name, sizes in shown["figure"]["held"].items()}
    assert sum(at_peak.values()) == found.peak.bytes
    assert {name: size for name, size in at_peak.items() if size} == {
        name: size for name, size in found.peak.by_category.items() if size
    }


@pytest.mark.parametrize(
    ("query", "said", "options"),
    [
        ("model=gpt3", "unknown model 'gpt3'; did you mean 'gpt2'? known:", ["model"]),
        ("model=gpt2&batch-size=0", "--batch-size 0 must be at least 1", ["batch-size"]),
        ("model=gpt2&batch-size=-3", "--batch-size -3 must be at least 1", ["batch-size"]),
        ("model=gpt2&bach-size=1", "unknown option 'bach-size'; did you mean 'batch-size'? known:", ["bach-size"]),
        ("model=vit-tiny-16&seq-len=5&gpu=t4", "--seq-len does not apply to vit-tiny-16", ["seq-len"]),
        ("model=gpt2&gpus=2&strategy=single", "strategy single runs on 1 rank, not 2", ["strategy"]),
        ("model=gpt2&strategy=fspd", "unknown strategy 'fspd'; ", ["strategy"]),
        ("gpu=t4", "give a model, one of: ", []),
        ("model=gpt2&adam=yes", "--adam 'yes' is one word too much", ["adam"]),
        ("model=gpt2&model=gpt2", "the model is said twice", ["model"]),
        ("model=gpt2&x=%ff", "this query cannot be read", []),
        ("&".join(f"a{i}=1" for i in range(200)), "this query cannot be read", []),
    ],
)
def test_a_mistake_is_one_line_and_says_whose(server: Server, query: str, said: str, options: list[str]) -> None:
    answer, text = ask(server, f"/api/estimate?{query}")
    found = json.loads(text)
    assert answer.status == 400
    assert found["error"].startswith(said) and "\n" not in found["error"]
    assert found["options"] == options


def test_an_option_twice_is_refused_by_whatever_name() -> None:
    for query in ("gpus=1&gpus=2", "adam=&adam=", "batch-size=1&micro-batch=2"):
        with pytest.raises(InputError, match="is said twice; leave one out"):
            asked(f"model=gpt2&{query}")


def test_a_port_in_use_is_one_line(run: Run, server: Server) -> None:
    done = run("ui", "--no-open", "--port", str(server.server_port))
    assert done.exit_code == 2
    assert done.stderr == (
        f"memcalc: port {server.server_port} of 127.0.0.1: address already in use; "
        "take another, or leave --port out for a free one\n"
    )
    assert run("ui", "--port", "70000").stderr == "memcalc: --port 70000 must be at most 65535\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly(root: Path, sent: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "memcalc", "ui", "--no-open"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what started the tests may have it ignored
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("memcalc: http://127.0.0.1:") and line.endswith("/ (Ctrl-C ends it)\n")
    port = int(line.split("/ ")[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):  # an open connection does not hold it up
        process.send_signal(sent)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "memcalc: ended\n")


def test_every_named_model_is_on_offer(server: Server) -> None:
    found: dict[str, Any] = json.loads(ask(server, "/api/catalog")[1])
    assert [row["name"] for row in found["models"]] == list(MODELS)
