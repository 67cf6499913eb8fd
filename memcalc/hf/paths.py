"""Which words mean a config.json or a file of weights, and which file that is."""

from __future__ import annotations

from pathlib import Path

from memcalc.errors import FileError, shorten

__all__ = ["FILES", "config_file", "config_path", "model_name"]

FILES = ("config.json", "model.safetensors.index.json", "model.safetensors")
"""What tells most stands first."""


def config_path(text: str) -> Path | None:
    """The path that a word means: one that exists, or is written like one. None for a name.

    >>> config_path("gpt2") is None, config_path("models/gpt2")
    (True, PosixPath('models/gpt2'))
    """
    path = Path(text)
    written = "/" in text or "\\" in text or text.endswith((".json", ".safetensors")) or text in (".", "..")
    try:
        there = path.is_file() or any((path / name).is_file() for name in FILES)
    except (OSError, ValueError):  # too long for a path, or in a folder that may not be read
        there = False
    return path if written or there else None


def config_file(path: Path) -> Path:
    """The file that a path means: itself, or in the folder a config.json or else its weights. Raises FileError."""
    try:
        if path.is_symlink() and not path.exists():
            raise FileError(f"{path} is a link that leads nowhere, or in a circle")
        if not path.is_dir():
            if not path.exists() and path.suffix != ".json":
                raise FileError(
                    f"{path} does not exist; give the path of a config.json or of a folder that has one: nothing is downloaded"
                )
            return path
        for name in FILES:
            if (path / name).is_file():
                return path / name
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a circle of links, before Python 3.13
        cause = error.strerror.lower() if isinstance(error, OSError) and error.strerror else shorten(str(error))
        raise FileError(f"{shorten(str(path))} cannot be read: {cause}") from None
    raise FileError(f"{path} is a folder without a config.json")


def model_name(path: Path) -> str:
    """The folder of a file that is named as all are, or the file's own name."""
    name = path.resolve().parent.name if path.name in FILES else path.stem
    return " ".join(name.split())[:60]
