"""What a process holds on the card outside of torch's allocator: the CUDA context and NCCL's communicators.

Nothing here is in ``max_memory_reserved``; nvidia-smi shows it. All of it is known as ranges only.
"""

from __future__ import annotations

from memcalc.coefficients import own_calibration
from memcalc.hardware import GPUS, Bounds, Gpu
from memcalc.plan import Plan
from memcalc.reserved import Range

__all__ = ["communicators", "context", "device_range", "outside"]

# Before torch 1.13 all kernels were loaded with the first: CUDA_MODULE_LOADING is LAZY from then on (pytorch pull
# request 86509). The least and most seen before: pytorch#49877, a 2080 Ti with CUDA 10.1 and a 3090 with CUDA 11.1,
# less the 156 MiB of the tensor there.
LAZY_SINCE = (1, 13)
_EAGER = Bounds(880 * 2**20, 1490 * 2**20)


def communicators(plan: Plan) -> dict[str, int]:
    """Process groups of one rank with more than one member, and how many are in each.

    Each makes one NCCL communicator at its first collective (ProcessGroupNCCL.cpp, initNCCLComm); two groups
    share none, because torch sets no ``splitShare`` (pytorch#129865).

    Megatron and DeepSpeed have a barrier of all ranks, take norms over tensor and pipeline ranks together, and sum the
    gradients of a tied head over first and last stage (megatron/core/parallel_state.py and distributed/
    finalize_model_grads.py; deepspeed/runtime/pipe/engine.py, module.py and topology.py).

    >>> from memcalc.models import MODELS
    >>> communicators(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1, ranks=8, strategy="ddp"))
    {'data': 8}
    """
    layout = plan.layout
    groups = {
        "data": plan.ranks // layout.model_parallel,
        "tensor": layout.tensor,
        "context": layout.context,
        "pipeline": layout.pipeline,
        "expert": layout.expert,
    }
    engine = plan.strategy_row.engine
    if layout.model_parallel > 1 and engine in ("megatron", "deepspeed"):
        groups |= {"model": layout.tensor * layout.pipeline, "world": plan.ranks}
        if layout.pipeline > 1 and plan.model.tied:
            groups["tied head"] = 2
        if engine == "deepspeed":  # a second group of the same ranks, for what its pipeline engine partitions
            groups["slice"] = layout.tensor if layout.pipeline > 1 else 1
    return {name: size for name, size in groups.items() if size > 1}


def context(plan: Plan, gpu: Gpu) -> Bounds:
    """Bytes of the CUDA context on one card: what memcalc calibrate measured where that card is this machine's."""
    own = own_calibration()
    if own is not None and own.context and own.is_of("cuda", gpu.name):
        return Bounds(own.context, own.context)
    if plan.torch_version < LAZY_SINCE and gpu.capability is not None:
        return _EAGER
    return gpu.context


def outside(plan: Plan, gpu: Gpu | None, stated: Bounds | None = None) -> Range:
    """Bytes on the card that are not torch's; ``stated`` is a context that somebody measured.

    Without a card the widest bounds of the catalog stand. The point is the middle of the bounds.

    >>> from memcalc.models import MODELS
    >>> found = outside(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1), GPUS["a100-80gb"])
    >>> found.low // 2**20, found.point // 2**20, found.high // 2**20
    (256, 468, 680)
    """
    if plan.device == "cpu":
        return Range(low=0, point=0, high=0)
    cards, count = [gpu] if gpu else list(GPUS.values()), len(communicators(plan))
    contexts = [stated or context(plan, card) for card in cards]
    low = min(each.low + count * card.nccl.low for each, card in zip(contexts, cards, strict=True))
    high = max(each.high + count * card.nccl.high for each, card in zip(contexts, cards, strict=True))
    return Range(low=low, point=(low + high) // 2, high=high)


def device_range(plan: Plan, reserved: Range, gpu: Gpu | None) -> Range:
    """What nvidia-smi shows when this run is alone on the card."""
    rest = outside(plan, gpu)
    return Range(low=reserved.low + rest.low, point=reserved.point + rest.point, high=reserved.high + rest.high)
