"""Running one command that has children of its own, so that none of them outlives it.

torchrun starts each worker in a session of its own, out of reach of a signal to torchrun's process group.
So every process of a run carries the run's token in its environment, which children inherit:

- the command ends, or is stopped: whatever still carries the token is killed;
- this process is killed (SIGKILL cannot be handled): the kernel sends the command SIGTERM, and torchrun
  stops its workers on SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from memcalc.errors import RunError

__all__ = ["GRACE_SECONDS", "Stopped", "started", "stop_signals", "supervise"]

GRACE_SECONDS = 32.0
"""How long a run that was told to stop may take to do so before it is killed: more than torchrun gives its ranks, 30 s."""

_TOKEN = "MEMCALC_RUN"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_POLL_SECONDS = 0.1


class Stopped(RunError):
    """The run was stopped by a signal; the exit code is the shell's for that signal."""

    def __init__(self, number: int, advice: str = "") -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        super().__init__(f"stopped by {self.signal.name}; no process of the run is left{advice and '; '}{advice}")


def supervise(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    errors: Path,
    show: Callable[[str], None],
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Run ``command`` to its end, handing each line of its output to ``show``; returns its exit code.

    Its error output goes to the file ``errors``. SIGINT, SIGTERM and SIGHUP stop the run and raise Stopped:
    first SIGTERM (SIGINT stays what it is), then SIGKILL after ``grace_seconds`` or at the next signal. Whether this returns or raises,
    no process of the run is left. Raises RunError when the command cannot be started.
    """
    with (
        errors.open("ab") as log,
        stop_signals(most=2),  # the first stops the run, the second the wait for it
        started(command, environment=environment, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            _follow(process, show)
            return process.wait()
        except BaseException as error:
            hasty = isinstance(error, Stopped) and error.signal is signal.SIGINT
            _ask_to_stop(process, signal.SIGINT if hasty else signal.SIGTERM, grace_seconds)
            raise


@contextlib.contextmanager
def started(
    command: Sequence[str], *, environment: Mapping[str, str], stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` in a session of its own, with nothing to read; at the end it and all it started are killed, in whatever
    session they are. Raises RunError when it cannot be started.
    """
    token, process, came = uuid.uuid4().hex, None, list[int]()
    try:
        with _noted(came):  # a signal that ended this in the middle would leave a process that nobody knows
            process = subprocess.Popen(
                command,
                env={**environment, _TOKEN: token},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        for number in came:
            signal.raise_signal(number)
        yield process
    except OSError as error:
        if process is not None:
            raise
        raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
    finally:
        if process is not None:
            _kill(process, token)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def _noted(came: list[int]) -> Iterator[None]:
    """Within, signals that end a program are put into a list, where Python allows it: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals(most: int = 1) -> Iterator[None]:
    """Turn the signals that end a program into Stopped, ``most`` of them, where Python allows it: in the main thread.

    What comes after changes nothing, so that killing what is left is not cut short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received = 0

    def stop(number: int, frame: object) -> None:
        nonlocal received
        received += 1
        if received <= most:
            raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs first so that it gets SIGTERM when this process is gone; Linux only."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    parent = os.getpid()

    def run() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)

    return run


def _follow(process: subprocess.Popen[bytes], show: Callable[[str], None]) -> None:
    """Show output line by line until the command ends.

    Not until the pipe closes: a worker that survived the command would hold it open for ever.
    """
    assert process.stdout is not None
    pipe, rest, open_ = process.stdout.fileno(), b"", True
    os.set_blocking(pipe, False)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while open_:
            ended = process.poll() is not None
            ready = bool(selector.select(0 if ended else _POLL_SECONDS))
            if ready:
                chunk = os.read(pipe, 1 << 16)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    show(line.decode(errors="replace"))
                open_ = bool(chunk)
            elif ended:
                break
    if rest:
        show(rest.decode(errors="replace"))


def _ask_to_stop(process: subprocess.Popen[bytes], told: signal.Signals, grace_seconds: float) -> None:
    """A signal to the command's group, then wait; a further one ends the wait.

    After SIGTERM the ranks save what they did, after SIGINT they do not.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, told)
    with contextlib.suppress(subprocess.TimeoutExpired, Stopped, KeyboardInterrupt):
        process.wait(grace_seconds)


def _kill(process: subprocess.Popen[bytes], token: str) -> None:
    """SIGKILL for whatever is left, again until nothing is: a process may start one while we look."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := list(_carriers(token))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _carriers(token: str) -> Iterator[int]:
    """Processes whose environment holds the token, from Linux's process table; none where there is no such table."""
    wanted = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
