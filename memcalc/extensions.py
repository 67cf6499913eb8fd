"""Extensions that torch builds when they are first used, and locks that a killed build leaves behind.

Whoever builds one holds ``OP/lock`` open below the cache; all others wait until the file is gone, without an end
(torch/utils/file_baton.py). A build that was killed leaves it there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["DEEPSPEED_OPS", "LIBAIO", "SWAP_OPS", "blocking", "built", "cache", "cure", "has_libaio", "let_go", "stale"]

DEEPSPEED_OPS = ("deepspeed_shm_comm",)
"""What DeepSpeed builds for memcalc's runs on a CPU (op_builder/cpu/comm.py); their optimizers are torch's."""
SWAP_OPS = ("pin_memory", "async_io")
"""What it builds for offload to NVMe, on GPUs too (op_builder/async_io.py, op_builder/pin_memory.py)."""
LIBAIO = "apt-get install libaio-dev (dnf install libaio-devel)"
"""How what async_io is built with is installed."""
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


def built(op: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an extension has been built for some Python already."""
    top = cache(environ)
    return any(path.is_file() for path in (*top.glob(f"{op}/{op}.so"), *top.glob(f"*/{op}/{op}.so")))


def has_libaio() -> bool:
    """Whether a program with libaio compiles and links, which is what DeepSpeed asks (op_builder/async_io.py)."""
    flags = [word for name in ("CFLAGS", "LDFLAGS") for word in shlex.split(os.environ.get(name, ""))]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "asks.cpp"
        source.write_text("#include <libaio.h>\nint main() { return io_destroy(nullptr); }\n")
        words = [
            *shlex.split(os.environ.get("CXX") or "c++"),
            str(source),
            *flags,
            "-laio",
            "-o",
            str(Path(folder) / "asks"),
        ]
        try:
            return subprocess.run(words, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def blocking(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/"), ops: tuple[str, ...] = DEEPSPEED_OPS
) -> list[Path]:
    """Stale locks on which a run of DeepSpeed under this Python, which uses ``ops``, would wait for ever."""
    here = f"py{sys.version_info.major}{sys.version_info.minor}"
    top = cache(environ)
    return [
        lock for lock in stale(environ, root)
        if lock.parent.name in ops and (lock.parents[1] == top or lock.parents[1].name.startswith(here))
    ]  # fmt: skip


def cure(locks: list[Path]) -> str:
    """What to do about locks that were left behind."""
    return f"rm {' '.join(map(str, locks))} (unless another machine that shares the folder builds there)"


def let_go(environ: Mapping[str, str] = os.environ) -> None:
    """Remove the locks that this very process holds: it ends without letting torch do so. Nothing where there is no /proc."""
    top = Path(os.path.realpath(cache(environ)))
    for path in map(Path, _open_files(Path("/"), "self")):
        if path.name == "lock" and path.is_relative_to(top):
            path.unlink(missing_ok=True)


def _open_files(root: Path, processes: str = "[0-9]*") -> Iterator[str]:
    for folder in (root / "proc").glob(f"{processes}/fd"):
        try:
            for entry in os.scandir(folder):
                yield os.readlink(entry.path)
        except OSError:  # another user's, or ended meanwhile
            continue
