"""One rank of a run: its process group, its device, its log, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.errors import FileError, MemcalcError, RunError
from memcalc.files import write_text

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Process", "Rank", "exit_on_signals", "join", "log_to_file", "report"]

_TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for a rank that does not come; torch's own default is 10 or 30 minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Where this process stands in the run, as torchrun tells it; alone when it was not started by torchrun."""

    rank: int
    local: int
    world: int

    @classmethod
    def from_environment(cls) -> Rank:
        """Read torchrun's variables."""
        rank, local, world = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
        return cls(rank=rank, local=local, world=world)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank that has joined its process group."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        """The rank that writes what is written once."""
        return self.rank == 0


@contextlib.contextmanager
def join(place: Rank, device_type: str, seed: int) -> Iterator[Process]:
    """Join the process group, NCCL on CUDA and gloo on CPU, and leave it at the end. Raises RunError."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if device_type == "cuda":
        if place.local >= torch.cuda.device_count():
            raise RunError(f"rank {place.rank} needs GPU {place.local}; this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(place.local)
    device = torch.device(f"cuda:{place.local}" if device_type == "cuda" else device_type)
    # Gradients close to zero become denormal numbers, which some CPUs multiply a hundred times slower.
    torch.set_flush_denormal(True)
    random.seed(seed)
    torch.manual_seed(seed)
    own = not dist.is_initialized()
    if own:
        store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=place.rank if store else -1,
            world_size=place.world if store else -1,
            timeout=_TIMEOUT,
            device_id=device if device_type == "cuda" else None,
        )
    try:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        yield Process(rank=dist.get_rank(), world=dist.get_world_size(), device=device, mesh=mesh)
    finally:
        # After an error the others may be gone, and taking leave of them politely could hang: the process ends anyway.
        if own and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def log_to_file(path: Path) -> int:
    """Send everything this process prints to a file as well as, for lines of ``print``, nowhere else.

    File descriptor 2 is redirected too, so that messages of C++ libraries are kept. Returns a descriptor of
    the terminal's error stream for the one line a user has to see. Raises FileError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    terminal = os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    return terminal


def exit_on_signals() -> None:
    """End at once, with the shell's exit code, on SIGTERM and SIGINT.

    A thread waits for them, because Python runs signal handlers only between bytecodes and a rank that waits
    in a collective for a dead peer executes none. Files are written by rename, so ending at once leaves none half-written.
    """
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)

    def wait() -> None:
        number = signal.sigwait(stops)
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def report(error: BaseException, *, out: Path, rank: int, moment: str) -> str:
    """Log the traceback, leave ``OUT/errors/rank-R.json`` for launch, and return the one line for the user."""
    traceback.print_exception(error)
    sys.stderr.flush()
    oom = _is_oom(error)
    message = str(error).strip().split("\n")[0] or type(error).__name__
    said = {"rank": rank, "moment": moment, "kind": "oom" if oom else "error", "message": message}
    path = out / "errors" / f"rank-{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(said) + "\n")
    except (OSError, MemcalcError):
        traceback.print_exc()  # a full disk: the log says what happened
    if isinstance(error, MemcalcError):
        return f"error: {message}"
    return f"error: rank {rank} failed in {moment}: {message}; see {out / 'logs' / f'rank-{rank}.log'}"


def _is_oom(error: BaseException) -> bool:
    import torch

    # The CPU allocator raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)
