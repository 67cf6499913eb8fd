"""CUDA streams beside the computation's own: which tensors are made on them, and which frees wait for them.

A block is used again on the stream it was allocated for only, so each stream has pools of its own. A tensor that
another stream still reads (``record_stream``) is free for the program at once, and for the allocator when that
stream has come past it; the CPU runs ahead of the GPU, so it is counted as free as late as the program allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from memcalc.plan import Plan

__all__ = ["STREAMS", "WAITING", "delayed", "stream_of"]

# Stream by the ending of a tensor's name, which memcalc/parallel gives it; 0 is the computation's own.
# FSDP 2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py): foreach_all_gather casts shards and makes the flat
# buffer on the copy-in stream, foreach_reduce makes the sharded gradients on the reduce-scatter stream. The full
# parameters and the reduce-scatter's input are made on the stream of the computation.
# FSDP 1 (torch/distributed/fsdp/_runtime_utils.py): _unshard casts shards on the pre-unshard stream and gathers on the
# unshard stream; _post_backward_hook casts gradients and makes their shards on the post-backward stream.
STREAMS = {
    "2": {" cast shard": 1, " gather": 1, " shards gradient": 2},
    "1": {" cast shard": 1, " gather": 3, " gradient to reduce": 2, " shards gradient": 2},
}

# Under FSDP 1 frees wait for another stream: that of a gathered unit for the computation (_free_unsharded_flat_param),
# that of a cast shard for the gather (_free_low_precision_sharded_param), that of a unit's whole gradient for its
# reduction (_post_backward_hook). FSDP 2 waits for events of its own instead.
WAITING = (" cast shard", " gather", " flat gradient")
# _limiter_utils.py: before a gather the CPU waits for the last free but one, so that at most two are under way.
UNDER_WAY = 2


def stream_of(plan: Plan, names: Sequence[str]) -> dict[int, int]:
    """The stream of each tensor that is not on the computation's own.

    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1, strategy="fsdp-full-shard", ranks=8)
    >>> stream_of(plan, ["h.0 gather", "h.0.attn.c_attn.weight gathered", "h.0 shards gradient"])
    {0: 1, 2: 2}
    """
    endings = STREAMS[_version(plan)] if plan.strategy_row.gathers else {}
    known = tuple(endings)
    return {
        ident: next(stream for ending, stream in endings.items() if name.endswith(ending))
        for ident, name in enumerate(names)
        if name.endswith(known)
    }


def delayed(plan: Plan, names: Sequence[str], events: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Events ``(ident, bytes)`` of forward and backward, with frees that wait moved to where the allocator learns of them.

    Where the program lets go of them, and allocated bytes fall, a free of 0 bytes stands.
    What still waits is free at the end: before the optimizer's step the computation waits for all gradients
    (``_post_backward_final_callback``).
    """
    if not (plan.strategy_row.gathers and _version(plan) == "1"):
        return list(events)
    found: list[tuple[int, int]] = []
    waiting: dict[str, deque[tuple[int, int]]] = {ending: deque() for ending in WAITING}
    for event in events:
        ident, size = event
        ending = next((ending for ending in WAITING if names[ident].endswith(ending)), None)
        if ending is None:
            found.append(event)
        elif size < 0:
            waiting[ending].append(event)
            found.append((ident, 0))
        else:
            if len(waiting[ending]) >= UNDER_WAY:
                found.append(waiting[ending].popleft())
            found.append(event)
    found.extend(free for queue in waiting.values() for free in queue)
    return found


def _version(plan: Plan) -> str:
    """Which FSDP; NO_SHARD's wrapper, FSDP 1 too, gathers nothing."""
    return plan.fsdp.version
