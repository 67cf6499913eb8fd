"""``memcalc snapshot``: files as torch writes them, of all its versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.snapshot import load_snapshot
from memcalc.snapshot_fields import Frame
from memcalc.snapshot_origin import CATEGORIES_BY_FRAME, MOMENTS_BY_FRAME, origin
from memcalc.snapshot_summary import summarise
from memcalc.snapshot_timeline import recorded
from memcalc.timeline import CATEGORIES, MOMENTS
from tests.snapshots import MIB, STACKS, TORCH, Recorder, invoke, read, trained, written

EXPANDABLE = "expandable_segments:True"


def test_the_peak_by_category_follows_from_the_stacks(tmp_path: Path) -> None:
    found = read(tmp_path, trained().snapshot())
    assert found.peak.moment == "backward"
    assert found.peak_blocks == 123 * MIB, "two of 15 MiB in blocks of 16: what is left is not more than 1 MiB"
    assert found.by_category == {
        "parameters": 20 * MIB,
        "gradients": 20 * MIB,
        "optimizer": 40 * MIB,
        "activations": 34 * MIB,
        "temporary": 6 * MIB,
        "unknown": MIB,  # the batch: a user's line says nothing
    }
    assert found.peak.bytes == sum(found.by_category.values()) == 121 * MIB
    assert found.peak.by_moment["step"] == 93 * MIB
    largest = found.largest[0]
    assert (largest.each, largest.count, largest.category) == (20 * MIB, 2, "optimizer")
    assert found.largest[1].place == "me/model.py:31 forward"
    assert any("reserves the recorded bytes at every request" in note for note in found.notes)


def test_requests_without_a_python_stack_are_of_autograds_thread(tmp_path: Path) -> None:
    """On a GPU backward runs in a thread of the engine, where Python has no frames."""
    recorder = Recorder()
    recorder.use(3 * MIB, frames=STACKS["forward"])
    gradient = recorder.use(5 * MIB)
    recorder.drop(recorder.use(7 * MIB))
    recorder.use(2 * MIB, frames=STACKS["states"])
    found = read(tmp_path, recorder.snapshot())
    assert gradient.used
    assert found.by_category == {"activations": 3 * MIB, "gradients": 5 * MIB, "temporary": 7 * MIB}


def test_without_any_stack_nothing_is_guessed(tmp_path: Path) -> None:
    found = read(tmp_path, trained(stacks=False).snapshot())
    assert found.by_category == {"unknown": 121 * MIB}
    assert any("no stacks were recorded" in note for note in found.notes)


CALLS = f"{TORCH}/nn/modules/module.py", 1, "_call_impl"
ROWS = [
    ([("m.py", 1, "forward"), CALLS], "forward", "activations", "activations"),
    ([CALLS, (f"{TORCH}/utils/checkpoint.py", 1, "recompute_fn"), *STACKS["backward"]], "backward", "activations", "activations"),
    ([("f.py", 1, "backward"), (f"{TORCH}/autograd/function.py", 1, "apply")], "backward", "gradients", "temporary"),
    ([("f.py", 1, "forward"), (f"{TORCH}/autograd/function.py", 1, "apply"), CALLS], "forward", "activations", "activations"),
    ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_all_gather"), CALLS], "forward", "communication", "communication"),
    ([(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_reduce"),
      (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 1, "post_backward")], "backward", "gradients", "communication"),
    ([(f"{TORCH}/distributed/fsdp/_flat_param.py", 1, "_alloc_padded_unsharded_flat_param"), CALLS], "forward", "communication", "communication"),
    ([(f"{TORCH}/nn/parallel/distributed.py", 1, "_ddp_init_helper"), (f"{TORCH}/nn/parallel/distributed.py", 1, "__init__")], "init", "communication", "communication"),
    ([("??", 0, "c10d::Reducer::initialize_buckets(std::vector<long>)"), (f"{TORCH}/nn/parallel/distributed.py", 1, "__init__")], "init", "communication", "communication"),
    ([("??", 0, "at::native::mm(at::Tensor)"), ("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<x>)")], "backward", "gradients", "temporary"),
    ([("??", 0, "at::cuda::getCurrentCUDABlasHandle()"), CALLS], "forward", "workspaces", "workspaces"),
    ([(f"{TORCH}/nn/utils/clip_grad.py", 1, "clip_grad_norm_"), ("t.py", 1, "main")], "step", "temporary", "temporary"),
    ([(f"{TORCH}/optim/sgd.py", 1, "_multi_tensor_sgd"), (f"{TORCH}/optim/sgd.py", 1, "step")], "step", "optimizer", "temporary"),
    ([(f"{TORCH}/optim/optimizer.py", 1, "load_state_dict"), ("t.py", 1, "main")], "resume", "optimizer", "optimizer"),
    ([("C:\\x\\site-packages\\torch\\nn\\modules\\loss.py", 1, "forward")], "loss", "activations", "activations"),
    ([("t.py", 1, "main")], None, None, None),
]  # fmt: skip


@pytest.mark.parametrize(("frames", "moment", "lasting", "passing"), ROWS, ids=lambda value: str(value)[:30])
def test_what_a_stack_tells(frames: list[Any], moment: str | None, lasting: str | None, passing: str | None) -> None:
    assert origin(tuple(Frame(*frame) for frame in frames))[:3] == (moment, lasting, passing)


def test_the_tables_name_moments_and_categories_that_there_are() -> None:
    assert {row.moment for row in MOMENTS_BY_FRAME} <= set(MOMENTS)
    assert {name for row in CATEGORIES_BY_FRAME for name in (row.lasting, row.passing)} <= set(CATEGORIES)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 5000, MIB, 3 * MIB, 9 * MIB, 25 * MIB]), st.integers(0, 1)), max_size=60),
    st.sampled_from(["", EXPANDABLE]),
    st.integers(0, 60),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_what_a_ring_has_lost_follows_from_the_segments(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[int, int, int]], options: str, lost: int
) -> None:
    """A history that lost its beginning ends with the same bytes, and never shows more than the whole one."""
    recorder, live = Recorder(options), {}
    recorder.use(2 * MIB)
    for ident, size, stream in operations:
        if ident in live:
            recorder.drop(live.pop(ident))
        else:
            live[ident] = recorder.use(size, stream)
    folder, data = tmp_path_factory.mktemp("ring"), recorder.snapshot()
    snapshot = load_snapshot(written(folder, data))
    whole = recorded(snapshot)
    assert summarise(snapshot, whole).peak_blocks == recorder.most >= whole.timeline.peak().bytes
    assert whole.reserved[0] == whole.before == whole.missed == 0
    assert whole.reserved[1] >= whole.reserved[2] == recorder.reserved
    end = sum(recorder.options.round(size) for _, size, _ in recorder.used_blocks.values())
    assert int(whole.timeline.live()[-1]) == end
    data["device_traces"][0] = data["device_traces"][0][lost:]
    ring = recorded(load_snapshot(written(folder, data)))
    assert ring.missed == 0 and int(ring.timeline.live()[-1]) == end
    assert ring.reserved[2] == recorder.reserved and 0 <= ring.reserved[0] <= ring.reserved[1] <= whole.reserved[1]
    assert ring.timeline.peak().bytes <= whole.timeline.peak().bytes
    assert int(ring.timeline.live().min()) >= 0


def test_a_lost_beginning_is_said(tmp_path: Path) -> None:
    data = trained().snapshot()
    del data["device_traces"][0][:20]
    found = read(tmp_path, data)
    assert found.peak_blocks is None
    assert any("lacks the beginning" in note and "an earlier peak is not known" in note for note in found.notes)
    assert found.by_category["parameters"] == 20 * MIB, "the segments keep the stacks of what is still in use"


def test_recording_that_began_after_the_model_was_made(tmp_path: Path) -> None:
    """The usual case: parameters have no stack, and are shown as what was there before."""
    data = trained().snapshot()
    del data["device_traces"][0][:2]
    for segment in data["segments"]:
        for block in segment["blocks"]:
            if block["frames"] and block["frames"][0]["name"] == "convert":
                block["frames"] = []
    found = read(tmp_path, data)
    assert found.by_category["unknown"] == 21 * MIB and "parameters" not in found.by_category
    (weights,) = (group for group in found.largest if group.place == "(alive before the history, no stack)")
    assert (weights.bytes, weights.category) == (20 * MIB, "unknown")
    assert found.peak.bytes == 121 * MIB


def test_recording_that_was_interrupted_is_said(tmp_path: Path) -> None:
    data = trained().snapshot()
    trace = data["device_traces"][0]
    freed = next(index for index, e in enumerate(trace) if (e["action"], e["size"]) == ("free_requested", 15 * MIB))
    del trace[freed : freed + 2]  # its address is used again in the next step
    assert any("gaps" in note and "1 blocks were freed unseen" in note for note in read(tmp_path, data).notes)


def test_no_history_at_all(tmp_path: Path) -> None:
    found = read(tmp_path, trained().snapshot() | {"device_traces": [[]]})
    assert found.peak.bytes == found.allocated == 80 * MIB
    assert found.by_category == {"parameters": 20 * MIB, "gradients": 20 * MIB, "optimizer": 40 * MIB}
    assert "no history was recorded" in found.notes[-1]


def test_what_reserved_holds(tmp_path: Path) -> None:
    """12 of 20 MiB in use, in two blocks with a hole of 3 between; a whole segment free; another stream; a graph's pool."""
    recorder = Recorder()
    blocks = [recorder.use(size) for size in (5 * MIB, 3 * MIB, 7 * MIB)]
    recorder.drop(blocks[1])
    recorder.drop(recorder.use(30 * MIB))
    recorder.use(1000, stream=7)
    data = recorder.snapshot()
    data["segments"][1]["segment_pool_id"] = (0, 3)
    found = read(tmp_path, data)
    pools = {(pool.name, pool.stream): pool for pool in found.pools}
    assert set(pools) == {("large", 0), ("large, private 0:3", 0), ("small", 7)}
    assert pools["large, private 0:3", 0].free == 30 * MIB and pools["large", 0].split == 8 * MIB
    assert found.reserved == 52 * MIB == sum(pool.reserved for pool in found.pools)
    assert found.split == 8 * MIB + 2 * MIB - 1024
    assert sum(pool.free for pool in found.pools) == 30 * MIB
    assert found.allocated == 12 * MIB + 1024 and found.requested == 12 * MIB + 1000
    for pool in found.pools:
        assert pool.reserved == pool.allocated + pool.waiting + pool.free + pool.split
    assert max(pool.largest_free for pool in found.pools) == 30 * MIB
    first, second = found.torn
    assert (first.size, first.held, first.blocks, first.largest_free) == (20 * MIB, 12 * MIB, 2, 5 * MIB)
    assert (second.pool, second.stream, second.held) == ("small", 7, 1024), "a whole free segment is not torn"
    assert sum(each.size - each.held for each in found.torn) == found.split


def test_expandable_segments_are_told_apart(tmp_path: Path) -> None:
    recorder = Recorder(EXPANDABLE)
    recorder.use(30 * MIB)
    found = read(tmp_path, recorder.snapshot())
    assert [pool.name for pool in found.pools] == ["large expandable"]
    assert found.reserved == found.peak_reserved == 40 * MIB


def test_an_out_of_memory_error_is_told_with_its_numbers(tmp_path: Path) -> None:
    recorder = trained()
    oom = {"action": "oom", "device_free": 3 * MIB, "size": 500 * MIB, "stream": 0, "time_us": 0}
    recorder.trace.append(oom)
    said = read(tmp_path, recorder.snapshot()).notes[0]
    assert said.startswith("out of memory: 524.288 MB (500 MiB) asked for with 83.886 MB (80 MiB) allocated")
    assert "(3 MiB) free on the device" in said


def old(data: dict[str, Any]) -> dict[str, Any]:
    """torch 2.0: no pools, no expandable segments, no addresses of blocks, stacks and sizes in a block's history."""
    for segment in data["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames", "requested_size"):
            del segment[key]
        for block in segment["blocks"]:
            asked, frames = block.pop("requested_size"), block.pop("frames")
            del block["address"]
            if block["state"] != "inactive":
                block["history"] = [{"addr": 0, "real_size": asked, "frames": frames}]
    return {"segments": data["segments"], "device_traces": data["device_traces"]}


def documented(data: dict[str, Any]) -> dict[str, Any]:
    data["segments"][0]["blocks"][0]["state"] = "active_awaiting_free"
    return data


VERSIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "2.0": old,
    "segments alone": lambda data: data["segments"],
    "the docstring's word for waiting": documented,
    "keys of the future": lambda data: data | {"new": {"a": [1]}},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_other_versions(tmp_path: Path, version: str) -> None:
    found = read(tmp_path, VERSIONS[version](trained().snapshot()))
    assert found.reserved == 134 * MIB and found.allocated + found.waiting == 80 * MIB
    if version == "2.0":
        assert found.by_category == read(tmp_path, trained().snapshot()).by_category


def test_several_devices(tmp_path: Path) -> None:
    data, second = trained().snapshot(), Recorder()
    second.use(200 * MIB)
    more = second.snapshot()
    for segment in more["segments"]:
        segment["device"] = 2
    data["segments"] += more["segments"]
    data["device_traces"] += [[], more["device_traces"][0]]
    assert read(tmp_path, data).device == 2, "the one that reserves the most"
    first = read(tmp_path, data, device=0)
    assert first.peak.bytes == 121 * MIB and first.notes[0] == "the file also has device 2; choose with --device"
    result = invoke(written(tmp_path, data), "--device", 1)
    assert result.exit_code == 2 and "has nothing of device 1; it has 0, 2" in result.output
