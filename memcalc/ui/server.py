"""The server of ``memcalc ui``: on loopback, for this machine's browser, and for nobody else.

A page of another site could send requests to a server on loopback, or read its answers by a name that it resolves to
127.0.0.1. So a request is answered only if its Host is this server's own address, and if it was not another site that
sent it (Sec-Fetch-Site, Origin). Nothing is ever written, no code is run, and no answer allows another origin.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from memcalc.cli.app import explain
from memcalc.errors import InputError
from memcalc.palette import CATEGORY, DARK, LIGHT, Surface
from memcalc.ui.answers import Running, catalog, estimate_json, picture
from memcalc.ui.words import OwnConfig

__all__ = ["HOST", "Server"]

HOST = "127.0.0.1"
LONGEST = 8_000
"""Characters of a path with its query."""
LARGEST = 2**20
"""Bytes of a config.json."""
PATIENCE = 10
"""Seconds that a request may take to arrive."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PAGES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/controls.js": ("controls.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

Answer = Callable[[str, OwnConfig | None], str]


class Server(ThreadingHTTPServer):
    """Listens as soon as it exists; ``port`` 0 takes a free one. Raises InputError where the port cannot be had."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int = 0) -> None:
        self.running = Running()
        self.answers: dict[str, Answer] = {
            "/api/estimate": estimate_json,
            "/api/recommend": self.running.recommend_json,
            "/api/picture": picture,
            "/api/choices": self.running.choices,
        }
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            cause = (error.strerror or "it cannot be had").lower()
            raise InputError(
                f"port {port} of {HOST}: {cause}; take another, or leave --port out for a free one"
            ) from None

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def server_close(self) -> None:
        super().server_close()
        self.running.stop()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away, or says nothing more, is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    server_version, sys_version = "memcalc", ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    # A small answer at once: Nagle's algorithm would wait for the browser's acknowledgement, up to 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer(None)

    def do_HEAD(self) -> None:
        """What GET says, without its body."""
        self._answer(None)

    def do_POST(self) -> None:
        """The same questions about a config.json: the body is its text, ``config-name`` in the query its name."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") is not None or len(self.headers.get_all("Content-Length", [])) > 1:
            # Who reads it by the other of the two takes a part of the body for the next request (RFC 9112, 6.3).
            self._refuse(HTTPStatus.BAD_REQUEST, "a request must say its length once, and have no Transfer-Encoding")
        elif not re.fullmatch("[0-9]{1,9}", length):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a request with a body must say its length")
        elif int(length) > LARGEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a config.json may have {LARGEST >> 20} MiB, not more")
        elif (body := self._body(int(length))) is None:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body is shorter than the {length} B that were announced")
        else:
            self._answer(body)

    def _body(self, length: int) -> bytes | None:
        """So many bytes; None where they do not come."""
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            return None
        return body if len(body) == length else None

    def _answer(self, body: bytes | None) -> None:
        if refused := self._unwanted():
            return self._refuse(HTTPStatus.FORBIDDEN, refused)
        if len(self.path) > LONGEST:
            return self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address may have {LONGEST} characters, not more")
        path, _, query = self.path.partition("?")
        if body is None and path in PAGES:
            return self._send(HTTPStatus.OK, PAGES[path][1], page(PAGES[path][0]))
        if body is None and path == "/palette.css":
            return self._send(HTTPStatus.OK, "text/css", palette())
        if body is None and path == "/api/catalog":
            return self._send(HTTPStatus.OK, "application/json", catalog())
        answer = self.server.answers.get(path)
        if answer is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing at this address")
        self._ask(partial(_with_config, answer, query, body), query)

    def _ask(self, answer: Callable[[], str], query: str) -> None:
        try:
            text = answer()
        except Exception as error:  # one line for the page, as the command line has it
            line, code = explain(error)
            status = HTTPStatus.BAD_REQUEST if code == 2 else HTTPStatus.INTERNAL_SERVER_ERROR
            line = re.sub(r" \(see .* --help\)$", "", line)
            said = json.dumps({"error": line, "options": _mentioned(line, query)})
            return self._send(status, "application/json", said)
        self._send(HTTPStatus.OK, "application/json", text)

    def _unwanted(self) -> str:
        """Why a request is not answered; blank when it is."""
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get_all("Host", []) not in [[host] for host in own]:
            return "this page is at its own address only"
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in own}:
            return "requests of other sites are not answered"
        # A link on another site may lead to the page itself, which shows nothing that is not in the link.
        link = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.path.partition("?")[0] == "/"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not link:
            return "requests of other sites are not answered"
        return ""

    def _refuse(self, status: HTTPStatus, line: str) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(status, "application/json", json.dumps({"error": line, "options": []}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, such as other methods."""
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for each request would say nothing that the page does not show."""


def _with_config(answer: Answer, query: str, body: bytes | None) -> str:
    if body is None:
        return answer(query, None)
    pairs = parse_qsl(query, keep_blank_values=True)
    name = next((value for key, value in pairs if key == "config-name"), "model")
    rest = "&".join(part for part in query.split("&") if part.partition("=")[0] != "config-name")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{name}/config.json is not UTF-8 text") from None
    return answer(rest, OwnConfig(name=name, text=text))


def _mentioned(line: str, query: str) -> list[str]:
    """Options of the query that a message names, so that it can be shown beside their controls: as options first, then
    those that it quotes, or whose value it quotes, then those that it has as words.

    >>> _mentioned("unknown strategy 'fspd'; did you mean 'fsdp-full-shard'?", "model=gpt2&strategy=fspd")
    ['strategy']
    """
    pairs = parse_qsl(query, keep_blank_values=True)
    typed = [key for key, _ in pairs if re.search(rf"--{re.escape(key)}(?![\w-])", line)]
    quoted = [key for key, value in pairs if repr(key) in line or value and repr(value) in line]
    words = [key for key, _ in pairs if re.search(rf"\b{re.escape(key).replace('-', '[ -]')}\b", line, re.IGNORECASE)]
    return list(dict.fromkeys([*typed, *quoted, *words]))


@cache
def page(name: str) -> str:
    """A file of the package."""
    return (files("memcalc.ui") / "page" / name).read_text(encoding="utf-8")


@cache
def palette() -> str:
    """The colours that all pictures of memcalc have, as CSS."""

    def surface(colours: Surface) -> str:
        return " ".join(f"--{name}: {value};" for name, value in colours._asdict().items())

    categories = "\n".join(f".{name} {{ --colour: {value}; }}" for name, value in CATEGORY.items())
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {surface(DARK)} }} }}"
    return f":root {{ {surface(LIGHT)} }}\n{dark}\n{categories}\n"
