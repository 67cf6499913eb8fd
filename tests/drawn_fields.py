"""Hypothesis strategies for groups of a plan's fields: the loss, the update, offload, DeepSpeed, checkpoints."""

from __future__ import annotations

from hypothesis import strategies as st

from memcalc.checkpointing import POLICIES, Checkpointing
from memcalc.deepspeed import DeepSpeed
from memcalc.loss import LOSS_FORMS, Loss
from memcalc.models import FAMILIES, Model
from memcalc.offload import Offload
from memcalc.optimizers import Optimizer
from memcalc.strategies import STRATEGIES
from memcalc.update import Update

__all__ = ["checkpointings", "deepspeeds", "losses", "offloads", "updates"]


@st.composite
def deepspeeds(draw: st.DrawFn, strategy: str) -> DeepSpeed:
    """DeepSpeed's fields, with buckets and thresholds that small models fill."""
    if STRATEGIES[strategy].zero_stage is None:
        return DeepSpeed()
    sizes = st.sampled_from([1, 100, 5_000, 10**6, 10**9])
    return DeepSpeed(
        reduce_bucket_size=draw(sizes),
        overlap_comm=draw(st.sampled_from(["auto", "on", "off"])),
        contiguous_gradients=draw(st.booleans()),
        reduce_scatter=draw(st.booleans()),
        round_robin_gradients=draw(st.booleans()),
        grad_accum_dtype=draw(st.sampled_from(["weights", "float32"])),
        flatten=draw(st.sampled_from(["device", "host"])),
        persistence_threshold=draw(st.sampled_from([0, 50, 10**5])),
        prefetch_bucket_size=draw(st.sampled_from([0, 100, 10**6])),
        max_live_parameters=draw(sizes),
        max_reuse_distance=draw(sizes),
        sub_group_size=draw(sizes),
    )


@st.composite
def offloads(draw: st.DrawFn, strategy: str, optimizer: str, device: str, plain: bool) -> Offload:
    """What the strategy can offload from a GPU."""
    row = STRATEGIES[strategy]
    if device == "cpu" or plain or not (row.gathers or row.zero_stage) or draw(st.booleans()):
        return Offload()
    if row.gathers:
        return Offload(optimizer="cpu", parameters="cpu")
    places = ["none", "cpu", "nvme"] if row.zero_stage == 3 else ["none", "cpu"]
    return Offload(
        optimizer=draw(st.sampled_from(places)) if optimizer in ("adam", "adamw") else "none",
        parameters=draw(st.sampled_from(places)) if row.zero_stage == 3 else "none",
        pin_memory=draw(st.booleans()),
    )


@st.composite
def checkpointings(draw: st.DrawFn, model: Model) -> Checkpointing:
    """What a checkpoint may keep, for models in which it can be told."""
    family = FAMILIES[model.family]
    if family.opaque or family.encodes:
        return Checkpointing()
    policies = [name for name in POLICIES if name != "core-attention" or model.heads]
    return Checkpointing(policy=draw(st.sampled_from(policies)), one_in=draw(st.integers(1, 3)))


@st.composite
def losses(draw: st.DrawFn, device: str, tokens: int, scaled: bool) -> Loss:
    """Every form of the loss, whole or in chunks."""
    form = draw(st.sampled_from(LOSS_FORMS if device == "cuda" else ("plain", "compiled")))
    chunks = 0 if form == "cut" else draw(st.sampled_from([0, 0, *range(1, min(tokens, 4) + 1)]))
    chunk_head = bool(chunks) and form != "fused-linear" and not scaled and draw(st.booleans())
    return Loss(
        form=form, chunks=chunks, chunk_head=chunk_head, vocab_multiple=draw(st.sampled_from([1, 64])),
        shift_copy=form not in ("fused-linear", "cut") and not chunks and draw(st.booleans()),
        float32_output=form not in ("fused-linear", "cut") and not chunk_head and draw(st.booleans()),
        converted=form not in ("fused-linear", "cut") and not chunk_head and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def updates(draw: st.DrawFn, optimizer: Optimizer, gradients_wait: bool) -> Update:
    """Decay, clipping and averages; where ``gradients_wait`` for nothing, also the step inside backward."""
    in_backward = not gradients_wait and optimizer.rest is None and optimizer.name != "lbfgs" and draw(st.booleans())
    return Update(
        l2=not optimizer.decoupled and draw(st.booleans()),
        clip=not in_backward and draw(st.booleans()),
        ema=draw(st.sampled_from(["none", "none", "weights", "float32"])),
        in_backward=in_backward,
    )
