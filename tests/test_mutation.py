"""The faults of tests/mutation.py still fit the code; `make mutation` shows that each is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault, root: Path, tmp_path: Path) -> None:
    original = (root / "memcalc" / fault.file).read_text(encoding="utf-8")
    planted = tmp_path / "memcalc" / fault.file
    planted.parent.mkdir(parents=True)
    planted.write_text(original, encoding="utf-8")
    fault.plant(tmp_path)
    assert planted.read_text(encoding="utf-8") != original
    compile(planted.read_text(encoding="utf-8"), str(planted), "exec")
