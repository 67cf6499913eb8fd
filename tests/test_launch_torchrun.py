"""Launching under the real torchrun, with trainers that only talk."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memcalc.errors import RunError
from tests.launching import TWO, run

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


TALKERS = {
    "one dies": "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\nprint('waiting', flush=True)\ntime.sleep(120)\n",
    "sum": (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x)\n"
        "if dist.get_rank() == 0: print('sum', int(x), flush=True)\n"
        "dist.destroy_process_group()\n"
    ),
    # One write: unbuffered, print() makes two, and the lines of two ranks on one pipe get mixed.
    "deaf": (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(1, b'waiting\\n')\ntime.sleep(120)\n"
    ),
}


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(name: str) -> None:
        (tmp_path / "path" / "trainers").mkdir(parents=True)
        (tmp_path / "path" / "trainers" / "__init__.py").touch()
        (tmp_path / "path" / "trainers" / "__main__.py").write_text(TALKERS[name])
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        monkeypatch.chdir(tmp_path)

    return use


def processes(mark: str) -> list[str]:
    """Command lines of the living processes that mention ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


def test_a_rank_that_dies_stops_the_others(tmp_path: Path, talker: Callable[[str], None]) -> None:
    talker("one dies")
    started = time.monotonic()
    with pytest.raises(RunError, match="rank 1 ended with exit code 3 and left no message"):
        run(TWO, tmp_path / "run")
    assert time.monotonic() - started < 110  # the other one would sleep 120
    assert processes(str(tmp_path)) == []


def test_two_launches_at_once(tmp_path: Path, talker: Callable[[str], None]) -> None:
    talker("sum")
    TWO.save(tmp_path / "plan.json")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND_LINE, str(tmp_path / name)],
            env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert all("sum 2" in output.splitlines() for output in outputs)


COMMAND_LINE = """
import sys
from pathlib import Path
from memcalc.errors import MemcalcError
from memcalc.launch import launch
from memcalc.training import Training
from memcalc.plan import Plan
try:
    launch(Plan.load(Path("plan.json")), out=Path(sys.argv[1]), training=Training(), grace_seconds=1.0,
           show=lambda line: print(line, flush=True))
except MemcalcError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def started(tmp_path: Path, talker: Callable[[str], None]) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose two ranks are up and do not listen to SIGTERM."""
    talker("deaf")
    TWO.save(tmp_path / "plan.json")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND_LINE, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        waiting = 0
        while waiting < 2:
            line = process.stdout.readline()
            assert line, "the launcher ended before its ranks were up"
            waiting += line == "waiting\n"
        yield process
        process.kill()


def test_ctrl_c_leaves_no_orphan(tmp_path: Path, started: subprocess.Popen[str]) -> None:
    assert len(processes(str(tmp_path))) == 4  # the launcher, torchrun and two ranks
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=110)
    assert out.splitlines()[-1] == (
        "stopped by SIGINT; no process of the run is left; no checkpoint was written; --checkpoint-every N keeps some"
    )
    assert started.returncode == 130
    assert processes(str(tmp_path)) == []
