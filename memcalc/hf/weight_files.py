"""A model known by its files of weights alone: its size, and what they say about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, shorten
from memcalc.files import read_json
from memcalc.hf.safetensors import Stored, read_header
from memcalc.models import Model

__all__ = ["is_index", "of_file", "of_index"]

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_LONGEST_NAME = 255  # bytes, of a file in Linux's file systems (limits.h, NAME_MAX)
_ALONE = (
    "only sizes are known, so neither activations nor how tensors are divided; a config.json beside them tells both"
)


def of_file(path: Path, name: str) -> Model:
    """The size of one .safetensors file, exactly, from its header. Raises FileError."""
    return _of_tensors(read_header(path), name, f"the header of {path.name}")


def is_index(found: Any) -> bool:
    """A JSON file says which tensor stands in which of several files."""
    return isinstance(found, dict) and "weight_map" in found and "model_type" not in found


def of_index(found: Mapping[str, Any], path: Path, name: str) -> Model:
    """The size of several files together: exactly from their headers where all lie beside the index, else from the bytes
    that the index adds up. Raises FileError."""
    names = _files(found, path)
    beside = [path.parent / each for each in names]
    if all(each.is_file() for each in beside):
        tensors = [tensor for each in beside for tensor in read_header(each)]
        listed = Counter(tensor.name for tensor in tensors)
        if listed.keys() != found["weight_map"].keys():
            odd = sorted(listed.keys() ^ found["weight_map"].keys())[0]
            raise FileError(f"{path}: tensor {shorten(odd)} is in the index or in the files beside it, but not in both")
        return _of_tensors(tensors, name, f"the headers of {len(beside)} file{'s' * (len(beside) > 1)}")
    return _of_total(found, path, name, len(names))


def _files(found: Mapping[str, Any], path: Path) -> list[str]:
    where = found["weight_map"]
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise FileError(f"{path}: weight_map is {shorten(where)}, which does not name a file for each tensor")
    names = sorted(set(where.values()))
    for each in names:
        if (
            Path(each).name != each
            or each in ("", ".", "..")
            or "\0" in each
            or len(each.encode("utf-8", "replace")) > _LONGEST_NAME
        ):
            raise FileError(f"{path}: weight_map names {shorten(each)}, which is not a file beside the index")
    return names


def _of_tensors(tensors: Iterable[Stored], name: str, source: str) -> Model:
    tensors = list(tensors)
    floats = [tensor for tensor in tensors if tensor.is_float]
    if not floats:
        raise FileError(f"{name}: {source} has no tensor of floating point, so nothing that could be trained")
    bits = Counter[str]()
    for tensor in floats:
        bits[tensor.dtype] += tensor.numel
    said = ", ".join(f"{count:,} of {dtype}" for dtype, count in bits.most_common())
    notes = [f"parameters are counted from {source}: {said}; what is trained in is --precision"]
    if others := len(tensors) - len(floats):
        are = "tensor of whole numbers is" if others == 1 else "tensors of whole numbers are"
        notes.append(f"{others} {are} not counted: buffers, or weights packed by quantisation")
    return _sized(sum(bits.values()), name, notes)


def _of_total(found: Mapping[str, Any], path: Path, name: str, files: int) -> Model:
    metadata = found.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some tools write it so
        total = int(total)
    if type(total) is not int or not 0 < total < 2**60:
        raise FileError(f"{path}: metadata.total_size is {shorten(total)}, which is not a number of bytes")
    stated = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    if type(stated) is int and 0 < stated <= 2 * total:
        return _sized(
            stated,
            name,
            [
                f"parameters are those that {path.name} states; its {files} file{'s are' if files > 1 else ' is'} not here"
            ],
        )
    dtype = _dtype_beside(path.parent)
    each = _BYTES.get(dtype, 2)
    why = f"at {each} B each, as torch_dtype {dtype} of the config.json beside it says" if dtype else (
        f"at {each} B each, as float16 and bfloat16 have; the index does not say the dtype, and of float32 they would be half"
    )  # fmt: skip
    notes = [
        f"{path.name} adds up to {total:,} B in {files} file{'s' * (files > 1)} that {'are' if files > 1 else 'is'} not here: {total // each:,} parameters {why}"
    ]
    return _sized(total // each, name, notes)


def _dtype_beside(folder: Path) -> str:
    """What a config.json beside the index says its weights are stored in; blank when it says nothing that is known."""
    try:
        config = read_json(folder / "config.json", str(folder / "config.json"))
    except FileError:
        return ""
    said = config.get("dtype", config.get("torch_dtype")) if isinstance(config, dict) else None
    return said if isinstance(said, str) and said in _BYTES else ""


def _sized(parameters: int, name: str, notes: list[str]) -> Model:
    return Model(name=name, family="size", parameters=parameters, notes=(*notes, _ALONE))
