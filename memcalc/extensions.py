"""Extensions that torch builds when they are first used, and locks that a killed build leaves behind.

Whoever builds one holds ``OP/lock`` open below the cache; all others wait until the file is gone, without an end
(torch/utils/file_baton.py). A build that was killed leaves it there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["DEEPSPEED_OPS", "blocking", "cache", "cure", "stale"]

DEEPSPEED_OPS = ("deepspeed_shm_comm",)
"""What DeepSpeed builds for memcalc's runs on a CPU (op_builder/cpu/comm.py); their optimizers are torch's."""
_LONGEST_BUILD = 1800.0
"""Seconds after which a lock counts as left behind where nothing says who holds it."""


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of built extensions (torch/utils/cpp_extension.py, ``_get_build_directory``).

    >>> cache({"TORCH_EXTENSIONS_DIR": "/somewhere"}).name
    'somewhere'
    """
    if said := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(said)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def stale(environ: Mapping[str, str] = os.environ, root: Path = Path("/"), now: float | None = None) -> list[Path]:
    """Locks that no process of this machine holds. Raises nothing.

    Where there is no /proc, those that are older than any build.
    """
    locks = [*cache(environ).glob("*/lock"), *cache(environ).glob("*/*/lock")]
    if not locks:
        return []
    held = None if not (root / "proc/self").exists() else {os.path.realpath(path) for path in _open_files(root)}
    found = []
    for lock in locks:
        try:
            age = (time.time() if now is None else now) - lock.stat().st_mtime
        except OSError:  # released meanwhile
            continue
        if (age > _LONGEST_BUILD) if held is None else (os.path.realpath(lock) not in held):
            found.append(lock)
    return sorted(found)


def blocking(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Path]:
    """Stale locks on which a run of DeepSpeed under this Python would wait for ever."""
    here = f"py{sys.version_info.major}{sys.version_info.minor}"
    top = cache(environ)
    return [
        lock for lock in stale(environ, root)
        if lock.parent.name in DEEPSPEED_OPS and (lock.parents[1] == top or lock.parents[1].name.startswith(here))
    ]  # fmt: skip


def cure(locks: list[Path]) -> str:
    """What to do about locks that were left behind."""
    return f"rm {' '.join(map(str, locks))} (unless another machine that shares the folder builds there)"


def _open_files(root: Path) -> Iterator[str]:
    for folder in (root / "proc").glob("[0-9]*/fd"):
        try:
            for entry in os.scandir(folder):
                yield os.readlink(entry.path)
        except OSError:  # another user's, or ended meanwhile
            continue
