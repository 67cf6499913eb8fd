"""Puts the tables of ``memcalc bench`` into validation/published.md, under its heading Results: `python docs/published.py`."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from memcalc.cli.bench import command

__all__ = ["PAGE", "refreshed"]

PAGE = Path(__file__).resolve().parent / "validation" / "published.md"
OPTIONS = ["--format", "markdown", "--worst", "12"]
RESULTS = re.compile(r"^## Results\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def refreshed(text: str) -> str:
    """The page with the tables of today."""
    done = CliRunner().invoke(command, OPTIONS, catch_exceptions=False)
    return RESULTS.sub(lambda match: f"## Results\n\n{done.output}\n", text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
