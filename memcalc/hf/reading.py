"""From a path to a Model: a config.json of Hugging Face, read without torch and without running anything it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.errors import LONGEST, FileError, InputError, PlanError, shorten
from memcalc.files import read_json
from memcalc.hf.dropout import dropout_of
from memcalc.hf.keys import TRANSFORMERS, Values, read_keys
from memcalc.hf.paths import config_file, model_name
from memcalc.hf.record import HfModel, ModelType
from memcalc.hf.rows import TYPES
from memcalc.hf.weight_files import is_index, of_file, of_index
from memcalc.models import FAMILIES, Model

__all__ = ["UnknownModelType", "of_config", "read_config", "read_model", "wrapped_as", "written_as"]

# Sizes without which no decoder can be counted; only a repository's own code could tell what null means.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


# Ends of classes whose last layer has a row for each label.
_LABELLED = ("Classification", "QuestionAnswering")
_UNSAID = "the file names no architecture"


class UnknownModelType(InputError):
    """A ``model_type`` that has no row; ``nulls`` are sizes that the file leaves to code of its own."""

    def __init__(self, model_type: str, path: str, nulls: tuple[str, ...] = ()) -> None:
        from difflib import get_close_matches

        self.model_type, self.path, self.nulls = model_type, path, nulls
        written = model_type[:LONGEST].lower()
        near = get_close_matches(written, TYPES, n=1, cutoff=0.6)
        hint = f"; the nearest is {near[0]}" if near else ""
        if nulls:
            what = f"{' and '.join(nulls)} {'is' if len(nulls) == 1 else 'are'} null, so that only its own code could count it"
        else:
            close = get_close_matches(written, TYPES, n=8, cutoff=0.0)
            what = f"known are {', '.join(close)} and {len(TYPES) - len(close)} more"
        super().__init__(f"{path}: model_type {shorten(model_type)} is not known{hint}; {what}")


def read_model(path: str | Path) -> Model:
    """The Model of a config.json, or of a folder that has one; of files of weights one known by its size.

    Raises FileError and InputError, in one line.
    """
    file = config_file(Path(path))
    if file.suffix == ".safetensors":
        return of_file(file, model_name(file))
    found = read_json(file, str(file))
    return of_index(found, file, model_name(file)) if is_index(found) else _of_json(found, file).model


def written_as(path: str | Path) -> Mapping[str, str]:
    """How transformers' code of a config.json is written, in fields of a plan's ``implementation``; nothing where the
    file is of weights or of a type without a row."""
    file = config_file(Path(path))
    found = {} if file.suffix == ".safetensors" else read_json(file, str(file))
    if not isinstance(found, dict) or found.get("model_type") not in TYPES:
        return {}
    return _of_json(found, file).written


def wrapped_as(path: str | Path) -> tuple[str, ...]:
    """Classes of transformers that the blocks of a config.json's model have; empty where they are not known."""
    file = config_file(Path(path))
    found = {} if file.suffix == ".safetensors" else read_json(file, str(file))
    model_type = found.get("model_type") if isinstance(found, dict) else None
    return TYPES[model_type].blocks if isinstance(model_type, str) and model_type in TYPES else ()


def read_config(path: str | Path) -> HfModel:
    """The same with the names that its tensors have in transformers."""
    file = config_file(Path(path))
    return _of_json(read_json(file, str(file)), file)


def _of_json(config: Any, path: Path) -> HfModel:
    if not isinstance(config, dict):
        raise FileError(f"{path}: expected an object as a config.json is one, found {shorten(config)}")
    return of_config(config, str(path), model_name(path))


def of_config(config: Mapping[str, Any], source: str, name: str) -> HfModel:
    """The model that parsed JSON describes; ``source`` stands before every refusal."""
    row = _row(config, source)
    head, notes = _head(config, row, source)
    values, said = read_keys(row.keys, config, source, row.config)
    if head.endswith(_LABELLED):
        values["labels"], labelled = _labels(config, source)
        said += labelled
    uncounted: list[str] = []
    for key, usual in row.parts.items():
        part = _part(config, key, usual, source)
        values[key] = part.model
        said += [f"{key}: {note}" for note in part.model.notes if not note.startswith(_UNSAID)]
        uncounted += [f"{key}: {sentence}" for sentence in part.model.uncounted]
    try:
        fields = row.fields(values, head)
        notes += [*said, *row.notes(values), *_left_aside(config, source)]
        dropout, lacking = dropout_of(config, values, FAMILIES[fields["family"]], source)
        said_apart = {
            "dropout": dropout,
            "window": _window(config, values, source),
            "uncounted": (*uncounted, *lacking),
        }
        return HfModel(
            model=Model(name=name or row.name, notes=tuple(notes), **{**fields, **said_apart}),
            row=row,
            head=head,
            written=row.written(values),
        )
    except PlanError as error:
        raise FileError(f"{source}: {error}") from None


def _window(config: Mapping[str, Any], values: Values, source: str) -> int:
    """The sliding window; those types whose class leaves it out unless it is switched on have no key of it in their row."""
    if "window" in values:
        return values["window"] or 0
    found = config.get("sliding_window") if config.get("use_sliding_window") is True else None
    if found is None:
        return 0
    if type(found) is not int or not 1 <= found <= 10**9:
        raise FileError(f"{source}: sliding_window is {shorten(found)}, which is not a whole number from 1 to 10**9")
    return found


def _part(config: Mapping[str, Any], key: str, usual: str, source: str) -> HfModel:
    """The model that an object inside the config describes; nothing at all is one of defaults alone."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise FileError(f"{source}: {key} is {shorten(found)}, which is not an object")
    return of_config({"model_type": usual, **(found or {})}, f"{source}: {key}", key)


def _labels(config: Mapping[str, Any], source: str) -> tuple[int, list[str]]:
    """Classes of a classifier: names in id2label, or the count in num_labels, or two (configuration_utils.py)."""
    names, number = config.get("id2label"), config.get("num_labels")
    if names is not None and (not isinstance(names, dict) or not names):
        raise FileError(f"{source}: id2label is {shorten(names)}, which is not an object with a name for each label")
    if number is not None and (type(number) is not int or not 1 <= number <= 10**9):
        raise FileError(f"{source}: num_labels is {shorten(number)}, which is not a whole number from 1 to 10**9")
    if names is not None and number not in (None, len(names)):
        raise FileError(f"{source}: num_labels {number} and the {len(names)} names in id2label contradict each other")
    if names is not None:
        return len(names), []
    return (number, []) if number is not None else (2, ["the file names no labels; counted are 2, the usual number"])


def _row(config: Mapping[str, Any], source: str) -> ModelType:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        what = "is missing" if model_type is None else f"is {shorten(model_type)}"
        raise FileError(f"{source}: model_type {what}; it says which model this is, such as llama")
    if model_type not in TYPES:
        nulls = tuple(key for key in _SIZES if key in config and config[key] is None)
        raise UnknownModelType(model_type, source, nulls if "auto_map" in config else ())
    return TYPES[model_type]


def _head(config: Mapping[str, Any], row: ModelType, source: str) -> tuple[str, list[str]]:
    """The class that is counted, and a note where the file names another one or none."""
    named = config.get("architectures")
    if named is None:
        return row.heads[0], [f"the file names no architecture; counted is {row.heads[0]}"]
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise FileError(f"{source}: architectures is {shorten(named)}, which is not a list of class names")
    known = [each for each in named if each in row.heads]
    if known:
        return known[0], []
    said = ", ".join(named)[:60] or "none"
    return row.heads[0], [f"architectures says {said}; counted is {row.heads[0]}, with its head"]


def _left_aside(config: Mapping[str, Any], source: str) -> list[str]:
    """Keys that never change a plan by themselves."""
    notes = []
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            notes.append(
                f"{key} {shorten(config[key])} says how the file's weights are stored; what is trained in is --precision"
            )
    if (stored := config.get("quantization_config")) is not None:
        if not isinstance(stored, dict):
            raise FileError(f"{source}: quantization_config is {shorten(stored)}, which is not an object")
        notes.append(
            "quantization_config is of the stored weights and is left aside; to train beside quantised ones take --quantize"
        )
    if config.get("auto_map") is not None:
        notes.append(
            f"auto_map names code of the repository, which is never run; the model is that of transformers {TRANSFORMERS}"
        )
    return notes
