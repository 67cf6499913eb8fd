"""Histories as torch writes them, replayed; the driver is played by a second allocator whose addresses do not ascend."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.allocator_history import load_history, replay_history
from memcalc.allocator_options import AllocatorOptions
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError, MemcalcError
from tests.snapshots import Recorder

MIB = 2**20
EXPANDABLE = "expandable_segments:True"


def written(folder: Path, snapshot: dict[str, Any]) -> Path:
    path = folder / "history.json"
    path.write_text(json.dumps(snapshot))
    return path


SIZES = st.sampled_from([1, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 13 * MIB, 25 * MIB, 47 * MIB])


@given(
    st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 1)), max_size=60),
    st.sampled_from(["", EXPANDABLE, "max_split_size_mb:24"]),
    st.sampled_from([None, 150 * MIB]),
)
@settings(max_examples=100, deadline=None)
def test_a_recorded_history_reserves_the_recorded_bytes_again(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[int, int, int]],
    options: str,
    capacity: int | None,
) -> None:
    if options == EXPANDABLE:
        capacity = None  # what an expandable segment gives back is known to the page only
    recorder, live = Recorder(options, capacity), {}
    for ident, size, stream in operations:
        if ident in live:
            recorder.drop(live.pop(ident))
        elif capacity is None or recorder.allocated + 70 * MIB < capacity:
            live[ident] = recorder.use(size, stream)
    history = load_history(written(tmp_path_factory.mktemp("history"), recorder.snapshot()))
    found = replay_history(history)
    assert (found.peak_reserved, found.reserved) == history.reserved
    assert found.differs_at is None
    assert found.peak_active == found.peak_allocated


def test_where_the_driver_puts_segments_decides_between_equal_blocks(tmp_path: Path) -> None:
    recorder = Recorder()
    first, second = recorder.use(12 * MIB), recorder.use(12 * MIB)
    assert first.address > second.address
    recorder.drop(first)
    recorder.drop(second)
    small = recorder.use(5 * MIB)
    assert small.address == second.address, "the lower of the two"
    found = replay_history(load_history(written(tmp_path, recorder.snapshot())))
    assert (found.peak_reserved, found.differs_at) == (24 * MIB, None)


def test_the_lower_segment_may_be_the_younger_one(tmp_path: Path) -> None:
    """Of two holes of 20 MiB the lower is filled. It was cut from 40 MiB, which are not free as one after that."""
    recorder = Recorder()
    elder, younger = recorder.use(20 * MIB), recorder.use(40 * MIB)
    assert younger.address < elder.address
    recorder.drop(younger)
    lower, upper = recorder.use(20 * MIB), recorder.use(20 * MIB)
    recorder.drop(elder)
    recorder.drop(lower)
    assert recorder.use(20 * MIB).address == lower.address
    recorder.drop(upper)
    recorder.use(40 * MIB)
    found = replay_history(load_history(written(tmp_path, recorder.snapshot())))
    # Addresses that ascend would have filled the elder segment and had 40 MiB free in the younger one.
    assert (found.peak_reserved, found.differs_at) == ((20 + 40 + 40) * MIB, None)


def test_a_block_that_waits_for_a_stream_is_active_and_not_allocated(tmp_path: Path) -> None:
    """record_stream: free_requested at once, free_completed when the other stream is done; nothing reuses it before."""
    recorder = Recorder()
    recorder.note("segment_alloc", 0, 12 * MIB)
    recorder.note("alloc", 0, 12 * MIB)
    recorder.note("free_requested", 0, 12 * MIB)
    recorder.note("segment_alloc", 2**30, 12 * MIB)
    recorder.note("alloc", 2**30, 12 * MIB)
    recorder.note("free_completed", 0, 12 * MIB)
    recorder.note("alloc", 0, 12 * MIB)
    snapshot = recorder.snapshot() | {"segments": [{"device": 0, "total_size": 24 * MIB}]}
    found = replay_history(load_history(written(tmp_path, snapshot)))
    assert (found.peak_allocated, found.peak_active, found.peak_reserved) == (24 * MIB, 24 * MIB, 24 * MIB)
    assert found.differs_at is None
    del recorder.trace[-1]
    found = replay_history(load_history(written(tmp_path, snapshot)))
    assert (found.peak_allocated, found.peak_active) == (12 * MIB, 24 * MIB)


def test_another_setting_is_tried_on_the_same_requests(tmp_path: Path) -> None:
    recorder = Recorder()
    blocks = [recorder.use(12 * MIB), recorder.use(12 * MIB)]
    for block in blocks:
        recorder.drop(block)
    recorder.use(24 * MIB)
    history = load_history(written(tmp_path, recorder.snapshot()))
    assert replay_history(history).peak_reserved == 48 * MIB
    assert replay_history(history, AllocatorOptions(expandable_segments=True)).peak_reserved == 40 * MIB


def test_a_replay_that_differs_says_where(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.use(12 * MIB)
    recorder.note("segment_alloc", 2**35, 20 * MIB)  # torch took a segment for which the replay sees no reason
    recorder.use(100)
    snapshot = recorder.snapshot() | {"segments": [{"device": 0, "total_size": 34 * MIB}]}
    assert replay_history(load_history(written(tmp_path, snapshot))).differs_at == 4


def test_a_history_that_began_late_is_refused(tmp_path: Path) -> None:
    recorder = Recorder()
    block = recorder.use(3 * MIB)
    recorder.trace.clear()
    recorder.drop(block)
    with pytest.raises(FileError, match=r"lacks the beginning; call torch.cuda.memory._record_memory_history"):
        load_history(written(tmp_path, recorder.snapshot()))
    history = load_history(written(tmp_path, recorder.snapshot() | {"segments": []}))
    with pytest.raises(InputError, match=r"history.json: entry 0 of its history frees what it has not allocated"):
        replay_history(history)


ODD = [
    ({"action": "allocate"}, "action of entry 2 of its history is 'allocate'; expected one of alloc,"),
    ({"size": -512}, "size of entry 2 of its history is -512"),
    ({"size": 1.5}, "size of entry 2 of its history is 1.5"),
    ({"size": True}, "size of entry 2 of its history is True"),
    ({"addr": "0x7f"}, "addr of entry 2 of its history is '0x7f'"),
    ({"addr": 2**64}, "addr of entry 2 of its history is 18446744073709551616"),
    ({"stream": None}, "stream of entry 2 of its history is None"),
    ({"frames": [3]}, "a frame of entry 2 of its history is 3, not a dict"),
    ({"action": "alloc"}, "entry 2 of its history allocates what is allocated already"),
    ({"action": "free_completed"}, "entry 2 of its history frees what it has not allocated"),
]


@pytest.mark.parametrize(("change", "said"), ODD, ids=lambda value: str(value)[:40])
def test_odd_entries_are_refused_with_the_file_and_the_entry(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    recorder = Recorder()
    recorder.drop(recorder.use(12 * MIB))
    assert recorder.trace[2]["action"] == "free_requested"
    recorder.trace[2] |= change
    path = written(tmp_path, recorder.snapshot())
    with pytest.raises(MemcalcError) as caught:
        replay_history(load_history(path))
    assert str(caught.value).startswith(str(path)) and said in str(caught.value)


def test_more_given_back_than_taken_is_refused(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.note("segment_free", 0, 2 * MIB)
    recorder.note("segment_alloc", 0, 2 * MIB)
    path = written(tmp_path, recorder.snapshot())
    with pytest.raises(InputError, match="history.json: entry 0 of its history gives back more than was taken"):
        replay_history(load_history(path))


def test_a_pickled_history_is_replayed_as_the_same_in_json(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.drop(recorder.use(12 * MIB))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorder.snapshot()))
    assert load_history(path).entries == load_history(written(tmp_path, recorder.snapshot())).entries


@pytest.mark.parametrize("text", ["[]", "{}", '{"device_traces": [[{"action": "alloc"}]], "segments": []}', "pickle"])
def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        load_history(path)
    assert "\n" not in str(caught.value)


def test_on_the_command_line(tmp_path: Path) -> None:
    recorder = Recorder()
    blocks = [recorder.use(12 * MIB), recorder.use(12 * MIB)]
    for block in blocks:
        recorder.drop(block)
    recorder.use(24 * MIB)
    path = written(tmp_path, recorder.snapshot())
    result = CliRunner().invoke(app, ["explain-meters", "--history", str(path), "--device", "1GiB"])
    assert result.exit_code == 0, result.output
    assert "the replay of its 5 requests and frees reserves the recorded" in result.output
    assert "expandable_segments:True would have reserved 41.943 MB (40 MiB)" in result.output
    both = CliRunner().invoke(app, ["explain-meters", "--history", str(path), "--reserved", "1GiB"])
    assert both.exit_code == 2 and "leave out --reserved" in both.output
