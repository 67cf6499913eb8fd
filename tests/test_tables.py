"""Rows to text in four formats."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.tables import FORMATS, heading, printable, render

ROWS = [("gpt2", 124439808), ('a "quoted", name', 1), ("a|b", 22)]
HEADERS = ["model", "parameters"]
cells = st.one_of(st.integers(), st.text(), st.none(), st.floats(allow_nan=False, allow_infinity=False))


def test_numbers_stand_right_and_names_left() -> None:
    assert render(ROWS, HEADERS).splitlines() == [
        "model               parameters",
        "----------------  ------------",
        "gpt2                 124439808",
        'a "quoted", name             1',
        "a|b                         22",
    ]


def test_markdown_keeps_its_columns() -> None:
    lines = render(ROWS, HEADERS, "markdown").splitlines()
    assert lines[-1].replace("\\|", "").count("|") == lines[0].count("|") == 3


@given(st.lists(st.tuples(cells, cells)))
def test_csv_reads_back(rows: list[tuple[object, object]]) -> None:
    text = render(rows, HEADERS, "csv") + "\n"
    read = list(csv.reader(io.StringIO(text)))
    shown = [["" if c is None else printable(c) if isinstance(c, str) else str(c) for c in row] for row in rows]
    assert read == [HEADERS, *shown]


@given(st.lists(st.tuples(cells, cells)))
def test_json_reads_back(rows: list[tuple[object, object]]) -> None:
    shown = [[printable(c) if isinstance(c, str) else c for c in row] for row in rows]
    assert json.loads(render(rows, HEADERS, "json")) == [dict(zip(HEADERS, row, strict=True)) for row in shown]


@given(st.lists(st.tuples(cells, cells)), st.sampled_from(FORMATS))
def test_any_cell_stays_on_its_line(rows: list[tuple[object, object]], format: str) -> None:
    text = render(rows, HEADERS, format)
    text.encode("utf-8")
    assert all(line.isprintable() for line in text.split("\n"))
    if format != "json":
        assert len(text.split("\n")) == len(rows) + (1 if format == "csv" else 2)


@given(st.text())
def test_printable_text_is_one_line_without_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_a_table_without_rows_still_has_its_headers() -> None:
    assert [render([], HEADERS, format).split("\n")[0] for format in ("table", "csv")] == [
        "model    parameters",
        "model,parameters",
    ]


def test_a_ragged_row_and_an_unknown_format_are_errors() -> None:
    with pytest.raises(ValueError, match="more or fewer cells"):
        render([(1,)], HEADERS)
    with pytest.raises(ValueError, match="unknown format"):
        render(ROWS, HEADERS, "html")


def test_a_heading_is_bold_unless_colour_is_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert heading("peak") == "\033[1mpeak\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert heading("peak") == "peak"
