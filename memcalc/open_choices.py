"""What a search tries where nothing is said: for each choice of a plan the values that make sense for its base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memcalc.adapters import Adapter
from memcalc.assumptions import activations_known
from memcalc.checkpointing import Checkpointing
from memcalc.errors import PlanError
from memcalc.hardware import NODE_GPUS
from memcalc.loss import Loss
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = [
    "CHUNKS", "MICRO_BATCHES", "checkpoints", "default_precisions", "gpu_counts", "kinds", "losses", "micro_batches",
    "offloads", "pipelines", "plain", "policies", "pure_precision", "syncs", "tensors", "unsaid_precision",
]  # fmt: skip

TENSOR_CORES = (7, 0)
"""Compute capability from which 16-bit matrix products are several times faster (CUDA C++ Programming Guide)."""

MICRO_BATCHES = tuple(sorted({base << k for k in range(11) for base in (1, 3)} - {3 << 10, 3 << 9}))
"""Micro batches tried where no global batch is given: 2**k and 3 * 2**k, up to 1024."""

MOST_MICRO_BATCH = 2**16
"""Largest divisor of a global batch that is tried; past it more accumulation costs next to nothing."""

CHUNKS = 8
"""Parts of the tokens the loss is cut into, as torchtune and torchtitan do (num_output_chunks)."""

EVERY = (2,)
"""Blocks that one checkpoint spans, beside all blocks one by one: fewer are kept, and more is alive while one runs again."""


def gpu_counts(most: int, per_node: int = NODE_GPUS) -> tuple[int, ...]:
    """Numbers of GPUs worth trying up to ``most``: any on one machine, then whole machines in growing steps. What is
    tried for fewer is tried for more, so that more can only be faster.

    >>> gpu_counts(6), gpu_counts(100)[8:]
    ((1, 2, 3, 4, 5, 6), (16, 24, 32, 40, 48, 56, 64, 80, 96))
    """
    machines = sorted({count << k for k in range(most.bit_length()) for count in range(1, 9)})
    return (
        *range(1, min(most, per_node) + 1),
        *(count * per_node for count in machines if per_node < count * per_node <= most),
    )


def default_precisions(base: Plan) -> tuple[str, ...]:
    """The recipe tried where none is given; see ``search``.

    Frozen weights are held in 16 bit where the adapters beside them are float32, as PEFT trains a model that was loaded
    so (peft/tuners/tuners_utils.py, autocast_adapter_dtype). Beside quantised ones all else is float32
    (peft/utils/other.py, prepare_model_for_kbit_training).
    """
    adapter = base.adapter
    if adapter.freezes and adapter.dtype == "float32" and adapter.quantize == "none":
        usual = default_precisions(replace(base, adapter=Adapter()))[0]
        return ({"amp-bf16": "bf16", "amp-fp16": "fp16"}.get(usual, usual),)
    gpu = base.gpu_row
    if base.device == "cpu":
        return ("fp32",)
    if gpu is None or gpu.bfloat16:
        return ("amp-bf16",)
    return ("amp-fp16",) if (gpu.capability or (0, 0)) >= TENSOR_CORES else ("fp32",)


def unsaid_precision(plan: Plan) -> str:
    """Why a plan whose precision nobody said is in another than a search would take, in a sentence; blank where it is not.

    >>> from memcalc.models import MODELS
    >>> unsaid_precision(Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, gpu="t4"))
    'fp32 is what torch takes unasked; memcalc recommend and strategies take amp-fp16 here: --precision amp-fp16'
    """
    usual = default_precisions(plan)[0]
    if plan.precision == usual:
        return ""
    module = plan.model.module.factory  # which is not searched
    others = "memcalc strategies takes" if module else "memcalc recommend and strategies take"
    return f"{plan.precision} is what torch takes unasked; {others} {usual} here: --precision {usual}"


def pure_precision(base: Plan) -> str:
    """The recipe with 16-bit weights that the hardware computes fast."""
    return "fp16" if default_precisions(base)[0].endswith("fp16") else "bf16"


def plain(nodes: int) -> list[str]:
    """Strategies of torch alone; hybrid ones where there is more than one machine to keep a copy on."""
    return [row.name for row in STRATEGIES.values() if row.plain and (nodes > 1 or not row.replicates)]


def tensors(base: Plan, per_node: int) -> tuple[int, ...]:
    """Powers of two that divide the heads and lie within a machine: beyond it tensor parallel collapses."""
    model, layout = base.model, base.layout
    if layout.tensor > 1 or base.device == "cpu" or not base.family.divides or base.adapter.freezes:
        return (layout.tensor,)
    degrees = [1 << k for k in range(per_node.bit_length())]
    return tuple(n for n in degrees if n <= per_node and not (model.heads % n or model.kv_heads % n or model.ffn % n))


def pipelines(base: Plan) -> tuple[int, ...]:
    """Powers of two with at least two blocks a stage."""
    family, layout = base.family, base.layout
    one_sequence = family.reads == "tokens" and not (family.encodes or family.unplayed)
    if layout.pipeline > 1 or base.device == "cpu" or not one_sequence or base.adapter.freezes:
        return (layout.pipeline,)
    return tuple(1 << k for k in range(max(base.model.blocks // 2, 1).bit_length()))


def checkpoints(base: Plan) -> tuple[int, ...]:
    if not (activations_known(base) and base.model.blocks):
        return (0,)
    return (0, 1, *(every for every in EVERY if every < base.model.blocks))


def policies(base: Plan) -> tuple[str, ...]:
    known = activations_known(base) and base.model.blocks and base.model.heads
    skips = base.family.unplayed or base.family.encodes or base.reentrant or base.checkpointing != Checkpointing()
    return ("matrix-products",) if known and not skips else ()


def kinds(base: Plan) -> tuple[str, ...]:
    """The usual way first; one kernel for all where the optimizer has it."""
    usual = base.optimizer_kind
    return (usual, "fused") if usual == "foreach" and "fused" in base.optimizer_row.kinds else (usual,)


def losses(base: Plan) -> tuple[Loss, ...]:
    whole = base.loss == Loss() and not base.keep_logits and base.device == "cuda"
    if not (whole and base.tokens >= CHUNKS and base.model.says_words and not base.family.unplayed):
        return (base.loss,)
    return (base.loss, Loss(chunks=CHUNKS, chunk_head=True))


def syncs(base: Plan) -> tuple[bool, ...]:
    """Whether FSDP reduces gradients after every micro batch: that sends more, and no rank keeps all of them whole."""
    return (True,) if base.fsdp.sync_every_micro_batch else (False, True)


def offloads(base: Plan) -> tuple[bool, ...]:
    if base.offload.on:
        return (True,)
    return (False,) if base.device == "cpu" or base.adapter.freezes or base.family.opaque else (False, True)


def micro_batches(base: Plan, ranks: Sequence[int], global_batch: int | None) -> Sequence[int]:
    if base.model.family == "size" and (base.model.layer_bytes or not base.model.features):
        return [base.micro_batch]  # what a layer keeps was stated for this micro batch, or is not known at all
    if global_batch is None:
        return MICRO_BATCHES
    if base.layout.model_parallel == 1 and not any(global_batch % count == 0 for count in ranks):
        near = max(global_batch // ranks[0], 1) * ranks[0]
        raise PlanError(
            f"global batch {global_batch} does not divide over {ranks[0]} ranks; take {near} or {near + ranks[0]}"
        )
    return [size for size in range(1, min(global_batch, MOST_MICRO_BATCH) + 1) if global_batch % size == 0]
