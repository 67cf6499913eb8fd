"""The command line: words become a Plan, one library function is called, its result is shown."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The ``memcalc`` command."""
    from memcalc.cli.app import app

    app(prog_name="memcalc")
