"""The final weights in one file that any tool reads, written tensor by tensor so that no host holds them all.

The format is that of https://github.com/huggingface/safetensors (README, "Format"): eight bytes with the length of a
JSON header, the header, then every tensor's bytes one after the other. The library's own writer wants all tensors
of a model in memory at once, which for a sharded model is what sharding is there to avoid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from memcalc.errors import FileError

__all__ = ["header", "save_weights"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8  # the header is padded with spaces so that tensors start at a multiple of it


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """The length and the JSON that stand before the tensors; shapes are of whole tensors, whatever a rank holds.

    >>> header({"w": torch.zeros(2, 3)})[8:].decode().rstrip()
    '{"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}'
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def save_weights(path: Path, tensors: Mapping[str, Tensor], whole: Callable[[str], Tensor], *, first: bool) -> None:
    """Gather the tensors one by one, together with all ranks, and let the first rank write them. Raises FileError.

    The file appears whole or not at all. Of ``tensors`` shape and dtype count; ``whole`` gives their values by name.
    """
    if not first:
        for name in tensors:
            whole(name)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    failed: OSError | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(header(tensors))
            for name, tensor in tensors.items():
                file.write(_bytes(whole(name).to(tensor.dtype)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        failed = error
    if failed is not None:
        temporary.unlink(missing_ok=True)
        raise FileError(f"weights {path} cannot be written: {(failed.strerror or str(failed)).lower()}") from failed


def _bytes(tensor: Tensor) -> bytes:
    """The elements in order; numpy knows no bfloat16, so they go by as bytes."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
