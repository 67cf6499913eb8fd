"""No process outlives its run, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import RunError
from memcalc.supervise import Stopped, started, stop_signals, supervise

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's process table")

# A stand-in for torchrun: a command whose child sits in a session of its own and ignores SIGTERM.
PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
print("up", flush=True)
exec(sys.argv[3])
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"


def run(tmp_path: Path, *arguments: str, grace: float = 1.0, lines: list[str] | None = None) -> int:
    return supervise(
        [sys.executable, *arguments],
        environment=os.environ,
        errors=tmp_path / "errors.log",
        show=(lines if lines is not None else []).append,
        grace_seconds=grace,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def wait_until(condition: object, seconds: float = 90.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(condition())  # type: ignore[operator]


def pids(tmp_path: Path) -> list[int]:
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def test_output_is_shown_line_by_line_and_errors_go_to_the_file(tmp_path: Path) -> None:
    lines: list[str] = []
    code = run(
        tmp_path, "-c", "import sys; print('a'); print('b', end=''); sys.stderr.write('why'); sys.exit(7)", lines=lines
    )
    assert (code, lines) == (7, ["a", "b"])
    assert (tmp_path / "errors.log").read_text() == "why"


def test_long_and_broken_output(tmp_path: Path) -> None:
    lines: list[str] = []
    code = run(tmp_path, "-c", "import os; os.write(1, b'x' * 300_000 + b'\\n' + b'\\xff\\n')", lines=lines)
    assert code == 0
    assert [len(line) for line in lines] == [300_000, 1]


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be started: No such file"):
        supervise(["/no/such/program"], environment={}, errors=tmp_path / "log", show=print)


def test_a_worker_that_outlives_its_command_is_killed(tmp_path: Path) -> None:
    """It also holds the output pipe open, so waiting for the pipe to close would wait for ever."""
    started = time.monotonic()
    code = run(tmp_path, "-c", PARENT, str(tmp_path / "pids"), STUBBORN, "os._exit(3)")
    assert code == 3
    assert time.monotonic() - started < 90  # it would sleep 120
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_failure_while_showing_stops_the_run(tmp_path: Path) -> None:
    def show(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        supervise(
            [sys.executable, "-c", PARENT, str(tmp_path / "pids"), STUBBORN, "time.sleep(120)"],
            environment=os.environ, errors=tmp_path / "log", show=show, grace_seconds=1.0,
        )  # fmt: skip
    assert not any(alive(pid) for pid in pids(tmp_path))


LAUNCHER = """
import os, sys
from pathlib import Path
from memcalc.supervise import Stopped, supervise
folder = Path(sys.argv[1])
try:
    supervise([sys.executable, "-c", *sys.argv[2:]], environment=os.environ, errors=folder / "log",
              show=lambda line: (folder / line).touch(), grace_seconds=float(os.environ["GRACE"]))
except Stopped as stopped:
    print(stopped)
    sys.exit(stopped.exit_code)
"""


def start(tmp_path: Path, body: str, grace: str = "1", said: str = "up") -> subprocess.Popen[str]:
    """A launcher of its own, as a shell would start it, up to where its command has said a line."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), PARENT, str(tmp_path / "pids"), STUBBORN, body],
        env={**os.environ, "GRACE": grace, "PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wait_until((tmp_path / said).exists)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start(tmp_path, "time.sleep(120)")
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 128 + number
    assert out == f"stopped by {number.name}; no process of the run is left\n"
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    launcher = start(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(120)",
        grace="600", said="deaf",
    )  # fmt: skip
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    begun = time.monotonic()
    while launcher.poll() is None and time.monotonic() - begun < 90:
        launcher.send_signal(signal.SIGINT)  # again, since two that come before the launcher runs are one
        time.sleep(0.5)
    assert launcher.poll() is not None
    launcher.communicate(timeout=90)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_when_the_launcher_is_killed_the_command_is_told(tmp_path: Path) -> None:
    """As torchrun does, this command stops its worker on SIGTERM."""
    body = "signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(1))); print('listens', flush=True); time.sleep(120)"
    launcher = start(tmp_path, body, said="listens")
    launcher.kill()
    launcher.communicate()
    assert wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_a_signal_while_a_command_is_being_started_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine, where starting takes a while."""
    begun: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(120)"]
    quiet = subprocess.DEVNULL
    with (
        pytest.raises(Stopped),
        stop_signals(),
        started(command, environment=os.environ, stdout=quiet, stderr=quiet),
    ):
        pytest.fail("it was told to stop before")
    assert begun and not any(map(alive, begun))


def test_signals_work_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run(tmp_path, "-c", "pass")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert Stopped(signal.SIGINT).exit_code == 130
