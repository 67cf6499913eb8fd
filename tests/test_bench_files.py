"""Files of published facts: how they are read, refused and filtered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.bench.rows import COLUMNS, Row, read_rows, select
from memcalc.errors import FileError, InputError
from tests.published_rows import GPT2, row_of, text_of


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "rows.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_rows_are_read(file: Callable[[str], Path]) -> None:
    (row,) = read_rows(file("\ufeff" + text_of(GPT2 | {"value_gib": " 4.0 "}) + "\n"))
    assert (row.id, row.measured, row.meter, row.tier, row.group) == ("x-1", 4.0, "allocated", "A", "someone/project")
    assert row.whole("layers") == 12
    assert row.whole("lora_rank") is None
    assert row_of(seq_len="<=512").whole("seq_len") is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("id,source\n", r"has no column model, n_params, hidden, layers, heads and \d+ more"),
        (text_of(columns=(*COLUMNS[:-1],)), "has no column notes;"),
        (text_of(columns=(*COLUMNS, "id")), "has the column id twice"),
        (text_of(), "has columns but no rows"),
        (text_of(GPT2) + "a,b\n", "line 3 has 2 cells, but there are 31 columns"),
        (text_of(GPT2, GPT2), "line 3: the id 'x-1' stands twice"),
        (text_of(GPT2 | {"id": " "}), "line 2: id is blank"),
        (text_of(GPT2 | {"source": ""}), "line 2: source is blank"),
        (text_of(GPT2 | {"metric": "max_memory"}), "unknown metric 'max_memory'; did you mean 'max_memory_"),
        *((text_of(GPT2 | {"value_gib": value}), f"value_gib '{value}' must be") for value in ("nan", "-1", "inf", "4 GB", "")),
        (text_of(GPT2) + '"open', "line 3 is not valid CSV"),
        (text_of(GPT2 | {"notes": "n" * 200_000}), "is not valid CSV: field larger than field limit"),
        ("id,\0source\n", "holds NUL bytes"),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_broken_file_is_refused_in_one_line(file: Callable[[str], Path], text: str, fault: str) -> None:
    with pytest.raises(FileError, match=fault) as caught:
        read_rows(file(text))
    assert "\n" not in str(caught.value)


def test_a_binary_or_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    binary, huge = tmp_path / "binary.csv", tmp_path / "huge.csv"
    binary.write_bytes(b"\xff\xfe\x00id")
    with huge.open("wb") as stream:
        stream.truncate(65 * 2**20)
    for path, fault in ((binary, "not UTF-8"), (huge, "larger than 64 MiB"), (tmp_path / "no.csv", "does not exist")):
        with pytest.raises(FileError, match=fault):
            read_rows(path)


def test_a_boundary_needs_no_value(file: Callable[[str], Path]) -> None:
    (row,) = read_rows(file(text_of(GPT2 | {"metric": "OOM", "value_gib": ""})))
    assert row.measured is None
    assert row.meter == "boundary"


def test_filters() -> None:
    rows = [row_of(id="a"), row_of(id="b", notes="tier B; x"), row_of(id="c", source="Other/Thing", notes="")]
    rows = [
        Row(id=r.id, source=r.source, metric=r.metric, measured=1.0, cells=r.cells | {"use": "score"}) for r in rows
    ]
    assert [row.id for row in select(rows, tier="B")] == ["b"]
    assert [row.id for row in select(rows, use="score", source="other")] == ["c"]
    with pytest.raises(InputError, match="none of the 3 rows is left with --tier C --source x"):
        select(rows, tier="C", source="x")
    with pytest.raises(InputError, match="no column 'use'"):
        select([row_of()], use="score")
