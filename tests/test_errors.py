"""One line for the user, whatever was typed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc import errors
from memcalc.errors import (
    InputError,
    MemcalcError,
    PlanError,
    RunError,
    UnknownNameError,
    shorten,
)


def test_the_tree_is_the_one_drawn_on_top() -> None:
    drawn = {line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line}
    assert drawn | {"MemcalcError"} == set(errors.__all__) - {"shorten"}
    for name in drawn:
        assert issubclass(getattr(errors, name), MemcalcError)
    assert issubclass(UnknownNameError, InputError)
    assert issubclass(PlanError, InputError)


def test_exit_codes() -> None:
    assert (MemcalcError.exit_code, InputError.exit_code, RunError.exit_code) == (2, 2, 1)


@given(st.text(), st.lists(st.text(min_size=1, max_size=10), max_size=5))
def test_an_unknown_name_is_shown_whole_or_shortened_on_one_line(name: str, known: list[str]) -> None:
    error = UnknownNameError("GPU", name, known)
    head = str(error).partition(" known: ")[0]
    assert len(head.splitlines()) == 1
    assert error.nearest is None or error.nearest in known
    assert error.known == sorted(known)


def test_without_anything_known_it_says_so() -> None:
    assert str(UnknownNameError("port", "x", [])) == "unknown port 'x'; known: none"


def test_a_megabyte_of_name_is_answered_at_once() -> None:
    begin = time.process_time()
    assert len(str(UnknownNameError("GPU", "gpt2-" * 200_000, ["a100", "gpt2"]))) < 150
    assert time.process_time() - begin < 2


@given(st.text() | st.binary() | st.lists(st.integers()), st.integers(3, 100))
def test_shortened_values_keep_their_start(value: object, limit: int) -> None:
    text = shorten(value, limit)
    assert len(text) <= limit
    assert len(text.splitlines()) <= 1
    assert repr(value).startswith(text.removesuffix("..."))


@pytest.mark.parametrize("value", ["short", 7, None])
def test_short_values_are_shown_whole(value: object) -> None:
    assert shorten(value) == repr(value)
