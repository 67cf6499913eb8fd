"""Every knob of a plan that changes memory, run for real on the CPU and held against the ledger moment by moment.

``memcalc validate`` covers strategies, precisions and checkpointing of the first families; here are the rest: attention
kernels, dropout, reentrant and every-n checkpoints, accumulation, autocast, buckets, kept gradients, optimizers, adapters
(adapted.py), and the other families (families.py). All run in one call, which starts torch once for a number of ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.fsdp import Fsdp
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.loss import Loss
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.validate import Result, loss_problems, validate
from tests.trainers import adapted
from tests.trainers.adapted import LLAMA
from tests.trainers.families import SMALL, plans
from tests.trainers.runs import rare, some

GPT2 = Model(
    name="knobs-gpt2", family="gpt2", layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1000, context=128, tied=True
)  # fmt: skip
MLP = Model(name="knobs-mlp", family="mlp", layers=4, hidden=384, features=96, classes=10)

QWEN2 = dataclasses.replace(LLAMA, name="knobs-qwen2", biases=("qkv",), tied=True)
QWEN3 = dataclasses.replace(LLAMA, name="knobs-qwen3", qk_norm=True, head_dim=48)
PYRAMID = dataclasses.replace(MLP, name="knobs-pyramid", widths=(300, 200, 100, 50), activation="gelu", batch_norm=True)

ALONE = Plan(model=GPT2, tokens=128, micro_batch=4, device="cpu")
KNOBS: dict[str, dict[str, object]] = {
    "plain": {},
    "eager": {"attention": "eager"},
    "math": {"attention": "math"},
    "eager-dropout": {"attention": "eager", "dropout": 0.1},
    "dropout": {"dropout": 0.1},
    "llama-eager": {"model": LLAMA, "attention": "eager"},
    "llama-math": {"model": LLAMA, "attention": "math"},
    "every-2": {"checkpoint_every": 2},
    "every-3": {"checkpoint_every": 3},
    "reentrant": {"checkpoint_every": 1, "reentrant": True},
    "llama-reentrant": {"model": LLAMA, "checkpoint_every": 1, "reentrant": True},
    "dropout-checkpoint": {"dropout": 0.1, "checkpoint_every": 1},
    "accumulation": {"accumulation": 3},
    "amp": {"precision": "amp-bf16"},
    "llama-amp": {"model": LLAMA, "precision": "amp-bf16"},
    "amp-checkpoint": {"precision": "amp-bf16", "checkpoint_every": 1},
    "amp-reentrant": {"precision": "amp-bf16", "checkpoint_every": 1, "reentrant": True},
    "mlp-amp": {"model": MLP, "precision": "amp-bf16", "tokens": 0, "micro_batch": 256},
    "keep-gradients": {"set_to_none": False},
    "loss-of-logits": {"precision": "bf16", "loss_dtype": "logits"},
    "keep-logits": {"keep_logits": True},
    "bf16-keep-logits": {"precision": "bf16", "keep_logits": True},
    "chunks": {"loss": Loss(chunks=4)},
    "bf16-chunks": {"precision": "bf16", "loss": Loss(chunks=4)},
    "bf16-chunks-of-logits": {"precision": "bf16", "loss_dtype": "logits", "loss": Loss(chunks=8)},
    "chunks-kept": {"keep_logits": True, "loss": Loss(chunks=4)},
    "chunk-head": {"loss": Loss(chunks=8, chunk_head=True)},
    "llama-chunk-head-bf16": {"model": LLAMA, "precision": "bf16", "loss": Loss(chunks=8, chunk_head=True)},
    "amp-chunk-head": {"precision": "amp-bf16", "loss": Loss(chunks=4, chunk_head=True)},
    "padded-vocabulary": {"loss": Loss(vocab_multiple=128)},
    "float32-logits": {"precision": "bf16", "loss": Loss(float32_output=True), "keep_logits": True},
    "python-gelu": {"precision": "bf16", "implementation": Implementation(gelu="python")},
    "python-gelu-amp": {"precision": "amp-bf16", "implementation": Implementation(gelu="python")},
    "wide-softmax": {"precision": "bf16", "attention": "eager", "implementation": Implementation(softmax="float32")},
    "llama-python-norm": {"model": LLAMA, "precision": "bf16", "implementation": Implementation(norm="python")},
    "llama-repeat": {"model": LLAMA, "implementation": Implementation(grouped="repeat")},
    "qwen2": {"model": QWEN2, "precision": "bf16"},
    "qwen3": {"model": QWEN3, "precision": "bf16", "implementation": Implementation(norm="python")},
    "fused-qkv": {"model": dataclasses.replace(LLAMA, fused_qkv=True), "checkpoint_every": 1},
    "mlp-of-all-kinds": {"model": PYRAMID, "tokens": 0, "micro_batch": 256, "dropout": 0.3},
    "short": {"tokens": 64},
    "for-loop": {"optimizer_kind": "for-loop"},
    "fused": {"optimizer_kind": "fused"},
    "sgd": {"optimizer": "sgd", "model": MLP, "tokens": 0},
    "sgd-momentum": {"optimizer": "sgd-momentum", "model": MLP, "tokens": 0},
    "amsgrad": {"optimizer": "amsgrad", "model": MLP, "tokens": 0},
    "rmsprop": {"optimizer": "rmsprop", "model": MLP, "tokens": 0},
    "adagrad": {"optimizer": "adagrad", "model": MLP, "tokens": 0},
    "adafactor": {"optimizer": "adafactor", "optimizer_kind": "for-loop", "model": MLP, "tokens": 0},
}
TOGETHER: dict[str, dict[str, object]] = {
    "ddp-views": {"strategy": "ddp", "bucket_views": True},
    "ddp-accumulation": {"strategy": "ddp", "accumulation": 3},
    "ddp-views-accumulation": {"strategy": "ddp", "bucket_views": True, "accumulation": 2},
    "ddp-keep": {"strategy": "ddp", "set_to_none": False},
    "ddp-amp": {"strategy": "ddp", "precision": "amp-bf16"},
    "ddp-reentrant": {"strategy": "ddp", "checkpoint_every": 1, "reentrant": True},
    "ddp-chunk-head": {"strategy": "ddp", "loss": Loss(chunks=4, chunk_head=True)},
    "full-shard-chunk-head": {"strategy": "fsdp-full-shard", "model": LLAMA, "loss": Loss(chunks=4, chunk_head=True)},
    "full-shard-amp-chunks": {"strategy": "fsdp-full-shard", "precision": "amp-bf16", "loss": Loss(chunks=4)},
    "zero-1-llama": {"strategy": "zero-1", "model": LLAMA},
    "no-shard": {"strategy": "fsdp-no-shard"},
    "no-shard-mlp": {"strategy": "fsdp-no-shard", "model": MLP, "tokens": 0},
    "full-shard-amp": {"strategy": "fsdp-full-shard", "precision": "amp-bf16"},
    "full-shard-amp-mlp": {
        "strategy": "fsdp-full-shard",
        "precision": "amp-bf16",
        "model": MLP,
        "tokens": 0,
        "micro_batch": 256,
    },
    "grad-op-amp-llama": {"strategy": "fsdp-shard-grad-op", "precision": "amp-bf16", "model": LLAMA},
    "full-shard-accumulation": {"strategy": "fsdp-full-shard", "accumulation": 3},
    "grad-op-accumulation": {"strategy": "fsdp-shard-grad-op", "accumulation": 2},
    "full-shard-every-2": {"strategy": "fsdp-full-shard", "checkpoint_every": 2},
    "full-shard-keep": {"strategy": "fsdp-full-shard", "set_to_none": False},
    "full-shard-reentrant": {"strategy": "fsdp-full-shard", "checkpoint_every": 1, "reentrant": True},
    "full-shard-llama-eager": {"strategy": "fsdp-full-shard", "model": LLAMA, "attention": "eager"},
    "full-shard-amp-accumulation": {"strategy": "fsdp-full-shard", "precision": "amp-bf16", "accumulation": 2},
    "reduce-low": {"strategy": "fsdp-full-shard", "precision": "amp-bf16", "fsdp": Fsdp(reduce_dtype="compute")},
    "reduce-high": {"strategy": "fsdp-full-shard", "precision": "bf16", "fsdp": Fsdp(reduce_dtype="float32")},
    "fsdp-1-amp": {"strategy": "fsdp-full-shard", "precision": "amp-bf16", "fsdp": Fsdp(version="1")},
    "fsdp-1-grad-op": {"strategy": "fsdp-shard-grad-op", "accumulation": 3, "fsdp": Fsdp(version="1")},
    "fsdp-1-prefetch": {
        "strategy": "fsdp-full-shard",
        "model": LLAMA,
        "fsdp": Fsdp(version="1", backward_prefetch="post", forward_prefetch=True),
    },
}
# On 4 ranks: a start of its own, where test_matrix.py has hybrids too.
HYBRIDS: dict[str, dict[str, object]] = {
    "hybrid": {
        "strategy": "fsdp-hybrid-shard",
        "ranks": 4,
        "precision": "amp-bf16",
        "fsdp": Fsdp(replicas=2, reduce_dtype="compute"),
    },
    "hybrid-1": {"strategy": "fsdp-hybrid-shard-grad-op", "ranks": 4, "fsdp": Fsdp(version="1", replicas=2)},
}


KNOBS, TOGETHER = some(KNOBS, one_in=5), some(TOGETHER, one_in=4) | rare(HYBRIDS)
ADAPTED = adapted.cases()
OF_FAMILIES = {family: plans(family) for family in SMALL}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    together = {name: {"ranks": 2, **changes} for name, changes in TOGETHER.items()}
    made = {name: dataclasses.replace(ALONE, **changes) for name, changes in (KNOBS | together | ADAPTED).items()}  # type: ignore[arg-type]
    made |= {name: each for family in OF_FAMILIES.values() for name, each in family.items()}
    found = validate(made, out=tmp_path_factory.mktemp("knobs"), show=lambda result: None)
    return {result.name: result for result in found}


@pytest.mark.parametrize(
    "name", [*KNOBS, *TOGETHER, *ADAPTED, *(name for each in OF_FAMILIES.values() for name in each)]
)
def test_the_ledger_agrees_with_a_real_run(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert result.problem is None, result
    if name in ADAPTED:
        # Besides the peak to a percent: all but torch's scalars on the CPU, 8 bytes a multiplication by a number.
        assert result.comparison is not None
        assert abs(result.comparison.peak.error_bytes) < 1024


# Batch norm takes its statistics over a rank's own samples, so a ResNet's losses depend on the ranks.
@pytest.mark.parametrize("family", [name for name in SMALL if name != "resnet"])
def test_fp32_losses_do_not_depend_on_the_strategy(results: dict[str, Result], family: str) -> None:
    # Dropout differs by rank.
    same = [
        results[name] for name, each in OF_FAMILIES[family].items() if not each.dropout and each.model == SMALL[family]
    ]
    assert len({r.plan.strategy for r in same}) == 3
    assert loss_problems(same) == []


def test_what_experts_keep_does_not_depend_on_the_routing(results: dict[str, Result]) -> None:
    """Real routers are not balanced, but the moment of the loss, when all that is kept is alive, agrees to a few bytes:
    the profiler's random generator and the scalars of the loss."""
    result = results["moe single fp32 none"]
    assert result.comparison is not None
    measured = result.comparison.measurement.ranks[0].by_moment["loss"]
    assert abs(ledger(result.plan).peak().by_moment["loss"] - measured) <= 16
