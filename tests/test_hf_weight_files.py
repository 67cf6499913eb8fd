"""Files of weights read by their headers alone: sizes by hand, and everything that is not what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.errors import FileError, MemcalcError
from memcalc.hf.reading import read_model
from memcalc.hf.safetensors import DTYPE_BITS, Stored, read_header
from memcalc.plan import Plan

LINEAR = {"fc.weight": ("BF16", [3, 5]), "fc.bias": ("F32", [3])}


def entries(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """Header of tensors that lie end to end, and how many bytes they take."""
    found, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, size = end, DTYPE_BITS[dtype] // 8
        for part in shape:
            size *= part
        end += size
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return found, end


def stored(path: Path, header: Any, payload: int) -> Path:
    """A file with this header and so many zeros after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(payload))
    return path


def index(folder: Path, **metadata: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    files = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": files}))
    return path


def test_a_header_says_every_tensor(tmp_path: Path) -> None:
    header, size = entries(LINEAR)
    path = stored(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, **header}, size)
    assert read_header(path) == [Stored("fc.weight", (3, 5), "BF16"), Stored("fc.bias", (3,), "F32")]
    model = read_model(path)
    assert (model.family, model.parameters, model.name) == ("size", 18, tmp_path.name)
    assert "15 of BF16, 3 of F32" in model.notes[0]
    assert Plan(model=model).model == read_model(tmp_path)


def test_whole_numbers_are_not_parameters(tmp_path: Path) -> None:
    header, size = entries({**LINEAR, "mask": ("BOOL", [7]), "packed": ("I32", [2, 2])})
    model = read_model(stored(tmp_path / "m.safetensors", header, size))
    assert model.parameters == 18
    assert any(note.startswith("2 tensors of whole numbers are not counted") for note in model.notes)
    header, size = entries({**LINEAR, "mask": ("BOOL", [7])})
    alone = read_model(stored(tmp_path / "alone.safetensors", header, size)).notes
    assert any(note.startswith("1 tensor of whole numbers is not counted") for note in alone)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=5), st.tuples(st.sampled_from(["F64", "F32", "BF16", "F8_E4M3", "I64"]), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_headers_come_back_as_they_were_written(tmp_path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    tensors.pop("__metadata__", None)
    header, size = entries(tensors)
    found = read_header(stored(tmp_path / "drawn.safetensors", header, size))
    assert {each.name: (each.dtype, list(each.shape)) for each in found} == tensors


def test_an_index_is_counted_from_the_files_beside_it(tmp_path: Path) -> None:
    path = index(tmp_path, total_size=1)
    for name, dtype in (("a", "F32"), ("b", "BF16")):
        header, size = entries({f"{name}.weight": (dtype, [4, 2])})
        stored(tmp_path / f"model-0000{1 + (name == 'b')}-of-00002.safetensors", header, size)
    model = read_model(path)
    assert model.parameters == 16
    assert "the headers of 2 files: 8 of F32, 8 of BF16" in model.notes[0]
    header, size = entries({"c.weight": ("F32", [4, 2])})
    stored(tmp_path / "model-00002-of-00002.safetensors", header, size)
    with pytest.raises(FileError, match="tensor 'b.weight' is in the index or in the files beside it, but not in both"):
        read_model(path)


@pytest.mark.parametrize(
    ("config", "parameters", "said"),
    [
        (None, 500, "does not say the dtype, and of float32 they would be half"),
        ({"torch_dtype": "float32"}, 250, "torch_dtype float32 of the config.json"),
        ({"dtype": "bfloat16"}, 500, "torch_dtype bfloat16 of the config.json"),
        ({"dtype": "int3"}, 500, "does not say the dtype"),
    ],
)
def test_an_index_alone_says_bytes(tmp_path: Path, config: dict[str, str] | None, parameters: int, said: str) -> None:
    path = index(tmp_path, total_size=1000)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(path)
    assert model.parameters == parameters
    assert "1,000 B in 2 files that are not here" in model.notes[0]
    assert said in model.notes[0]
    assert read_model(index(tmp_path, total_size=1000, total_parameters=123)).parameters == 123


HEADER, SIZE = entries(LINEAR)
BAD = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
MALICIOUS = {
    "a length past the file": (
        (2**40).to_bytes(8, "little") + b"{}",
        "cut off: it has 10 bytes, and its header would have 1,099",
    ),
    "a length of 2**64 - 1": (b"\xff" * 8, "its header would have 18,446,744"),
    "a length just past the file": (
        (3).to_bytes(8, "little") + b"{}",
        "cut off: it has 10 bytes, and its header would have 3",
    ),
    "nothing": (b"", "no safetensors file, or cut off: it has 0 bytes"),
    "seven bytes": (b"\0" * 7, "no safetensors file, or cut off: it has 7 bytes"),
    "no JSON": (b"{nothing", "not valid JSON"),
    "no text": (b"\xff\xfe", "not UTF-8 text"),
    "a list": (["fc"], "is not an object"),
    "nesting": (b"[" * 200_000, "not valid JSON"),
    "a name twice": (b'{"a": {}, "a": {}}', "the key 'a' stands twice"),
    "a number for a tensor": ({"a": 1}, "has not all of dtype, shape and data_offsets"),
    "a dtype that is none": ({"a": {**BAD, "dtype": "F33"}}, "dtype 'F33'; known are"),
    "a list for a dtype": ({"a": {**BAD, "dtype": ["F32"]}}, "has dtype"),
    "a negative size": ({"a": {**BAD, "shape": [-3]}}, "not a list of whole numbers"),
    "true for a size": ({"a": {**BAD, "shape": [True]}}, "not a list of whole numbers"),
    "a size past any memory": ({"a": {**BAD, "shape": [2**62, 2**62]}}, "does not fill bytes 0 to 12"),
    "one offset": ({"a": {**BAD, "data_offsets": [0]}}, "not a beginning and an end"),
    "an end before its beginning": ({"a": {**BAD, "data_offsets": [12, 0]}}, "does not fill bytes 12 to 0"),
    "tensors over each other": ({"a": BAD, "b": BAD}, "do not follow the tensor before"),
    "a hole": ({"a": {**BAD, "data_offsets": [4, 16]}}, "do not follow the tensor before"),
    "a payload cut off": (HEADER, "its tensors take 42 bytes, but 12 follow the header"),
    "only whole numbers": (
        {"a": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}},
        "nothing that could be trained",
    ),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_what_is_no_header_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    content, said = MALICIOUS[name]
    path = tmp_path / "bad.safetensors"
    if isinstance(content, bytes) and name.startswith(("a length", "nothing", "seven")):  # the whole file
        path.write_bytes(content)
    else:
        stored(path, content, 12)
    with pytest.raises(MemcalcError, match=said) as refused:
        read_model(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_map": {}}, "does not name a file for each tensor"),
        ({"weight_map": {"a": 3}}, "does not name a file for each tensor"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "not a file beside the index"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not a file beside the index"),
        ({"metadata": None}, "metadata.total_size is None, which is not a number of bytes"),
        ({"metadata": {"total_size": -5}}, "not a number of bytes"),
        ({"metadata": {"total_size": "many"}}, "not a number of bytes"),
        ({"metadata": {"total_size": True}}, "not a number of bytes"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    whole = {"metadata": {"total_size": 10}, "weight_map": {"a": "missing.safetensors"}}
    path.write_text(json.dumps({**whole, **changes}))
    with pytest.raises(MemcalcError, match=said):
        read_model(path)


def test_estimate_takes_them_as_models(tmp_path: Path) -> None:
    path = index(tmp_path, total_size=2 * 10**9)
    for word in (str(path), str(tmp_path)):
        done = CliRunner().invoke(app, ["estimate", word, "--adam"])
        assert done.exit_code == 0, done.output
        assert "1,000,000,000 parameters at 2 B each" in " ".join(done.output.split())
        assert done.output.splitlines()[1].startswith(f"{tmp_path.name}: 1,000,000,000 parameters, fp32, adam")
    done = CliRunner().invoke(app, ["estimate", str(tmp_path / "none.safetensors")])
    assert done.exit_code == 2
    assert "does not exist" in done.output
