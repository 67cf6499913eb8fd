"""One wrong line to plant into memcalc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fault"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One wrong line: ``right`` stands in ``file`` exactly once, and becomes ``wrong``."""

    name: str
    file: str
    right: str
    wrong: str

    def plant(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / "memcalc" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise SystemExit(
                f"{self.name}: {self.right!r} stands {text.count(self.right)} times in {self.file}, not once"
            )
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")
