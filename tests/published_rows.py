"""Rows of published facts in the making, shared by the tests of the bench."""

from __future__ import annotations

import csv
import io
from functools import cache

from memcalc.bench.rows import COLUMNS, METERS, Row, read_rows
from memcalc.bench.run import score
from memcalc.bench.score import Score
from memcalc.bench.words import say
from memcalc.cli.bench import FACTS
from memcalc.plan import Plan

__all__ = ["GPT2", "LLAMA", "MLP", "facts", "lacks_of", "plan_of", "row_of", "text_of"]

# One run said in full: GPT-2 small in bfloat16 on one card.
GPT2 = {
    "id": "x-1", "source": "someone/project README", "model": "GPT-2 124M", "n_params": "124439808", "hidden": "768",
    "layers": "12", "heads": "12", "kv_heads": "12", "ffn": "3072", "vocab": "50257", "seq_len": "1024",
    "micro_batch_per_gpu": "4", "grad_accum": "1", "n_gpus": "1", "gpu_type": "A100-80GB", "gpu_gib": "80",
    "strategy": "single", "param_dtype": "bf16", "compute_dtype": "bf16", "optimizer": "AdamW",
    "activation_checkpointing": "none", "attention": "sdpa", "compile": "no", "offload": "none",
    "metric": "max_memory_allocated", "value_gib": "4.0", "notes": "tier A",
}  # fmt: skip
LLAMA = GPT2 | {
    "model": "Llama-2-7B", "n_params": "6738415616", "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "32",
    "ffn": "11008", "vocab": "32000",
}  # fmt: skip

MLP = {"model": "MLP input:1565_output:273_depth:2_arch:uniform_batch:123_act:tanh_dropout:0.49_dropout:False_batchnorm:False",
       "n_params": "5329098", "vocab": "", "param_dtype": "fp32", "compute_dtype": "fp32"}  # fmt: skip


def text_of(*rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def row_of(base: dict[str, str] = GPT2, **cells: str) -> Row:
    values = dict.fromkeys(COLUMNS, "") | base | cells
    measured = float(values["value_gib"]) if METERS[values["metric"]] != "boundary" else None
    return Row(id=values["id"], source=values["source"], metric=values["metric"], measured=measured, cells=values)


def plan_of(base: dict[str, str] = GPT2, **cells: str) -> Plan:
    said = say(row_of(base, **cells))
    assert said.plan is not None, said.lacks
    return said.plan


def lacks_of(base: dict[str, str] = GPT2, **cells: str) -> list[str]:
    return [lack.reason for lack in say(row_of(base, **cells)).lacks]


@cache
def facts() -> tuple[list[Row], list[Score]]:
    """The facts that come with memcalc, and what the bench says of each; they take half a minute."""
    rows = read_rows(FACTS)
    return rows, [score(row) for row in rows]
