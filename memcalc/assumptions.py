"""What an estimate takes for granted, in sentences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memcalc.coefficients import own_calibration
from memcalc.compute import Compute
from memcalc.engines import ENGINES
from memcalc.hardware import LARGE_NODES, NODE_GPUS
from memcalc.hints import copied_once, frozen, per_machine, whole_gradients
from memcalc.kernels import refusal
from memcalc.ledger import peaks
from memcalc.outside import communicators
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.reserved import UNSEEN_PCT, Range
from memcalc.timeline import Timeline
from memcalc.units import format_both

__all__ = [
    "GROWN",
    "GUESSED",
    "HOSTED",
    "REHEARSED",
    "Rehearsed",
    "activations_known",
    "assumptions",
    "compiled",
    "doubts",
    "in_one_machine",
    "limits",
    "measured_here",
    "uncounted",
    "undivided",
]  # fmt: skip

# schedule.step(return_outputs=False) of torch.distributed.pipelining (pytorch pull request 165822, October 2025).
RETURN_OUTPUTS_SINCE = (2, 10)

GUESSED = (
    "its code asks for the values of tensors ({} times), which a rehearsal has not: each was taken for 1, and what other "
    "values would take is not counted"
)
GROWN = (
    "its code keeps {:,} B more after the second step than before it: memory grows with every step, and what later steps "
    "take is not counted"
)
HOSTED = (
    "{:,} B that its code makes on the CPU in two steps, and does not move, lie in the host's memory and are left out"
)
REHEARSED = "rehearsed: two steps of its own code, strategy and optimizer on tensors without values"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What a rehearsal of the plan's own code gave."""

    timeline: Timeline | None
    """None where it could not be rehearsed; the remarks say why."""
    remarks: tuple[str, ...] = ()
    sure: bool = False
    """The code went the way it goes with any values."""


def activations_known(plan: Plan) -> bool:
    model = plan.model
    return (
        not plan.family.unplayed
        or not model.module.factory
        and bool(model.layer_bytes or (model.features and model.layers))
    )


def uncounted(plan: Plan) -> list[str]:
    """What the plan's model keeps and nothing here counts, in sentences; with any of them no verdict is ``fits``."""
    model, said = plan.model, list(plan.model.uncounted)
    if (
        plan.layout.pipeline > 1
        and plan.torch_version < RETURN_OUTPUTS_SINCE
        and ENGINES[plan.strategy_row.engine].works
    ):
        whole = plan.accumulation * plan.micro_batch * plan.tokens * model.vocab
        size = whole * (4 if plan.loss.float32_output else DTYPE_BYTES[plan.precision_row.compute])
        said.append(
            f"torch {plan.torch} keeps the last stage's outputs of all micro batches until the next step, {format_both(size)}, "
            "and copies them into one tensor; neither is counted"
        )
    if model.wide_scores and plan.kernel == "eager" and plan.precision_row.compute != "float32":
        said.append(
            "transformers keeps float32 copies of queries and keys for attention written out, which are not counted"
        )
    return said


def dropout(plan: Plan) -> list[str]:
    """Which dropout is counted, where the model's file says one."""
    said = plan.model.dropout
    if not said:
        return []
    if plan.dropout == said:
        return [
            f"dropout {said:g} is the largest of the file, counted wherever the model has one; --dropout says another"
        ]
    return [f"dropout {plan.dropout:g} is counted, where the file says {said:g}"]


def undivided(plan: Plan) -> str:
    """What a strategy would divide by tensors and cannot, because of a model known by its size one tensor is known; blank
    where nothing is. Its states are an upper bound then."""
    row = plan.strategy_row
    if not plan.family.opaque or plan.model.layers or plan.shards == 1:
        return ""
    if row.zero_stage:
        return (
            "DeepSpeed reduces gradients tensor by tensor, and of a model known by its size one tensor is known, so that its "
            "gradients stand undivided at the peak: states are at most this much; give --layers N"
        )
    if row.shards_optimizer and not (row.gathers or row.main_grads):
        return (
            "whole tensors are handed to ranks, and of a model known by its size one tensor is known, so that nothing is "
            "divided: states are at most this much; give --layers N"
        )
    return ""


def limits(plan: Plan) -> list[str]:
    """What stays whole, or out, because the layers of a model known by its size were not given."""
    gathered = "gathered layers are not counted because their number was not given; give --layers"
    return [*[gathered] * plan.gathers_unknown_layers, *filter(None, [undivided(plan)])]


def attended(plan: Plan) -> str:
    """Which attention kernel is counted, and why no better one, in a sentence."""
    said = f"attention by the {plan.kernel} kernel"
    if plan.attention != "auto" or plan.kernel == "eager" or plan.device == "cpu":
        return said
    if plan.kernel == "math":
        why = "; ".join(f"{kernel}: {refusal(kernel, plan.attends)}" for kernel in ("flash", "efficient"))
        return f"{said}, which keeps the scores of tokens x tokens: no other can be taken ({why})"
    if plan.gpu is None and plan.kernel == "flash":
        return f"{said}, as on cards of compute capability 8.0 and newer; older ones (T4, V100) keep more: give --gpu"
    return said


def compiled(plan: Plan) -> str:
    """What torch.compile may do to the estimate, in a sentence: the ends of its range (memcalc/compute.py)."""
    least = dataclasses.replace(plan, compute=Compute(float8=plan.compute.float8), checkpoint_every=1)
    most = dataclasses.replace(plan, compute=Compute(float8=plan.compute.float8))
    low, high = (peaks(each, [plan.micro_batch])[0] for each in (least, most))
    return (
        f"torch.compile is counted as eager with fused norms, which keeps most; allocated is at least "
        f"{format_both(min(low, high))}, as if every block were computed again"
    )


def measured_here(plan: Plan) -> list[str]:
    """What of this plan's hardware memcalc calibrate measured on this machine, in a sentence."""
    own = own_calibration()
    if own is None or not own.is_of(plan.device, plan.gpu_row.name if plan.gpu_row else None):
        return []
    what = "its speeds and its CUDA context are" if own.context else "its speeds are"
    return [f"this machine was measured by memcalc calibrate ({own.made}): {what} its own, from {own.path}"]


def in_one_machine(plan: Plan) -> list[str]:
    """That more GPUs than machines are built with are taken to be in one, in a sentence."""
    most = LARGE_NODES.get(plan.gpu or "", NODE_GPUS)
    if plan.device == "cpu" or plan.nodes > 1 or plan.ranks <= most:
        return []
    few = -(-plan.ranks // most)
    return [
        f"all {plan.ranks} GPUs are taken to be in 1 machine; where they are in more, say so: --nodes {few} for {most} in each"
        if plan.ranks % few == 0
        else f"all {plan.ranks} GPUs are taken to be in 1 machine; where they are in more, say so: --nodes N"
    ]


def doubts(plan: Plan, rehearsal: Rehearsed | None = None) -> list[str]:
    """What could make the estimate wrong, in sentences: what is not counted first, then what was guessed."""
    said = uncounted(plan)
    if rehearsal is not None:
        said += [remark for remark in rehearsal.remarks if remark != REHEARSED]
    elif not activations_known(plan):
        why = (
            "a module's code is run for them only when it is named"
            if plan.model.module.factory
            else "no shape was given"
        )
        said.append(f"activations are not counted because {why}")
    said += limits(plan)
    if plan.family.opaque and plan.optimizer_kind == "for-loop":
        said.append("the largest tensor is not known, so the temporaries of the for-loop step are not counted")
    if plan.static_graph and plan.ranks > 1 and activations_known(plan):
        said.append(copied_once(plan))
    if plan.family.assumption:
        said.append(plan.family.assumption)
    if plan.model.layer_bytes:
        each = plan.model.layer_bytes * plan.micro_batch * plan.model.layers
        said.append(
            f"activation bytes per layer are taken for the whole micro batch of {plan.micro_batch}; "
            f"were they per sample, activations would be {each:,} B"
        )
    if plan.masked:
        said.append(
            f"{plan.tokens} tokens reach the sliding window of {plan.model.window}: every layer is counted with a mask "
            "of tokens x tokens, as transformers makes it, also where only some layers have the window"
        )
    said += [*plan.model.notes, *dropout(plan), *filter(None, [frozen(plan)])]
    said += in_one_machine(plan)
    if plan.device == "cpu":
        return [*said, "one thread per rank; scratch memory inside oneDNN's kernels is not counted"]
    if plan.compute.compile and not plan.family.opaque:
        said.append(compiled(plan))
    if _attends(plan) and attended(plan) != f"attention by the {plan.kernel} kernel":
        said.append(attended(plan))
    if plan.compute.offload_activations:
        said.append("activations in pinned host memory are not counted in host")
    if plan.gpu is None and not plan.family.opaque:
        said.append("cuBLAS workspaces (16 MiB to 64 MiB by card) are counted only with --gpu")
    return said


def _attends(plan: Plan) -> bool:
    return bool(plan.tokens) and not plan.family.opaque and not plan.family.unplayed


def assumptions(
    plan: Plan, reserved: Range, *, stage: int, in_blocks: int, host: int, rehearsal: Rehearsed | None = None
) -> list[str]:
    """What else the estimate takes for granted, and how its numbers are meant, in sentences; ``in_blocks`` is what blocks
    hold beside their tensors, ``host`` what one rank holds there."""
    said = ["the peak of all moments up to the second step, which repeats itself, on the fullest rank"]
    said += measured_here(plan)
    if rehearsal is not None and REHEARSED in rehearsal.remarks:
        said.append(REHEARSED)
    if plan.layout.pipeline > 1:
        said.append(
            f"the fullest stage of the pipeline is number {stage}, counted from 0 to {plan.layout.pipeline - 1}"
        )
        if plan.accumulation < plan.layout.pipeline:
            said.append(
                f"only {plan.accumulation} micro batch{'es' * (plan.accumulation > 1)} a step for {plan.layout.pipeline} "
                "stages, so that most stages wait; with more (--accumulation) more of them are in flight at once"
            )
    if plan.layout.tensor > 1:
        whose = "Megatron's" if plan.family.divides == "megatron" else "torch's (torch.distributed.tensor.parallel)"
        said.append(f"tensor parallel is {whose}, as the model's family is written")
    forms = [f"{field} {form}" for field, form in dataclasses.asdict(plan.implementation).items() if form != "auto"]
    if forms:
        said.append(f"the model's code is written with {', '.join(forms)}")
    if (
        plan.strategy_row.gathers
        and plan.fsdp.version == "2"
        and plan.model.stacked
        and plan.shards > plan.model.experts
    ):
        said.append(
            f"fully_shard divides stacked experts by expert, so that {plan.model.experts} over {plan.shards} ranks leave a "
            "whole one on every rank (FSDPParam._init_sharded_param pads); --fsdp-version 1 divides them evenly"
        )
    said += filter(None, [whole_gradients(plan)])
    if plan.strategy_row.gathers:
        itemsize = DTYPE_BYTES[plan.precision_row.weights]
        whole = itemsize * sum(weight.numel for weight in plan.family.weights(plan.model))
        said.append(
            f"saving is not counted; a whole state dict takes {format_both(whole)} of RAM on every rank that gathers it"
        )
    if plan.device == "cpu":
        return said
    said.append(
        f"reserved is most likely {format_both(reserved.point)}: the caching allocator replayed from the model's "
        "construction on; the high end is that on an endless card, or what published runs reserved of so much, if it is more, "
        f"and {UNSEEN_PCT} % beyond, as published runs were"
    )
    said.append(f"torch {plan.torch}; sizes are rounded up to blocks of 512 B, as the caching allocator does")
    if in_blocks:
        said.append(
            f"blocks of more than 1 MiB are not split to the last byte: max_memory_allocated, which counts blocks, may "
            f"be {format_both(in_blocks)} higher"
        )
    if _attends(plan) and attended(plan) == f"attention by the {plan.kernel} kernel":
        said.append(attended(plan))
    if plan.offload.on:
        each = per_machine(plan)
        said.append(f"host is of one rank; the {each} of a machine need {format_both(each * host)} together")
    if groups := communicators(plan):
        named = ", ".join(f"{name} of {size}" for name, size in groups.items())
        said.append(f"NCCL has a communicator for each group of ranks: {named}")
    if plan.gpu is None:
        said.append("device adds the widest range of CUDA contexts in the catalog; give --gpu for one card's")
    return said
