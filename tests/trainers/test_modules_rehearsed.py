"""Modules of one's own, rehearsed: against real runs on the CPU, and against what autograd was seen to save."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memcalc.compare import exact
from memcalc.measurement import RankMeasurement
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS
from tests.own_modules import Sequences
from tests.trainers.metered import metered
from tests.trainers.runs import Job, run, some
from tests.trainers.test_module_code import numel
from trainers import module
from trainers.rehearsal.run import STEPS, rehearse
from trainers.rehearsal.tracer import Tracer

TESTS = Path(__file__).parents[1]
MIB = 2**20


def planned(name: str, *, file: str = "own_modules.py", sample: str = "", wrap: str = "", **fields: Any) -> Plan:
    shape, tokens = fields.pop("shape", ()), fields.get("tokens", 0)
    sample = sample and f"{TESTS / file}:{sample}"
    model = module.describe(f"{TESTS / file}:{name}", sample=sample, wrap=wrap, shape=shape, tokens=tokens)
    return Plan(model=model, **{"micro_batch": 4, "optimizer_kind": "for-loop", **fields})


def test_real_runs_take_what_their_rehearsals_say(tmp_path: Path) -> None:
    """Two ranks under gloo, metered to the byte; in float32, for which oneDNN takes no scratch memory of its own."""
    plans = {
        "fsdp-checkpointed": planned(
            "Stack", sample="samples", strategy="fsdp-shard-grad-op", ranks=2, device="cpu", checkpoint_every=1
        ),
        "fsdp-wrapped": planned("Stack", shape=(12,), wrap="Linear", strategy="fsdp-full-shard", ranks=2, device="cpu"),
        "fsdp": planned("Stack", shape=(12,), strategy="fsdp-full-shard", ranks=2, device="cpu"),
        "ddp-tied": planned("Tied", tokens=8, strategy="ddp", ranks=2, device="cpu"),
        "ddp-recurrent": planned("Recurrent", shape=(8,), strategy="ddp", ranks=2, device="cpu", accumulation=2),
        "zero-1": planned("Losing", sample="losing_samples", strategy="zero-1", ranks=2, device="cpu"),
    }
    chosen = some(plans)
    measured = run({name: Job(plan, steps=2, measure_steps=2) for name, plan in chosen.items()}, 2, tmp_path)
    for name, plan in chosen.items():
        rehearsed, real = rehearse(plan), measured[name].ranks[0]
        assert rehearsed.allocated_peak == pytest.approx(real.allocated_peak, rel=0.01), name
        for category in ("parameters", "gradients", "optimizer"):
            of_all = max(getattr(rank, category) for rank in measured[name].ranks)
            assert exact(plan, category) == of_all, (name, category)


def saved(measured: RankMeasurement) -> float:
    """MiB of activations and inputs alive when backward begins."""
    step = measured.timeline
    assert step is not None
    before = slice(0, int(np.flatnonzero(step.moment == MOMENTS.index("backward"))[0]))
    kinds = [CATEGORIES.index(name) for name in ("activations", "inputs")]
    return float(step.delta[before][np.isin(step.category[before], kinds)].sum()) / MIB


# What torch.autograd.graph.saved_tensors_hooks saw of one forward pass with its loss, each storage once and weights left
# out; batch 32 of 224 x 224 pictures, and 8.
@pytest.mark.parametrize(
    ("name", "batch", "parameters", "expected"),
    [
        ("resnet_50", 32, 25_557_032, {"fp32": 2622.0, "bf16": 1335.6}),
        ("VisionTransformer", 8, 86_567_656, {"bf16": 451.3}),
    ],
)
def test_published_architectures_keep_what_they_were_seen_to_keep(
    name: str, batch: int, parameters: int, expected: dict[str, float]
) -> None:
    plan = planned(name, file="own_pictures.py", shape=(3, 224, 224), micro_batch=batch)
    assert numel(plan.model) == parameters
    for precision, mib in expected.items():
        assert saved(rehearse(dataclasses.replace(plan, precision=precision))) == pytest.approx(mib, rel=0.001)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {"bf16": 772.7, "amp-bf16": 1071.3, "fp32": 1138.7}),
        ("bert", {"bf16": 340.3, "amp-bf16": 732.6, "fp32": 666.5}),
    ],
)
def test_models_of_transformers_keep_what_they_were_seen_to_keep(name: str, expected: dict[str, float]) -> None:
    """Batch 4, sequence 512, dropout 0.1, labels given; found in the same way."""
    pytest.importorskip("transformers")
    plan = planned(name, file="own_transformers.py", tokens=512)
    assert plan.model.module.arguments == ("input_ids", "labels")
    for precision, mib in expected.items():
        assert saved(rehearse(dataclasses.replace(plan, precision=precision))) == pytest.approx(mib, rel=0.001)


def test_adapters_of_peft_are_the_only_ones_trained() -> None:
    pytest.importorskip("peft")
    plan = planned("lora", file="own_transformers.py", tokens=16, device="cpu")
    trained = [weight for weight in plan.weights if weight.trainable]
    assert all(".lora_" in weight.name for weight in trained)
    found = rehearse(plan)
    assert found.gradients == exact(plan, "gradients") == 4 * sum(weight.numel for weight in trained)
    assert found.optimizer == exact(plan, "optimizer")


def test_a_type_that_only_transformers_knows_is_its_module_on_the_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    said = {
        "model_type": "olmo", "architectures": ["OlmoForCausalLM"], "vocab_size": 256, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "code--of.Repository"}, "quantization_config": {"bits": 4},
    }  # fmt: skip
    path.write_text(json.dumps(said))
    model = module.describe(str(path), sample="", wrap="", shape=(), tokens=16)
    config = transformers.OlmoConfig(**{key: said[key] for key in list(said)[2:8]})
    real = transformers.OlmoForCausalLM(config)
    expected = [(name, tuple(weight.shape)) for name, weight in real.named_parameters()]
    assert [(weight.name, weight.shape) for weight in model.module.weights] == expected
    assert {weight.dtype for weight in model.module.weights} == {""}
    assert (model.layers, model.module.loss) == (2, "own")
    assert model.notes[0].startswith("its model_type is one that only transformers knows")
    found = rehearse(
        Plan(model=model, tokens=16, micro_batch=2, ranks=2, strategy="fsdp-full-shard", checkpoint_every=1)
    )
    assert found.allocated_peak > found.parameters + found.optimizer


@pytest.mark.parametrize(("name", "asked"), [("Stack", False), ("Branching", True), ("BranchingBack", True)])
def test_code_that_asks_for_numbers_is_noticed(name: str, asked: bool) -> None:
    plan = planned(name, shape=(12,))
    tracer = Tracer(plan.device, STEPS - 1)
    rehearse(plan, tracer=tracer)
    assert (tracer.guessed > 0) == asked


def test_an_lstm_takes_at_its_peak_what_was_rehearsed() -> None:
    """Scratch of oneDNN's layers among it, forward and backward: one thread, two steps, to the byte but for the last mean."""
    plan = planned("Sequences", shape=(100, 16), device="cpu", micro_batch=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        real = metered(
            lambda: Sequences().train(),
            lambda: (torch.zeros(4, 100, 16), torch.zeros(4, dtype=torch.int64)),
            lambda module, batch: module(batch[0]),
            lambda output, batch: torch.nn.functional.cross_entropy(output.float(), batch[1]),
        )
    finally:
        torch.set_num_threads(threads)
    assert rehearse(plan).allocated_peak == pytest.approx(real.allocated_peak, abs=64)


def test_an_lstm_keeps_what_its_kernel_on_the_cpu_keeps() -> None:
    """oneDNN's layer keeps a workspace, of which the fake one says that it is empty; on CUDA there is another kernel."""
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.extend([tensor.nbytes] * (tensor.dtype == torch.uint8))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        Sequences()(torch.zeros(4, 100, 16)).sum()
    plan = planned("Sequences", shape=(100, 16), device="cpu")
    assert any("scratch memory is measured" in note for note in plan.model.notes)
    step, on_cuda = (rehearse(dataclasses.replace(plan, device=device)).timeline for device in ("cpu", "cuda"))
    assert step is not None and on_cuda is not None
    sizes = [
        size for ident, size in zip(step.ident, step.delta, strict=True) if "mkldnn_rnn_layer" in step.names[ident]
    ]
    assert len(kept) == 2 and min(kept) > 4 * 100 * 64 * 4 * 4, "four gates"
    assert [size for size in sizes if size in kept] == kept
    assert not any("mkldnn" in name for name in on_cuda.names)
    gates, activations = 2 * 4 * 100 * 4 * 64 * 4, on_cuda.category == CATEGORIES.index("activations")
    assert on_cuda.delta[activations & (on_cuda.delta > 0)].sum() > gates


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "amp-fp16"},
        {"precision": "amp-bf16", "accumulation": 2},
        {"strategy": "ddp", "ranks": 2},
        {"strategy": "zero-1", "ranks": 2},
        {"strategy": "fsdp-full-shard", "ranks": 2, "checkpoint_every": 1},
        {"device": "cpu"},
    ],
)
def test_nothing_is_asked_for_or_kept_by_what_surrounds_a_module(fields: dict[str, Any]) -> None:
    plan = planned("Stack", shape=(12,), **fields)
    tracer = Tracer(plan.device, STEPS - 1)
    rehearse(plan, tracer=tracer)
    assert (tracer.guessed, tracer.grown) == (0, 0)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_a_module_keeps_of_every_call_is_counted(accumulation: int) -> None:
    plan = planned("Keeping", shape=(12,), device="cpu", accumulation=accumulation)
    tracer = Tracer(plan.device, STEPS - 1)
    rehearse(plan, tracer=tracer)
    assert tracer.grown == 4000 * accumulation


def test_what_a_module_makes_on_the_host_is_not_the_gpus() -> None:
    """Unless it is moved there, or used with what is there."""
    plan = planned("Hosting", shape=(12,))
    tracer, plain = Tracer(plan.device, STEPS - 1), Tracer(plan.device, STEPS - 1)
    with tracer.host:
        found = rehearse(plan, tracer=tracer)
    assert tracer.host_bytes == STEPS * 4 * 4 * 10**6
    assert plain.host_bytes == 0
    without = rehearse(dataclasses.replace(planned("Stack", shape=(12,))), tracer=plain)
    assert 0 < found.by_moment["forward"] - without.by_moment["forward"] < 20_000
    step = found.timeline
    assert step is not None
    assert {512 * -(-size // 512) for size in (12_000, 4000, 2000, 32)} <= set(step.delta.tolist())
