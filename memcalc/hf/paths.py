"""Which words mean a config.json, and which file that is."""

from __future__ import annotations

from pathlib import Path

from memcalc.errors import FileError, shorten

__all__ = ["config_file", "config_path", "model_name"]


def config_path(text: str) -> Path | None:
    """The path that a word means: one that exists, or is written like one. None for a name.

    >>> config_path("gpt2") is None, config_path("models/gpt2")
    (True, PosixPath('models/gpt2'))
    """
    path = Path(text)
    written = "/" in text or "\\" in text or text.endswith(".json") or text in (".", "..")
    return path if written or path.is_file() or (path / "config.json").is_file() else None


def config_file(path: Path) -> Path:
    """The config.json that a path means, itself or in the folder. Raises FileError."""
    try:
        if path.is_symlink() and not path.exists():
            raise FileError(f"{path} is a link that leads nowhere, or in a circle")
        if not path.is_dir():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a circle of links, before Python 3.13
        raise FileError(f"{shorten(str(path))} cannot be read: {error}") from None
    raise FileError(f"{path} is a folder without a config.json")


def model_name(path: Path) -> str:
    """The folder of a config.json, or the file's own name."""
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return " ".join(name.split())[:60]
