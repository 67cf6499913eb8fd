"""What makes a plan sound; each check raises PlanError with the numbers that clash."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc.catalog import Catalog
from memcalc.errors import PlanError, UnknownNameError, shorten
from memcalc.hardware import GPUS
from memcalc.kernels import chosen, refusal
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import KINDS, OPTIMIZERS
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES
from memcalc.units import things, undivided

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = [
    "ATTENTIONS", "DEVICES", "LOSSES", "MOST_LAYERS", "MOST_RANKS", "check_attention", "check_effects", "check_fields", "check_world", "name_exactly", "unheard",
]  # fmt: skip

MOST_RANKS = 10**6
"""Past it a number is a slip: the largest clusters have a few hundred thousand cards."""
MOST_LAYERS = 10**4
"""Past it a number is a slip, and a ledger would take minutes."""
DEVICES = ("cuda", "cpu")
LOSSES = ("float32", "logits")
ATTENTIONS = ("auto", "flash", "efficient", "math", "eager")

_CATALOGS: dict[str, Catalog[Any]] = {
    "strategy": STRATEGIES, "precision": PRECISIONS, "optimizer": OPTIMIZERS, "gpu": GPUS,
}  # fmt: skip

_OF_ALL = ("name", "family", "dropout", "notes", "uncounted")
"""Fields of a model that say something of any family."""
# trainers/models/module.py, loss_kind, and what a module returns itself.
_LOSSES_OF_MODULES = ("", "own", "cross-entropy", "mean-square", "mean-square of the output")


def name_exactly(plan: Plan) -> None:
    """Names as the catalogs have them, whatever case, spaces or alias they were given in: code compares them as they are."""
    for field, catalog in _CATALOGS.items():
        said = getattr(plan, field)
        if said is not None and (exact := catalog[said].name) != said:
            object.__setattr__(plan, field, exact)
    if (model := _named_exactly(plan.model)) is not plan.model:
        object.__setattr__(plan, "model", model)


def _named_exactly(model: Model) -> Model:
    vision = _named_exactly(model.vision) if model.vision is not None else None
    family = FAMILIES[model.family].name
    if (family, vision) == (model.family, model.vision):
        return model
    return dataclasses.replace(model, family=family, vision=vision)


@cache
def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(Model)}


@cache
def _unread(family: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a model that a family does not read, and what they are where nothing is said."""
    read = {*_OF_ALL, *FAMILIES[family].fields}
    return tuple((field, default) for field, default in _defaults().items() if field not in read)


def check_effects(plan: Plan) -> None:
    """No field of the model, nor of its vision tower, says something that its family does not read."""
    model = plan.model
    for part in (model, model.vision) if model.vision is not None else (model,):
        for field, default in _unread(part.family):
            if (value := getattr(part, field)) != default:
                raise PlanError(
                    f"model {part.name}: {field} {shorten(value)} says nothing of the family {part.family}; leave it out"
                )
    module = model.module
    if module.loss not in _LOSSES_OF_MODULES:
        raise UnknownNameError(f"model {model.name}: loss", module.loss, [name for name in _LOSSES_OF_MODULES if name])
    if module.wrap and not model.layers:
        raise PlanError(f"model {model.name}: wrap {shorten(module.wrap)}, but none of its weights is of a block")


def unheard(plan: Plan) -> list[str]:
    """What a plan says that changes nothing about it, in sentences: a file may, where the options would be refused."""
    said = []
    for name in ("bucket_mb", "bucket_views", "static_graph") if not plan.strategy_row.buckets else ():
        if getattr(plan, name) != type(plan).__dataclass_fields__[name].default:
            said.append(f"--{name.replace('_', '-')} is for DDP's buckets, not for strategy {plan.strategy}")
    for group in plan.groups:
        idle = group.idle(plan)
        for each in dataclasses.fields(group):  # type: ignore[arg-type]  # each kind of group is a dataclass
            if each.name in idle and getattr(group, each.name) != each.default:
                said.append(f"{each.metadata['option']} {idle[each.name]}")
    return said


def check_fields(plan: Plan) -> None:
    """Each field by itself."""
    for field in ("ranks", "nodes", "accumulation", "bucket_mb"):
        _at_least(field, getattr(plan, field), 1)
    for field in ("micro_batch", "tokens", "checkpoint_every"):
        _at_least(field, getattr(plan, field), 0)
    most = {
        "ranks": (plan.ranks, MOST_RANKS),
        "layers": (plan.model.layers, MOST_LAYERS),
        "bucket mb": (plan.bucket_mb, 10**6),
    }
    for field, (value, limit) in most.items():
        if value > limit:
            raise PlanError(f"{field} {value} must be at most {limit}")
    for field, share in {"dropout": plan.dropout, f"model {plan.model.name}: dropout": plan.model.dropout}.items():
        if not 0 <= share < 1:
            raise PlanError(f"{field} {share} must be at least 0 and below 1")
    choices = {"device": DEVICES, "attention": ATTENTIONS, "optimizer_kind": KINDS, "loss_dtype": LOSSES}
    for field, known in choices.items():
        if getattr(plan, field) not in known:
            raise UnknownNameError(field.replace("_", " "), getattr(plan, field), known)
    if plan.torch_version < (1, 10):
        raise PlanError(f"torch {plan.torch} is older than 1.10, the oldest version memcalc knows")
    _ = plan.allocator_options  # reading them refuses what cannot be read
    if plan.optimizer_kind not in plan.optimizer_row.kinds:
        kinds = ", ".join(plan.optimizer_row.kinds)
        raise PlanError(f"{plan.optimizer} has no {plan.optimizer_kind} form; it has: {kinds}")


def check_attention(plan: Plan) -> None:
    """A named kernel exists for the device, the card, the precision and the model's heads."""
    if plan.family.unplayed or plan.family.written_out or not plan.model.heads:
        return  # what they say of attention, their families refuse
    if why := refusal(plan.attention, plan.attends):
        instead = chosen(plan.attends)
        raise PlanError(f"attention {plan.attention}: {why}; take --attention {instead}")


def check_world(plan: Plan) -> None:
    """Ranks, strategy, precision and optimizer go together."""
    if plan.gpu and plan.device == "cpu":
        raise PlanError(f"gpu {plan.gpu} is named, but the device is the cpu; leave one of them out")
    if plan.ranks % plan.nodes:
        raise PlanError(f"{undivided(plan.ranks, 'rank')} over {things(plan.nodes, 'node')}")
    if plan.ranks > plan.layout.model_parallel and not plan.strategy_row.parallel:
        raise PlanError(
            f"strategy {plan.strategy} runs on {things(plan.layout.model_parallel, 'rank')}, not {plan.ranks}; for more take ddp or fsdp-full-shard"
        )
    if plan.precision_row.master and not plan.strategy_row.masters:
        keep = ", ".join(row.name for row in STRATEGIES.values() if row.masters)
        raise PlanError(f"strategy {plan.strategy} keeps no master copies ({plan.precision}); these do: {keep}")
    if plan.strategy_row.main_grads and not (plan.precision_row.master or plan.precision == "fp32"):
        raise PlanError(f"{plan.strategy} trains in fp32, bf16-master or fp16-master, not in {plan.precision}")
    row = plan.strategy_row
    whole = not (row.gathers or (row.main_grads and row.shards_optimizer) or row.zero_stage)
    if not whole and not plan.optimizer_row.shardable:
        raise PlanError(f"{plan.optimizer} cannot update the shards of {plan.strategy}; take adamw, or ddp")
    if plan.loss_dtype == "logits" and plan.precision_row.autocast and not plan.strategy_row.gathers:
        raise PlanError(f"{plan.precision}: autocast takes the loss in float32; leave out --loss-dtype logits")
    if plan.reentrant and not plan.checkpoint_every:
        raise PlanError("reentrant says how to checkpoint activations, but checkpointing is off")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise PlanError(f"{name.replace('_', ' ')} {value} must be at least {least}")
