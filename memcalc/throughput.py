"""How long a training step takes, as far as it is needed to rank plans of one job on one kind of hardware.

    step = max(compute, weight traffic, host) + hooks + exposed communication + optimizer

Seconds are good for the order of plans, not for clocks. Every coefficient stands in
``memcalc/coefficients.py`` with its source; none was fitted to the timing of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from memcalc.coefficients import COEFFICIENTS
from memcalc.hardware import GPUS, Gpu
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.traffic import collectives, units

__all__ = ["Hardware", "StepTime", "hardware_of", "step_time"]


def _value(name: str) -> float:
    return COEFFICIENTS[name].value


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one rank runs on. FLOP/s and bytes/s."""

    name: str
    flops: Mapping[str, float]
    """Dense peak by compute dtype."""
    efficiency: float
    memory_bandwidth: float
    link: float
    """What one rank sends to its neighbour in the ring, one direction, where the ring goes through all machines."""
    inside: float
    """The same within a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on one rank, in parts; ``total`` says how they hide behind each other."""

    compute: float
    """Matrix products of forward and backward."""
    recompute: float
    """Forward run again for checkpointed blocks; not part of ``compute``."""
    traffic: float
    """Weights read twice and gradients written once per micro batch: the floor for small batches."""
    host: float
    """Python starting operations: the floor for tiny models."""
    hooks: float
    """FSDP's work around each unit. A unit waits for its gather and the hook starts it, so it is not hidden."""
    communication: float
    """Everything this rank sends, hidden or not."""
    exposed: float
    """The part of it that nothing hides."""
    optimizer: float
    total: float
    samples: int
    """Samples of the step over all ranks."""

    @property
    def seconds_per_sample(self) -> float:
        return self.total / max(self.samples, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What a model costs, counted from its weights. Products are multiplications of one sample's forward pass."""

    parameters: int
    tensors: int
    multiplied: int
    """Parameters that take part in matrix products."""
    products: float
    """Each of them times the rows it multiplies."""
    blocks: float
    """The part of the products inside blocks."""
    last: float
    """The last product of all blocks, which non-reentrant checkpointing does not run again."""
    layers: int


# The product that ends a block. A block of the MLP ends with a ReLU and one of BERT with a LayerNorm, whose saved
# tensors need it to be run again.
_LAST = {
    "gpt2": ".mlp.c_proj.weight",
    "llama": ".mlp.down_proj.weight",
    "decoder": ".mlp.down_proj.weight",
    "vit": ".mlp.fc2.weight",
}

# Operations a block starts in forward, counted in trainers/models; backward starts about twice as many. A layer of
# a model known by its size is taken for a GPT block. Each expert of a mixture starts six more.
_OPERATIONS = {
    "bert": 16,
    "decoder": 25,
    "gpt2": 14,
    "llama": 25,
    "mlp": 2,
    "moe": 45,
    "resnet": 10,
    "size": 14,
    "t5": 28,
    "vit": 14,
}


@lru_cache(maxsize=64)
def _work(model: Model, tokens: int) -> _Work:
    family = FAMILIES[model.family]
    weights, last = family.weights(model), _LAST.get(model.family)
    products = [(w, w.numel * family.rows(model, tokens, w)) for w in weights]
    return _Work(
        parameters=sum(w.numel for w in weights),
        tensors=len(weights),
        multiplied=sum(w.numel for w, product in products if product),
        products=sum(product for _, product in products),
        blocks=sum(product for w, product in products if "." in w.group),
        last=sum(product for w, product in products if last and w.name.endswith(last)),
        layers=len({w.group for w in weights if "." in w.group}),
    )


@lru_cache(maxsize=64)
def _state_bytes(model: Model, optimizer: str, dtype: str) -> int:
    return sum(sum(OPTIMIZERS[optimizer].state_bytes(w, dtype)) for w in FAMILIES[model.family].weights(model))


def hardware_of(plan: Plan) -> Hardware:
    """The speeds of one rank of a plan; on a CPU one core is one rank. Raises nothing.

    A plan for CUDA without a GPU is timed on an A100: only the order of plans matters.
    """
    if plan.device == "cpu":
        flops = _value("cpu-core-flops")
        return Hardware(
            name="one CPU core", flops=dict.fromkeys(("float32", "bfloat16", "float16"), flops), efficiency=1.0,
            memory_bandwidth=_value("cpu-memory-bandwidth"), link=_value("cpu-link"), inside=_value("cpu-link"),
        )  # fmt: skip
    gpu = plan.gpu_row or GPUS["a100"]
    link = gpu.link_bandwidth * _value("link-efficiency")
    return Hardware(
        name=gpu.name,
        flops={dtype: gpu.flops(dtype) for dtype in ("float32", "bfloat16", "float16")},
        efficiency=_value(f"efficiency-{_generation(gpu)}"),
        memory_bandwidth=gpu.memory_bandwidth,
        link=min(link, _value("node-link")) if plan.nodes > 1 else link,
        inside=link,
    )


def _generation(gpu: Gpu) -> str:
    capability = gpu.capability or (0, 0)
    return "hopper" if capability >= (9, 0) else "ampere" if capability == (8, 0) else "other"


def step_time(plan: Plan, hardware: Hardware | None = None) -> StepTime:
    """Predicted seconds of one optimizer step.

    >>> from dataclasses import replace
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
    >>> plain, again = step_time(plan), step_time(replace(plan, checkpoint_every=1))
    >>> again.compute == plain.compute, 0.1 < again.total / plain.total - 1 < 1 / 3
    (True, True)
    """
    hardware = hardware or hardware_of(plan)
    work = _work(plan.model, plan.tokens)
    speed = hardware.flops[plan.precision_row.compute] * hardware.efficiency
    forward, again = _forward_flops(plan, work)
    micro_compute, micro_again = 3 * forward / speed, again / speed
    micro_traffic = 3 * work.multiplied * DTYPE_BYTES[plan.precision_row.compute] / hardware.memory_bandwidth
    micro_host, micro_hooks = _host(plan, work), _hooks(plan)
    micro = max(micro_compute + micro_again, micro_traffic, micro_host)
    busy = plan.accumulation * micro
    sent = collectives(plan)
    seconds = [each.sent / (hardware.inside if each.inside else hardware.link) for each in sent]
    hideable = sum(time for each, time in zip(sent, seconds, strict=True) if each.hideable)
    bare = sum(seconds) - hideable + _broadcasts(plan, work)
    gathers, by_units = plan.strategy_row.shards_parameters, plan.strategy_row.backend.startswith("fsdp")
    overlap = _value("overlap-fsdp" if gathers or by_units else "overlap-ddp")
    # Gathers go on through the whole step; all-reduces only in the backward pass of the last micro batch.
    window = busy if gathers else micro * (2 * forward + again) / (3 * forward + again or 1)
    exposed = (1 - overlap) * hideable + max(0.0, overlap * hideable - window) + bare
    update = _update(plan, work, hardware)
    return StepTime(
        compute=plan.accumulation * micro_compute,
        recompute=plan.accumulation * micro_again,
        traffic=plan.accumulation * micro_traffic,
        host=plan.accumulation * micro_host,
        hooks=plan.accumulation * micro_hooks,
        communication=hideable + bare,
        exposed=exposed,
        optimizer=update,
        total=busy + plan.accumulation * micro_hooks + exposed + update,
        samples=plan.global_batch,
    )


def _forward_flops(plan: Plan, work: _Work) -> tuple[float, float]:
    """FLOPs of one forward pass, and of what checkpointing runs again, for one micro batch.

    Two per multiplied parameter and row; attention adds four times the heads' width a pair of query and key, half of it where the
    kernel skips what a causal mask hides (Dao 2023, FlashAttention-2, section 3.1).
    """
    masked, full = plan.family.pairs(plan.model, plan.tokens)
    skips = plan.kernel in ("flash", "efficient")
    attention = 4 * plan.model.heads * plan.model.head_width * (masked * (0.5 if skips else 1.0) + full)
    again = 0.0
    if plan.checkpoint_every:
        again = 2 * work.blocks + attention
        if not plan.reentrant and not plan.dropout:
            # Recomputation stops at the last saved tensor, before the product that ends a checkpoint
            # (torch/utils/checkpoint.py, early_stop); only one block in checkpoint_every ends one.
            again -= 2 * work.last / plan.checkpoint_every
    return plan.micro_batch * (2 * work.products + attention), plan.micro_batch * again


def _host(plan: Plan, work: _Work) -> float:
    """Seconds Python needs to start the operations of one micro batch."""
    passes = 3 + (1 if plan.checkpoint_every else 0)
    operations = (
        passes
        * work.layers
        * (_OPERATIONS.get(plan.model.family, 1) + 6 * plan.model.experts * (not plan.model.stacked))
    )
    return operations * _value("launch-seconds")


def _hooks(plan: Plan) -> float:
    """Seconds FSDP's hooks add to one micro batch."""
    name = (
        f"unit-seconds-{plan.strategy.replace('fsdp-hybrid-shard-grad', 'fsdp-shard-grad').replace('hybrid', 'full')}"
    )
    if plan.ranks == 1 or name not in COEFFICIENTS:
        return 0.0
    _, count = units(plan.model, max(plan.checkpoint_every, 1))
    return count * _value(name)


def _broadcasts(plan: Plan, work: _Work) -> float:
    alone = plan.ranks > 1 and plan.strategy == "zero-1"  # tensor by tensor; DeepSpeed and Megatron gather buckets
    return work.tensors * _value("broadcast-seconds") if alone else 0.0


def _update(plan: Plan, work: _Work, hardware: Hardware) -> float:
    """Seconds of the optimizer step: bytes read and written over the memory's bandwidth, or the host's time."""
    dtype = plan.precision_row.weights
    states = _state_bytes(plan.model, plan.optimizer, dtype)
    touched = 3 * work.parameters * DTYPE_BYTES[dtype] + 2 * states
    fused = plan.optimizer_kind == "fused"
    share = plan.ranks if plan.strategy_row.shards_optimizer else 1
    host = work.tensors * _value("launch-seconds")
    return max(touched / share * (1 if fused else _value("unfused-passes")) / hardware.memory_bandwidth, host)
