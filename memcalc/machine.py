"""What this machine has: GPUs, CPU cores and RAM that this process may use. Never imports torch itself."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.hardware import GPUS

__all__ = ["FoundGpu", "Machine", "detect", "visible"]

# NVML's total holds what the driver keeps for itself. Over all cards of the catalog that is at most 2.95 % (T4 with
# ECC: 15360 MiB by NVML, 14.56 GiB by torch, modal-client#2797), so 3 % is taken off where NVML does not tell it.
_DRIVER_SHARE = 0.03
_TORCH_SECONDS = 60.0
_TORCH_SCRIPT = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    found.append([properties.name, properties.total_memory, torch.cuda.mem_get_info(index)[0]])
print(json.dumps(found))
"""
# Without one of these there is no GPU, and torch need not be started to say so: NVIDIA, Jetson, WSL, AMD.
_DEVICE_NODES = ("nvidia[0-9]*", "nvmap", "dxg", "kfd")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundGpu:
    """One GPU of this machine."""

    name: str
    """Its name in the catalog, or what the driver calls it when it is not there."""
    usable_bytes: int
    """What torch could take if nobody else used the card."""
    free_bytes: int
    """What nobody uses right now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this process may use."""

    gpus: tuple[FoundGpu, ...]
    cores: int
    ram_bytes: int
    """RAM, or the limit of this process's control group where that is less; 0 when nobody says."""


def detect(
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    nvml: Any = None,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> Machine:
    """Look at this machine. Raises nothing: a part that cannot be asked counts as not there.

    GPUs come from NVML (``nvidia-ml-py``) where it is installed and its answer is clear, else from torch in a
    process of its own. The parameters are the places it looks at, so that a test can hand in others.
    """
    found = _by_nvml(nvml or _import_nvml(), environ)
    if found is None:
        found = _by_torch(environ, root, run)
    return Machine(gpus=tuple(found), cores=_cores(), ram_bytes=_ram(root))


def _gpu(name: str, usable: int, free: int) -> FoundGpu:
    known = GPUS[name].name if name in GPUS else name
    return FoundGpu(name=known, usable_bytes=usable, free_bytes=min(free, usable))


def _import_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _by_nvml(nvml: Any, environ: Mapping[str, str]) -> list[FoundGpu] | None:
    """GPUs as the driver knows them; None when it cannot be asked or CUDA may see something else."""
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        # CUDA numbers cards by speed unless told otherwise, and shows slices (MIG) instead of the card.
        if len(set(names)) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        if any(_sliced(nvml, handle) for handle in handles):
            return None
        shown = visible(environ.get("CUDA_VISIBLE_DEVICES"), [_text(nvml.nvmlDeviceGetUUID(h)) for h in handles])
        return [_gpu(names[index], *_memory(nvml, handles[index], names[index])) for index in shown]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    # Releases of the binding before 11.515 answer in bytes.
    return value.decode() if isinstance(value, bytes) else value


def _sliced(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # cards without that mode answer "not supported"


def _memory(nvml: Any, handle: Any, name: str) -> tuple[int, int]:
    """(bytes torch may use, bytes free)."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.free)
    except (AttributeError, TypeError, nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        known = GPUS[name].usable_bytes if name in GPUS else int(memory.total * (1 - _DRIVER_SHARE))
        return known, int(memory.free)


def visible(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """The cards CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: numbers or starts of UUIDs, up to the first wrong one.

    >>> visible(None, ["GPU-a", "GPU-b"]), visible("1,0", ["GPU-a", "GPU-b"]), visible("GPU-b", ["GPU-a", "GPU-b"])
    ([0, 1], [1, 0], [1])
    >>> visible("", ["GPU-a"]), visible("0,7,0", ["GPU-a"])
    ([], [0])
    """
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.isascii() and word.isdigit():
            matches = [int(word)] if len(word) < 6 and int(word) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if word and uuid.lower().startswith(word.lower())]
        if len(matches) != 1:
            break
        if matches[0] in shown:
            return []
        shown += matches
    return shown


def _by_torch(environ: Mapping[str, str], root: Path, run: Callable[..., Any]) -> list[FoundGpu]:
    """GPUs as torch sees them, asked in a process of its own so that a broken torch cannot hurt this one."""
    nodes = any(any((root / "dev").glob(pattern)) for pattern in _DEVICE_NODES)
    if (sys.platform == "linux" and not nodes) or importlib.util.find_spec("torch") is None:
        return []
    command = [sys.executable, "-c", _TORCH_SCRIPT]
    try:
        answer = run(command, capture_output=True, text=True, timeout=_TORCH_SECONDS, env=dict(environ), check=False)
        found = json.loads(answer.stdout.strip().splitlines()[-1]) if answer.returncode == 0 else []
        return [_gpu(str(name), int(total), int(free)) for name, total, free in found]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return []


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram(root: Path) -> int:
    total = _meminfo(root / "proc/meminfo") or _sysconf()
    return min([total, *_group_limits(root)]) if total else min(_group_limits(root), default=0)


def _meminfo(path: Path) -> int:
    """MemTotal in bytes; the file says kB and means KiB (proc(5))."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemTotal:" and words[1].isdigit():
            return int(words[1]) * 1024
    return 0


def _sysconf() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _group_limits(root: Path) -> list[int]:
    """Memory limits of this process's control group and all above it, version 1 and 2 (cgroups(7))."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # Inside a container the path may be the host's; its mount then starts at the group itself.
        for depth in range(len(parts) + 1):
            text = _read(top.joinpath(*parts[:depth], name)).strip()
            if text.isdigit():
                limits.append(int(text))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
