"""Images and their labels, from numpy files or folders of pictures; what is in them is read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import FileError, InputError, shorten

__all__ = ["Images", "find_images", "holds_images"]

_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images of one shape and the class of each, in the order of their files."""

    shape: tuple[int, ...]
    """Of one image."""
    labels: NDArray[np.generic]
    count: int
    read: Callable[[], NDArray[np.generic]]
    """All of them, one in each row; raises FileError for what is damaged."""


def holds_images(data: Path) -> bool:
    """A numpy file, a folder with images.npy, or one with folders of pictures. Raises FileError."""
    if not data.is_dir():
        return data.suffix == ".npy"
    if (data / "images.npy").exists():
        return True
    return any(_is_image(path) for folder in _inside(data) if folder.is_dir() for path in _inside(folder))


def find_images(data: Path, looked_at: int = 0) -> Images:
    """Images and labels of a folder, whose sizes are read from the files' headers.

    Pictures are decoded at once until their files are ``looked_at`` bytes together, to find those that are damaged.
    Raises InputError without labels, FileError for what cannot be read.
    """
    if not data.is_dir():
        raise InputError(
            f"{data} has no labels; give a folder with images.npy and labels.npy, or with one folder per class"
        )
    if not (data / "images.npy").exists():
        return _class_folders(data, looked_at)
    images, labels = _load_array(data / "images.npy"), _load_array(data / "labels.npy")
    return Images(shape=images.shape[1:], labels=labels, count=len(images), read=lambda: images)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in (".npy", *_PICTURES) and not path.name.startswith(".") and path.is_file()


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _load_array(path: Path) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{path} is not a numpy array: {shorten(str(error).splitlines()[0], 100)}") from None
    if not isinstance(array, np.ndarray) or not array.ndim or not np.issubdtype(array.dtype, np.number):
        raise FileError(f"{path} is not an array of numbers with a first dimension")
    return array


def _class_folders(data: Path, looked_at: int) -> Images:
    found: list[tuple[Path, int]] = []
    for label, folder in enumerate(path for path in _inside(data) if path.is_dir() and path.name[0] != "."):
        found += [(path, label) for path in _inside(folder) if _is_image(path)]
    files, size = [path for path, _ in found], 0
    shape: tuple[int, ...] = ()
    for path in files:
        size += path.stat().st_size
        own = _read(path).shape if size <= looked_at else _shape(path)
        shape = shape or own
        if own != shape:
            raise InputError(f"{path} is {_sides(own)}, and {files[0]} is {_sides(shape)}; all images need one size")
    labels = np.array([label for _, label in found], dtype=np.int64)
    return Images(shape=shape, labels=labels, count=len(files), read=lambda: np.stack([_read(path) for path in files]))


def _sides(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _shape(path: Path) -> tuple[int, ...]:
    """Of an image, from the header of its file."""
    if path.suffix == ".npy":
        return _load_array(path).shape
    with _opened(path) as image:
        return image.height, image.width, 3


def _read(path: Path) -> NDArray[np.generic]:
    if path.suffix == ".npy":
        return _load_array(path)
    with _opened(path) as image:
        return np.asarray(image.convert("RGB"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A picture whose header is read; what cannot be read of it, then or later, is a FileError."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"{path} needs the package pillow to be read; install it, or store the images as .npy"
        ) from None
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise FileError(f"{path} is not a picture: {shorten(str(error), 100)}") from None
