"""What one rank sends in an optimizer step, collective by collective.

In a ring of N ranks an all-reduce of M bytes sends 2 (N-1)/N M from each, a gather, a reduce-scatter, a broadcast and an
all-to-all (N-1)/N M (Rajbhandari et al. 2020, ZeRO, section 7; NCCL's rings).

Ranks of tensor parallel lie next to each other, those of context parallel and of data parallel follow, and stages of a
pipeline are farthest apart (megatron/core/parallel_state.py, ``tp-cp-ep-dp-pp``; DeepSpeed's PipeModelDataParallelTopology).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from memcalc.models import FAMILIES, Model
from memcalc.parallel import ROOT_UNIT, shard_units
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.tensor_parallel import share, split_model
from memcalc.work import StageWork, stages_of

__all__ = ["MICRO_BATCH", "SAMPLE", "STEP", "Collective", "collectives", "sent_bytes", "terms", "units"]

_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1, "all-to-all": 1}
FLOAT = DTYPE_BYTES["float32"]
STEP, MICRO_BATCH, SAMPLE = "step", "micro batch", "sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of collective of a step."""

    what: str
    operation: str
    """A key of the ring's passes: all-reduce, all-gather, reduce-scatter, broadcast, reduce or all-to-all; or send, to
    one neighbour."""
    bytes: int
    """The whole tensor, over all ranks of the group, of all its calls in the step together."""
    ranks: int
    """Of its group."""
    hideable: bool = True
    """Runs while the step computes."""
    near: int = 0
    """Ranks of its group in one machine; 0 for all of them. One that sends to another machine has 1."""
    calls: float = 1
    """Times it is called in the step."""
    per: str = STEP
    """What its bytes are of where they are not of the whole step: a micro batch, or a sample of one."""

    @property
    def inside(self) -> bool:
        """Its group lies within a machine."""
        return self.near in (0, self.ranks)

    @property
    def sent(self) -> float:
        """Bytes that one rank sends."""
        if self.operation == "send":
            return self.bytes
        return _PASSES[self.operation] * self.bytes * (self.ranks - 1) / self.ranks


@lru_cache(maxsize=256)
def units(model: Model, every: int) -> tuple[int, int]:
    """(parameters of the root unit, number of units): the root is gathered once for forward and backward."""
    found = shard_units(FAMILIES[model.family].weights(model), every)
    return sum(w.numel for w in found[ROOT_UNIT]), len(found)


def sent_bytes(plan: Plan) -> int:
    """All that one rank sends in a step.

    >>> from memcalc.models import Model
    >>> billion = Model(name="1e9", family="size", parameters=10**9, layers=10)
    >>> [sent_bytes(Plan(model=billion, ranks=8, strategy=name)) for name in ("ddp", "fsdp-full-shard")]
    [7000000000, 10500000000]
    """
    return round(sum(each.sent for each in collectives(plan)))


def collectives(plan: Plan) -> list[Collective]:
    """What is sent in one optimizer step; nothing on one rank."""
    times = {STEP: 1, MICRO_BATCH: plan.accumulation, SAMPLE: plan.accumulation * plan.micro_batch}
    calls = times | {SAMPLE: plan.accumulation}
    return [
        replace(each, bytes=each.bytes * times[each.per], calls=each.calls * calls[each.per], per=STEP)
        for each in terms(plan)
    ]


def terms(plan: Plan, stages: tuple[StageWork, ...] | None = None) -> list[Collective]:
    """The same with micro batch and accumulation left open: of a step, of each micro batch, or of each sample."""
    if plan.ranks == 1:
        return []
    row, stages = plan.strategy_row, stages or stages_of(plan)
    found = list(_of_model_parallel(plan, stages))
    if row.one_process:
        return list(_one_process(plan))
    if plan.data_parallel * plan.layout.context == 1:
        return found
    if row.gathers:
        return [*found, *_fully_sharded(plan, stages)]
    if row.zero_stage is not None:
        return [*found, *_deepspeed(plan, stages)]
    return [*found, *(_megatron(plan, stages) if row.main_grads else _replicated(plan, stages))]


def _near(plan: Plan, size: int, stride: int) -> int:
    """Ranks of a group in one machine, of ``size`` that lie ``stride`` apart."""
    return max(1, min(size, plan.ranks // plan.nodes // stride))


def _sizes(stages: tuple[StageWork, ...]) -> tuple[int, int]:
    """Parameters that are trained, and all of them, of the stage that has most."""
    fullest = max(stages, key=lambda each: each.parameters)
    return fullest.trainable, fullest.parameters


def _data(plan: Plan) -> tuple[int, int]:
    """Ranks that hold the same weights, and how many of them are in one machine."""
    size = plan.data_parallel * plan.layout.context
    return size, _near(plan, size, plan.layout.tensor)


def _replicated(plan: Plan, stages: tuple[StageWork, ...]) -> Iterator[Collective]:
    """DDP once a step, in the last micro batch (no_sync); gradients have the weights' dtype."""
    if not plan.strategy_row.parallel:
        return
    trained, _ = _sizes(stages)
    ranks, near = _data(plan)
    size = trained * DTYPE_BYTES[plan.precision_row.weights]
    calls = -(-size // (plan.bucket_mb << 20))
    yield Collective(what="gradients", operation="all-reduce", bytes=size, ranks=ranks, near=near, calls=calls)
    if plan.strategy_row.shards_optimizer:
        # ZeroRedundancyOptimizer, _sync_params: tensor by tensor, when nothing is left to hide behind.
        fullest = max(stages, key=lambda each: each.parameters)
        yield Collective(
            what="updated weights", operation="broadcast", bytes=size, ranks=plan.shards, hideable=False,
            near=_near(plan, plan.shards, plan.layout.tensor), calls=fullest.tensors,
        )  # fmt: skip


def _one_process(plan: Plan) -> Iterator[Collective]:
    """nn.DataParallel copies the module in every forward (``replicate``) and sums gradients in every backward; its
    outputs, which the first GPU collects, come on top."""
    weights = plan.weights
    trained, whole = sum(w.numel for w in weights if w.trainable), sum(w.numel for w in weights)
    width = DTYPE_BYTES[plan.precision_row.weights]
    yield Collective(
        what="weights", operation="broadcast", bytes=whole * width, ranks=plan.ranks, hideable=False, per=MICRO_BATCH
    )
    yield Collective(
        what="gradients", operation="reduce", bytes=trained * width, ranks=plan.ranks, hideable=False, per=MICRO_BATCH
    )


def _fully_sharded(plan: Plan, stages: tuple[StageWork, ...]) -> Iterator[Collective]:
    """FSDP gathers in every micro batch, and reduces in the last one unless told otherwise."""
    trained, whole = _sizes(stages)
    low, full = DTYPE_BYTES[plan.precision_row.compute], DTYPE_BYTES[plan.reduce_dtype]
    often = MICRO_BATCH if plan.fsdp.sync_every_micro_batch else STEP
    copies, tensor = plan.data_parallel * plan.layout.context // plan.shards, plan.layout.tensor
    root, count = units(split_model(plan.model, plan.layout), max(plan.checkpoint_every, 1))
    if plan.layout.pipeline > 1:
        count, root = -(-count // plan.layout.pipeline), min(root, whole)
    of = {"ranks": plan.shards, "near": _near(plan, plan.shards, tensor), "calls": count}
    yield Collective(what="weights for forward", operation="all-gather", bytes=low * whole, per=MICRO_BATCH, **of)  # type: ignore[arg-type]
    if plan.strategy_row.reshards:
        yield Collective(
            what="weights for backward", operation="all-gather", bytes=low * (whole - root), per=MICRO_BATCH, **of  # type: ignore[arg-type]
        )  # fmt: skip
    yield Collective(what="gradients", operation="reduce-scatter", bytes=trained * full, per=often, **of)  # type: ignore[arg-type]
    if copies > 1:
        part, near = trained * full // plan.shards, _near(plan, copies, tensor * plan.shards)
        yield Collective(
            what="gradients of replicas", operation="all-reduce", bytes=part, ranks=copies, near=near, calls=count, per=often
        )  # fmt: skip


def _deepspeed(plan: Plan, stages: tuple[StageWork, ...]) -> Iterator[Collective]:
    """engine.py, ``allreduce_gradients``: stages 0 and 1 at the boundary of accumulation, 2 and 3 in every micro batch; in
    the 16-bit dtype of training (``communication_data_type``). Stages 1 and 2 gather the updated weights."""
    trained, whole = _sizes(stages)
    stage, low = plan.strategy_row.zero_stage or 0, DTYPE_BYTES[plan.precision_row.weights]
    ranks, near, settings = plan.shards, _near(plan, plan.shards, plan.layout.tensor), plan.deepspeed
    if stage == 3:
        calls = max(-(-whole // max(settings.prefetch_bucket_size, 1)), max(each.layers for each in stages), 1)
        for what in ("weights for forward", "weights for backward"):
            yield Collective(
                what=what, operation="all-gather", bytes=low * whole, ranks=ranks, near=near, calls=calls, per=MICRO_BATCH
            )  # fmt: skip
    yield Collective(
        what="gradients",
        operation="reduce-scatter" if stage and settings.reduce_scatter else "all-reduce",
        bytes=low * trained,
        ranks=ranks,
        near=near,
        calls=-(-trained // settings.reduce_bucket_size),
        hideable=settings.overlaps(stage),
        per=MICRO_BATCH if stage >= 2 else STEP,
    )
    if stage in (1, 2):
        yield Collective(
            what="updated weights", operation="all-gather", bytes=low * trained, ranks=ranks, near=near,
            calls=-(-trained // settings.allgather_bucket_size), hideable=False,
        )  # fmt: skip


def _megatron(plan: Plan, stages: tuple[StageWork, ...]) -> Iterator[Collective]:
    """core/distributed/param_and_grad_buffer.py: float32 main gradients, while backward runs with ``--overlap-grad-reduce``,
    which is taken for given; the distributed optimizer gathers 16-bit weights. Of several instances each has all states:
    gradients are scattered in one and then summed over all."""
    trained, _ = _sizes(stages)
    ranks, near = _data(plan)
    size = FLOAT * trained

    def calls(group: int) -> int:  # buckets (distributed_data_parallel.py): 40 million, or a million a rank
        return -(-trained // max(40_000_000, 1_000_000 * group))

    if not plan.strategy_row.shards_optimizer:
        yield Collective(
            what="gradients", operation="all-reduce", bytes=size, ranks=ranks, near=near, calls=calls(ranks)
        )  # fmt: skip
        return
    low, shards, copies = DTYPE_BYTES[plan.precision_row.weights], plan.shards, ranks // plan.shards
    near = _near(plan, shards, plan.layout.tensor)
    yield Collective(
        what="gradients", operation="reduce-scatter", bytes=size, ranks=shards, near=near, calls=calls(shards)
    )  # fmt: skip
    if copies > 1:
        yield Collective(
            what="gradients of instances", operation="all-reduce", bytes=size // shards, ranks=copies, calls=calls(shards),
            near=_near(plan, copies, plan.layout.tensor * shards),
        )  # fmt: skip
    yield Collective(
        what="updated weights", operation="all-gather", bytes=low * trained, ranks=shards, near=near, hideable=False,
        calls=calls(shards),
    )  # fmt: skip


def _of_model_parallel(plan: Plan, stages: tuple[StageWork, ...]) -> Iterator[Collective]:
    """What ranks that share samples send each other, of one sample; nothing of it hides. Recomputed blocks send again what
    they sent in forward."""
    layout, model = plan.layout, plan.model
    if layout.model_parallel * layout.expert == 1:
        return
    tokens, size = share(plan.tokens, layout.context), DTYPE_BYTES[plan.precision_row.compute]
    layers = max(each.layers for each in stages)
    again = 1 if plan.checkpoint_every and plan.checkpointing.policy == "recompute-all" else 0
    stream = tokens * model.hidden * size
    if layout.tensor > 1:
        # Korthikanti et al. 2022, section 4.2: a gather and a scatter send as much as an all-reduce. Twice a block in
        # forward and in backward; attention and MLP that read one input are summed together.
        passes = (2 + again) * (1 if model.side_by_side else 2) * layers + 2  # and embedding and head
        yield Collective(
            what="activations of tensor parallel", operation="all-reduce", bytes=passes * stream, ranks=layout.tensor,
            near=_near(plan, layout.tensor, 1), hideable=False, calls=passes, per=SAMPLE,
        )  # fmt: skip
    if layout.context > 1:
        # Keys and values in forward and backward, and their gradients.
        both = plan.tokens * 2 * model.kv_heads * model.head_width * size // layout.tensor
        passes = (3 + again) * layers
        yield Collective(
            what="keys and values of context parallel", operation="all-gather", bytes=passes * both, ranks=layout.context,
            near=_near(plan, layout.context, layout.tensor), hideable=False, calls=passes, per=SAMPLE,
        )  # fmt: skip
    if layout.expert > 1:
        # Tokens to experts and back, in forward and in backward.
        passes = (4 + 2 * again) * max(layers - len(model.dense_layers), 0)
        sent = stream * model.top_k // (layout.tensor if layout.sequence else 1)
        yield Collective(
            what="tokens of expert parallel", operation="all-to-all", bytes=passes * sent, ranks=layout.expert,
            near=_near(plan, layout.expert, layout.tensor), hideable=False, calls=passes, per=SAMPLE,
        )  # fmt: skip
    if layout.pipeline > 1:
        # Megatron and DeepSpeed send each rank's share of the stream and gather it on the other side (megatron's
        # p2p_communication.py, scatter_gather_tensors_in_pipeline; deepspeed/runtime/pipe/engine.py, is_pipe_partitioned).
        passes, stride = 2 * layout.chunks, plan.ranks // layout.pipeline
        shares = layout.tensor if layout.sequence or plan.strategy_row.engine != "torch" else 1
        yield Collective(
            what="stream between stages", operation="send", hideable=False, ranks=layout.pipeline,
            bytes=passes * stream // shares,
            near=1 if stride >= plan.ranks // plan.nodes else layout.pipeline, calls=passes, per=SAMPLE,
        )  # fmt: skip
