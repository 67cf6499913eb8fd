"""``memcalc snapshot`` and files that were damaged, cut or made up: an answer or one line, and never code."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.errors import FileError
from memcalc.snapshot import load_snapshot
from tests.snapshots import MIB, invoke, read, trained, written


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(data: Any) -> None:
        *way, last = (int(word) if word.isdigit() else word for word in path.split("."))
        for word in way:
            data = data[word]
        data[last] = value

    return apply


ODD = [
    ("segments", 3, "segments is 3, not a list"),
    ("segments.0", None, "segment 0 is None, not a dict"),
    ("segments.0.total_size", 5 * MIB, "the blocks of segment 0 come to"),
    ("segments.0.total_size", -1, "total_size of segment 0 is -1"),
    ("segments.0.total_size", 2**60, "total_size of segment 0 is"),
    ("segments.0.segment_type", "huge", "segment_type of segment 0 is 'huge'; expected one of small, large"),
    ("segments.0.segment_pool_id", "00", "segment_pool_id of segment 0 is '00'"),
    ("segments.0.blocks", {}, "blocks of segment 0 is a dict, not a list"),
    ("segments.0.blocks.0.size", 0, "size of block 0 of segment 0 is 0"),
    ("segments.0.blocks.0.state", "lost", "state of block 0 of segment 0 is 'lost'"),
    ("segments.0.blocks.0.frames", "here", "frames of block 0 of segment 0 is 'here', not a list"),
    ("device_traces", {}, "device_traces is a dict, not a list"),
    ("device_traces.0", "x", "history of device 0 is 'x', not a list"),
    ("device_traces.0.1.action", "grab", "action of entry 1 of its history is 'grab'"),
    ("device_traces.0.1.size", -4, "size of entry 1 of its history is -4"),
    ("device_traces.0.1.frames.0.name", None, "name of a frame of block 0 of segment 7 is None; expected text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), ODD, ids=lambda value: str(value)[:40])
def test_odd_values_are_named(tmp_path: Path, path: str, value: object, said: str) -> None:
    data = pickle.loads(pickle.dumps(trained().snapshot()))
    change(path, value)(data)
    result = invoke(written(tmp_path, data))
    assert result.exit_code == 2, result.output
    assert said in result.output and "snapshot.pickle" in result.output and result.output.count("\n") == 1


def test_a_segment_that_stands_a_million_times_is_refused_soon(tmp_path: Path) -> None:
    block = {"size": 512, "requested_size": 512, "address": 0, "state": "inactive", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 512 * 10**5, "segment_type": "large", "blocks": [block] * 10**5}
    started = time.process_time()
    with pytest.raises(FileError, match="more than 4,000,000 blocks"):
        load_snapshot(written(tmp_path, {"segments": [segment] * 10**5, "device_traces": []}))
    assert time.process_time() - started < 5


def test_one_stack_without_end_in_every_entry_costs_its_length_once(tmp_path: Path) -> None:
    """Shared in the file, so that it is small: hashing or comparing it again for each entry would take hours."""
    frame = {"filename": "a.py", "line": 1, "name": "f"}
    stacks = [[frame] * 50_000 for _ in range(2)]
    trace: list[dict[str, Any]] = []
    for index in range(10_000):
        entry = {"addr": 512 * index, "size": 512, "stream": 0, "time_us": 0}
        trace.append({**entry, "frames": stacks[0], "action": "alloc"})
        trace.append({**entry, "frames": stacks[1], "action": "free_requested"})
        trace.append({"action": "oom", "device_free": 0, "size": 512, "stream": 0, "time_us": 0})
    started = time.process_time()
    found = read(tmp_path, {"segments": [], "device_traces": [trace]})
    assert found.peak.bytes == 512 and "the last of 10,000 times" in found.notes[0]
    assert time.process_time() - started < 10


GOOD = pickle.dumps(trained().snapshot())


@given(st.integers(0, len(GOOD)), st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3))
@settings(max_examples=250, deadline=None)
def test_cut_and_flipped_files_give_an_answer_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, length: int, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(GOOD)
    for place, value in flips:
        data[place] = value
    path = tmp_path_factory.mktemp("flip") / "snapshot.pickle"
    path.write_bytes(data if flips else data[:length])
    result = invoke(path, "--format", random.Random(length).choice(["table", "json", "csv"]))
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 2:
        assert result.output.startswith("memcalc: ") and result.output.count("\n") == 1
        assert "Traceback" not in result.output
    elif not flips:
        assert length == len(GOOD)


def test_the_four_formats(tmp_path: Path) -> None:
    path = written(tmp_path, trained().snapshot())
    table, markdown, csv, js = (invoke(path, "--format", name) for name in ("table", "markdown", "csv", "json"))
    assert all(result.exit_code == 0 for result in (table, markdown, csv, js))
    assert "device 0: peak 126.878 MB (121 MiB) allocated, in the moment backward" in table.output
    assert "| largest at the peak" in markdown.output
    assert "at the peak (backward),gradients,,20971520" in csv.output.splitlines()
    found = json.loads(js.output)
    assert found["peak"]["bytes"] == 121 * MIB and found["reserved"] == 134 * MIB
    assert len(json.loads(invoke(path, "--largest", 2, "--format", "json").output)["largest"]) == 2


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(trained().snapshot()))
    assert "peak 126.878 MB" in invoke(path).output


@pytest.mark.parametrize(("name", "said"), [("nothing", "does not exist"), (".", "is a folder")])
def test_what_is_no_file(tmp_path: Path, name: str, said: str) -> None:
    result = invoke(tmp_path / name)
    assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1


def test_torch_is_never_imported(tmp_path: Path) -> None:
    path = written(tmp_path, trained().snapshot())
    code = f"import sys; sys.argv = ['memcalc', 'snapshot', {str(path)!r}]\nimport atexit, runpy\n"
    code += "atexit.register(lambda: print('torch' in sys.modules, 'pickle' in sys.modules))\n"
    code += "runpy.run_module('memcalc', run_name='__main__')"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[0] == "False"
