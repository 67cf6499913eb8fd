"""Bytes and counts: what is read, what is refused, and that printing and reading agree."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.units import (
    BINARY,
    DECIMAL,
    format_both,
    format_bytes,
    format_count,
    parse_bytes,
    parse_count,
)

SIZES = st.integers(1, 10**18)


def test_the_two_systems_of_case_c41() -> None:
    assert format_both(83_000_000_000) == "83 GB (77.3 GiB)"
    assert f"{83e9 / 2**30:.2f}" == "77.30"
    assert parse_bytes("80 GiB") == 85_899_345_920
    assert format_bytes(parse_bytes("80 GiB")) == "85.899 GB"
    assert f"{parse_bytes('80GiB') / 1e9:.2f}" == "85.90"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64KB", 64_000), ("64kb", 64_000), ("64KiB", 65_536), ("1.5GB", 1_500_000_000), ("1.5 gib", 1_610_612_736),
        ("1", 1), ("1e3", 1000), ("1E3", 1000), ("+5", 5), ("1_000B", 1000), (".5kB", 500), ("1.kB", 1000),
        ("  7 MB  ", 7_000_000), ("1e-3GB", 1_000_000), ("79.15GiB", 84_986_665_370), ("1e18", 10**18), ("1PB", 10**15),
    ],
)  # fmt: skip
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1e9", 10**9), ("1_000_000_000", 10**9), ("1B", 10**9), ("7b", 7 * 10**9), ("124M", 124 * 10**6),
        ("1.5B", 1_500_000_000), ("0.5k", 500), ("2T", 2 * 10**12), ("124439808", 124_439_808),
    ],
)  # fmt: skip
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count


REFUSED = [
    "", " ", "0", "-0", "-1", "-5GB", "nan", "inf", "-inf", "1e400", "1e999999999", "1e-999999999", "1e99999999999999999999",
    "1.5", "1e-1", "1..2", ".", "_", "_1", "1_", "1__0", "1e", "e5", "1e5e5", "1 2", "1,5", "0x10", "1 e3", "½", "²", "٣",
    "１２", "1\x00", "9" * 39, "9" * 10_000, "1.00000000000000000000000000000000001", "1e-30GB", "1 parsec", "1 \u212a", "1ſ",
]  # fmt: skip


@pytest.mark.parametrize("read", [parse_bytes, parse_count])
@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:30])
def test_everything_else_is_refused_at_once_on_one_line(read: object, text: str) -> None:
    begin = time.process_time()
    with pytest.raises(InputError) as caught:
        read(text)  # type: ignore[operator]
    assert time.process_time() - begin < 0.5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("read", "text"), [(parse_count, "1GB"), (parse_count, "1KiB"), (parse_bytes, "1k"), (parse_bytes, "1T")]
)
def test_a_unit_of_the_other_kind_is_refused(read: object, text: str) -> None:
    with pytest.raises(InputError, match="write it like"):
        read(text)  # type: ignore[operator]


def test_the_message_says_what_was_given_and_what_would_do() -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes("lots", "activation per layer")
    assert str(caught.value) == "activation per layer 'lots' cannot be read; write it like 64KB, 1.5GB or 80GiB"


@given(st.text(max_size=60) | st.from_regex(r"[+-]?[0-9_.]{0,20}(e[+-]?[0-9]{0,12})? ?[a-zA-Z]{0,4}", fullmatch=True))
@example("1e999999999")
@example("1e-999999999KiB")
def test_any_text_is_a_size_or_one_clear_error(text: str) -> None:
    for read in (parse_bytes, parse_count):
        value, line = 1, ""
        try:
            value = read(text)
        except InputError as error:
            line = str(error)
        assert type(value) is int
        assert 0 < value <= 10**18
        assert len(line.splitlines()) <= 1


@given(SIZES, st.booleans())
@example(999_999_999, False)
@example(10**18, True)
def test_a_printed_size_reads_back_to_the_last_digit(count: int, binary: bool) -> None:
    text = format_bytes(count, binary=binary)
    unit = (BINARY if binary else DECIMAL)[text.split()[1]]
    assert abs(Fraction(parse_bytes(text)) - count) <= Fraction(unit, 2000) + 1


@given(SIZES, st.booleans())
def test_a_printed_size_has_between_one_and_its_next_unit(count: int, binary: bool) -> None:
    number, unit = format_bytes(count, binary=binary).split()
    assert 1 <= float(number) < (1024 if binary else 1000) or unit in ("PB", "PiB")
    assert unit == "B" or ("i" in unit) == binary


@given(st.sampled_from(["", "k", "M", "G", "T"]), st.integers(1, 900))
def test_decimal_and_binary_are_never_confused(prefix: str, number: int) -> None:
    decimal = parse_bytes(f"{number}{prefix}B")
    assert decimal == number * DECIMAL[f"{prefix}B"]
    assert format_bytes(decimal) == f"{number} {prefix}B"
    if prefix:
        binary = f"{prefix.upper()}iB"
        assert parse_bytes(f"{number}{binary}") == number * BINARY[binary] > decimal
        assert format_bytes(number * BINARY[binary], binary=True) == f"{number} {binary}"


@given(SIZES)
def test_counts_read_back_exactly(count: int) -> None:
    assert (
        parse_count(format_count(count).replace(",", "_"))
        == count
        == parse_count(str(count))
        == parse_bytes(f"{count}B")
    )


@given(st.integers(1, 999_999), st.sampled_from("kmbKMB"))
def test_case_of_a_count_does_not_matter(count: int, unit: str) -> None:
    assert parse_count(f"{count}{unit}") == parse_count(f"{count}{unit.swapcase()}")
