"""What two models' own code does to scores before and in the softmax: torch's own allocations, one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from memcalc import softmaxes
from memcalc.graph import Tensor as Sized
from memcalc.tape import Tape
from trainers.history import Event
from trainers.meters import _walk

B, S, HEADS = 2, 64, 4
# Neither the scalars of a graph nor the mask of a tensor's few bytes: everything here has tokens x tokens.
LEAST = S * S


@torch.jit.script
def upcast_masked_softmax(x: Tensor, mask: Tensor, fill: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """As in transformers/models/gpt_bigcode/modeling_gpt_bigcode.py."""
    low = x.dtype
    x = x.to(dtype) * scale
    x = torch.where(mask, x, fill)
    return torch.nn.functional.softmax(x, dim=-1).to(low)


def measured(function: Callable[[Tensor], Tensor]) -> list[tuple[int, int]]:
    """Bytes of each allocation, and what is there after it, in a forward and a backward pass."""
    scores = torch.randn(B, S, HEADS, S, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones_like(scores)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        y = function(scores)
        y.backward(gradient)
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events: list[Event] = []
    _walk(profiled.profiler.kineto_results.experimental_event_tree(), (), events, [])
    return allocations([event.bytes for event in sorted(events, key=lambda event: event.time)])


def estimated(function: Callable[[Tape, Sized, str], Sized]) -> list[tuple[int, int]]:
    """The same on the tape."""
    tape = Tape((), weight_dtype="bfloat16", compute_dtype="bfloat16", device="cpu")
    held = tape.allocate("scores", (HEADS, S, S), "bfloat16", "inputs")
    x = tape.leaf(Sized(held, (HEADS, S, S), "bfloat16", None))
    del held
    y = function(tape, x, "attention")
    tape.moment = "backward"
    tape.backward(y, y.shape)
    timeline = tape.skeleton(1).at(B)
    theirs = zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True)
    outside = ("scores", "gradient of the loss")
    return allocations([delta for ident, delta in theirs if timeline.names[ident] not in outside])


def allocations(deltas: list[int]) -> list[tuple[int, int]]:
    large = [delta for delta in deltas if abs(delta) >= LEAST]
    return [(delta, there) for delta, there in zip(large, accumulate(large), strict=True) if delta > 0]


def test_torch_allocates_the_same_for_a_scripted_softmax() -> None:
    mask, fill = torch.ones(B, S, 1, S, dtype=torch.bool).tril(), torch.tensor(-1e30)

    def run(x: Tensor) -> Tensor:
        return upcast_masked_softmax(x, mask, fill, 1.0, torch.float32)

    for _ in range(3):  # TorchScript watches a run forward and one backward before it differentiates anything itself
        measured(run)
    assert measured(run) == estimated(softmaxes.scripted_softmax)


def test_torch_allocates_the_same_for_clamped_scores() -> None:
    """As in transformers/models/opt/modeling_opt.py of 4.48."""
    lowest = torch.tensor(torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    assert measured(lambda x: torch.max(x, lowest)) == estimated(softmaxes.clamped)
