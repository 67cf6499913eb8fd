"""Checkpoints that other engines wrote, which no run here goes on from: whose they are, and what would do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOREIGN", "Foreign", "foreign"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """One way to write checkpoints."""

    name: str
    signs: tuple[str, ...]
    """Patterns of files, one of which is there."""
    cure: str
    """What makes its weights readable; ``{place}`` is its folder."""


_ZERO_TO_FP32 = "python {place}/zero_to_fp32.py {place} WEIGHTS --safe_serialization"
FOREIGN = (
    # deepspeed/checkpoint/ds_to_universal.py: latest_universal, and STEP/zero/WEIGHT/fp32.pt; it is made beside the one
    # it was made of, whose folder has the script (runtime/engine.py, _copy_recovery_script).
    Foreign(
        name="a universal checkpoint of DeepSpeed's",
        signs=("latest_universal", "zero/*/fp32.pt", "*/zero/*/fp32.pt"),
        cure=f"{_ZERO_TO_FP32}, in the folder that it was made of,",
    ),
    # runtime/engine.py, _save_checkpoint and _save_zero_checkpoint.
    Foreign(
        name="a checkpoint of DeepSpeed's own",
        signs=("zero_to_fp32.py", "*_model_states.pt", "*/*_model_states.pt"),
        cure=_ZERO_TO_FP32,
    ),
    # accelerate/utils/constants.py; transformers' Trainer writes the same names and its own.
    Foreign(
        name="a checkpoint of accelerate's",
        signs=("random_states_0.pkl", "trainer_state.json", "checkpoint-*/trainer_state.json", "pytorch_model_fsdp_0"),
        cure="accelerate merge-weights {place}/pytorch_model_fsdp_0 WEIGHTS, where its weights are in parts,",
    ),
)
"""In the order in which they are looked for: a folder of the first kinds may have files of the later ones."""


def foreign(out: Path) -> str:
    """What is said of a checkpoint of another engine in a run's folder; blank where there is none.

    They hold pickles, which are not opened, and most of them are for as many ranks as wrote them.
    """
    for place in (out, out / "checkpoints"):
        for each in FOREIGN:
            if any(next(place.glob(sign), None) is not None for sign in each.signs):
                return (
                    f"{place} has {each.name}, whose pickles memcalc does not read; "
                    f"{each.cure.format(place=place)} writes weights that torch reads"
                )
    return ""
