"""Model families (how a model is built) and named models (with which numbers)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from memcalc.catalog import Catalog
from memcalc.errors import UnknownNameError
from memcalc.models.family import Block, Family
from memcalc.models.named import MODELS
from memcalc.spec import HEAD, ROOT, Model, Module, Weight

__all__ = ["FAMILIES", "HEAD", "MODELS", "ROOT", "Block", "Family", "Model", "Module", "Weight"]

_PLACES = {
    "mlp": "mlp.MLP",
    "gpt2": "gpt2.GPT2",
    "llama": "llama.LLAMA",
    "decoder": "decoder.DECODER",
    "bert": "bert.BERT",
    "vit": "vit.VIT",
    "moe": "moe.MOE",
    "resnet": "resnet.RESNET",
    "t5": "t5.T5",
    "megatron": "megatron.MEGATRON",
    "megatron-t5": "megatron_t5.MEGATRON_T5",
    "clip": "clip.CLIP",
    "llava": "llava.LLAVA",
    "whisper": "whisper.WHISPER",
    "mbart": "whisper.MBART",
    "size": "size.SIZE",
    "module": "module.MODULE",
    "token-module": "module.TOKEN_MODULE",
}
"""By the family's name: its row, in a module of this package."""


class _Families(Catalog[Family]):
    """Rows that are imported when they are asked for: an estimate needs one of them, and every start would pay for all."""

    def __init__(self) -> None:
        super().__init__("model family", [])

    def __getitem__(self, name: str) -> Family:
        if type(name) is str and (known := self._rows.get(name)) is not None:
            return known
        key = self._key(name)
        if key not in _PLACES:
            raise UnknownNameError(self.kind, str(name), _PLACES)
        if key not in self._rows:
            module, row = _PLACES[key].split(".")
            self._rows[key] = getattr(import_module(f"{__name__}.{module}"), row)
        return self._rows[key]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name) in _PLACES

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


FAMILIES: Catalog[Family] = _Families()
