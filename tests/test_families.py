"""What the families say about themselves: what they refuse, and how much they compute."""

from __future__ import annotations

import dataclasses
import json

import pytest

from memcalc.errors import FileError, InputError, PlanError
from memcalc.estimate import estimate
from memcalc.models import FAMILIES, MODELS, Model, Module
from memcalc.plan import Plan

MOE, T5, RESNET = (MODELS[name] for name in ("mixtral-8x7b", "t5-base", "resnet-18"))


OTHER = {int: 3, bool: True, float: 0.5, str: "other", tuple: ("other",)}
EVERY = {
    **{
        MODELS[name].family: MODELS[name]
        for name in ("gpt2", "mlp", "llama-3-8b", "opt-125m", "bert-base", "vit-base-16")
    },
    **{model.family: model for model in (MOE, T5, RESNET, MODELS["megatron-1.3b"])},
    "size": Model(name="size", family="size", parameters=10**6),
}


@pytest.mark.parametrize("family", EVERY)
def test_what_a_family_does_not_read_is_refused_by_name(family: str) -> None:
    model = EVERY[family]
    tokens = 32 if FAMILIES[family].reads == "tokens" else 0
    plan = Plan(model=model, tokens=tokens, micro_batch=1)
    read = {"name", "family", "dropout", "notes", "uncounted", *FAMILIES[family].fields}
    fields = {field.name: field for field in dataclasses.fields(Model)}
    assert read <= set(fields)
    for name in sorted(set(fields) - read):
        others = {
            "module": Module(factory="a:b"),
            "vision": MODELS["vit-base-16"],
            "dense_layers": (1,),
            "stages": (1,),
            "widths": (1,),
        }
        said = others[name] if name in others else OTHER[type(fields[name].default)]
        with pytest.raises(
            PlanError, match=rf"^model {model.name}: {name} .* says nothing of the family {family}; leave it out$"
        ):
            dataclasses.replace(plan, model=dataclasses.replace(model, **{name: said}))


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("gpt2", {"positions": "rotary"}, "positions 'rotary' says nothing of the family gpt2; leave it out"),
        ("gpt2", {"experts": 4}, "experts 4 says nothing of the family gpt2"),
        ("bert-base", {"activation": "tanh"}, "unknown model bert-base: activation 'tanh'; known: gelu, relu"),
        ("bert-base", {"head": "pooled", "classes": 3}, "model bert-base: 3 classes, but its head is pooled"),
        ("mixtral-8x7b", {"top_k": 9}, "each token takes 9 experts, but there are 8"),
        ("mixtral-8x7b", {"experts": 0}, "experts 0 must be at least 1"),
        ("vit-base-16", {"patch": 15}, "patches of 15 do not divide an image of 224"),
        ("vit-base-16", {"image": 112}, "150528 features are not 3 x 112 x 112"),
        ("resnet-18", {"stages": ()}, r"stages \[\] must be numbers of blocks, each at least 1"),
        ("resnet-18", {"stages": (2, 0)}, r"stages \[2, 0\] must be numbers of blocks"),
        ("resnet-18", {"stages": (10**6,)}, "must be a slip"),
        ("t5-base", {"buckets": 0}, "buckets 0 must be at least 1"),
        ("t5-base", {"kv_heads": 6}, "6 key/value heads, but t5 has one for each of its 12 heads"),
        ("bert-base", {"tied": False}, "tied is false, but the head of bert is the token embedding itself"),
        ("mixtral-8x7b", {"dense_layers": (0, 1)}, "blocks 0, 1 have no experts; give dense_ffn, their MLP's width"),
        ("mixtral-8x7b", {"shared_gate": True}, "a gate of the shared expert, but there is none; give shared_ffn"),
        ("mixtral-8x7b", {"embedding_dim": 8}, "embedding_dim 8 says nothing of the family moe"),
        ("mixtral-8x7b", {"biases": ("mlp",)}, "a bias of mlp is for the family decoder; moe has only qkv and out"),
        ("mixtral-8x7b", {"q_lora": 8}, "q_lora and value_dim are of latent attention, which needs kv_lora"),
        ("mixtral-8x7b", {"kv_lora": 8}, "head_dim 0 must be at least 1"),
        ("llama-3-8b", {"norm_after": True}, "norm_after True says nothing of the family llama; leave it out"),
        ("opt-125m", {"norm_after": True, "side_by_side": 1}, "norm after needs attention and MLP one after the other"),
        ("opt-125m", {"fused_gate_up": True}, "fused gate and up, but its MLP has no gate"),
        ("t5-base", {"heads": 7}, "7 heads do not divide hidden 768"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(base: str, changes: dict[str, object], message: str) -> None:
    model = dataclasses.replace(MODELS[base], **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        Plan(model=model, tokens=model.context, micro_batch=1)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("vit-base-16", {"tokens": 8}, "reads images, not tokens"),
        ("vit-base-16", {"micro_batch": 0}, "micro batch 0 must be at least 1"),
        ("resnet-18", {"dropout": 0.1}, "the resnet family has none"),
        ("resnet-18", {"attention": "math"}, "the resnet family has none"),
        ("mixtral-8x7b", {"dropout": 0.1}, "the moe family has none"),
        ("bert-base", {"tokens": 513}, "513 tokens are more than the 512 positions"),
        ("t5-base", {"attention": "efficient"}, "t5 adds a learned bias to its scores"),
        ("t5-base", {"checkpoint_every": 1, "reentrant": True}, "two streams"),
        ("t5-base", {"checkpoint_every": 5}, "5 blocks do not divide the 12 encoder layers"),
    ],
)
def test_plans_a_family_cannot_follow_are_refused(model: str, changes: dict[str, object], message: str) -> None:
    fields = {"model": MODELS[model], "tokens": MODELS[model].context, "micro_batch": 1, **changes}
    with pytest.raises(PlanError, match=message):
        Plan(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [[2, "2"], [2.5], "2222", 4])
def test_stages_are_read_as_whole_numbers(stages: object) -> None:
    data = json.loads(Plan(model=RESNET, micro_batch=1).to_json())
    data["model"]["stages"] = stages
    with pytest.raises(FileError, match="which is not a list, each of it a whole number"):
        Plan.from_json(json.dumps(data))


# torchvision's documentation of its models, column GFLOPS, which counts multiplications; attention included.
PRODUCTS = {
    "resnet-18": 1.81, "resnet-34": 3.66, "resnet-50": 4.09, "resnet-101": 7.80, "resnet-152": 11.51,
    "vit-base-16": 17.56, "vit-large-16": 61.55,
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_multiplications_of_one_image(name: str) -> None:
    model = MODELS[name]
    family = FAMILIES[model.family]
    products = sum(weight.numel * family.rows(model, 0, weight) for weight in family.weights(model))
    attention = 2 * model.hidden * sum(family.pairs(model, 0))
    assert (products + attention) / 1e9 == pytest.approx(PRODUCTS[name], abs=0.006)


def test_a_token_meets_the_active_parameters_of_mixtral() -> None:
    """12,879,925,248 of Mixtral 8x7B's parameters are active: all but six of eight experts (Jiang et al. 2024: 13B)."""
    family = FAMILIES["moe"]
    shares = [(weight.numel, family.rows(MOE, 4, weight) / 4) for weight in family.weights(MOE)]
    assert sum(numel * (share or 1) for numel, share in shares) == 12_879_925_248


def test_what_families_take_for_granted_is_said() -> None:
    said = estimate(Plan(model=MOE, tokens=64, micro_batch=1)).assumptions
    assert any("experts are loaded evenly" in line for line in said)
    assert "attention by the eager kernel" in estimate(Plan(model=T5, tokens=64, micro_batch=1)).assumptions


def test_a_resnet_keeps_pixels_by_the_square() -> None:
    """Beside the statistics of batch norms and the loss, which do not depend on the size of an image."""

    def kept(image: int) -> int:
        model = dataclasses.replace(RESNET, image=image, features=3 * image**2)
        return estimate(Plan(model=model, micro_batch=4, device="cpu")).timeline.at_moment("loss", "activations")

    assert kept(512) - kept(256) == 4 * (kept(256) - kept(128))
