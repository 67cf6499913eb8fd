"""HTML that is escaped unless it is known to be HTML: text is ``str``, and what these functions make is ``Html``."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Html", "data", "element", "join", "table", "wide"]

_EMPTY = {"rect", "polygon", "polyline", "line", "input", "meta", "path"}


class Html(str):
    """Text that is HTML already; everything else is escaped where it is put into an element."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: object) -> Html:
    """An element; ``class_`` is the attribute class, ``aria_label`` is aria-label. None leaves an attribute out, True has
    no value.

    >>> element("p", "a < b", class_="x")
    '<p class="x">a &lt; b</p>'
    """
    said = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if name in _EMPTY:
        return Html(f"<{name}{said}/>")
    return Html(f"<{name}{said}>{join(content)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after another, escaped where they are plain text."""
    return Html("".join(part if isinstance(part, Html) else html.escape(_shown(part)) for part in parts))


def data(name: str, value: Any) -> Html:
    """JSON for the page's script; no text in it can end its element."""
    text = (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> Html:
    """A table in a frame of its own, in which it scrolls where the page is narrower; the first cell of a row is its name.

    ``right`` are the columns that hold numbers.
    """
    numbers = set(right)

    def cell(kind: str, index: int, text: str, **more: object) -> Html:
        return element(kind, text, class_="n" if index in numbers else None, **more)

    head = element("tr", *(cell("th", i, text, scope="col") for i, text in enumerate(heads)))
    body = [
        element("tr", *(cell("td" if i else "th", i, text, scope=None if i else "row") for i, text in enumerate(row)))
        for row in rows
    ]
    made = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    return wide(caption, made)


def wide(label: str, content: Html) -> Html:
    """A frame that scrolls sideways, by keys as well, so that the page does not."""
    return element("div", content, class_="wide", tabindex="0", role="region", aria_label=label)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(_shown(str(value)))}"'


def _shown(text: str) -> str:
    """Control characters and lone surrogates, which no page may hold, as ``?``."""
    return "".join(c if c.isprintable() or c in "\n\t " else "?" for c in text)
