"""Whatever a plan says of a model, its torch twin has, or the plan is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from memcalc.errors import MemcalcError
from memcalc.models import FAMILIES, MODELS, Model
from memcalc.plan import Plan
from tests.trainers.families import SMALL
from trainers.models import build

TRAINED = {**SMALL, "gpt2": MODELS["gpt2-tiny"], "llama": MODELS["llama-tiny"], "mlp": MODELS["mlp-tiny"]}
WORDS: dict[str, tuple[object, ...]] = {
    "biases": (("qkv",), ("out",), ("mlp",), ("head",), ("norm",)),
    "capped": (("attention",), ("logits",)),
    "dense_layers": ((0,),),
    "head": ("pretraining", "tokens", "spans", "replaced", "pooled", "bare"),
    "norm": ("rms", "layer"),
    "positions": ("rotary", "learned", "alibi"),
    "scaled": (("embedding",), ("residual",), ("logits",)),
    "stages": ((1, 1),),
}


def changed(model: Model) -> Iterator[tuple[str, Plan]]:
    """The model with one field after the other said otherwise, as far as a plan takes it."""
    family = FAMILIES[model.family]
    for field in family.fields:
        said = getattr(model, field)
        if not isinstance(said, int) and field not in WORDS:
            continue
        whole = (2 * said, said // 2) if isinstance(said, int) and said else (16, 64)
        numbers = (not said,) if isinstance(said, bool) else whole
        for other in WORDS.get(field, numbers):
            tokens = 8 if family.reads == "tokens" else 0
            try:
                varied = replace(model, **{field: other})  # type: ignore[arg-type]
                yield f"{field} {other}", Plan(model=varied, tokens=tokens, micro_batch=1, device="cpu")
            except MemcalcError:
                continue


@pytest.mark.parametrize("name", TRAINED)
def test_each_field_is_built_or_refused(name: str) -> None:
    built = 0
    for said, plan in changed(TRAINED[name]):
        if not plan.untrained:
            shapes = [tuple(each.shape) for each in build(plan).parameters()]
            assert shapes == [weight.shape for weight in plan.weights], said
            built += 1
    assert built >= 4
