"""Rows to text: a table for people, Markdown, CSV or JSON. The only place that imports tabulate."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from textwrap import fill

__all__ = ["FORMATS", "coloured", "columns", "folded", "heading", "printable", "render"]

FORMATS = ("table", "markdown", "csv", "json")


def render(rows: Iterable[Sequence[object]], headers: Sequence[str], format: str = "table") -> str:
    """Rows under headers in one of FORMATS, without a newline at the end. Raises ValueError for another format.

    Numbers stand right and everything else left; JSON is a list of objects keyed by the headers.

    >>> print(render([("gpt2", 124439808)], ["model", "parameters"], "csv"))
    model,parameters
    gpt2,124439808
    >>> print(render([("gpt2", 124439808)], ["model", "parameters"]))
    model      parameters
    -------  ------------
    gpt2        124439808
    """
    cells = [[_cell(value) for value in row] for row in rows]
    if any(len(row) != len(headers) for row in cells):
        raise ValueError("a row has more or fewer cells than there are headers")
    if format == "json":
        return json.dumps([dict(zip(headers, row, strict=True)) for row in cells], indent=2)
    if format == "csv":
        return _csv(cells, headers)
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}")
    return _tabulate(cells, headers, markdown=format == "markdown")


def heading(text: str) -> str:
    """Text in bold; where the output is not a terminal, click's echo takes the bold away again."""
    return text if os.environ.get("NO_COLOR") else f"\033[1m{text}\033[0m"


_COLOURS = {"fits": 32, "tight": 33, "does-not-fit": 31}
"""Foreground colours of ECMA-48 by verdict."""


def coloured(text: str, verdict: str) -> str:
    """Text in the verdict's colour, on a terminal like ``heading``.

    >>> coloured("fits", "fits") in ("fits", "\\x1b[32mfits\\x1b[0m")
    True
    """
    code = None if os.environ.get("NO_COLOR") else _COLOURS.get(verdict)
    return text if code is None else f"\033[{code}m{text}\033[0m"


def printable(text: str) -> str:
    """Text on one line that any terminal can show: control characters and lone surrogates become ``?``.

    >>> printable("two\\nlines \\x1b[31m")
    'two lines ?[31m'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def columns() -> int | None:
    """Columns of the terminal that is written to, or that COLUMNS says; None where neither is there: a file is endless."""
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    except (OSError, ValueError):
        return None


def folded(line: str, mark: str, room: int | None) -> str:
    """A sentence after its mark, broken between words where ``room`` ends.

    >>> print(folded("peak is allocated memory", "- ", 16))
    - peak is
        allocated
        memory
    """
    if room is None:
        return mark + line
    return fill(
        line,
        room,
        initial_indent=mark,
        subsequent_indent=" " * (len(mark) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(value: object) -> object:
    return printable(value) if isinstance(value, str) else value


def _csv(cells: list[list[object]], headers: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(cells)
    return text.getvalue().removesuffix("\n")


def _tabulate(cells: list[list[object]], headers: Sequence[str], *, markdown: bool) -> str:
    from tabulate import tabulate

    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(headers))]
    texts = [["" if value is None else str(value) for value in row] for row in cells]
    if markdown:
        texts = [[text.replace("|", "\\|") for text in row] for row in texts]
    return tabulate(
        texts,
        headers=list(headers),
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
        colalign=["right" if r else "left" for r in right] if cells else None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
