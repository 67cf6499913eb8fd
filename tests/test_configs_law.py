"""The law of launch files: what is written is read back to the same plan, and what a format cannot say is refused."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memcalc.cli.recommend import EMITTED as OFFERED
from memcalc.configs import apply, read, settle
from memcalc.configs.emit import EMITTED
from memcalc.configs.write import FORMATS, leaves, suited, write
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import MemcalcError, PlanError
from memcalc.fsdp import Fsdp
from memcalc.hyperparameters import read_coefficients
from memcalc.layout import Layout
from memcalc.models import MODELS
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.rates import schedule_text
from memcalc.startup import Startup
from memcalc.training import Training
from memcalc.update import Update
from tests.plans import deepspeeds, plans

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
# Given to the launcher, not to the file.
BESIDE = ("ranks", "layout.tensor", "layout.context", "layout.pipeline", "device")


def again(plan: Plan, format: str) -> Plan:
    """What the file of a plan says, beside what the format leaves to the training script and its launcher."""
    row = FORMATS[format]
    said, values = row.says(plan), leaves(plan)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / row.file
        path.write_text(write(plan, format).text)
        found = settle(read(path), {name: values[name] for name in BESIDE if name not in said}, plan.model)
    bare = leaves(Plan(model=plan.model, tokens=plan.tokens, micro_batch=plan.micro_batch))
    fields = {name: bare[name] for name in said} | found.fields
    if "micro_batch" not in said or not plan.micro_batch:
        fields["micro_batch"] = plan.micro_batch
    result: Plan = apply(plan, fields)
    return result


@QUICK
@given(plans(), st.sampled_from(list(FORMATS)))
def test_any_plan_is_read_back_or_refused_in_words(plan: Plan, format: str) -> None:
    plan, _ = suited(plan, format)
    try:
        write(plan, format)
    except PlanError as error:
        assert "cannot say" in str(error) or "accelerate takes DDP" in str(error)
        return
    assert again(plan, format) == plan


def drawn(draw: st.DrawFn, **fields: Any) -> Plan:
    model = draw(st.sampled_from([MODELS[name] for name in ("gpt2", "llama-tiny", "bert-tiny", "resnet-tiny")]))
    tokens = 16 if model.context else 0
    try:
        return Plan(model=model, tokens=tokens, micro_batch=draw(st.integers(1, 4)), **fields)
    except MemcalcError:
        assume(False)
        raise


@st.composite
def of_the_fsdp_file(draw: st.DrawFn) -> Plan:
    checkpoint = draw(st.integers(0, 1))
    device = draw(st.sampled_from(["cuda", "cpu"]))
    place = draw(st.sampled_from(["none", "cpu"])) if device == "cuda" else "none"
    strategy = draw(st.sampled_from(["fsdp-full-shard", "fsdp-no-shard"]))
    return drawn(
        draw, strategy=strategy, ranks=2 * draw(st.integers(1, 8)), device=device, checkpoint_every=checkpoint,
        precision=draw(st.sampled_from(["fp32", "amp-bf16", "amp-fp16", "fp16"])),
        reentrant=bool(checkpoint) and draw(st.booleans()),
        offload=Offload(optimizer=place, parameters=place) if strategy == "fsdp-full-shard" else Offload(),
        accumulation=draw(st.integers(1, 3)),
    )  # fmt: skip


@st.composite
def of_deepspeed(draw: st.DrawFn) -> Plan:
    stage = draw(st.integers(0, 3))
    optimizer, kinds = draw(st.sampled_from([
        ("adamw", ("fused", "foreach", "for-loop")), ("adam", ("fused", "foreach", "for-loop")), ("adagrad", ("foreach", "fused")),
        ("sgd-momentum", ("foreach", "for-loop")), ("sgd-nesterov", ("fused",)), ("nadam", ("foreach", "for-loop")),
    ]))  # fmt: skip
    places = ["none", "cpu", "nvme"] if stage == 3 else ["none", "cpu"] if stage else ["none"]
    offload = Offload(
        optimizer=draw(st.sampled_from(places)) if optimizer in ("adam", "adamw") else "none",
        parameters=draw(st.sampled_from(places)) if stage == 3 else "none",
    )
    if offload.on:
        offload = dataclasses.replace(offload, pin_memory=draw(st.booleans()))
    if offload.parameters == "nvme":
        offload = dataclasses.replace(offload, max_in_cpu=draw(st.sampled_from([0, 10**9])), parameter_buffers=3)
    return drawn(
        draw, strategy=f"deepspeed-{stage}", ranks=draw(st.integers(1, 8)), optimizer=optimizer, offload=offload,
        precision=draw(st.sampled_from(["fp32", "bf16-master", "fp16-master"])), optimizer_kind=draw(st.sampled_from(kinds)),
        accumulation=draw(st.integers(1, 3)), update=Update(clip=draw(st.booleans()), l2=optimizer != "adamw" and draw(st.booleans())),
        deepspeed=dataclasses.replace(draw(deepspeeds(f"deepspeed-{stage}")), flatten="device"),
    )  # fmt: skip


@st.composite
def of_accelerate(draw: st.DrawFn) -> Plan:
    kind = draw(st.sampled_from(["ddp", "fsdp", "deepspeed"]))
    common = {"ranks": 2 * draw(st.integers(1, 4)), "nodes": draw(st.sampled_from([1, 2]))}
    if kind == "deepspeed":
        stage = draw(st.integers(0, 3))
        return drawn(
            draw, strategy=f"deepspeed-{stage}", precision=draw(st.sampled_from(["fp32", "bf16-master", "fp16-master"])),
            accumulation=draw(st.integers(1, 3)), update=Update(clip=draw(st.booleans())),
            offload=Offload(optimizer=draw(st.sampled_from(["none", "cpu"])) if stage else "none"),
            startup=Startup(build=draw(st.sampled_from(["shards", "whole"])) if stage == 3 else "shards"), **common,
        )  # fmt: skip
    common["precision"] = draw(st.sampled_from(["fp32", "amp-bf16", "amp-fp16"]))
    if kind == "ddp":
        return drawn(draw, strategy="ddp", device=draw(st.sampled_from(["cuda", "cpu"])), **common)
    version = draw(st.sampled_from(["1", "2"]))
    names = ["fsdp-full-shard", "fsdp-shard-grad-op"] + ["fsdp-hybrid-shard", "fsdp-no-shard"] * (version == "1")
    strategy, place = draw(st.sampled_from(names)), draw(st.sampled_from(["none", "cpu"]))
    free = version == "1" and strategy != "fsdp-no-shard"
    fsdp = Fsdp(
        version=version, reduce_dtype="weights" if common["precision"] == "fp32" or strategy == "fsdp-no-shard" else "compute",
        backward_prefetch=draw(st.sampled_from(["pre", "post", "none"])) if free else "pre",
        forward_prefetch=free and draw(st.booleans()), original_parameters=not free or draw(st.booleans()),
    )  # fmt: skip
    offload = Offload(optimizer=place, parameters=place) if strategy != "fsdp-no-shard" else Offload()
    return drawn(
        draw, strategy=strategy, fsdp=fsdp, offload=offload, checkpoint_every=draw(st.integers(0, 1)), **common
    )


@QUICK
@given(st.data())
@pytest.mark.parametrize(
    ("format", "drawing"),
    [("fsdp", of_the_fsdp_file()), ("deepspeed", of_deepspeed()), ("accelerate", of_accelerate())],
)
def test_what_a_format_can_say_is_read_back(format: str, drawing: st.SearchStrategy[Plan], data: st.DataObject) -> None:
    plan = data.draw(drawing)
    assert again(plan, format) == plan


@pytest.mark.parametrize(
    ("format", "field", "fields"),
    [
        ("fsdp", "precision bf16", {"precision": "bf16"}),
        ("fsdp", "strategy fsdp-shard-grad-op", {"strategy": "fsdp-shard-grad-op"}),
        ("fsdp", "every 2 blocks", {"checkpoint_every": 2}),
        ("fsdp", "nodes 2", {"nodes": 2}),
        ("fsdp", "layout pipeline 2", {"layout": Layout(pipeline=2)}),
        ("deepspeed", "strategy fsdp-full-shard", {}),
        ("deepspeed", "precision fp32", {"strategy": "ddp", "precision": "fp32"}),
        ("accelerate", "strategy zero-1", {"strategy": "zero-1"}),
        ("accelerate", "precision bf16", {"precision": "bf16"}),
        ("accelerate", "fsdp reduce dtype weights; it would be read as compute", {"precision": "amp-bf16"}),
        ("accelerate", "layout tensor 2", {"layout": Layout(tensor=2), "fsdp": Fsdp(version="1")}),
        ("accelerate", "fsdp-hybrid-shard with FSDP 2 but for a number of copies", {"strategy": "fsdp-hybrid-shard"}),
        ("accelerate", "deepspeed sub group size 5", {"strategy": "deepspeed-3", "deepspeed": DeepSpeed(sub_group_size=5)}),
    ],
)  # fmt: skip
def test_what_a_format_cannot_say_is_named(format: str, field: str, fields: dict[str, Any]) -> None:
    plan = Plan(
        **{"model": MODELS["gpt2"], "tokens": 64, "micro_batch": 1, "ranks": 4, "strategy": "fsdp-full-shard"} | fields
    )
    with pytest.raises(PlanError, match="cannot say") as caught:
        write(plan, format)
    if not (format == "deepspeed" and "precision" in field):
        assert field in str(caught.value)


def test_what_is_left_to_the_script_is_listed() -> None:
    plan = Plan(
        model=MODELS["gpt2"], tokens=64, micro_batch=2, strategy="deepspeed-2", keep_logits=True, checkpoint_every=1
    )
    assert write(plan, "deepspeed").left == ("tokens 64", "checkpoint every 1", "keep logits true")
    assert write(plan, "deepspeed", Training(learning_rate=1e-4)).text.count("0.0001") == 1


def test_the_command_offers_every_format() -> None:
    assert OFFERED == EMITTED


@pytest.mark.parametrize("format", ["fsdp", "deepspeed", "accelerate"])
def test_how_to_train_is_read_back_where_the_format_says_it(format: str, tmp_path: Path) -> None:
    schedule = schedule_text("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 7, "warmup_type": "linear"})
    numbers = '{"weight_decay": 0.25, "betas": [0.5, 0.75]}'
    training = Training(learning_rate=0.25, clip=2.5, checkpoint_every=9, schedule=schedule, coefficients=numbers)
    strategy = "fsdp-full-shard" if format == "fsdp" else "deepspeed-1"
    plan = Plan(model=MODELS["gpt2"], tokens=64, micro_batch=2, strategy=strategy, update=Update(clip=format != "fsdp"))
    path = tmp_path / FORMATS[format].file
    path.write_text(write(plan, format, training).text)
    said = {
        "fsdp": {"checkpoint_every": 9, "out": "./checkpoints"},
        "deepspeed": {"learning_rate": 0.25, "clip": 2.5, "schedule": schedule, "coefficients": numbers},
        "accelerate": {"clip": 2.5},
    }
    found = dict(read(path).training)
    again = [read_coefficients(each.pop("coefficients", "{}")) for each in (found, said[format])]  # type: ignore[attr-defined]
    assert (found, again[0]) == (said[format], again[1])
