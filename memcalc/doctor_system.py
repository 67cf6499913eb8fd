"""The part of ``memcalc doctor`` that needs no torch: processes' limits, shared memory, ports, compiler, disk, settings."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from memcalc import extensions
from memcalc.allocator_options import AllocatorOptions
from memcalc.doctor_facts import MISSING, OK, WARNING, Finding
from memcalc.errors import InputError
from memcalc.units import format_both

__all__ = [
    "PORT",
    "compiler",
    "disk",
    "host",
    "left_locks",
    "libraries",
    "limits",
    "port",
    "python",
    "settings",
    "shared_memory",
    "soft_limit",
]

# NCCL's troubleshooting page ("Docker"): a container's default of 64 MB is too little; it recommends --shm-size=1g.
_SHARED = 2**30
# Each tensor on its way from a DataLoader's worker holds a descriptor (docs of torch.multiprocessing, "file_descriptor").
_FILES = 4096
_PROCESSES = 4096  # a rank starts dozens of threads: OpenMP, autograd, NCCL, gloo, DataLoader workers
_DISK = 10 * 10**9  # less than one checkpoint of a model with a billion parameters and Adam: 12 GB
PORT = 29500  # torchrun's default, torch/distributed/elastic/rendezvous


def limits(root: Path, gpus: bool, get: Callable[[str], int | None]) -> Iterator[Finding]:
    """``ulimit``; ``get`` gives a soft limit by name, None where there is no end."""
    files = get("NOFILE")
    low = files is not None and files < _FILES
    yield Finding(
        what="open files (ulimit -n)",
        status=WARNING if low else OK,
        found=_limit(files),
        cure="DataLoader workers run out of descriptors: ulimit -n 65536" if low else "",
    )
    processes = get("NPROC")
    low = processes is not None and processes < _PROCESSES
    yield Finding(
        what="processes (ulimit -u)",
        status=WARNING if low else OK,
        found=_limit(processes),
        cure="threads count as well: ulimit -u 65536" if low else "",
    )
    locked = get("MEMLOCK")
    fabric = (root / "sys/class/infiniband").is_dir()
    low = locked is not None and (fabric or gpus)
    yield Finding(
        what="locked memory (ulimit -l)",
        status=WARNING if low else OK,
        found=_limit(locked, of_bytes=True),
        cure="NCCL pins memory for the network: ulimit -l unlimited, in a container --ulimit memlock=-1" if low else "",
    )


def soft_limit(name: str) -> int | None:
    """A soft limit of this process; None where there is none, or no such thing."""
    try:
        import resource  # not on Windows

        value = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        return None if value == resource.RLIM_INFINITY else value
    except (ImportError, AttributeError, OSError, ValueError):
        return None


def _limit(value: int | None, of_bytes: bool = False) -> str:
    return "unlimited" if value is None else format_both(value) if of_bytes else f"{value:,}"


def shared_memory(root: Path) -> Finding:
    """/dev/shm, through which DataLoader workers hand over batches and NCCL talks within a machine."""
    path = root / "dev/shm"
    try:
        size = shutil.disk_usage(path).total
    except OSError:
        return Finding(what="shared memory (/dev/shm)", status=OK, found="there is none on this system")
    low = size < _SHARED
    cure = "too small for DataLoader workers and NCCL; in a container: --shm-size=1g or --ipc=host"
    return Finding(
        what="shared memory (/dev/shm)",
        status=WARNING if low else OK,
        found=format_both(size),
        cure=cure if low else "",
    )


def port(number: int = PORT) -> Finding:
    """Whether ranks could meet at torchrun's default port."""
    try:
        with socket.socket() as server:
            server.bind(("", number))
    except OSError as error:
        said = (error.strerror or "cannot be bound").lower()
        cure = "another run may hold it: give torchrun --master-port, or --rdzv-endpoint with another port"
        return Finding(what=f"port {number}", status=WARNING, found=said, cure=cure)
    return Finding(what=f"port {number}", status=OK, found="free")


def host(name: Callable[[], str] = socket.gethostname, resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    """Whether this machine finds its own name: gloo listens at that address (torch/csrc/distributed/c10d/GlooDeviceFactory.cpp)."""
    own = name()
    try:
        return Finding(what="host name", status=OK, found=f"{own} is {resolve(own)}")
    except OSError:
        cure = "gloo listens at that address: add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding(what="host name", status=WARNING, found=f"{own} has no address", cure=cure)


def compiler(environ: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> Iterator[Finding]:
    """What compiles DeepSpeed's operations, and torch.compile's on the CPU, when they are first used."""
    needs = MISSING if _installed("deepspeed") else WARNING
    wanted = environ.get("CXX", "").split()[:1] or ["g++", "c++", "clang++"]
    found = next(filter(None, map(which, wanted)), None)
    cure = "DeepSpeed and torch.compile build programs: apt install g++"
    yield Finding(what="C++ compiler", status=OK if found else needs, found=found or "none", cure="" if found else cure)
    ninja = which("ninja") or ("the Python package" if _installed("ninja") else None)
    cure = "DeepSpeed builds with it: pip install ninja"
    yield Finding(what="ninja", status=OK if ninja else needs, found=ninja or "none", cure="" if ninja else cure)


def nvme_library(environ: Mapping[str, str], asks: Callable[[], bool] = extensions.has_libaio) -> Iterator[Finding]:
    """What offload to NVMe is built with; only where DeepSpeed is, which offloads there."""
    if not _installed("deepspeed"):
        return
    if extensions.built("async_io", environ):
        yield Finding(what="libaio", status=OK, found="DeepSpeed's async_io is built")
    elif asks():
        yield Finding(what="libaio", status=OK, found="there, to build DeepSpeed's async_io with")
    else:
        cure = f"only for offload to NVMe: {extensions.LIBAIO}"
        yield Finding(what="libaio", status=WARNING, found="none", cure=cure)


def left_locks(environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """Locks of builds that were killed; only where there are any."""
    if locks := extensions.stale(environ, root):
        names = ", ".join(lock.parent.name for lock in locks)
        said = f"{len(locks)} left by builds that were killed: {names}"
        cure = f"runs that use them wait for ever: {extensions.cure(locks)}"
        yield Finding(what="locks of extensions", status=WARNING, found=said, cure=cure)


def libraries(names: tuple[str, ...] = ("deepspeed", "accelerate", "transformers", "safetensors", "pyyaml")) -> Finding:
    """What is installed of the packages some plans take."""
    there = [f"{name} {found}" for name in names if (found := _installed(name))]
    lacking = [name for name in names if not _installed(name)]
    said = ", ".join(there) or "none"
    cure = f"for plans that take them: pip install {' '.join(lacking)}" if lacking else ""
    return Finding(what="optional packages", status=OK, found=said, cure=cure)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def disk(folder: Path) -> Finding:
    """Room for a checkpoint where runs would be written."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding(what="disk", status=WARNING, found=f"{folder} cannot be asked", cure="give launch another --out")
    low = free < _DISK
    cure = "a checkpoint takes 12 bytes a parameter with Adam in float32: give launch an --out elsewhere"
    return Finding(
        what="disk", status=WARNING if low else OK, found=f"{format_both(free)} free here", cure=cure if low else ""
    )


def settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that change a run unseen; only those that are set."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if text := environ.get(name):
            try:
                AllocatorOptions.parse(text)
                yield Finding(what=name, status=OK, found=text)
            except InputError as error:
                yield Finding(what=name, status=WARNING, found=text, cure=str(error))
    if environ.get("CUDA_VISIBLE_DEVICES") == "":
        cure = "it hides all GPUs: unset CUDA_VISIBLE_DEVICES"
        yield Finding(what="CUDA_VISIBLE_DEVICES", status=WARNING, found="empty", cure=cure)
    for name, found in sorted(environ.items()):
        if re.fullmatch(r"NCCL_(P2P|SHM|IB)_DISABLE", name) and found not in ("", "0"):
            cure = f"ranks then talk through a slower path: unset {name} if there is no reason for it"
            yield Finding(what=name, status=WARNING, found=found, cure=cure)


def python() -> str:
    """This interpreter's version."""
    return ".".join(map(str, sys.version_info[:3]))
