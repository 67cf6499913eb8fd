"""Rows of published speeds in the making, and the table that comes with memcalc, timed once for all tests."""

from __future__ import annotations

from functools import cache

from memcalc.bench.throughput.plans import Run, run_of
from memcalc.bench.throughput.rows import COLUMNS, METRICS, Timing, read_timings
from memcalc.bench.throughput.run import Report, report
from memcalc.bench.throughput.score import Scored, score
from memcalc.cli.bench_throughput import FACTS
from memcalc.plan import Plan

__all__ = ["LLAMA", "known", "plan_of", "run_with", "scored", "table", "timing"]

LLAMA = {
    "id": "x-1", "source": "someone/project README", "group": "g", "model": "Llama-7B", "n_params": "6738415616",
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "11008", "vocab": "32000",
    "seq_len": "2048", "micro_batch_per_gpu": "2", "grad_accum": "4", "global_batch": "64", "n_gpus": "8",
    "gpus_per_node": "8", "gpu_type": "A100-80GB", "interconnect": "NVLink (one node)", "strategy": "fsdp_full_shard8",
    "precision": "bf16 mixed", "activation_checkpointing": "none", "compile": "no", "optimizer": "AdamW (fused)",
    "offload": "none", "metric": "tokens_per_s_per_gpu", "value": "3000", "notes": "tier A; cmp=strict",
}  # fmt: skip


def timing(**cells: str) -> Timing:
    values = dict.fromkeys(COLUMNS, "") | LLAMA | cells
    measured = float(values["value"]) if values["metric"] in METRICS else None
    return Timing(id=values["id"], source=values["source"], metric=values["metric"], measured=measured, cells=values)


def run_with(**cells: str) -> Run:
    return run_of(timing(**cells))


def plan_of(**cells: str) -> Plan:
    found = run_with(**cells)
    assert found.plan is not None, found.skipped
    return found.plan


@cache
def known() -> dict[str, Timing]:
    """The rows that come with memcalc, by id."""
    return {row.id: row for row in read_timings(FACTS)}


@cache
def scored() -> tuple[Scored, ...]:
    return tuple(score(run_of(row)) for row in known().values())


@cache
def table(comparison: str = "strict") -> Report:
    return report(scored(), comparison)
