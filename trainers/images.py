"""Images and their labels as arrays, from numpy files or folders of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import FileError, InputError, shorten

__all__ = ["holds_images", "read_images"]

_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")


def holds_images(data: Path) -> bool:
    """A numpy file, a folder with images.npy, or one with folders of pictures."""
    if not data.is_dir():
        return data.suffix == ".npy"
    return (data / "images.npy").exists() or any(
        path.suffix.lower() in (".npy", *_PICTURES)
        for folder in data.iterdir()
        if folder.is_dir()
        for path in folder.iterdir()
    )


def read_images(data: Path) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Images and labels, one of each a sample. Raises InputError without labels, FileError for what cannot be read."""
    if not data.is_dir():
        raise InputError(
            f"{data} has no labels; give a folder with images.npy and labels.npy, or with one folder per class"
        )
    if (data / "images.npy").exists():
        return _load_array(data / "images.npy"), _load_array(data / "labels.npy")
    return _class_folders(data)


def _load_array(path: Path) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{path} is not a numpy array: {shorten(str(error).splitlines()[0], 100)}") from None
    if not array.ndim or not np.issubdtype(array.dtype, np.number):
        raise FileError(f"{path} is not an array of numbers with a first dimension")
    return array


def _class_folders(data: Path) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    folders = sorted(path for path in data.iterdir() if path.is_dir() and not path.name.startswith("."))
    images: list[NDArray[np.generic]] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        for path in sorted(folder.iterdir()):
            if path.suffix == ".npy":
                images.append(_load_array(path))
            elif path.suffix.lower() in _PICTURES:
                images.append(_picture(path))
            else:
                continue
            labels.append(label)
            if images[-1].shape != images[0].shape:
                raise InputError(
                    f"{path} is {list(images[-1].shape)}, others are {list(images[0].shape)}; all images need one size"
                )
    return np.stack(images), np.array(labels, dtype=np.int64)


def _picture(path: Path) -> NDArray[np.generic]:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"{path} needs the package pillow to be read; install it, or store the images as .npy"
        ) from None
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} is not a picture: {shorten(str(error), 100)}") from None
