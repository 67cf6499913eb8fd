"""Cells that a source leaves blank and its script or its published config says: each with where."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from memcalc.bench.throughput.rows import Timing

__all__ = ["filled"]

_CLM = "run_clm.py: block_size is the tokenizer's limit, 1024 at most"
# (beginning of the source, pattern of the model's name, cells, where they are documented); the first that fits.
_BLANKS: tuple[tuple[str, str, Mapping[str, str], str], ...] = (
    (
        "microsoft/DeepSpeedExamples", r"bert",
        {"seq_len": "128"}, "examples/text-classification/run_glue.py: max_seq_length 128",
    ),
    ("microsoft/DeepSpeedExamples", r"gpt", {"seq_len": "1024"}, _CLM),
    ("huggingface/blog pytorch-fsdp", r"gpt", {"seq_len": "1024"}, _CLM),
    ("huggingface/transformers issue", r"gpt", {"seq_len": "1024"}, _CLM),
    (
        "facebookresearch/fairscale", r"resnet",
        {"micro_batch_per_gpu": "256", "grad_accum": "1", "precision": "fp32", "optimizer": "RMSprop", "image": "28"},
        "benchmarks/oss.py: batch_size 256, RMSprop with momentum, MNIST's 28 x 28 pixels",
    ),
    (
        "modelscope/ms-swift", r"",
        {"micro_batch_per_gpu": "1", "grad_accum": "16", "activation_checkpointing": "full"},
        "docs/source_en/LLM/Benchmark.md: batch_size 1, gradient_accumulation_steps 16, gradient_checkpointing true",
    ),
    (
        "oumi-ai/oumi PR #213", r"2B",
        {
            "layers": "24", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "50272",
            "n_params": "", "seq_len": "2048", "micro_batch_per_gpu": "16", "grad_accum": "1", "precision": "bf16",
            "activation_checkpointing": "full",
        },
        "configs/lema/llama2b.pt.yaml: HuggingFaceFW/ablation-model-fineweb-v1, 2048 tokens; PR #207: 16 samples",
    ),
    (
        "deepspeedai/DeepSpeed issue #3901", r"falcon",
        {"micro_batch_per_gpu": "1", "grad_accum": "1"},
        "the script is attached, not printed; one sample of 4096 tokens is what 2.9 s and 24 GB allow without checkpoints",
    ),
)  # fmt: skip


def filled(row: Timing) -> tuple[Timing, str]:
    """The row with the cells its source documents elsewhere, and a sentence that says so; blank where nothing was filled.

    A table's cell that is not blank stays, but for a size in words that the config replaces.
    """
    for start, pattern, cells, where in _BLANKS:
        if row.source.startswith(start) and re.search(pattern, row["model"], re.IGNORECASE):
            found = {name: value for name, value in cells.items() if not row.cells.get(name) or not value}
            said = ", ".join(f"{name} {value}" for name, value in found.items() if value)
            if not said:
                return row, ""
            return dataclasses.replace(row, cells={**row.cells, **found}), f"{said}: {where}"
    return row, ""
