"""Histories as torch writes them, replayed; the driver is played by a second allocator whose addresses do not ascend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.allocator import Allocator
from memcalc.allocator_blocks import Block
from memcalc.allocator_history import load_history, replay_history
from memcalc.allocator_options import AllocatorOptions
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError

MIB = 2**20
EXPANDABLE = "expandable_segments:True"


class Recorder(Allocator):
    """Writes what it does down, as record_trace in c10/cuda/CUDACachingAllocator.cpp; segments go down in address."""

    def __init__(self, options: str = "", capacity: int | None = None) -> None:
        super().__init__(AllocatorOptions.parse(options), capacity)
        self.text, self.trace, self.below = options, [], 2**40
        self.sizes: dict[int, int] = {}

    def note(self, action: str, address: int, size: int, stream: int = 0) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, "stream": stream, "time_us": 0})

    def _take(self, size: int, stream: int) -> Block | None:
        before = self.reserved
        if not self.options.expandable_segments:
            self.below -= self.segment_size(size)
            self.next_address = self.below
        block = super()._take(size, stream)
        if block is not None and self.options.expandable_segments:
            self.note("segment_map", block.address, self.reserved - before, stream)
        elif block is not None:
            self.note("segment_alloc", block.address, block.size, stream)
        return block

    def _release(self, block: Block, pool: Any) -> None:
        super()._release(block, pool)
        self.note("segment_free", block.address, block.size, block.stream)

    def use(self, size: int, stream: int = 0) -> Block:
        block = self.allocate(size, stream)
        assert block is not None
        self.sizes[block.address] = size
        self.note("alloc", block.address, size, stream)
        return block

    def drop(self, block: Block) -> None:
        size = self.sizes[block.address]
        self.note("free_requested", block.address, size, block.stream)
        self.note("free_completed", block.address, size, block.stream)
        self.free(block)

    def snapshot(self) -> dict[str, Any]:
        return {
            "segments": [{"device": 0, "total_size": self.reserved}],
            "device_traces": [self.trace],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.text},
        }


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
    with pytest.raises(InputError, match="entry 0 of the history frees what it has not allocated"):
        replay_history(history)


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
