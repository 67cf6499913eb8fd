"""Tables by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.catalog import Catalog
from memcalc.errors import UnknownNameError
from memcalc.hardware import GPUS
from memcalc.models import FAMILIES, MODELS
from memcalc.optimizers import OPTIMIZERS
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES


@dataclass(frozen=True)
class Row:
    name: str


COLOURS = Catalog("colour", [Row("red"), Row("light-blue")], aliases={"sky": "light-blue"})
ALL = {"GPUS": GPUS, "MODELS": MODELS, "OPTIMIZERS": OPTIMIZERS, "PRECISIONS": PRECISIONS, "STRATEGIES": STRATEGIES}


@pytest.mark.parametrize("name", ["light-blue", "Light-Blue", "  sky ", "SKY"])
def test_lookup_ignores_case_and_spaces_and_knows_aliases(name: str) -> None:
    assert COLOURS[name].name == "light-blue"
    assert name in COLOURS
    assert COLOURS.get(name) is COLOURS["light-blue"]


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(UnknownNameError, match="unknown colour 'lightblue'; did you mean 'light-blue'") as caught:
        COLOURS["lightblue"]
    assert caught.value.nearest == "light-blue"
    assert "lightblue" not in COLOURS
    assert COLOURS.get("lightblue") is None
    assert COLOURS.get("lightblue", 3) == 3


def test_a_catalog_is_read_only_and_in_order() -> None:
    assert list(COLOURS) == ["red", "light-blue"]
    assert len(COLOURS) == 2
    with pytest.raises(TypeError):
        COLOURS["green"] = Row("green")  # type: ignore[index]


@given(st.text() | st.none() | st.integers())
def test_containing_and_getting_agree(name: object) -> None:
    if name in COLOURS:
        assert COLOURS[name] in COLOURS.values()  # type: ignore[index]
    elif isinstance(name, str):
        with pytest.raises(UnknownNameError):
            COLOURS[name]


@pytest.mark.parametrize("catalog", [*ALL.values(), FAMILIES], ids=[*ALL, "FAMILIES"])
def test_every_row_is_found_by_its_own_name(catalog: Catalog[Row]) -> None:
    assert len(catalog) > 0
    for name, row in catalog.items():
        assert name == row.name == name.strip().lower(), "names are lower case"
        assert catalog[name.upper()] is row


@pytest.mark.parametrize("name", ALL)
def test_the_catalogs_are_public(name: str) -> None:
    assert getattr(memcalc, name) is ALL[name]
