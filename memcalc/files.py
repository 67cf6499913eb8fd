"""Reading files a user points at, and writing files whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, shorten

__all__ = ["read_json", "read_text", "write_text"]

_LIMIT = 64 * 2**20  # a plan, a config or a result is far smaller; a slip of the path should not fill the RAM


def read_text(path: Path) -> str:
    """The text of a file. Raises FileError with the cause in one line."""
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no file" if not path.exists() else "not a regular file"
            raise FileError(f"{path} is {kind}" if kind != "no file" else f"{path} does not exist")
        if path.stat().st_size > _LIMIT:
            raise FileError(f"{path} is larger than {_LIMIT >> 20} MiB, too large for a file of this kind")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {_cause(error)}") from None


def read_json(source: Path | str, name: str) -> Any:
    """Parsed JSON from a path, or from text. Raises FileError; ``NaN`` and duplicate surprises included."""
    text = read_text(source) if isinstance(source, Path) else source
    if not text.strip():
        raise FileError(f"{name} is empty; expected JSON")
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is not valid JSON: {_cause(error)}") from None


def write_text(path: Path, text: str) -> None:
    """Write through a temporary neighbour and a rename, so that readers see the old file or the new one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {_cause(error)}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number JSON knows")


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return shorten(str(error).split("\n")[0], 100).strip("'\"") or type(error).__name__
