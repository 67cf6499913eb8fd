"""Cells of published tables that hold numbers: no odd one is read as another, in any column of either table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from memcalc.bench import cells as cells_
from memcalc.bench import rows as memory
from memcalc.bench.cells import NUMBERS, check_numbers
from memcalc.bench.throughput import rows as speeds
from memcalc.cli.app import app
from memcalc.errors import FileError
from tests.published_rows import GPT2
from tests.published_speeds import LLAMA

Table = tuple[str, tuple[str, ...], Mapping[str, str], Callable[[Path], object]]
TABLES: tuple[Table, ...] = (
    ("memory", (*memory.COLUMNS, *memory.MESSAGE), GPT2 | {"metric": "OOM"}, memory.read_rows),
    ("speed", (*speeds.COLUMNS, "image"), LLAMA, speeds.read_timings),
)
CELLS = [(table, column) for table in TABLES for column in NUMBERS if column in table[1]]

# Numbers that float() or int() would read, and people would not mean or not see: signs, words, separators, bases, scripts.
digits = st.integers(1, 10**6).map(str)
scripts = st.sampled_from("٠۰०০੦๐０𝟎")  # zero in Arabic, Persian, Hindi, Bengali, Gurmukhi, Thai, wide and bold digits
foreign = st.builds(lambda text, zero: "".join(chr(ord(zero) + int(each)) for each in text), digits, scripts)
odd = st.one_of(
    st.sampled_from(["nan", "NaN", "inf", "Infinity", "-inf", "-1", "-0.5", "+3", "−3", "1_000", "0x10", "0b11", "1,000", "1 000",
                     "9" * 16, "1e400", "1e-400", ".5", "5%", "1e", "-1e3"]),
    foreign, foreign.map("<={}".format), digits.map("-{}".format), digits.map("+{}".format), digits.map("{}_0".format),
)  # fmt: skip


def text_of(columns: tuple[str, ...], base: Mapping[str, str], **changed: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerow(base)
    writer.writerow({**base, "id": "x-2", **changed})
    return text.getvalue()


@given(st.sampled_from(CELLS), odd)
@example((TABLES[1], "layers"), "3.5")
@example((TABLES[0], "n_gpus"), "0")
@example((TABLES[1], "value"), "0")
def test_an_odd_number_is_refused_with_line_and_column(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[Table, str], text: str
) -> None:
    (_, columns, base, read), column = where
    file = tmp_path_factory.getbasetemp() / "odd.csv"
    file.write_text(text_of(columns, base, **{column: text}), encoding="utf-8")
    with pytest.raises(FileError) as error:
        read(file)
    said = str(error.value)
    assert said.startswith(f"{file} line 3: {column} {text!r} must be a ")
    assert "\n" not in said


@pytest.mark.parametrize(("table", "columns", "base", "read"), TABLES)
def test_plain_numbers_and_words_stay(
    tmp_path: Path, table: str, columns: tuple[str, ...], base: Mapping[str, str], read: Callable[[Path], object]
) -> None:
    file = tmp_path / f"{table}.csv"
    said = {"seq_len": "<=512", "layers": "2-2-18-2", "vocab": "~250k", "lora_rank": "config default", "kv_heads": "0",
            "micro_batch_per_gpu": "32 (local batch)", "gpu_gib": "95.04", "value": "1.5e-3", "n_gpus": "八"}  # fmt: skip
    file.write_text(text_of(columns, base, **said), encoding="utf-8")
    assert len(read(file)) == 2  # type: ignore[arg-type]


@given(st.sampled_from(sorted(NUMBERS)), st.one_of(st.text(max_size=12), digits, st.floats().map(str)))
def test_what_is_not_refused_is_a_plain_number_or_no_number(column: str, text: str) -> None:
    """Whatever Python reads as a number has plain digits and is within the column's bounds, or is refused."""
    text = text.strip()  # as a table's reader does
    try:
        check_numbers("here", {column: text})
    except FileError as error:
        assert str(error).startswith(f"here: {column} ")
        return
    try:
        value = float(text)
    except ValueError:
        return
    assert text.isascii()
    assert "_" not in text
    kind = NUMBERS[column]
    assert (0 if kind.zero else 5e-324) <= value < kind.high
    assert value.is_integer() or not kind.whole


def test_every_numeric_column_of_the_tables_is_known() -> None:
    """A column of either table in which most cells are numbers stands in NUMBERS."""
    for file in Path(cells_.__file__).parent.glob("*.csv"):
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        for column in rows[0]:
            filled = [row[column] for row in rows if row[column]]
            plain = [text for text in filled if text.replace(".", "", 1).isdigit()]
            assert column in NUMBERS or 2 * len(plain) <= len(filled), (file.name, column)


@pytest.mark.parametrize(("table", "option"), [(TABLES[0], ()), (TABLES[1], ("--throughput",))], ids=lambda each: "")
def test_the_command_says_it_in_one_line(tmp_path: Path, table: Table, option: tuple[str, ...]) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text_of(table[1], table[2], heads="٣٢"), encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", *option, str(file)])
    assert done.exit_code == 2
    assert f"{file} line 3: heads '٣٢' must be a whole number from 0 on and below 1e+15, in plain digits" in done.output
    assert "Traceback" not in done.output
