"""Reading a checkpoint of torch.distributed.checkpoint without letting its files run code.

torch keeps the list of tensors, ``.metadata``, as a pickle and unpickles it whole; entries that are no tensors, such as a
step that an optimizer counts in an int, are unpickled, too (torch/distributed/checkpoint/filesystem.py
``read_metadata``, default_planner.py ``load_bytes``). Of the list few classes are asked for, and no other is made here;
the rest is read as torch reads weights alone.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from memcalc.checkpoints import INDEX
from memcalc.errors import FileError, shorten

__all__ = ["Planner", "Reader"]

_METADATA = "torch.distributed.checkpoint.metadata"
_MADE = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
                                     "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
"""What the list of a checkpoint of tensors is made of; pathlib's classes have moved in Python 3.13."""


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder, whose list of tensors makes nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's list of which tensor is where. Raises FileError for anything else."""
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
        except OSError as error:
            raise FileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except Exception as error:  # what a torn pickle ends in is not one kind
            raise FileError(f"{path} is no list of tensors: {shorten(str(error), 100)}") from None
        if not isinstance(index, Metadata):
            raise FileError(f"{path} is no list of tensors")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MADE or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise FileError(f"it asks for {module}.{name}")


class Planner(DefaultLoadPlanner):
    """torch's planner, for which what is no tensor is still read as weights are."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a number or text where it belongs. Raises pickle.UnpicklingError for anything that would run code."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
