"""A read-only table of one kind of thing, looked up by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from memcalc.errors import UnknownNameError

__all__ = ["Catalog"]


class Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)


class Catalog(Mapping[str, Row], Generic[Row]):
    """Rows by name, in the order they were written; lookup ignores case and knows aliases.

    A name that is not there raises UnknownNameError with the nearest one as a hint.
    """

    def __init__(self, kind: str, rows: Iterable[Row], aliases: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._rows = {row.name: row for row in rows}
        self._aliases = dict(aliases or {})

    def _key(self, name: object) -> str:
        key = str(name).strip().lower()
        return self._aliases.get(key, key)

    def __getitem__(self, name: str) -> Row:
        if type(name) is str and (row := self._rows.get(name)) is not None:  # nearly all, of every plan of a search
            return row
        try:
            return self._rows[self._key(name)]
        except KeyError:
            raise UnknownNameError(self.kind, str(name), self._rows) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name) in self._rows

    def get(self, name: str, default: Any = None) -> Any:
        # Mapping.get would let the error through: it expects a KeyError.
        return self._rows.get(self._key(name), default)

    @property
    def aliases(self) -> dict[str, str]:
        """Other names, and whose they are."""
        return dict(self._aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
