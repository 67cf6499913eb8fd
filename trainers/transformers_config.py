"""A model that the library transformers builds from a configuration file; weights are random, no code comes from the file.

Nothing in the file may lead anywhere else either: to code beside it, to weights or kernels on a hub. Keys that would
are left aside or refused wherever they stand, and the process opens no connection while the model is built.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from memcalc.errors import InputError, shorten
from memcalc.files import read_json

__all__ = ["from_config", "offline"]

_LEFT_ASIDE = re.compile(
    r"auto_map|dtype|torch_dtype|quantization_config|use_pretrained_backbone|backbone_kwargs|_?\w*attn_implementation\w*"
    r"|_?\w*experts_implementation\w*"
)
"""Code of the repository, how stored weights are kept, whether others are fetched, and which kernels compute: transformers would fetch those from
a hub where the name is one of a repository (integrations/hub_kernels.py). None says what is trained."""
_REFUSED = {
    "backbone": "names a model that would be fetched",
}
"""transformers follows it in backbone_utils.py, load_backbone."""
_SIZE = re.compile(
    r"(?:num|n)_\w+|d_model|d_ff|d_kv|(?!\w*window)\w+_(?:size|dim|layers|heads|embeddings|channels|experts)|layers"
)
"""Keys of counts and widths, below zero in no model; a window of -1 is one without an end."""
_AUTO = "AutoModelForCausalLM"
"""What is trained where the file names no architecture."""
_CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
"""Audit events of Python (docs.python.org/3/library/audit_events.html)."""

_building = 0
"""How many models are being built: connections are refused meanwhile."""


@cache
def _watch() -> None:
    sys.addaudithook(_refuse_connection)  # which Python never takes away again


def _refuse_connection(event: str, arguments: object) -> None:
    if _building and event in _CONNECTS:
        raise ConnectionRefusedError("a model of a configuration file is built without any connection")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """No connection is opened inside by code in Python, and libraries of Hugging Face do not try to."""
    global _building
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")  # read when huggingface_hub is imported
    _watch()
    _building += 1
    try:
        yield
    finally:
        _building -= 1


def from_config(path: Path) -> Callable[[], nn.Module]:
    """A factory of the model in a ``config.json``. Raises InputError where transformers does not know it."""
    said = read_json(path, str(path))
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise InputError(f"{path} names no model_type")
    said = _plain(said, str(path))
    with offline():
        try:
            import transformers
        except ImportError:
            raise InputError(
                f"{path}: this model_type is known to transformers only: pip install transformers"
            ) from None
        config = _config(said, path)
    architectures = said.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    named = next(
        (getattr(transformers, name) for name in names if isinstance(getattr(transformers, name, None), type)), None
    )
    if named is None and type(config) not in getattr(transformers, _AUTO)._model_mapping:
        known = _heads(said["model_type"])
        raise InputError(
            f"{path}: model_type {said['model_type']} is no language model, and architectures names none of transformers' "
            f"classes; name one there{f', such as {known[0]}' if known else ''}, or a factory with --module"
        )

    def factory() -> nn.Module:
        with offline():
            if named is not None and issubclass(named, transformers.PreTrainedModel):
                module: nn.Module = named(config)
            else:
                module = getattr(transformers, _AUTO).from_config(config, trust_remote_code=False)
        return module

    return factory


def _heads(kind: str) -> list[str]:
    """Classes of transformers that train a model of a type, those with a head first."""
    from transformers.models.auto import modeling_auto

    found = [
        name
        for mapping, names in vars(modeling_auto).items()
        if mapping.endswith("_MAPPING_NAMES")
        for name in [names.get(kind)]
        if isinstance(name, str)
    ]
    return sorted(dict.fromkeys(found), key=lambda name: "For" not in name)


def _plain(said: Any, path: str, key: str = "") -> Any:
    """What a file says, without what leads elsewhere, at any depth. Raises InputError for what cannot be left out."""
    if isinstance(said, list):
        return [_plain(part, path, key) for part in said]
    if not isinstance(said, Mapping):
        if type(said) in (int, float) and said < 0 and _SIZE.fullmatch(key.rpartition(".")[2]):
            raise InputError(f"{path}: {key} is {said}; a size is not below 0")
        return said
    found = {}
    for name, value in said.items():
        full = f"{key}.{name}" if key else name
        if name in _REFUSED and value:
            raise InputError(f"{path}: {full} {_REFUSED[name]}; name a factory that builds the model with --module")
        if not _LEFT_ASIDE.fullmatch(name):
            found[name] = _plain(value, path, full)
    return found


def _config(said: Mapping[str, Any], path: Path) -> Any:
    """The configuration, in the class of its type."""
    import transformers

    kind, options = said["model_type"], {key: value for key, value in said.items() if key != "model_type"}

    def make(options: Mapping[str, Any]) -> Any:
        return transformers.AutoConfig.for_model(kind, **options)

    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{path}: model_type {kind!r} is unknown to transformers {transformers.__version__} too; "
            "its code is not run from the file, name a factory with --module"
        )
    try:
        config = make(options)
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{path}: {_blamed(make, options)}transformers does not take it ({line})") from None
    for part in (
        config,
        *(value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)),
    ):
        if getattr(part, "use_pretrained_backbone", False):  # the default of some types
            part.use_pretrained_backbone = False
    return config


def _blamed(make: Callable[[Mapping[str, Any]], Any], options: Mapping[str, Any]) -> str:
    """The key without which it could be made, and what it says; blank where no single one is to blame."""
    for key, value in options.items():
        with contextlib.suppress(Exception):
            make({other: kept for other, kept in options.items() if other != key})
            return f"{key} is {shorten(value)}; "
    return ""
