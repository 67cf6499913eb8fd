"""The tables of keys in docs/configs.md are those that reading uses."""

from __future__ import annotations

import key_tables


def test_the_tables_of_keys_are_those_of_the_code() -> None:
    text = key_tables.PAGE.read_text(encoding="utf-8")
    assert key_tables.refreshed(text) == text, "run `make docs`"
    for table in key_tables.TABLES.values():
        assert all(f"`{path}`" in text for path, key in table.items() if key.kind != "block")
