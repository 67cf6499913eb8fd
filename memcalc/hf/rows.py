"""Every ``model_type`` that is known."""

from __future__ import annotations

from memcalc.hf.decoders import DECODERS
from memcalc.hf.encoder_decoders import ENCODER_DECODERS
from memcalc.hf.encoders import ENCODERS
from memcalc.hf.gpts import GPTS
from memcalc.hf.later_decoders import LATER_DECODERS
from memcalc.hf.mixtures import MIXTURES
from memcalc.hf.open_gpts import OPEN_GPTS
from memcalc.hf.record import ModelType
from memcalc.hf.vision import VISION

__all__ = ["TYPES"]

TYPES: dict[str, ModelType] = {
    row.name: row
    for row in [*DECODERS, *GPTS, *OPEN_GPTS, *MIXTURES, *LATER_DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION]
}
