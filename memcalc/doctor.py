"""``memcalc doctor``: is this machine ready to train, and do the machines of a cluster agree?

Every finding carries its cure. What torch must be asked runs in a process of its own with a time limit, so that a broken
driver or a torch that is not there is a finding and not the end.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memcalc import doctor_system
from memcalc.doctor_facts import DRIVERS, LEAST, MISSING, OK, WARNING, Finding, Run, ask_torch, version
from memcalc.errors import InputError, RunError
from memcalc.machine import Machine, detect
from memcalc.units import format_both

__all__ = ["agreement", "cluster", "examine"]

_SECONDS = 60.0
_IN_USE = 2**30  # of a card that nobody else uses, torch's context in the asking process takes less
_TRAIN = "pip install 'torch>=2.6'"


def examine(
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    folder: Path = Path(),
    run: Run = subprocess.run,
    look: Callable[[], Machine] = lambda: detect(run=_not_again),
    limit: Callable[[str], int | None] = doctor_system.soft_limit,
) -> list[Finding]:
    """All findings of this machine. Raises nothing; the parameters are the places it looks at."""
    facts, why = ask_torch(environ, run, _SECONDS)
    return [
        _versioned("Python", doctor_system.python(), "memcalc and its trainers"),
        *of_torch(facts, why, _driver(root)),
        *_machine(look()),
        doctor_system.shared_memory(root),
        *doctor_system.limits(root, bool(facts and facts["gpus"]), limit),
        doctor_system.port(_port(environ)),
        doctor_system.host(),
        *doctor_system.compiler(environ),
        *doctor_system.nvme_library(environ),
        *doctor_system.left_locks(environ, root),
        doctor_system.libraries(),
        doctor_system.disk(folder),
        *doctor_system.settings(environ),
    ]


def _not_again(*args: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    """In place of the process in which ``detect`` asks torch for GPUs: torch was asked already."""
    raise OSError


def _versioned(name: str, found: str, who: str, cure: str = "") -> Finding:
    least = LEAST[name]
    if version(found) < version(least.distributed):
        said = f"distributed training takes {least.distributed} or later"
        return Finding(what=name, status=MISSING, found=found, cure=f"{said}{cure and f': {cure}'}")
    if version(found) < version(least.trainers):
        said = f"{who} take {least.trainers} or later"
        return Finding(what=name, status=WARNING, found=found, cure=f"{said}{cure and f': {cure}'}")
    return Finding(what=name, status=OK, found=found)


def of_torch(facts: dict[str, Any] | None, why: str, driver: str | None) -> Iterator[Finding]:
    """What torch said, or why it said nothing."""
    if facts is None:
        absent = why == "torch is not installed"
        cure = f"to train: {_TRAIN}" if absent else f"python -c 'import torch' says more; install it again: {_TRAIN}"
        yield Finding(what="torch", status=MISSING, found="not installed" if absent else why, cure=cure)
        if driver:
            yield Finding(what="driver", status=OK, found=driver)
        return
    yield _versioned("torch", facts["torch"], "memcalc's trainers", _TRAIN)
    if not (facts["distributed"] and facts["gloo"]):
        yield Finding(
            what="torch.distributed", status=MISSING, found="this torch was built without it",
            cure="install the build of pytorch.org",
        )  # fmt: skip
    if facts["hip"]:
        yield Finding(
            what="ROCm", status=WARNING, found=facts["hip"], cure="memcalc's cards and allocator are NVIDIA's"
        )
    yield from _cuda(facts, driver)
    for index, gpu in enumerate(facts["gpus"]):
        yield _gpu(index, gpu, facts["architectures"])
    if facts["error"]:
        yield Finding(
            what="CUDA", status=MISSING, found=facts["error"], cure="nvidia-smi says whether the driver works"
        )
    elif not facts["gpus"]:
        cure = f"torch sees none although driver {driver} is loaded: is CUDA_VISIBLE_DEVICES set, or this a CPU build?"
        yield Finding(
            what="GPUs", status=WARNING, found="none", cure=cure if driver else "plans with --device cpu run here"
        )


def _cuda(facts: dict[str, Any], driver: str | None) -> Iterator[Finding]:
    cuda = facts["cuda"]
    if cuda is None:
        if not facts["hip"]:
            cure = "to train on a GPU install a CUDA build of torch (pytorch.org)" if driver else ""
            yield Finding(what="CUDA", status=WARNING if driver else OK, found="a CPU build of torch", cure=cure)
        return
    yield _versioned("CUDA", cuda, "builds of torch 2.6", "install a newer build of torch (pytorch.org)")
    oldest = DRIVERS.get(cuda.split(".")[0])
    if driver and oldest and version(driver) < version(oldest):
        cure = f"CUDA {cuda} takes driver {oldest} or later: update the driver, or install torch for an older CUDA"
        yield Finding(what="driver", status=MISSING, found=driver, cure=cure)
    else:
        yield Finding(what="driver", status=OK, found=driver or "not found")
    if facts["nccl"]:
        yield Finding(what="NCCL", status=OK, found=facts["nccl"])
    else:
        yield Finding(
            what="NCCL",
            status=MISSING,
            found="not in this torch",
            cure="several GPUs need it: use the build of pytorch.org",
        )


def _gpu(index: int, gpu: dict[str, Any], architectures: list[str]) -> Finding:
    name, (major, minor) = gpu["name"], gpu["capability"]
    said = f"{name}, {format_both(gpu['free'])} of {format_both(gpu['total'])} free"
    if architectures and not _runs_on(major, minor, architectures):
        cure = f"this torch has no kernels for sm_{major}{minor} (it has {', '.join(architectures)}): install another build"
        return Finding(what=f"GPU {index}", status=MISSING, found=said, cure=cure)
    taken = gpu["total"] - gpu["free"]
    if taken > _IN_USE:
        cure = f"other programs hold {format_both(taken)} of it; nvidia-smi shows which"
        return Finding(what=f"GPU {index}", status=WARNING, found=said, cure=cure)
    return Finding(what=f"GPU {index}", status=OK, found=said)


def _runs_on(major: int, minor: int, architectures: list[str]) -> bool:
    """Binaries run on later minor versions of their major one; PTX (compute_) on all later ones (CUDA C++ guide, 6.1)."""
    for each in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", each)
        if match:
            built = int(match[2]), int(match[3])
            if built <= (major, minor) and (match[1] == "compute" or built[0] == major):
                return True
    return False


def _driver(root: Path) -> str | None:
    """The loaded NVIDIA driver, as its kernel module says."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    return match[1] if match else None


def _port(environ: Mapping[str, str]) -> int:
    """Where ranks meet: MASTER_PORT, else torchrun's default."""
    said = environ.get("MASTER_PORT", "")
    return int(said) if said.isascii() and said.isdigit() and 0 < int(said) < 2**16 else doctor_system.PORT


def _machine(machine: Machine) -> Iterator[Finding]:
    ram = format_both(machine.ram_bytes) if machine.ram_bytes else "RAM not known"
    yield Finding(what="cores and RAM", status=OK, found=f"{machine.cores} cores, {ram}")


_SAME = {
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "driver": "driver",
    "gpu": "GPU of the rank",
    "settings": "NCCL and allocator settings",
}


def cluster(
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    run: Run = subprocess.run,
    timeout: float = _SECONDS,
) -> list[Finding] | None:
    """Under torchrun: what all ranks see, on the first rank; None on the others. Raises InputError, RunError."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        raise InputError(
            "--cluster is for ranks: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "-m memcalc doctor --cluster"
        )
    told = {**environ, "MEMCALC_DRIVER": _driver(root) or ""}
    found, why = ask_torch(told, run, timeout + _SECONDS, "--cluster", f"{timeout:g}")
    if found is None:
        raise RunError(f"rank {environ['RANK']} of {environ['WORLD_SIZE']} did not hear from all others: {why}")
    return agreement(found) if environ["RANK"] == "0" else None


def agreement(ranks: list[dict[str, Any]]) -> list[Finding]:
    """Which facts all ranks share, and which ranks have another.

    >>> [found.status for found in agreement([{"rank": 0, "host": "a", "torch": "2.6"}, {"rank": 1, "host": "b", "torch": "2.7"}])][:3]
    ['ok', 'ok', 'warning']
    """
    hosts = dict.fromkeys(str(each.get("host")) for each in ranks)
    each_has = {host: sum(str(each.get("host")) == host for each in ranks) for host in hosts}
    said = ", ".join(f"{host} with {count}" for host, count in each_has.items())
    uneven = len(set(each_has.values())) > 1
    found = [
        Finding(
            what="ranks", status=WARNING if uneven else OK, found=f"{len(ranks)} on {len(hosts)} machine{'s' * (len(hosts) > 1)}: {said}",
            cure="sharding within a machine takes as many ranks on each" if uneven else "",
        )
    ]  # fmt: skip
    for key, name in _SAME.items():
        groups: dict[str, list[int]] = {}
        for each in ranks:
            groups.setdefault(_told(each.get(key)), []).append(int(each["rank"]))
        if len(groups) == 1:
            found.append(Finding(what=name, status=OK, found=f"{next(iter(groups))} on all ranks"))
            continue
        differ = "; ".join(f"{value} on {_ranks(members)}" for value, members in groups.items())
        found.append(Finding(what=name, status=WARNING, found=differ, cure=f"give all machines the same {name}"))
    return found


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={found}" for name, found in sorted(value.items())) or "none set"
    return str(value) if value not in (None, "") else "none"


def _ranks(members: list[int]) -> str:
    shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"rank{'s' * (len(members) > 1)} {shown}"
