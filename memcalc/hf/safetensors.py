"""Files of weights by what they say of themselves: the header of a .safetensors file, and the index of several.

A file begins with the length of its header in 8 bytes, little endian, and the header: JSON that gives each tensor's
dtype, shape and place (github.com/huggingface/safetensors, README, "Format"). Nothing after the header is ever read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, shorten
from memcalc.files import read_json

__all__ = ["DTYPE_BITS", "Stored", "read_header"]

HEADER_LIMIT = 64 * 2**20
"""Past this a length is a slip or an attack: a header has about 100 bytes a tensor. The format's own limit is 100 MB."""
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""safetensors/src/tensor.rs, Dtype::bitsize."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bits(self) -> int:
        return self.numel * DTYPE_BITS[self.dtype]

    @property
    def is_float(self) -> bool:
        """What a parameter can be; whole numbers are buffers, or weights that were packed."""
        return self.dtype.startswith(("F", "BF", "C"))


def read_header(path: Path) -> list[Stored]:
    """Every tensor of a .safetensors file. Raises FileError for what is cut off, overlaps or was made up."""
    header, rest = _header(path)
    found = read_json(header, str(path))
    if not isinstance(found, dict):
        raise FileError(f"{path}: its header is not an object with a name for each tensor, but {shorten(found)}")
    found.pop("__metadata__", None)
    tensors, end = [], 0
    for name, entry in sorted(found.items(), key=lambda item: _begin(item[1])):
        tensors.append(_tensor(name, entry, path))
        begin, stop = entry["data_offsets"]
        if begin != end or (stop - begin) * 8 != -(-tensors[-1].bits // 8) * 8:
            raise FileError(
                f"{path}: tensor {shorten(name)} of {tensors[-1].dtype} {list(tensors[-1].shape)} does not fill bytes {begin} "
                f"to {stop}, or they do not follow the tensor before"
            )
        end = stop
    if end != rest:
        raise FileError(
            f"{path}: its tensors take {end:,} bytes, but {rest:,} follow the header; the file is cut off or damaged"
        )
    return tensors


def _header(path: Path) -> tuple[str, int]:
    """The header, and how many bytes follow it."""
    try:
        if not path.is_file():
            raise FileError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise FileError(
                    f"{path} is no safetensors file, or cut off: it has {size:,} bytes, and its header would have {length:,}"
                )
            return file.read(length).decode(), size - 8 - length
    except (OSError, ValueError) as error:
        cause = "its header is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
        raise FileError(f"{path} cannot be read: {shorten(cause, 100)}") from None


def _begin(entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets[0] if isinstance(offsets, list) and offsets and type(offsets[0]) is int else -1


def _tensor(name: str, entry: Any, path: Path) -> Stored:
    where = f"{path}: tensor {shorten(name)}"
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FileError(f"{where} is {shorten(entry)}, which has not all of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FileError(f"{where} has dtype {shorten(dtype)}; known are {', '.join(DTYPE_BITS)}")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
            raise FileError(f"{where} has {what} {shorten(values)}, which is not a list of whole numbers from 0 on")
    if len(offsets) != 2:
        raise FileError(f"{where} has data_offsets {shorten(offsets)}, which are not a beginning and an end")
    return Stored(name, tuple(shape), dtype)
