"""What DeepSpeed builds when a run first uses it: built before, and not waited for in vain.

    python -m trainers.backends.deepspeed_build          # once after the installation; 20 to 40 s the first time
    python -m trainers.backends.deepspeed_build --nvme   # also what offload to NVMe takes, some minutes

DeepSpeed's communication on a CPU takes an extension in C++ (deepspeed/comm/torch.py, ``build_shm_op``).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from memcalc import extensions
from memcalc.errors import RunError

__all__ = ["build", "show_ninja", "watched"]

LOOK = 3.0
"""Seconds between looks at the locks; two in a row without a holder end the wait."""


def build(*, nvme: bool = False) -> None:
    """Build what runs on the CPU take, and with ``nvme`` what offload to it does. Raises RunError where that cannot be."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    show_ninja()
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError as error:
        raise RunError(f"deepspeed cannot be imported ({error}); pip install deepspeed") from None

    with watched():
        ShareMemCommBuilder().load(verbose=False)
    if nvme:
        from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

        with watched(extensions.SWAP_OPS):
            AsyncIOBuilder().load(verbose=False)


def show_ninja() -> None:
    """torch asks the PATH for ninja even where nothing is left to build; the package's stands beside this Python, which may
    have been called without its folder on the PATH."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@contextlib.contextmanager
def watched(ops: tuple[str, ...] = extensions.DEEPSPEED_OPS) -> Iterator[None]:
    """Ends a wait for a build whose builder is gone, which torch itself would wait for without an end. Raises RunError."""
    found: list[Path] = []
    over = threading.Event()

    def look() -> None:
        before: set[Path] = set()
        while not over.wait(LOOK):
            now = set(extensions.blocking(ops=ops))
            if both := now & before:
                found.extend(sorted(both))
                _thread.interrupt_main()
                return
            before = now

    thread = threading.Thread(target=look, name="builds", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if not found:
            raise
        raise RunError(f"the build of an extension of DeepSpeed's was killed: {extensions.cure(found)}") from None
    finally:
        over.set()


if __name__ == "__main__":
    try:
        build(nvme="--nvme" in sys.argv[1:])
    except RunError as error:
        sys.exit(f"memcalc: {error}")
