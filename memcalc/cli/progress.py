"""How far long work is, on standard error: a counter on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

import click

__all__ = ["EVERY", "counted", "waiting"]

EVERY = 5.0
"""Seconds between two lines where nobody watches a terminal; work that is done before has no line."""

Thing = TypeVar("Thing")


def counted(things: Sequence[Thing], what: str) -> Iterator[Thing]:
    """The things one after the other; ``what`` they are is said in the plural."""
    watched, last, said = sys.stderr.isatty(), time.monotonic(), ""
    for done, thing in enumerate(things):
        now = time.monotonic()
        said = f"{done} of {len(things)} {what}"
        if watched:
            click.echo(f"\r{said}", nl=False, err=True)
        elif now - last >= EVERY:
            click.echo(f"memcalc: {said}", err=True)
            last = now
        yield thing
    if watched and said:
        click.echo(f"\r{' ' * (len(said) + 1)}\r", nl=False, err=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says every few seconds how long work has taken that cannot tell how far it is."""
    done, started = Event(), time.monotonic()

    def say() -> None:
        while not done.wait(EVERY):
            click.echo(f"memcalc: {what}, {time.monotonic() - started:.0f} s", err=True)

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
