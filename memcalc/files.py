"""Reading files a user points at, and writing files whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, shorten

__all__ = ["check_output", "read_bytes", "read_json", "read_text", "write_bytes", "write_text"]

_LIMIT = 64 * 2**20  # a plan, a config or a result is far smaller; a slip of the path should not fill the RAM


def read_text(path: Path) -> str:
    """The text of a file. Raises FileError with the cause in one line."""
    try:
        # Editors on Windows put a byte order mark first, and two characters at the end of a line.
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except ValueError as error:
        raise FileError(f"{path} cannot be read: {_cause(error)}") from None


def read_bytes(path: Path, limit: int = _LIMIT) -> bytes:
    """All bytes of a regular file of at most ``limit`` bytes. Raises FileError with the cause in one line."""
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no file" if not path.exists() else "not a regular file"
            raise FileError(f"{path} is {kind}" if kind != "no file" else f"{path} does not exist")
        if path.stat().st_size > limit:
            raise FileError(f"{path} is larger than {limit >> 20} MiB, too large for a file of this kind")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {_cause(error)}") from None


def read_json(source: Path | str, name: str) -> Any:
    """Parsed JSON from a path, or from text. Raises FileError, also for NaN, 1e400 and a key that stands twice."""
    text = read_text(source) if isinstance(source, Path) else source
    if not text.strip():
        raise FileError(f"{name} is empty; expected JSON")
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once)
    except RecursionError:
        raise FileError(f"{name} is not valid JSON: it is nested too deeply to be read") from None
    except ValueError as error:
        # Python refuses thousands of digits with advice on how it could be made to read them.
        endless = "integer string conversion" in str(error)
        cause = "a whole number of thousands of digits is too large" if endless else _cause(error)
        raise FileError(f"{name} is not valid JSON: {cause}") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as ``write_bytes`` does. Raises FileError."""
    try:
        data = text.encode()
    except ValueError as error:
        raise FileError(f"{path} cannot be written: {_cause(error)}") from None
    write_bytes(path, data)


def write_bytes(path: Path, data: bytes) -> None:
    """Write through a temporary neighbour and a rename, so that readers see the old file or the new one.

    A link stays one: its target is written. Raises FileError.
    """
    try:
        path = _target(path)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        import tempfile  # takes as long as all of memcalc's own small modules, and an estimate writes nothing

        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: resolve() in a circle of links
        raise FileError(f"{path} cannot be written: {_cause(error)}") from None


def check_output(path: Path) -> None:
    """Raises FileError where ``write_bytes`` would, and leaves nothing there: for commands that work long before they write.

    >>> check_output(Path("no-such-folder/plan.json"))
    Traceback (most recent call last):
    memcalc.errors.FileError: no-such-folder/plan.json cannot be written: there is no folder no-such-folder
    """
    try:
        folder = _target(path).parent
        import tempfile

        with tempfile.TemporaryFile(dir=folder):  # root may write to folders that take no file, such as /proc
            pass
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} cannot be written: {_cause(error)}") from None


def _target(path: Path) -> Path:
    """The file that is written, without links."""
    # A rename would put a file in the place of a device such as /dev/null.
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}; give the name of a file")
    target = path.resolve()
    if not target.parent.exists():
        raise FileError(f"{path} cannot be written: there is no folder {path.parent}")
    return target


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number JSON knows")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(text)} is too large for a number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {shorten(twice)} stands twice")
    return found


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    text = shorten(str(error).split("\n")[0], 100)
    return text[1:].removesuffix(text[0]) or type(error).__name__
