"""A server of ``memcalc ui`` in a thread of the tests, and requests to it as bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from threading import Thread

from memcalc.ui.server import HOST, Server


@contextmanager
def served() -> Iterator[Server]:
    """A server on a free port, ended afterwards."""
    with Server() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[HTTPResponse, str]:
    """One request; ``headers`` replace those that are usual."""
    connection = HTTPConnection(HOST, server.server_port, timeout=300)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        usual = {"Host": f"{HOST}:{server.server_port}"} | (
            {"Content-Length": str(len(body))} if body is not None else {}
        )
        for name, value in (usual | (headers or {})).items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()
