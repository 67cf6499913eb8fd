"""Stacks of real training on the CPU: is what ``memcalc snapshot`` tells from them what the tensors are?

torch records no snapshot without a GPU, but its stacks are the same: each tensor that an operation makes is noted
down with the frames that CapturedTraceback gathers, which is what the CUDA allocator calls (torch/csrc/cuda/Module.cpp).
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._traceback import CapturedTraceback
from torch.utils.checkpoint import checkpoint

from memcalc.allocator_blocks import Block
from memcalc.snapshot import load_snapshot
from memcalc.snapshot_fields import Frame
from memcalc.snapshot_origin import origin
from memcalc.snapshot_summary import at_peak
from memcalc.snapshot_timeline import recorded
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from tests.snapshots import Recorder, written

WIDTH, ROWS, LAYERS = 64, 512, 3


def stack() -> list[tuple[str, int, str]]:
    frames = reversed(CapturedTraceback.extract(skip=2).summary())
    return [(f.filename, f.lineno or 0, f.name) for f in frames if not f.filename.endswith("_python_dispatch.py")]


class Watch(TorchDispatchMode):
    """Puts the storages that operations make into an allocator that records."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.live: dict[int, Block] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in {*old, *self.live} and storage.nbytes():
                self.live[storage._cdata] = self.recorder.use(storage.nbytes(), frames=stack())
                weakref.finalize(storage, self.drop, storage._cdata)
        return out

    def drop(self, key: int) -> None:
        self.recorder.drop(self.live.pop(key), stack())


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            part = lambda y, layer=layer: layer(y).tanh()  # noqa: E731
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return x


def timeline(folder: Path, checkpointed: bool) -> Timeline:
    torch.manual_seed(0)
    with Watch() as watch:
        model = Net(checkpointed)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x, y = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        snapshot = watch.recorder.snapshot()
    history = recorded(load_snapshot(written(folder, snapshot)))
    assert history.missed == history.before == 0 and history.stacks
    assert sum(group.bytes for group in at_peak(history)) == history.timeline.peak().bytes
    return history.timeline


WEIGHTS, ACTIVATION = 4 * WIDTH * WIDTH * LAYERS, 4 * WIDTH * ROWS


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_stacks_tell_what_tensors_are(tmp_path: Path, checkpointed: bool) -> None:
    found = timeline(tmp_path, checkpointed)

    def most(category: str, moment: str) -> int:
        return found.at_moment(moment, category)

    assert most("parameters", "backward") == WEIGHTS
    assert most("optimizer", "backward") in range(2 * WEIGHTS, 2 * WEIGHTS + 512 * LAYERS + 1), "states and counters"
    assert most("gradients", "step") == WEIGHTS
    assert most("gradients", "forward") == 0, "zero_grad lets go of them"
    if checkpointed:
        assert most("activations", "forward") < (LAYERS + 2) * ACTIVATION
        assert most("activations", "backward") >= (LAYERS + 1) * ACTIVATION, "computed again"
    else:
        assert most("activations", "forward") in range(LAYERS * ACTIVATION, (LAYERS + 2) * ACTIVATION + 1)
    assert {MOMENTS[m] for m in found.moment} >= {"init", "forward", "loss", "backward", "step"}
    assert int(found.category.max()) <= len(CATEGORIES)


class Stacks(TorchDispatchMode):
    """The C++ frames below each operation, by its name: what a snapshot has of autograd's own thread on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Frame, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frames = reversed(CapturedTraceback.extract(cpp=True).summary())
        self.found[str(func)] = tuple(Frame(f.filename, 0, f.name) for f in frames if not f.filename.endswith(".py"))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(sys.platform != "linux", reason="torch unwinds C++ stacks on Linux")
def test_frames_of_the_engine_alone_tell_backward() -> None:
    layer = nn.Linear(8, 8)
    with Stacks() as stacks:
        layer(torch.ones(4, 8)).sum().backward()
    assert origin(stacks.found["aten.mm.default"])[:3] == ("backward", "gradients", "temporary")
    assert origin(stacks.found["aten.addmm.default"]).moment is None, "forward has no frame of the engine"
