"""Puts the tables of keys into configs.md, from the tables that reading uses: `python docs/key_tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from memcalc.configs.accelerate_table import TABLE as ACCELERATE
from memcalc.configs.deepspeed_table import TABLE as DEEPSPEED
from memcalc.configs.fsdp_yaml import TABLE as FSDP
from memcalc.configs.keys import Key, Table

__all__ = ["PAGE", "refreshed"]

PAGE = Path(__file__).resolve().parent / "configs.md"
TABLES = {"Keys of the FSDP file": FSDP, "Keys of DeepSpeed's JSON": DEEPSPEED, "Keys of accelerate's YAML": ACCELERATE}
_KINDS = {
    "flag": "true or false", "whole": "whole number", "number": "number", "text": "text", "numbers": "list of numbers", "any": "anything",
}  # fmt: skip


def row(path: str, key: Key) -> str:
    """One key: its path, what may stand there, and what becomes of it."""
    may = _KINDS.get(key.kind) or ", ".join(f"`{name}`" for name in key.kind.split("|"))
    if key.kind == "whole" and key.least:
        may += f" from {key.least} on"
    if key.auto:
        may += ', `"auto"`'
    becomes = {"plan": key.says, "training": f"how memcalc's runs train: {key.says}", "neutral": f"nothing: {key.says}"}
    unless = f", unless it is {' or '.join(f'`{json.dumps(value)}`' for value in key.off)}" if key.off else ""
    return f"| `{path}` | {may if key.role != 'refused' else ''} | {becomes.get(key.role, f'refused{unless}: {key.says}')} |"


def rendered(table: Table) -> str:
    """A table of keys in Markdown; blocks stand in the paths of their keys."""
    lines = [row(path, key) for path, key in table.items() if key.kind != "block"]
    return "\n".join(["| key | may be | becomes |", "|---|---|---|", *lines]) + "\n"


def refreshed(text: str) -> str:
    """The page with the tables of today."""
    for title, table in TABLES.items():
        section = re.compile(rf"^(## {re.escape(title)}\n\n.*?\n\n)\|.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)
        text, count = section.subn(lambda match, table=table: match[1] + rendered(table), text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} tables under {title!r}")
    return text


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
