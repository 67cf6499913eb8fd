"""Parsed launch files from text that nobody vouches for: JSON as it is, YAML without its surprises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, shorten
from memcalc.files import read_json, read_text

__all__ = ["dump_yaml", "parse", "parse_text"]

_LIMIT = 2**20
"""Bytes of a launch file; real ones are a thousandth of it."""
_YAML_LIMIT = 2**16
"""The same of YAML, which takes a second to read so much."""
_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
_AMBIGUOUS = {"", "null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"}
"""Words that YAML 1.1 does not read as text."""


def parse(path: Path) -> Any:
    """What stands in a launch file, JSON or YAML. Raises FileError in one line.

    Refused besides what is not well formed: keys that stand twice, aliases, merges, tags and several documents.
    """
    return parse_text(read_text(path), str(path))


def parse_text(text: str, name: str) -> Any:
    """The same from text; the name says which of both it is, unless the text begins as JSON does."""
    if len(text) > _LIMIT:
        raise FileError(f"{name} has more than 1 MiB, which no launch file has")
    if name.lower().endswith(".json") or text.lstrip().startswith("{"):
        return read_json(text, name)
    return _yaml(text, name)


def _yaml(text: str, name: str) -> Any:
    if len(text) > _YAML_LIMIT:
        raise FileError(f"{name} has more than {_YAML_LIMIT >> 10} KiB, which no launch file in YAML has")
    try:
        import yaml
    except ImportError:
        raise FileError(f"{name} is YAML, which needs PyYAML: pip install pyyaml") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise FileError(f"{name} is empty")
        _sound(root, name, set())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        if isinstance(error, yaml.reader.ReaderError):
            problem = f"the character U+{error.character:04X} at position {error.position} is none of YAML's"
        problem = problem or "it cannot be read"
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise FileError(f"{name} is not valid YAML: {where}{shorten(problem, 100)[1:-1]}") from None
    except RecursionError:
        raise FileError(f"{name} is not valid YAML: it is nested too deeply") from None
    except (ValueError, OverflowError):
        raise FileError(f"{name} is not valid YAML: a number in it cannot be read") from None


def _sound(node: Any, name: str, seen: set[int]) -> None:
    """Raises FileError for a node that is used twice, has a tag, or a key that stands twice."""
    line = f"{name}: line {node.start_mark.line + 1}"
    if id(node) in seen:
        raise FileError(f"{line} is used again by an alias (*name); write it out")
    seen.add(id(node))
    if node.tag not in _PLAIN:
        kind = "a merge (<<)" if node.tag.endswith(":merge") else f"the tag {shorten(node.tag)}"
        raise FileError(f"{line} has {kind}; only plain keys, lists, text and numbers are read")
    if isinstance(node.value, str):
        return
    keys: set[str] = set()
    for item in node.value:
        for part in item if isinstance(item, tuple) else (item,):
            _sound(part, name, seen)
        if isinstance(item, tuple) and isinstance(item[0].value, str):
            if item[0].value in keys:
                raise FileError(f"{name}: line {item[0].start_mark.line + 1}: the key {item[0].value!r} stands twice")
            keys.add(item[0].value)


def dump_yaml(tree: Mapping[str, Any], indent: int = 0) -> str:
    """YAML of nested blocks of text, numbers and flags, in their order; needs no PyYAML.

    >>> print(dump_yaml({"fsdp_config": {"fp16": True, "checkpoint_dir": "./checkpoints"}, "mixed_precision": "no"}), end="")
    fsdp_config:
      fp16: true
      checkpoint_dir: ./checkpoints
    mixed_precision: 'no'
    """
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += [f"{' ' * indent}{key}:\n", dump_yaml(value, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, int):
        return str(value)
    plain = all(letter.isalnum() or letter in "_./-" for letter in value) and value[:1] not in "-"
    if plain and value.isascii() and not value[:1].isdigit() and value.lower() not in _AMBIGUOUS and value[:1] != ".":
        return str(value)
    if value.startswith("./") and plain and value.isascii():
        return str(value)
    escaped = value.replace("'", "''")
    return f"'{escaped}'"
