"""Settings of the caching allocator: what pytorch's own tests expect of a GPU, and how options are read.

None of the numbers comes from here: test/test_cuda.py and c10/test/core/AllocatorConfig_test.cpp state them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import InputError
from memcalc.replay import replay
from tests.allocations import DEFAULT, EXPANDABLE, MIB


@pytest.mark.parametrize(
    ("options", "size", "block"),
    [
        ("", 84, 84),
        ("roundup_power2_divisions:4", 84, 96),  # power2_div(84 MiB, 4): 64 and steps of 16
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84, 84),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84, 88),  # power2_div(84 MiB, 8)
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400, 512),  # power2_div(400 MiB, 2)
        ("release_lock_on_cudamalloc:True", 84, 84),
    ],
)
def test_test_allocator_settings(options: str, size: int, block: int) -> None:
    """test_allocator_settings: active bytes of torch.rand(21 Mi) and torch.rand(100 Mi) in float32."""
    assert replay([(0, size * MIB)], AllocatorOptions.parse(options)).peak_allocated == block * MIB


@pytest.mark.parametrize(
    "options",
    [
        "foo:1,bar:2",
        "garbage_collection_threshold:1.2",
        "max_split_size_mb:2",
        "release_lock_on_cudamalloc:none",
        "pinned_use_cuda_host_register:none",
        "pinned_num_register_threads:none",
        "pinned_num_register_threads:1024",
    ],
)
def test_test_allocator_settings_refuses(options: str) -> None:
    with pytest.raises(InputError):
        AllocatorOptions.parse(options)


def test_test_max_split_expandable() -> None:
    """test_max_split_expandable: 120 MiB are allowed; three times 40 fit, a fourth does not, and then 120 do."""
    three = [(ident, 40 * MIB) for ident in range(3)]
    for text in ("max_split_size_mb:40", "max_split_size_mb:40,expandable_segments:True"):
        options = AllocatorOptions.parse(f"{text},per_process_memory_fraction:1.0")
        assert replay([*three, (3, 40 * MIB)], options, capacity=120 * MIB).refused is not None
        freed = [(ident, -40 * MIB) for ident in range(3)]
        assert replay([*three, *freed, (3, 120 * MIB)], options, capacity=120 * MIB).refused is None


def test_test_garbage_collect_expandable() -> None:
    """test_garbage_collect_expandable: of 120 MiB two times 40 are used and freed, then 80 can be had."""
    events = [(0, 40 * MIB), (1, 40 * MIB), (0, -40 * MIB), (1, -40 * MIB), (2, 80 * MIB)]
    for text in ("", "expandable_segments:True,"):
        options = AllocatorOptions.parse(f"{text}garbage_collection_threshold:0.5,per_process_memory_fraction:1.0")
        assert replay(events, options, capacity=120 * MIB).refused is None


def test_test_allocate_in_thread_to_pool() -> None:
    """test_allocate_in_thread_to_pool: 16 B, then ten times a, b and a + b of 20 MiB: 4 segments, 2 if expandable."""
    events = [(0, 16)]
    for _ in range(10):
        events += [(1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), (1, -20 * MIB), (2, -20 * MIB), (3, -20 * MIB)]
    assert replay(events).segments == 4
    assert replay(events, EXPANDABLE).segments == 2


def test_options_are_those_torch_reads() -> None:
    options = AllocatorOptions.parse(
        "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
        "pinned_use_background_threads:True"
    )
    assert (options.max_split_size, options.max_non_split_rounding) == (40 * MIB, 30 * MIB)
    assert (options.garbage_collection_threshold, options.expandable_segments) == (0.5, True)
    expected = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 8192: 1}
    assert {mib: options.roundup_power2_divisions[mib.bit_length() - 1] for mib in expected} == expected
    second = AllocatorOptions.parse("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]")
    expected = {64: 8, 128: 8, 256: 16, 512: 1, 1024: 0, 2048: 8, 4096: 2}
    assert {mib: second.roundup_power2_divisions[mib.bit_length() - 1] for mib in expected} == expected
    assert set(AllocatorOptions.parse("roundup_power2_divisions:4").roundup_power2_divisions) == {4}
    assert AllocatorOptions.parse("large_segment_size_mb:15,max_split_size_mb:20").large_segment == 15 * MIB
    assert AllocatorOptions.parse("expandable_segments:False,") == DEFAULT
    assert AllocatorOptions.parse("") == DEFAULT


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "expandable_segment:True",
            "unknown allocator option 'expandable_segment'; did you mean 'expandable_segments'?",
        ),
        ("foo:123,bar:456", "unknown allocator option 'foo'"),
        ("max_split_size_mb", "max_split_size_mb has no value; write it like max_split_size_mb:32"),
        ("max_split_size_mb:", "max_split_size_mb has no value"),
        ("max_split_size_mb:10", "max_split_size_mb 10 must be at least large_segment_size_mb, 20"),
        ("max_split_size_mb:20,large_segment_size_mb:25", "max_split_size_mb 20 must be at least"),
        ("max_split_size_mb:-1", "'-1' must be a whole number of MiB"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be more than 10"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb must be at least 20"),
        ("expandable_segments:true", "expandable_segments 'true' must be True or False"),
        ("garbage_collection_threshold:1.5", "must be more than 0 and at most 1"),
        ("garbage_collection_threshold:1", "must be less than 1"),
        ("garbage_collection_threshold:.", "must be more than 0 and at most 1"),
        ("roundup_power2_divisions:3", "'3' must be a power of two"),
        ("roundup_power2_divisions:[64:8", "cannot be read; write it like [64:8,256:4,>:1]"),
        ("roundup_power2_divisions:[65:8]", "'65' must be a power of two"),
        ("backend:cudaMallocAsync", "only native can"),
    ],
)
def test_options_that_cannot_be_read_are_one_line(text: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        AllocatorOptions.parse(text)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="expandabl_segmtsTru:,[]>0123456789. ", max_size=60))
def test_any_text_gives_options_or_one_line(text: str) -> None:
    options = refused = None
    try:
        options = AllocatorOptions.parse(text)
    except InputError as error:
        refused = str(error)
    if options is None:
        assert refused and "\n" not in refused
    else:
        assert options.round(10**6) >= 10**6
