"""What rows say of FSDP, of DeepSpeed's ZeRO and of offload → the plan's groups for them."""

from __future__ import annotations

import re
from typing import Any

from memcalc.bench.reading import Reading
from memcalc.deepspeed import DeepSpeed
from memcalc.fsdp import Fsdp
from memcalc.offload import Offload
from memcalc.precision import PRECISIONS
from memcalc.spec import Model
from memcalc.strategies import STRATEGIES

__all__ = ["masters_of", "sharded_of"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What the column ``offload`` holds → where (optimizer states, parameters) go; the first that fits.
_OFFLOADS = (
    (r"none||activations->cpu", ("none", "none")),  # those are for the plan's compute
    (r"param\+optimizer cpu( \(fsdp\))?|cpu \(zero-3( params\+optimizer)?\)", ("cpu", "cpu")),
    (r"cpu \((zero-offload|optimizer)\)", ("cpu", "none")),
    (r"cpu", ("cpu", "cpu")),
)
# Ranks of a node where a row does not say how many: HSDP shards within one (DGX and HGX machines have 8 GPUs).
_GPUS_OF_A_NODE = 8


def masters_of(reading: Reading, strategy: str, precision: str) -> str:
    """DeepSpeed's 16-bit engines keep float32 masters, whether or not a row says so."""
    if STRATEGIES[strategy].zero_stage is None or precision not in ("bf16", "fp16"):
        return precision
    reading.assume("DeepSpeed keeps float32 copies of 16-bit weights: deepspeed/runtime/engine.py")
    return f"{precision}-master"


def sharded_of(reading: Reading, strategy: str, ranks: int, precision: str, built: Model) -> dict[str, Any]:
    """The fields ``fsdp``, ``deepspeed`` and ``offload`` of the plan."""
    row = STRATEGIES[strategy]
    found: dict[str, Any] = {"offload": _offload(reading, strategy)}
    if row.gathers:
        found["fsdp"] = Fsdp(
            version=_version(reading),
            reduce_dtype=_reduce_dtype(reading, precision),
            replicas=max(ranks // _GPUS_OF_A_NODE, 1) if row.replicates else 0,
            separate_root=reading.default("fsdp units") == "separate root" and not built.tied and built.family != "t5",
            sync_every_micro_batch=_accumulates(reading) and reading.default("sync") == "each",
        )
    elif not row.main_grads and not PRECISIONS[precision].master:
        said, kept = reading.row["reduce_dtype"], PRECISIONS[precision].weights
        if said and _DTYPES.get(said) != kept:
            reading.lack(f"reduce dtype {said} beside weights in {kept}")
    if row.zero_stage is not None:
        found["deepspeed"] = _deepspeed(reading, row.zero_stage, built)
    return found


def _accumulates(reading: Reading) -> bool:
    return (reading.row.whole("grad_accum") or int(reading.default("grad_accum"))) > 1


def _version(reading: Reading) -> str:
    notes = reading.row["strategy"].lower()
    if "fsdp1" in notes or "fsdp2" in notes:
        return "1" if "fsdp1" in notes else "2"
    return reading.default("fsdp")


def _reduce_dtype(reading: Reading, precision: str) -> str:
    said, row = _DTYPES.get(reading.row["reduce_dtype"]), PRECISIONS[precision]
    if said in (None, row.weights):
        return "weights"
    if said == row.compute:
        return "compute"
    if said != "float32":
        reading.lack(f"reduce dtype {reading.row['reduce_dtype']} beside weights in {row.weights}")
    return "float32"


def _offload(reading: Reading, strategy: str) -> Offload:
    said = reading.said("offload").lower()
    places = next((places for pattern, places in _OFFLOADS if re.fullmatch(pattern, said)), None)
    if places is None:
        reading.lack(f"offload {said}")
        return Offload()
    optimizer, parameters = places
    if (STRATEGIES[strategy].zero_stage or 3) < 3:
        parameters = "none"
    return Offload(optimizer=optimizer, parameters=parameters)


def _deepspeed(reading: Reading, stage: int, built: Model) -> DeepSpeed:
    """DeepSpeed's defaults, or what transformers/integrations/deepspeed.py puts for "auto": sizes by the hidden width."""
    reading.assume("the flat copy of the weights is made on the host, as DeepSpeed did when the row was published")
    said: dict[str, Any] = {
        "flatten": "host",
        "contiguous_gradients": reading.default("contiguous") != "no",
        "grad_accum_dtype": "float32" if stage == 1 and reading.row["grad_dtype"] == "fp32" else "weights",
        "pipeline_engine": reading.default("pipeline_engine") == "yes",
    }
    sizes = reading.default("zero_sizes")
    if sizes != "auto":
        named = dict(part.split("=") for part in sizes.split(", ") if part)
        return DeepSpeed(**(said | {name: int(size) for name, size in named.items()}))
    if stage < 3 or not built.hidden:
        return DeepSpeed(**said)
    width = built.hidden
    return DeepSpeed(
        **said,
        reduce_bucket_size=width * width,
        prefetch_bucket_size=int(0.9 * width * width),
        persistence_threshold=10 * width,
    )
