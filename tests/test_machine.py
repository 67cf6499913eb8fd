"""Looking at a machine, with stand-ins for the driver, torch and the files of /proc and /sys."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.hardware import GPUS
from memcalc.machine import FoundGpu, Machine, detect, visible

MIB, GIB = 2**20, 2**30
pytorch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


class FakeNvml:
    """The part of pynvml that is used, over cards given as (name, total, reserved, free)."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, cards: list[tuple[str, int, int, int]], *, second: bool = True, sliced: bool = False) -> None:
        self.cards, self.second, self.sliced, self.open = cards, second, sliced, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.cards[handle][0].encode()

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}0"

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if not self.sliced:
            raise self.NVMLError("not supported")
        return 1, 1

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 1) -> Any:
        if version == 2 and not self.second:
            raise self.NVMLError("not supported")
        _, total, reserved, free = self.cards[handle]
        return SimpleNamespace(total=total, free=free, **({"reserved": reserved} if version == 2 else {}))


A100 = ("NVIDIA A100-SXM4-40GB", 40960 * MIB, 634 * MIB, 40000 * MIB)
T4 = ("Tesla T4", 15360 * MIB, 450 * MIB, 14000 * MIB)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("torch was asked")


def test_nvml_gives_catalog_names_and_what_the_driver_leaves(tmp_path: Path) -> None:
    nvml = FakeNvml([A100, A100])
    machine = detect(environ={}, root=tmp_path, nvml=nvml, run=refuse)
    assert machine.gpus == (FoundGpu(name="a100-40gb", usable_bytes=40326 * MIB, free_bytes=40000 * MIB),) * 2
    assert nvml.open == 0


def test_an_old_driver_leaves_the_catalog_to_say_it(tmp_path: Path) -> None:
    unknown = ("NVIDIA Z1", 10_000 * MIB, 0, 9_999 * MIB)
    for card, usable in ((A100, GPUS["a100-40gb"].usable_bytes), (unknown, 9_700 * MIB)):
        found = detect(environ={}, root=tmp_path, nvml=FakeNvml([card], second=False), run=refuse).gpus[0]
        assert found.usable_bytes == usable
        assert found.free_bytes <= usable
    assert found.name == "NVIDIA Z1"


def test_cuda_visible_devices_is_honoured(tmp_path: Path) -> None:
    cards = [(f"NVIDIA Z{i}", (i + 1) * GIB, 0, GIB) for i in range(3)]
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,GPU-a"}
    machine = detect(environ=environ, root=tmp_path, nvml=FakeNvml(cards), run=refuse)
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA Z2", "NVIDIA Z0"]
    environ["CUDA_VISIBLE_DEVICES"] = ""
    assert detect(environ=environ, root=tmp_path, nvml=FakeNvml(cards), run=refuse).gpus == ()


@given(st.none() | st.text(alphabet="0123456789,-GPUabx ²٣", max_size=20), st.integers(0, 4))
def test_visible_never_invents_or_repeats_a_card(setting: str | None, count: int) -> None:
    shown = visible(setting, [f"GPU-{letter}" for letter in "abcd"[:count]])
    assert len(set(shown)) == len(shown)
    assert set(shown) <= set(range(count))


@pytorch
@pytest.mark.parametrize("nvml", [FakeNvml([A100, T4]), FakeNvml([A100], sliced=True)], ids=["mixed", "sliced"])
def test_torch_is_asked_where_nvml_cannot_know_what_cuda_shows(tmp_path: Path, nvml: FakeNvml) -> None:
    assert detect(
        environ={}, root=with_gpu(tmp_path), nvml=nvml, run=answer([["Tesla T4", 9 * GIB, 8 * GIB]])
    ).gpus == (FoundGpu(name="t4", usable_bytes=9 * GIB, free_bytes=8 * GIB),)


def with_gpu(root: Path) -> Path:
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    return root


def answer(found: Any, code: int = 0) -> Any:
    text = found if isinstance(found, str) else json.dumps(found)
    return lambda *args, **kwargs: subprocess.CompletedProcess(args, code, f"a warning of torch\n{text}\n", "")


class Gone(FakeNvml):
    def nvmlInit(self) -> None:
        raise self.NVMLError("library not found")


@pytorch
@pytest.mark.parametrize("reply", [answer("Segmentation fault", 139), answer("[[1]]"), answer("nonsense"), answer("")])
def test_a_broken_torch_means_no_gpu(tmp_path: Path, reply: Any) -> None:
    assert detect(environ={}, root=with_gpu(tmp_path), nvml=Gone([]), run=reply).gpus == ()


def test_a_torch_that_hangs_or_cannot_start_means_no_gpu(tmp_path: Path) -> None:
    def hang(*args: Any, timeout: float, **kwargs: Any) -> Any:
        raise subprocess.TimeoutExpired(args, timeout)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError

    root = with_gpu(tmp_path)
    for run in (hang, fail):
        assert detect(environ={}, root=root, nvml=Gone([]), run=run).gpus == ()


@pytest.mark.skipif(sys.platform != "linux", reason="device nodes are Linux")
def test_without_a_device_node_torch_is_not_started(tmp_path: Path) -> None:
    assert detect(environ={}, root=tmp_path, nvml=Gone([]), run=refuse).gpus == ()


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def ram(root: Path) -> int:
    return detect(environ={}, root=root, nvml=Gone([]), run=refuse).ram_bytes


MEMINFO = "MemTotal:       24684100 kB\nMemFree:        1 kB\n"


def test_ram_is_that_of_the_machine_without_limits(tmp_path: Path) -> None:
    assert ram(files(tmp_path, proc__meminfo=MEMINFO)) == 24684100 * 1024


def test_limits_of_groups_above_count_in_version_2(tmp_path: Path) -> None:
    files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a/b\n")
    for path, limit in (("sys/fs/cgroup/a/b/memory.max", "max\n"), ("sys/fs/cgroup/a/memory.max", "4294967296\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(limit)
    assert ram(tmp_path) == 4 * GIB


def test_version_1_reads_its_own_mount_even_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu:/x\n4:memory:/docker/123\n0::/\n")
    path = tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    path.parent.mkdir(parents=True)
    path.write_text(str(2 * GIB))
    assert ram(tmp_path) == 2 * GIB
    path.write_text("9223372036854771712\n")  # how version 1 says "none"
    assert ram(tmp_path) == 24684100 * 1024


@pytest.mark.skipif(not hasattr(__import__("os"), "sysconf"), reason="POSIX")
@pytest.mark.parametrize("text", ["", "MemTotal:\n", "MemTotal: many kB\n"])
def test_an_unreadable_meminfo_falls_back_to_sysconf(tmp_path: Path, text: str) -> None:
    assert ram(files(tmp_path, proc__meminfo=text)) > 0


def test_this_machine_has_cores_and_ram_and_torch_stays_out() -> None:
    code = "import sys; from memcalc.machine import detect; m = detect(); print(m.cores > 0 < m.ram_bytes, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    assert isinstance(detect(), Machine)
