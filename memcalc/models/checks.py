"""Rules that numbers of a model must keep, shared by the families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import PlanError, UnknownNameError
from memcalc.spec import Model

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = [
    "activation_is", "causal_mask", "full_heads", "head_is_tied", "heads_divide", "no_attention", "no_dropout", "positive",
    "reads_images", "reads_tokens",
]  # fmt: skip


def positive(model: Model, *fields: str) -> None:
    for field in fields:
        if getattr(model, field) < 1:
            raise PlanError(f"model {model.name}: {field} {getattr(model, field)} must be at least 1")


def activation_is(model: Model, *known: str) -> None:
    """What an MLP applies is one of those, or left to the family."""
    if model.activation and model.activation not in known:
        raise UnknownNameError(f"model {model.name}: activation", model.activation, known)


def heads_divide(model: Model) -> None:
    """Heads share the hidden width evenly, unless they have one of their own; key/value heads serve query heads evenly."""
    if model.hidden % model.heads and not model.head_dim:
        raise PlanError(f"model {model.name}: {model.heads} heads do not divide hidden {model.hidden}")
    if model.kv_heads and model.heads % model.kv_heads:
        raise PlanError(f"model {model.name}: {model.kv_heads} key/value heads do not divide {model.heads} heads")


def reads_tokens(model: Model, plan: Plan, *, limited: bool = True) -> None:
    """A token model needs at least one sample, and a sequence length, which its positions may limit."""
    if plan.micro_batch < 1:
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1")
    if plan.tokens < 1:
        raise PlanError(f"tokens {plan.tokens}: {model.name} reads tokens; give the sequence length")
    most = model.context - model.position_offset
    if limited and plan.tokens > most:
        raise PlanError(
            f"{plan.tokens} tokens are more than the {most} positions of model {model.name!r}; for one with more of them: "
            f"--context {plan.tokens + model.position_offset}"
        )


def reads_images(model: Model, plan: Plan) -> None:
    """An image model needs square images of its size, and at least one."""
    if plan.micro_batch < 1:
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1")
    if plan.tokens:
        raise PlanError(f"tokens {plan.tokens}: {model.name} reads images, not tokens")
    if model.features != model.channels * model.image**2:
        raise PlanError(
            f"model {model.name}: {model.features} features are not {model.channels} x {model.image} x {model.image}"
        )


def causal_mask(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    """Written-out attention keeps one mask for all layers and steps."""
    return [("causal mask", (plan.tokens, plan.tokens), "bool")] if plan.kernel == "eager" else []


def no_dropout(model: Model, plan: Plan) -> None:
    if plan.dropout:
        raise PlanError(f"dropout {plan.dropout}: the {model.family} family has none; leave --dropout out")


def no_attention(model: Model, plan: Plan) -> None:
    if plan.attention != "auto":
        raise PlanError(f"attention {plan.attention}: the {model.family} family has none; leave --attention out")


def full_heads(model: Model) -> None:
    if model.kv_heads != model.heads:
        raise PlanError(
            f"model {model.name}: {model.kv_heads} key/value heads, but {model.family} has one for each of its "
            f"{model.heads} heads"
        )


def head_is_tied(model: Model, tied: bool) -> None:
    if model.tied != tied:
        how = "the token embedding itself" if tied else "a matrix of its own"
        raise PlanError(
            f"model {model.name}: tied is {str(model.tied).lower()}, but the head of {model.family} is {how}"
        )
