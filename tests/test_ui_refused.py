"""``memcalc ui`` without a browser: no files for anybody, no answers to other sites, and one line for what is no request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import click
import pytest

from memcalc.cli.estimate import command as estimate_command
from memcalc.cli.kinds import File
from memcalc.errors import InputError
from memcalc.ui import words as ui_words
from memcalc.ui.server import HEADERS, HOST, LARGEST, LONGEST, PAGES, Handler, Server
from memcalc.ui.words import CLOSED, OwnConfig, asked
from tests.serving import ask, served


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as running:
        yield running


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
    monkeypatch.setattr(Handler, "timeout", 1.0)
    with socket.create_connection((HOST, server.server_port), timeout=300) as wire:
        wire.sendall(
            f"POST /api/estimate HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\nContent-Length: 9\r\n\r\n{{}}".encode()
        )
        if ends:
            wire.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: wire.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert "the body is shorter than the 9 B that were announced" in answer


def test_only_this_machine_can_reach_it(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
