"""What a block of CLIP, Whisper and LLaVA keeps, counted by hand, and parts that are frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from memcalc.adapters import Adapter
from memcalc.errors import MemcalcError
from memcalc.estimate import estimate
from memcalc.frozen import Frozen
from memcalc.fsdp import Fsdp
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS
from tests.figures import kept_by_a_layer, largest

TOWER = Model(
    name="tower", family="clip", layers=3, hidden=32, heads=4, kv_heads=4, ffn=96, image=32, channels=3, patch=8,
    features=3 * 32 * 32, activation="quick_gelu", head="pooled",
)  # fmt: skip
WHISPER = Model(
    name="whisper", family="whisper", layers=2, decoder_layers=2, hidden=32, heads=4, ffn=96, vocab=60, context=16,
    channels=8, encoder_tokens=20, tied=True,
)  # fmt: skip
LLAVA = Model(
    name="llava", family="llava", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=60, context=64,
    vision=dataclasses.replace(TOWER, head=""), vision_layers=2,
)  # fmt: skip
ROBERTA = dataclasses.replace(MODELS["bert-tiny"], name="roberta", types=1, position_offset=2, context=130)


def plan(model: Model, **fields: Any) -> Plan:
    tokens = {"whisper": 16, "llava": 32}.get(model.family, 0)
    return Plan(model=model, **{"tokens": tokens, "micro_batch": 1, "device": "cpu"} | fields)


def test_a_block_of_clip_keeps_quick_gelu_in_three_tensors() -> None:
    """Inputs and outputs of two norms, q, k, v and what attention makes; behind fc1 its output, a sigmoid, the product."""
    places, h, f, heads = 17, 32, 96, 4
    # Four statistics of norms and a logarithm for each head beside them.
    assert kept_by_a_layer(plan(TOWER)) == 4 * places * (8 * h + 3 * f + heads + 4)
    gelu = dataclasses.replace(TOWER, activation="gelu")
    assert kept_by_a_layer(plan(gelu)) == 4 * places * (8 * h + 2 * f + heads + 4)


def test_a_block_of_whispers_encoder_keeps_attention_twice() -> None:
    """Its queries lie head by head, and so does what attention makes, which the product after it gets as a copy."""
    tokens, h, f, heads = 20, 32, 96, 4
    assert kept_by_a_layer(plan(WHISPER)) == 4 * tokens * (9 * h + 2 * f + heads + 4)


def test_the_decoder_attends_to_all_positions_of_the_encoder() -> None:
    fewer, more = (
        ledger(plan(dataclasses.replace(WHISPER, decoder_layers=n, encoder_tokens=20))).at_moment("loss", "activations")
        for n in (2, 3)
    )
    tokens, long, h, f, heads = 16, 20, 32, 96, 4
    itself = 9 * h + heads  # as in the encoder, without its MLP and the second norm
    across = tokens * (5 * h + heads) + long * 2 * h  # norm, queries and both copies of the result; keys and values
    inside = tokens * (2 * h + 2 * f)
    norms = 6 * tokens
    assert more - fewer == 4 * (tokens * (itself - 2 * h) + across + inside + norms)


def test_written_out_the_decoder_has_a_score_for_each_position_of_the_encoder() -> None:
    """Scores, and what softmax makes of them, of 16 tokens and 20 or 40 positions; keys and values in two copies."""
    short, long = (
        ledger(plan(dataclasses.replace(WHISPER, layers=1, decoder_layers=1, encoder_tokens=n), attention="eager"))
        for n in (20, 40)
    )
    name = "decoder.layers.0.encoder_attn probabilities"
    sizes = [largest(timeline, name) for timeline in (short, long)]
    assert sizes == [4 * 4 * 16 * 20, 4 * 4 * 16 * 40]


def test_roberta_leaves_its_first_positions_out() -> None:
    assert Plan(model=ROBERTA, tokens=128, micro_batch=1).tokens == 128
    with pytest.raises(MemcalcError, match="129 tokens are more than the 128 positions of model 'roberta"):
        Plan(model=ROBERTA, tokens=129, micro_batch=1)


def test_frames_and_images_are_inputs() -> None:
    assert ledger(plan(WHISPER)).at_moment("forward", "inputs") == 2 * 16 * 8 + 4 * 8 * 40
    assert ledger(plan(LLAVA)).at_moment("forward", "inputs") == 2 * 32 * 8 + 4 * 3 * 32 * 32


def test_what_a_tower_returns_lives_until_the_loss() -> None:
    """The block that runs in vain with all it keeps, and its output; its input is kept by the block before."""
    timeline = ledger(plan(LLAVA))
    of_block = [index for index, name in enumerate(timeline.names) if name.startswith("vision.layers.2.")]
    mine = np.isin(timeline.ident, of_block) & (timeline.category == CATEGORIES.index("activations"))

    def alive(moment: str) -> int:
        before = np.flatnonzero(timeline.moment == MOMENTS.index(moment))[0]
        return int(timeline.delta[:before][mine[:before]].sum())

    assert alive("loss") == 4 * 17 * (8 * 32 + 3 * 96 + 4 + 4)
    assert alive("backward") == 0


@pytest.mark.parametrize(
    ("parts", "names"), [("vision", ("vision.",)), ("vision, projector", ("vision.", "projector."))]
)
def test_frozen_parts_have_neither_gradients_nor_states(parts: str, names: tuple[str, ...]) -> None:
    whole, some = estimate(plan(LLAVA)), estimate(plan(LLAVA, frozen=Frozen(parts=parts)))
    still = sum(weight.numel for weight in whole.plan.weights if weight.trainable and weight.name.startswith(names))
    assert whole.parameters - some.parameters == still > 0
    held = [each.timeline.at_moment("step", "optimizer") for each in (whole, some)]
    steps = sum(weight.trainable and weight.name.startswith(names) for weight in whole.plan.weights)
    assert held[0] - held[1] == 2 * 4 * still + 4 * steps
    kept = [each.timeline.at_moment("backward", "activations") for each in (whole, some)]
    assert kept[1] < kept[0]


def test_a_frozen_norm_in_python_keeps_its_input_alone() -> None:
    """The product with a weight that gets no gradient needs no factor: 4 B for each element of two norms a block."""
    text = {"implementation": Implementation(norm="python"), "attention": "auto"}
    parts = Frozen(parts="vision,embed_tokens,layers,norm,lm_head")
    tokens, h, f, heads = 32, 32, 64, 4
    kept = kept_by_a_layer(plan(LLAVA, frozen=parts, **text))
    # Of each norm the input and a statistic; q, k, v, and what attention makes with its logarithms; gate, its SiLU, up.
    assert kept == 4 * tokens * (2 * (h + 1) + 4 * h + heads + 3 * f)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"frozen": Frozen(parts="visoin")}, "unknown part to freeze 'visoin'; did you mean 'vision'"),
        (
            {"frozen": Frozen(parts="vision,projector,embed_tokens,layers,norm,lm_head")},
            "nothing of llava would be trained",
        ),
        ({"frozen": Frozen(parts="vision"), "adapter": Adapter(kind="lora")}, "adapters freeze all but themselves"),
        (
            {"frozen": Frozen(parts="vision"), "strategy": "fsdp-full-shard", "ranks": 2, "fsdp": Fsdp(version="1")},
            "FSDP 1 wants all or nothing of a unit trained",
        ),
        ({"frozen": Frozen(parts="vision"), "strategy": "megatron-distributed", "ranks": 2}, "leave one out"),
    ],
)
def test_what_cannot_be_frozen_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(MemcalcError, match=said):
        plan(LLAVA, **fields)


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "fsdp-full-shard", "deepspeed-2", "deepspeed-3"])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
def test_llava_runs_under_every_kind_of_strategy(strategy: str, precision: str) -> None:
    if strategy.startswith("deepspeed") and precision != "fp32":
        precision = "bf16-master"
    for checkpoint_every in (0, 1):
        made = plan(
            LLAVA, strategy=strategy, ranks=2, checkpoint_every=checkpoint_every, device="cuda", micro_batch=2,
            precision=precision, frozen=Frozen(parts="vision"),
        )  # fmt: skip
        timeline = ledger(made)
        live = timeline.live()
        assert (live >= 0).all()
        assert timeline.peak().bytes > 0
        assert Plan.from_json(made.to_json()) == made


def test_other_kinds_of_checkpoint_are_refused() -> None:
    with pytest.raises(MemcalcError, match="has two kinds; take full"):
        plan(LLAVA, checkpoint_every=2)
    with pytest.raises(MemcalcError, match="leave --reentrant out"):
        plan(LLAVA, checkpoint_every=1, reentrant=True)
    with pytest.raises(MemcalcError, match="a vision tower of its own"):
        dataclasses.replace(LLAVA, vision=LLAVA)
