"""A model that the library transformers builds from a configuration file; weights are random, no code comes from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from memcalc.errors import InputError
from memcalc.files import read_json

__all__ = ["from_config"]

_LEFT_ASIDE = ("auto_map", "dtype", "torch_dtype", "quantization_config")
"""Code of the repository, and how stored weights are kept: neither says anything about what is trained."""
_AUTO = "AutoModelForCausalLM"
"""What is trained where the file names no architecture."""


def from_config(path: Path) -> Callable[[], nn.Module]:
    """A factory of the model in a ``config.json``. Raises InputError where transformers does not know it."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"{path}: this model_type is known to transformers only: pip install transformers") from None
    said = read_json(path, str(path))
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise InputError(f"{path} names no model_type")
    said = {key: value for key, value in said.items() if key not in _LEFT_ASIDE}
    kind = said["model_type"]
    try:
        config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in said.items() if k != "model_type"})
    except ValueError as error:
        if kind in str(error):
            raise InputError(
                f"{path}: model_type {kind!r} is unknown to transformers {transformers.__version__} too; "
                "its code is not run from the file, name a factory with --module"
            ) from None
        raise
    names = [name for name in said.get("architectures") or () if isinstance(name, str)]
    named = next(
        (getattr(transformers, name) for name in names if isinstance(getattr(transformers, name, None), type)), None
    )

    def factory() -> nn.Module:
        if named is not None and issubclass(named, transformers.PreTrainedModel):
            module: nn.Module = named(config)
        else:
            module = getattr(transformers, _AUTO).from_config(config)
        return module

    return factory
