"""``memcalc ui`` without a browser: the same answers as the command line, and no others to anybody else."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.cli.estimate import command as estimate_command
from memcalc.cli.kinds import File
from memcalc.errors import InputError, MemcalcError
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES
from memcalc.ui import words as ui_words
from memcalc.ui.server import HEADERS, HOST, LARGEST, LONGEST, PAGES, Handler, Server
from memcalc.ui.words import CLOSED, OwnConfig, asked, plan_of, query_of
from tests.serving import ask, served

LLAMA = json.dumps({
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
}).encode()  # fmt: skip

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "gpt2")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


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
        ("model=gpt3", "unknown model 'gpt3'; did you mean 'gpt2'? known:", []),
        ("model=gpt2&batch-size=0", "--batch-size 0 must be at least 1", ["batch-size"]),
        ("model=gpt2&batch-size=-3", "--batch-size -3 must be at least 1", ["batch-size"]),
        ("model=gpt2&bach-size=1", "unknown option 'bach-size'; did you mean 'batch-size'? known:", []),
        ("model=vit-tiny-16&seq-len=5&gpu=t4", "--seq-len does not apply to vit-tiny-16", ["seq-len"]),
        ("model=gpt2&gpus=2&strategy=single", "strategy single runs on 1 rank, not 2", []),
        ("gpu=t4", "give a model, one of: ", []),
        ("model=gpt2&adam=yes", "--adam 'yes' is one word too much", ["adam"]),
        ("model=gpt2&model=gpt2", "the model is said twice", []),
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


@pytest.mark.parametrize("path", ["/etc/passwd", "config.json", "../x/config.json", ".", "a.safetensors"])
def test_no_address_has_a_file_read(server: Server, path: str) -> None:
    assert "unknown model" in json.loads(ask(server, f"/api/estimate?model={path}")[1])["error"]


def test_no_option_that_names_a_file_or_runs_code_is_open() -> None:
    for command in (estimate_command, ui_words._probe(), _recommend()):
        known = ui_words._open(command)
        assert {"batch-size", "gpu", "strategy"} <= known.keys()
        assert not {param.name for param in known.values()} & {
            *CLOSED,
            "plan_file",
            "config",
            "launch",
            "out",
            "rehearse",
        }
        for param in known.values():
            kinds = getattr(param.type, "types", [param.type])
            assert not any(isinstance(kind, File | click.Path | click.File) for kind in kinds), param.name
    for option in ("module", "sample", "plan", "config", "save-plan", "launch", "out", "format", "emit", "help"):
        with pytest.raises(InputError, match="unknown option"):
            asked(f"model=gpt2&{option}=x", _recommend())


def _recommend() -> click.Command:
    from memcalc.cli.recommend import command

    return command


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a\\b", ".x", "x" * 61, "a b", "<b>"])
def test_a_config_s_name_is_no_path(name: str) -> None:
    with pytest.raises(InputError, match="may have letters"):
        OwnConfig(name=name, text="{}")


OTHERS: list[dict[str, str]] = [
    {"Host": "example.com"},
    {"Host": "127.0.0.1"},
    {"Host": "127.0.0.1:1"},
    {"Host": "127.0.0.1.example.com:80"},
    {"Host": ""},
    {"Origin": "http://example.com"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
def test_other_sites_are_not_answered(server: Server, headers: dict[str, str]) -> None:
    answer, text = ask(server, "/api/estimate?model=gpt2-tiny", headers=headers)
    assert answer.status == 403
    assert "allocated" not in text


def test_a_link_to_the_page_works_from_elsewhere(server: Server) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(server, "/?model=gpt2", headers=link)[0].status == 200
    assert ask(server, "/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})[0].status == 403
    assert ask(server, "/", headers={"Host": f"localhost:{server.server_port}"})[0].status == 200


def test_every_answer_has_the_headers_and_none_opens_it_to_others(server: Server) -> None:
    for path in [*PAGES, "/palette.css", "/api/catalog", "/api/estimate?model=gpt2-tiny", "/api/estimate", "/nothing"]:
        answer, _ = ask(server, path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/nothing", "GET", {}, 404),
        ("/../setup.cfg", "GET", {}, 404),
        ("//[", "GET", {}, 404),
        ("/", "POST", {}, 404),
        ("/api/estimate", "OPTIONS", {}, 501),
        ("/api/estimate", "PUT", {}, 501),
        ("/api/estimate?x=" + "y" * LONGEST, "GET", {}, 414),
        ("/api/estimate", "POST", {"Content-Length": str(LARGEST + 1)}, 413),
        ("/api/estimate", "POST", {"Content-Length": "x"}, 411),
        ("/api/estimate", "POST", {"Content-Length": "-1"}, 411),
        ("/api/estimate", "POST", {"Content-Length": "2", "Transfer-Encoding": "chunked"}, 400),
        ("/api/estimate?model=gpt2&gpus=1&gpus=2", "GET", {}, 400),
    ],
)
def test_what_is_not_asked_for_like_this(
    server: Server, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    answer, text = ask(server, path, method, b"{}" if method == "POST" else None, headers)
    assert answer.status == status
    assert list(json.loads(text)) == ["error", "options"]


def test_head_says_what_get_says_without_its_body(server: Server) -> None:
    for path in ("/", "/nothing", "/api/estimate?model=gpt2-tiny"):
        (whole, text), (head, none) = ask(server, path), ask(server, path, "HEAD")
        assert (head.status, none) == (whole.status, "")
        assert int(head.headers["Content-Length"]) == len(text.encode())


@pytest.mark.parametrize("ends", [True, False])
def test_a_body_that_does_not_come_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.2)
    with socket.create_connection((HOST, server.server_port), timeout=20) as wire:
        wire.sendall(
            f"POST /api/estimate HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\nContent-Length: 9\r\n\r\n{{}}".encode()
        )
        if ends:
            wire.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: wire.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert "the body is shorter than the 9 B that were announced" in answer


def test_an_option_twice_is_refused_by_whatever_name() -> None:
    for query in ("gpus=1&gpus=2", "adam=&adam=", "batch-size=1&micro-batch=2"):
        with pytest.raises(InputError, match="is said twice; leave one out"):
            asked(f"model=gpt2&{query}")


def test_only_this_machine_can_reach_it(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


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
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("memcalc: http://127.0.0.1:") and line.endswith("/ (Ctrl-C ends it)\n")
    port = int(line.split("/ ")[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):  # an open connection does not hold it up
        process.send_signal(sent)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "memcalc: ended\n")


def test_every_named_model_is_on_offer(server: Server) -> None:
    found: dict[str, Any] = json.loads(ask(server, "/api/catalog")[1])
    assert [row["name"] for row in found["models"]] == list(MODELS)
