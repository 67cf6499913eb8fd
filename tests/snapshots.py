"""Snapshots as torch writes them, from an allocator that notes down what it does: the keys and order of
THCPModule_memorySnapshot in torch/csrc/cuda/Module.cpp and of record_trace in c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from memcalc.allocator import Allocator
from memcalc.allocator_blocks import Block
from memcalc.allocator_options import AllocatorOptions
from memcalc.cli.app import app
from memcalc.snapshot import load_snapshot
from memcalc.snapshot_summary import Summary, summarise
from memcalc.snapshot_timeline import recorded

MIB = 2**20
Frames = Sequence[tuple[str, int, str]]

USER = ("/home/me/train.py", 12, "main")
TORCH = "/usr/lib/python3/site-packages/torch"
# Innermost first; each but the first two as recorded with torch 2.13.
STACKS: dict[str, Frames] = {
    "init": [(f"{TORCH}/nn/modules/module.py", 1370, "convert"), (f"{TORCH}/nn/modules/module.py", 930, "_apply"), USER],
    "batch": [("/home/me/train.py", 20, "batches"), USER],
    "forward": [(f"{TORCH}/nn/modules/linear.py", 134, "forward"), (f"{TORCH}/nn/modules/module.py", 1790, "_call_impl"),
                ("/home/me/model.py", 31, "forward"), (f"{TORCH}/nn/modules/module.py", 1790, "_call_impl"), USER],
    "loss": [(f"{TORCH}/nn/functional.py", 3500, "cross_entropy"), USER],
    "backward": [(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward"), (f"{TORCH}/autograd/__init__.py", 360, "backward"),
                 (f"{TORCH}/_tensor.py", 630, "backward"), USER],
    "states": [(f"{TORCH}/optim/adam.py", 169, "_init_group"), (f"{TORCH}/optim/adam.py", 237, "step"),
               (f"{TORCH}/optim/optimizer.py", 520, "wrapper"), USER],
    "update": [(f"{TORCH}/optim/adam.py", 560, "_multi_tensor_adam"), (f"{TORCH}/optim/adam.py", 237, "step"), USER],
    "zero": [(f"{TORCH}/optim/optimizer.py", 1000, "zero_grad"), USER],
}  # fmt: skip


class Recorder(Allocator):
    """Segments go down in address, unless they are expandable."""

    def __init__(self, options: str = "", capacity: int | None = None) -> None:
        # Expandable segments take addresses for 9/8 of the card, which must stay within 64 bits.
        super().__init__(AllocatorOptions.parse(options), capacity or 2**40)
        self.text, self.below = options, 2**40
        self.most = 0
        """``max_memory_allocated``."""
        self.trace: list[dict[str, Any]] = []
        self.used_blocks: dict[int, tuple[Block, int, Frames]] = {}
        self.ranges: dict[int, tuple[int, int, bool]] = {}
        """Of each segment, by address: size, stream, and whether it is small."""
        self.frames: dict[tuple[str, int, str], dict[str, Any]] = {}

    def note(self, action: str, address: int, size: int, stream: int = 0, frames: Frames = ()) -> None:
        entry: dict[str, Any] = {"frames": self.stack(frames)} if frames else {}
        self.trace.append({**entry, "action": action, "addr": address, "size": size, "stream": stream, "time_us": 0})

    def stack(self, frames: Frames) -> list[dict[str, Any]]:
        """Equal frames are one object, as py_symbolize makes them."""
        return [self.frames.setdefault(f, {"name": f[2], "filename": f[0], "line": f[1]}) for f in map(tuple, frames)]

    def _take(self, size: int, stream: int) -> Block | None:
        if not self.options.expandable_segments:
            self.below -= self.segment_size(size)
            self.next_address = self.below
        block = super()._take(size, stream)
        if block is not None and not self.options.expandable_segments:
            self.note("segment_alloc", block.address, block.size, stream)
            self.ranges[block.address] = (block.size, stream, block.small)
        return block

    def _map(self, block: Block, size: int, pool: Any) -> bool:
        before, address = self.reserved, block.address
        done = super()._map(block, size, pool)
        if done:
            self.note("segment_map", address, self.reserved - before, block.stream)
            self.ranges[address] = (self.reserved - before, block.stream, block.small)
        return done

    def _release(self, block: Block, pool: Any) -> None:
        super()._release(block, pool)
        self.note("segment_free", block.address, block.size, block.stream)
        del self.ranges[block.address]

    def use(self, size: int, stream: int = 0, frames: Frames = ()) -> Block:
        block = self.allocate(size, stream)
        assert block is not None
        self.most = max(self.most, self.allocated)
        self.used_blocks[block.address] = (block, size, frames)
        self.note("alloc", block.address, size, stream, frames)
        return block

    def drop(self, block: Block, frames: Frames = ()) -> None:
        _, size, _ = self.used_blocks.pop(block.address)
        self.note("free_requested", block.address, size, block.stream, frames)
        self.note("free_completed", block.address, size, block.stream, frames)
        self.free(block)

    def snapshot(self) -> dict[str, Any]:
        return {
            "segments": [self._segment(*found) for found in self._stretches()],
            "device_traces": [self.trace],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.text},
            "external_annotations": [],
        }

    def _stretches(self) -> list[tuple[int, int, int, bool]]:
        """Address, size, stream and pool of each segment; what is mapped side by side is one (``snapshot``)."""
        found: list[tuple[int, int, int, bool]] = []
        for address, (size, stream, small) in sorted(self.ranges.items()):
            last = found[-1] if found and self.options.expandable_segments else (-1, 0, 0, False)
            if last[0] + last[1] == address and last[2:] == (stream, small):
                found[-1] = (last[0], last[1] + size, stream, small)
            else:
                found.append((address, size, stream, small))
        return found

    def _segment(self, address: int, size: int, stream: int, small: bool) -> dict[str, Any]:
        blocks, at, end = [], address, address + size
        used = {a: held for a, held in self.used_blocks.items() if address <= a < end}
        for start in [*sorted(used), end]:
            if start > at:
                blocks.append(
                    {"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []}
                )
            if start < end:
                block, asked, frames = used[start]
                blocks.append({"address": start, "size": block.size, "requested_size": asked,
                               "state": "active_allocated", "frames": self.stack(frames)})  # fmt: skip
                at = start + block.size
        held = sum(b["size"] for b in blocks if b["state"] != "inactive")
        return {
            "device": 0, "address": address, "total_size": size, "allocated_size": held, "active_size": held,
            "requested_size": sum(b["requested_size"] for b in blocks), "stream": stream,
            "segment_type": "small" if small else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.options.expandable_segments, "frames": [], "blocks": blocks,
        }  # fmt: skip


def written(folder: Path, snapshot: object, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(snapshot))
    return path


def trained(steps: int = 2, stacks: bool = True) -> Recorder:
    """A model of 20 MiB trained by Adam: 20 of gradients, 40 of states, 30 of activations, 6 of scratch in backward."""
    recorder = Recorder()

    def use(size: int, stack: str) -> Block:
        return recorder.use(size, frames=STACKS[stack] if stacks else ())

    def drop(block: Block, stack: str) -> None:
        recorder.drop(block, STACKS[stack] if stacks else ())

    weights = use(20 * MIB, "init")
    states: list[Block] = []
    gradient: Block | None = None
    for _ in range(steps):
        batch = use(MIB, "batch")
        if gradient is not None:
            drop(gradient, "zero")
        kept = [use(15 * MIB, "forward") for _ in range(2)]
        logits = use(4 * MIB, "loss")
        scratch = use(6 * MIB, "backward")
        gradient = use(20 * MIB, "backward")
        drop(scratch, "backward")
        for block in (*kept, logits):
            drop(block, "backward")
        states = states or [use(20 * MIB, "states") for _ in range(2)]
        update = use(12 * MIB, "update")
        drop(update, "update")
        drop(batch, "batch")
    assert weights.used
    return recorder


def read(folder: Path, snapshot: object, device: int | None = None) -> Summary:
    """What is found in a file of the snapshot."""
    found = load_snapshot(written(folder, snapshot), device)
    return summarise(found, recorded(found))


def invoke(*words: object) -> Any:
    """``memcalc snapshot WORDS``."""
    return CliRunner().invoke(app, ["snapshot", *map(str, words)])
