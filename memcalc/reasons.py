"""Why a plan was chosen, in one sentence."""

from __future__ import annotations

from dataclasses import replace

from memcalc.checkpointing import Checkpointing
from memcalc.choosing import Field
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = ["FORMS", "Known", "why"]

# What each strategy sends in a step, which is what it costs in time.
_SENDS = {
    "single": "one rank, so nothing is sent",
    "ddp": "fits without sharding anything, so there are no gathers and only gradients are sent, once a step",
    "zero-1": "shards optimizer states only; the updated weights are sent after the step",
    "fsdp-no-shard": "fits without sharding anything; one flat gradient per block saves DDP's buckets",
    "fsdp-shard-grad-op": "shards everything; weights are gathered once a micro batch",
    "fsdp-full-shard": "shards everything; weights are gathered twice a micro batch",
    "fsdp-hybrid-shard-grad-op": "shards within groups of ranks; weights are gathered once a micro batch, within a group",
    "fsdp-hybrid-shard": "shards within groups of ranks; weights are gathered twice a micro batch, within a group",
}


FORMS = (
    "the loss is taken in chunks, so that logits are never whole",
    "the optimizer's step is one fused kernel, without temporaries",
    "states wait in host memory and cross the bus every step",
    "gradients are reduced after every micro batch, so that no rank keeps all of them whole",
)
"""What a reason says of how a plan is carried out, which is the same for every plan that has it."""


class Known:
    """What a search has found out that a reason may claim."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.owners = {_open(each.plan): number for number, each in enumerate(field.structures)}
        self.groups: dict[int, list[int]] = {}
        for group, owner in dict(zip(field.group.tolist(), field.owner.tolist(), strict=True)).items():
            self.groups.setdefault(owner, []).append(group)

    def plainer(self, plan: Plan) -> bool | None:
        """A plainer structure on the same ranks fits, or none does; None where not all were looked at or none is there."""
        rank, fits = _plainness(plan), []
        for number, each in enumerate(self.field.structures):
            if each.plan.ranks == plan.ranks and _plainness(each.plan) < rank:
                fits += [self._fits(group) for group in self.groups.get(number, ())]
        if any(fits):
            return True
        return None if not fits or None in fits else False

    def _fits(self, group: int) -> bool | None:
        return int(self.field.fitting[group]) >= 0 if self.field.known(group) else None

    def largest_without(self, plan: Plan) -> int | None:
        """The largest micro batch that fits without checkpointing, 0 when none does; None where it is not searched."""
        bare = replace(plan, checkpoint_every=0, checkpointing=Checkpointing(), reentrant=False)
        owner = self.owners.get(_open(bare))
        if owner is None:
            return None
        most = 0
        for group in self.groups[owner]:
            place = self.field.largest(group)
            most = max(most, self.field.groups[group].micro_batches[place] if place >= 0 else 0)
        return most


def _open(plan: Plan) -> tuple[object, ...]:
    """All of a plan but what varies in a structure."""
    return tuple(getattr(plan, name) for name in Plan.__slots__ if name not in ("micro_batch", "accumulation"))


def why(plan: Plan, known: Known) -> str:
    """One sentence on a plan of a search."""
    text = _SENDS.get(plan.strategy, plan.strategy_row.summary)
    if plan.data_parallel == 1 and plan.ranks > 1:
        text = "one copy of the model over all ranks, so no gradients are averaged"
    elif plan.ranks > 1 and plan.strategy_row.shards_optimizer:
        plainer = known.plainer(plan)
        if plainer:
            text = f"{text}; each rank updates only its share"
        elif plainer is False:
            text = f"the plainest that fits: {text}"
    return text + _on_layout(plan) + _on_checkpointing(plan, known) + _on_forms(plan) + _on_batch(plan)


def _plainness(plan: Plan) -> tuple[int, int, int]:
    return list(STRATEGIES).index(plan.strategy), plan.layout.model_parallel, plan.checkpoint_every


def _on_layout(plan: Plan) -> str:
    layout, said = plan.layout, ""
    if layout.tensor > 1:
        said += f"; matrix products are divided over {layout.tensor} ranks, which sum activations in every block"
    if layout.pipeline > 1:
        said += f"; layers are divided over {layout.pipeline} stages, which wait for each other at both ends of a step"
    return said


def _on_checkpointing(plan: Plan, known: Known) -> str:
    if not plan.checkpoint_every:
        return "; nothing is computed twice"
    without = known.largest_without(plan)
    if without and plan.micro_batch > without:
        return f"; checkpointing makes room for a micro batch of {plan.micro_batch} instead of {without}"
    if without == 0:
        return "; without checkpointing it does not fit"
    if plan.checkpointing.policy == "matrix-products":
        return "; checkpointing saves memory and computes half of the products and all between them twice"
    return "; checkpointing saves memory and computes the forward pass twice"


def _on_forms(plan: Plan) -> str:
    here = (plan.loss.chunk_head, plan.optimizer_kind == "fused", plan.offload.on, _syncs(plan))
    return "".join(f"; {said}" for said, there in zip(FORMS, here, strict=True) if there)


def _syncs(plan: Plan) -> bool:
    return plan.strategy_row.gathers and plan.fsdp.sync_every_micro_batch and plan.accumulation > 1


def _on_batch(plan: Plan) -> str:
    return f"; {plan.accumulation} micro batches make up a step" if plan.accumulation > 1 else ""
