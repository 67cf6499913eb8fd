"""Stands in place of ``python -m trainers.rehearsal`` in tests: does what the plan's model name says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(deed: str, out: Path) -> None:
    if deed == "sleep":
        time.sleep(600)
    elif deed == "raise":
        print("Traceback: of no interest\nerror: the layers do not fit together", file=sys.stderr)
        sys.exit(2)
    elif deed == "die":
        sys.exit(7)
    elif deed == "nonsense":
        out.write_text("[1, 2")
    elif deed == "noise":
        print("x" * 10**6, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text())["model"]["name"], Path(sys.argv[2]))
