"""``memcalc doctor`` on machines that are made up: each fault is found, and its cure is said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memcalc import doctor, doctor_facts, doctor_system
from memcalc.cli.app import app
from memcalc.doctor_facts import Finding
from memcalc.errors import InputError, RunError
from memcalc.machine import Machine

GIB = 2**30
GOOD: dict[str, Any] = {
    "python": "3.11.7", "torch": "2.6.0+cu124", "cuda": "12.4", "hip": None, "nccl": "2.21.5", "distributed": True,
    "gloo": True, "architectures": ["sm_80", "sm_90"], "error": None,
    "gpus": [{"name": "NVIDIA H100", "capability": [9, 0], "total": 80 * GIB, "free": 79 * GIB + GIB // 2}],
}  # fmt: skip


def torch_says(**changes: Any) -> dict[str, Finding]:
    driver = changes.pop("driver", "550.54.15")
    return {each.what: each for each in doctor.of_torch(GOOD | changes, "", driver)}


def test_a_good_machine_has_nothing_to_cure() -> None:
    found = torch_says()
    assert [each.what for each in found.values()] == ["torch", "CUDA", "driver", "NCCL", "GPU 0"]
    assert all(each.status == "ok" and not each.cure for each in found.values())
    assert found["GPU 0"].found == "NVIDIA H100, 85.362 GB (79.5 GiB) of 85.899 GB (80 GiB) free"


A100 = GOOD["gpus"][0] | {"name": "NVIDIA A100", "capability": [8, 0]}
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"torch": "1.6.0"}, "torch", "missing", "distributed training takes 1.7 or later"),
    ({"torch": "2.5.1"}, "torch", "warning", "memcalc's trainers take 2.6 or later: pip install"),
    ({"torch": "2.10.0"}, "torch", "ok", ""),
    ({"cuda": "10.0"}, "CUDA", "missing", "distributed training takes 10.1 or later"),
    ({"cuda": "11.7"}, "CUDA", "warning", "11.8 or later"),
    ({"cuda": "13.0"}, "driver", "missing", "CUDA 13.0 takes driver 580 or later"),
    ({"driver": "525.60.12"}, "driver", "missing", "525.60.13"),
    ({"driver": "525.60.13"}, "driver", "ok", ""),
    ({"nccl": None}, "NCCL", "missing", "several GPUs need it"),
    ({"gloo": False}, "torch.distributed", "missing", "pytorch.org"),
    ({"error": "RuntimeError: no driver"}, "CUDA", "missing", "nvidia-smi"),
    ({"gpus": []}, "GPUs", "warning", "CUDA_VISIBLE_DEVICES"),
    ({"gpus": [], "driver": None}, "GPUs", "warning", "--device cpu"),
    ({"gpus": [GOOD["gpus"][0] | {"free": 40 * GIB}]}, "GPU 0", "warning", "other programs hold 42.95 GB (40 GiB)"),
    ({"gpus": [A100], "architectures": ["sm_90"]}, "GPU 0", "missing", "no kernels for sm_80"),
    ({"gpus": [A100 | {"capability": [8, 6]}]}, "GPU 0", "ok", ""),
    ({"gpus": [A100 | {"capability": [10, 0]}]}, "GPU 0", "missing", "no kernels for sm_100"),
    ({"gpus": [A100 | {"capability": [12, 0]}], "architectures": ["compute_90"]}, "GPU 0", "ok", ""),
    ({"cuda": None, "gpus": []}, "CUDA", "warning", "install a CUDA build"),
    ({"hip": "6.0", "cuda": None}, "ROCm", "warning", "NVIDIA's"),
]


@pytest.mark.parametrize(("changes", "what", "status", "cure"), CASES, ids=lambda value: str(value)[:40])
def test_what_torch_says(changes: dict[str, Any], what: str, status: str, cure: str) -> None:
    found = torch_says(**changes)[what]
    assert found.status == status and cure in found.cure and bool(found.cure) == (status != "ok")


@pytest.mark.parametrize(
    ("why", "found"),
    [("torch is not installed", "not installed"), ("no answer in 60 seconds", "no answer in 60 seconds")],
)
def test_no_answer_of_torch_is_a_finding(why: str, found: str) -> None:
    (said,) = doctor.of_torch(None, why, None)
    assert (said.what, said.status, said.found) == ("torch", "missing", found)
    assert "pip install 'torch>=2.6'" in said.cure


def limits(root: Path, gpus: bool = False, **soft: int) -> dict[str, Finding]:
    return {each.what.split(" (")[0]: each for each in doctor_system.limits(root, gpus, soft.get)}


def test_limits(tmp_path: Path) -> None:
    assert all(each.status == "ok" and each.found == "unlimited" for each in limits(tmp_path, True).values())
    low = limits(tmp_path, NOFILE=1024, NPROC=1000, MEMLOCK=2**16)
    assert [each.status for each in low.values()] == ["warning", "warning", "ok"]
    assert "ulimit -n 65536" in low["open files"].cure
    assert limits(tmp_path, True, MEMLOCK=2**16)["locked memory"].status == "warning"
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert "ulimit -l unlimited" in limits(tmp_path, MEMLOCK=2**16)["locked memory"].cure


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_system.shared_memory(tmp_path).found == "there is none on this system"
    sizes = {"low": 64 * 2**20, "enough": 2**30}
    for name, size in sizes.items():
        usage = type("usage", (), {"total": size})
        monkeypatch.setattr(doctor_system.shutil, "disk_usage", lambda path, usage=usage: usage)
        found = doctor_system.shared_memory(tmp_path)
        assert (found.status, "--shm-size=1g" in found.cure) == (("warning", True) if name == "low" else ("ok", False))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        number = server.getsockname()[1]
        found = doctor_system.port(number)
    assert (found.status, found.found) == ("warning", "address already in use") and "--master-port" in found.cure
    assert doctor_system.port(0).status == "ok"


def test_the_port_is_the_one_that_ranks_are_told() -> None:
    assert doctor._port({}) == doctor._port({"MASTER_PORT": "x"}) == doctor._port({"MASTER_PORT": "70000"}) == 29500
    assert doctor._port({"MASTER_PORT": "12345"}) == 12345


def test_a_host_that_does_not_know_its_name() -> None:
    def nobody(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    found = doctor_system.host(lambda: "node7", nobody)
    assert (found.status, found.found) == ("warning", "node7 has no address") and "/etc/hosts" in found.cure
    assert doctor_system.host(lambda: "node7", lambda name: "10.0.0.7").found == "node7 is 10.0.0.7"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_system, "_installed", lambda name: "0.19" if name == "deepspeed" else None)
    found = list(doctor_system.compiler({}, lambda name: None))
    assert [each.status for each in found] == ["missing", "missing"], "DeepSpeed is installed and compiles"
    assert "apt install g++" in found[0].cure and "pip install ninja" in found[1].cure
    monkeypatch.setattr(doctor_system, "_installed", lambda name: None)
    assert [each.status for each in doctor_system.compiler({}, lambda name: None)] == ["warning", "warning"]
    there = list(doctor_system.compiler({"CXX": "icpx -O2"}, lambda name: f"/opt/{name}"))
    assert [each.found for each in there] == ["/opt/icpx", "/opt/ninja"]


def test_what_offload_to_nvme_is_built_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    monkeypatch.setattr(doctor_system, "_installed", lambda name: None)
    assert not list(doctor_system.nvme_library(environ, lambda: pytest.fail("asked without DeepSpeed")))
    monkeypatch.setattr(doctor_system, "_installed", lambda name: "0.19")
    (lacks,) = doctor_system.nvme_library(environ, lambda: False)
    assert lacks.status == "warning" and "apt-get install libaio-dev" in lacks.cure
    assert [each.status for each in doctor_system.nvme_library(environ, lambda: True)] == ["ok"]
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    (built,) = doctor_system.nvme_library(environ, lambda: False)
    assert (built.status, built.found) == ("ok", "DeepSpeed's async_io is built")


def test_settings_that_change_a_run_unseen() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0",
               "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    found = {each.what: each for each in doctor_system.settings(environ)}
    assert set(found) == {"PYTORCH_CUDA_ALLOC_CONF", "NCCL_P2P_DISABLE", "CUDA_VISIBLE_DEVICES"}
    assert "did you mean 'expandable_segments'" in found["PYTORCH_CUDA_ALLOC_CONF"].cure
    assert list(doctor_system.settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))[0].status == "ok"


def test_the_driver_is_read_from_its_kernel_module(tmp_path: Path) -> None:
    assert doctor._driver(tmp_path) is None
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12"
    )
    assert doctor._driver(tmp_path) == "535.104.05"


def answers(stdout: str = "", stderr: str = "", code: int = 0) -> Any:
    return lambda *args, **settings: subprocess.CompletedProcess(args, code, stdout, stderr)


def test_torch_is_asked_in_a_process_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "find_spec", lambda name: object())
    assert doctor_facts.ask_torch({}, answers("noise\n" + json.dumps(GOOD)), 1) == (GOOD, "")
    assert doctor_facts.ask_torch({}, answers(stderr="a\nImportError: libcudart", code=1), 1) == (
        None,
        "ImportError: libcudart",
    )
    assert doctor_facts.ask_torch({}, answers(code=-11), 1) == (None, "it ended with status -11")
    assert doctor_facts.ask_torch({}, answers("junk"), 1)[1].startswith("it cannot be asked")

    def hangs(*args: Any, **settings: Any) -> Any:
        raise subprocess.TimeoutExpired("torch", settings["timeout"])

    assert doctor_facts.ask_torch({}, hangs, 60.0) == (None, "no answer in 60 seconds")
    monkeypatch.setattr(doctor_facts, "find_spec", lambda name: None)
    assert doctor_facts.ask_torch({}, hangs, 1) == (None, "torch is not installed")


def test_a_whole_machine_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "find_spec", lambda name: None)
    machine = Machine(gpus=(), cores=4, ram_bytes=16 * GIB)
    found = doctor.examine(environ={}, root=tmp_path, folder=tmp_path, look=lambda: machine, limit=lambda name: None)
    said = {each.what: each for each in found}
    assert said["torch"].status == "missing" and said["Python"].status == "ok"
    assert said["cores and RAM"].found == "4 cores, 17.18 GB (16 GiB)"
    assert {"disk", "C++ compiler", "ninja", "port 29500", "host name", "optional packages"} <= set(said)


def rank(number: int, **changes: Any) -> dict[str, Any]:
    return (
        GOOD
        | {"rank": number, "host": f"node{number // 2}", "driver": "550.1", "gpu": "H100", "settings": {}}
        | changes
    )


def test_ranks_that_agree_and_ranks_that_do_not() -> None:
    same = doctor.agreement([rank(number) for number in range(4)])
    assert all(each.status == "ok" for each in same)
    assert same[0].found == "4 on 2 machines: node0 with 2, node1 with 2"
    odd = [rank(0), rank(1), rank(2, nccl="2.20"), rank(3, nccl="2.20", settings={"NCCL_DEBUG": "INFO"})]
    found = {each.what: each for each in doctor.agreement(odd)}
    assert found["NCCL"].status == "warning"
    assert found["NCCL"].found == "2.21.5 on ranks 0, 1; 2.20 on ranks 2, 3"
    assert found["NCCL and allocator settings"].found == "none set on ranks 0, 1, 2; NCCL_DEBUG=INFO on rank 3"
    assert found["torch"].status == "ok"
    uneven = doctor.agreement([rank(number) for number in range(3)])[0]
    assert uneven.status == "warning" and uneven.found.endswith("node0 with 2, node1 with 1")


def test_the_cluster_is_asked_under_torchrun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "find_spec", lambda name: object())
    with pytest.raises(InputError, match="--cluster is for ranks: torchrun"):
        doctor.cluster(environ={})
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    both = answers(json.dumps([rank(0), rank(1)]))
    assert doctor.cluster(environ=environ, run=both) is None, "only the first rank speaks"
    first = doctor.cluster(environ=environ | {"RANK": "0"}, run=both)
    assert first is not None and first[0].status == "ok"
    with pytest.raises(RunError, match="rank 1 of 2 did not hear from all others: timed out"):
        doctor.cluster(environ=environ, run=answers(stderr="timed out", code=1))


def test_strict_fails_on_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [
        Finding(what="torch", status="missing", found="none", cure="pip"),
        Finding(what="disk", status="warning", found="", cure="x"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: lacking)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    strict = CliRunner().invoke(app, ["doctor", "--strict", "--format", "json"])
    assert strict.exit_code == 1 and "memcalc: missing: torch" in strict.output
    monkeypatch.setattr(doctor, "examine", lambda: lacking[1:])
    assert CliRunner().invoke(app, ["doctor", "--strict"]).exit_code == 0, "a warning is not missing"


def test_this_machine_answers_without_torch(root: Path) -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import importlib.util, memcalc.doctor_facts
memcalc.doctor_facts.find_spec = lambda name: None
sys.argv = ["memcalc", "doctor", "--format", "json"]
import runpy
runpy.run_module("memcalc", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    said = {each["what"]: each for each in json.loads(done.stdout)}
    assert said["torch"]["status"] == "missing" and len(said) > 10
