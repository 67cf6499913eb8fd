"""One rank of a run: its process group, its device, its log, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc import extensions
from memcalc.errors import FileError, InputError, MemcalcError, RunError, shorten
from memcalc.files import write_text

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Process", "Rank", "Signals", "join", "log_to_file", "report"]

_TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for a rank that does not come; torch's own default is 10 or 30 minutes."""


_LEAVE_SECONDS = 25.0
"""How long a rank that was told to stop may take to save what it did; torchrun kills it after 30 s (the default of
close() in torch/distributed/elastic/multiprocessing/api.py)."""


_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""What torchrun tells each process, and what holds where it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Where this process stands in the run, as torchrun tells it; alone when it was not started by torchrun."""

    rank: int
    local: int
    world: int

    @classmethod
    def from_environment(cls) -> Rank:
        """Read torchrun's variables. Raises InputError."""
        said = {name: os.environ.get(name, default) for name, default in _VARIABLES.items()}
        for name, value in said.items():
            if not re.fullmatch(r"[0-9]{1,7}", value):
                raise InputError(
                    f"{name}={shorten(value)} in the environment is not a whole number, as torchrun sets it"
                )
        rank, local, world = map(int, said.values())
        if rank >= world:
            raise InputError(f"RANK={rank} in the environment must be below WORLD_SIZE={world}")
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
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=_store(),
            rank=place.rank,
            world_size=place.world,
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


def _store() -> Store:
    """Where ranks tell each other their addresses: torchrun's store, or for a rank alone one of its own.

    Ranks that torchrun started again find the addresses of those that died in the same store, unless the names differ
    (torch 2.13 takes the store to be a new one, torch/distributed/rendezvous.py, but torchrun shares its own).
    """
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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


class Signals:
    """Waits for SIGTERM and SIGINT in a thread of its own.

    Python runs signal handlers only between bytecodes, and a rank that waits in a collective for a dead peer executes
    none. Files are written by rename, so ending at once leaves none half-written.
    """

    def __init__(self) -> None:
        self.saves = False
        """Whether there are steps that ending at once would lose; the loop says so."""
        self.told = False
        self._numbers = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def _wait(self) -> None:
        number = signal.sigwait(self._numbers)
        if number == signal.SIGTERM and self.saves:
            self.told = True
            print(
                f"told to stop by SIGTERM; saves a checkpoint within {_LEAVE_SECONDS:g} s", file=sys.stderr, flush=True
            )
            again = signal.sigtimedwait(self._numbers, _LEAVE_SECONDS)
            number = signal.SIGTERM if again is None else signal.Signals(again.si_signo)
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        extensions.let_go()  # in the middle of a build torch would leave a lock that all later runs wait for
        os._exit(128 + number)


def report(error: BaseException, *, out: Path, rank: int, moment: str) -> str:
    """Log the traceback, leave ``OUT/errors/rank-R.json`` for launch, and return the one line for the user."""
    traceback.print_exception(error)
    sys.stderr.flush()
    oom = _is_oom(error)
    message = str(error).strip().split("\n")[0] or type(error).__name__
    said: dict[str, object] = {"rank": rank, "moment": moment, "kind": "oom" if oom else "error", "message": message}
    if oom and (allocated := _allocated()):
        said["allocated"] = allocated
    path = out / "errors" / f"rank-{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(said) + "\n")
    except (OSError, MemcalcError):
        traceback.print_exc()  # a full disk: the log says what happened
    if isinstance(error, MemcalcError):
        return f"error: {message}"
    return f"error: rank {rank} failed in {moment}: {message}; see {out / 'logs' / f'rank-{rank}.log'}"


def _allocated() -> int:
    """The most this rank held on its GPU, in bytes; 0 on the CPU, which keeps no count."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def _is_oom(error: BaseException) -> bool:
    import torch

    # The CPU allocator raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)
