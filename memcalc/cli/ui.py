"""``memcalc ui``: the calculator as a page in the browser."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import click

from memcalc.cli.kinds import Whole
from memcalc.cli.options import Command, option
from memcalc.errors import InputError

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc ui
  memcalc ui --port 8265 --no-open

The page and its answers come from this machine alone: nothing is downloaded, and nobody else can reach it. To see it
from another machine, forward the port: ssh -L 8265:127.0.0.1:8265 HOST. Ctrl-C ends it.

\b
The same questions can be asked by other programs:
  curl 'http://127.0.0.1:8265/api/estimate?model=gpt2&batch-size=8&gpu=t4'
"""

_MOST = 65535


@click.command("ui", cls=Command, epilog=EXAMPLES)
@option("The server", "--port", type=Whole(0), default="0", metavar="N",
        help="Port on 127.0.0.1; 0 takes a free one.  [default: 0]")  # fmt: skip
@option("The server", "--no-open", is_flag=True, help="Only print the address, and open no browser.")
def command(port: int, no_open: bool) -> None:
    """Estimate and recommend in the browser, live as sliders move.

    Choose a model or give a config.json, and see at once whether a plan fits, what takes the memory, the timeline of a
    step, and which command gives the same.
    """
    if port > _MOST:
        raise InputError(f"--port {port} must be at most {_MOST}")
    from memcalc.ui.server import Server

    with contextlib.suppress(KeyboardInterrupt), Server(port) as server:
        signal.signal(signal.SIGTERM, _stop)
        click.echo(f"memcalc: {server.address} (Ctrl-C ends it)")
        if not no_open:
            _open(server.address)
        server.serve_forever(poll_interval=0.1)
    click.echo("memcalc: ended", err=True)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _open(address: str) -> None:
    """Only where there is a screen: without one, a browser of the terminal would take it over."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    import webbrowser

    webbrowser.open(address)
