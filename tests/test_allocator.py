"""The replayed caching allocator: every rule on numbers worked out by hand.

Rules are those of c10/cuda/CUDACachingAllocator.cpp; the function that states one is named in its test.
"""

from __future__ import annotations

import pytest

from memcalc.allocator import Allocator
from memcalc.allocator_options import AllocatorOptions
from memcalc.replay import replay
from tests.allocations import DEFAULT, EXPANDABLE, KIB, MIB, reserved_mib


@pytest.mark.parametrize(("size", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_blocks(size: int, block: int) -> None:
    """``round_size``."""
    assert DEFAULT.round(size) == block


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200, 4, 1536),  # 1200 <= 512 * 4: whole blocks
        (1200 * KIB, 4, 1280 * KIB),  # the example in the comment of roundup_power2_next_division, in KiB
        (1280 * KIB, 4, 1280 * KIB),
        (1281 * KIB, 4, 1536 * KIB),
        (1793 * KIB, 4, 2048 * KIB),
        (2048 * KIB, 4, 2048 * KIB),
        (1200 * KIB, 1, 1200 * KIB),
        (1200 * KIB, 0, 1200 * KIB),
    ],
)
def test_rounding_up_to_divisions_of_a_power_of_two(size: int, divisions: int, rounded: int) -> None:
    """``round_size``."""
    assert AllocatorOptions(roundup_power2_divisions=(divisions,) * 16).round(size) == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB - 511, 10),  # rounds to 10 MiB, which is no longer below kMinLargeAlloc
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ],
)
def test_segments(size: int, segment: int) -> None:
    """``get_allocation_size``."""
    assert reserved_mib((0, size / MIB)) == segment


def test_large_segment_size_replaces_20_mib() -> None:
    """``get_allocation_size``."""
    assert reserved_mib((0, 5), options=AllocatorOptions.parse("large_segment_size_mb:64")) == 64


def test_small_and_large_requests_share_nothing() -> None:
    """``get_pool``."""
    found = replay([(0, MIB), (1, MIB + 512), (1, -MIB - 512), (2, MIB), (3, MIB)])
    assert found.peak_reserved == (2 + 20 + 2) * MIB


def test_a_block_is_used_again_on_its_own_stream_only() -> None:
    """``get_pool``."""
    events = [(0, 12 * MIB), (0, -12 * MIB), (1, 12 * MIB)]
    assert replay(events).peak_reserved == 12 * MIB
    other = replay(events, streams={1: 7})
    assert other.peak_reserved == 24 * MIB
    assert other.by_stream == {0: 12 * MIB, 7: 12 * MIB}


def test_a_large_block_is_split_when_more_than_1_mib_is_left() -> None:
    """``should_split``."""
    kept = replay([(0, 19 * MIB)])  # a segment of 20 MiB: exactly 1 MiB is left, and stays with the block
    assert (kept.peak_reserved, kept.peak_allocated) == (20 * MIB, 20 * MIB)
    split = replay([(0, 9 * MIB), (1, 9 * MIB)])  # 9 + 9 + 2 of one segment of 20
    assert (split.peak_reserved, split.peak_allocated) == (20 * MIB, 18 * MIB)


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    """``should_split``."""
    found = replay([(0, MIB), (1, MIB - 512), (2, 512)])
    assert (found.peak_reserved, found.peak_allocated) == (2 * MIB, 2 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    """``get_free_block``."""
    # Free: 30 and 14. A request of 13 takes the 14 (all of it), which leaves the 30 for the 30.
    assert reserved_mib((0, 30), (1, 14), (0, -30), (1, -14), (2, 13), (3, 30)) == 44
    # A request of 16 must split the 30, and the 30 then needs a segment of its own.
    assert reserved_mib((0, 30), (1, 14), (0, -30), (1, -14), (2, 16), (3, 30)) == 74


def test_free_neighbours_become_one_block() -> None:
    """``try_merge_blocks``."""
    # 20 MiB as 6 + 6 + 8: the first two together hold 12, the first and the last do not.
    assert reserved_mib((0, 6), (1, 6), (2, 8), (0, -6), (1, -6), (3, 12)) == 20
    assert reserved_mib((0, 6), (1, 6), (2, 8), (0, -6), (2, -8), (3, 12)) == 32


def test_segments_do_not_merge() -> None:
    """``try_merge_blocks``."""
    assert reserved_mib((0, 12), (1, 12), (0, -12), (1, -12), (2, 24)) == 48


def test_a_smaller_request_takes_no_oversize_block() -> None:
    """``max_split_size``."""
    options = AllocatorOptions.parse("max_split_size_mb:32")
    events = ((0, 40), (0, -40), (1, 20))
    assert reserved_mib(*events) == 40
    assert reserved_mib(*events, options=options) == 60
    assert reserved_mib((0, 32), (0, -32), (1, 20), options=options) == 52  # 32 is oversize already


@pytest.mark.parametrize(("rounding", "wanted", "reserved"), [(20, 41, 60), (20, 40, 100), (32, 40, 60)])
def test_an_oversize_request_takes_a_block_less_than_so_much_larger(rounding: int, wanted: int, reserved: int) -> None:
    """``max_split_size``."""
    options = AllocatorOptions.parse(f"max_split_size_mb:32,max_non_split_rounding_mb:{rounding}")
    assert reserved_mib((0, 60), (0, -60), (1, wanted), options=options) == reserved


def test_an_oversize_block_is_never_split() -> None:
    """``max_split_size``."""
    found = replay([(0, 60 * MIB), (0, -60 * MIB), (1, 45 * MIB)], AllocatorOptions.parse("max_split_size_mb:32"))
    assert found.peak_allocated == 60 * MIB
    assert replay([(0, 60 * MIB), (0, -60 * MIB), (1, 45 * MIB)]).allocated == 45 * MIB


def test_cached_segments_are_released_when_the_device_is_full() -> None:
    """alloc_block, release_cached_blocks."""
    found = replay([(0, 30 * MIB), (1, 12 * MIB), (0, -30 * MIB), (2, 40 * MIB)], capacity=60 * MIB)
    assert found.refused is None
    assert (found.peak_reserved, found.reserved) == (52 * MIB, 52 * MIB)
    assert reserved_mib((0, 30), (1, 12), (0, -30), (2, 40)) == 82


def test_a_segment_with_a_block_in_use_cannot_be_released() -> None:
    """alloc_block, release_cached_blocks."""
    # 5 MiB keep a segment of 20: of 60, 40 are left, and 42 cannot be had.
    refused = replay([(0, 5 * MIB), (1, 42 * MIB)], capacity=60 * MIB).refused
    assert refused is not None
    assert (refused.event, refused.tried, refused.allocated, refused.reserved) == (1, 42 * MIB, 5 * MIB, 20 * MIB)


def test_an_out_of_memory_message_names_the_segment() -> None:
    """ "Tried to allocate 20.00 MiB" in countless reports: format_size(alloc_size), not the tensor's size."""
    refused = replay([(0, 3 * MIB)], capacity=8 * MIB).refused
    assert refused is not None and refused.tried == 20 * MIB


def test_oversize_blocks_are_released_first_and_only_as_many_as_needed() -> None:
    """release_available_cached_blocks."""
    events = [(0, 40 * MIB), (1, 50 * MIB), (2, 12 * MIB), (0, -40 * MIB), (1, -50 * MIB), (2, -12 * MIB)]
    options = AllocatorOptions.parse("max_split_size_mb:32")
    full = replay([*events, (3, 45 * MIB), (4, 30 * MIB)], options, capacity=102 * MIB)
    # 45 takes the 50 from the cache; 30 < 32 takes no oversize block: the 40 is released, the 12 stays.
    assert full.refused is None
    assert full.reserved == (50 + 12 + 30) * MIB
    # Without the option everything cached would have gone.
    assert replay([*events, (3, 45 * MIB), (4, 41 * MIB)], capacity=102 * MIB).reserved == (50 + 42) * MIB


def test_garbage_collection_releases_old_segments_before_new_ones_are_taken() -> None:
    """``garbage_collect_cached_blocks``."""
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 40 * MIB), (1, -40 * MIB), (2, 50 * MIB)]
    without = AllocatorOptions.parse("per_process_memory_fraction:1.0")
    with_it = AllocatorOptions.parse("per_process_memory_fraction:1.0,garbage_collection_threshold:0.5")
    assert replay(events, without, capacity=200 * MIB).reserved == 120 * MIB
    # 70 are held, 50 are the threshold. Ages: 30 was freed after 1 search, 40 after 2, this is the third: 2 and 1,
    # 1.5 on average, so the 30 goes, which is enough for the 20 to be reclaimed.
    assert replay(events, with_it, capacity=100 * MIB).reserved == 90 * MIB


def test_garbage_collection_needs_a_limit() -> None:
    """``garbage_collect_cached_blocks``."""
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 40 * MIB), (1, -40 * MIB), (2, 50 * MIB)]
    options = AllocatorOptions.parse("garbage_collection_threshold:0.1")
    assert replay(events, options, capacity=200 * MIB).reserved == 120 * MIB


def test_a_memory_fraction_is_a_limit() -> None:
    """``garbage_collect_cached_blocks``."""
    options = AllocatorOptions.parse("per_process_memory_fraction:0.5")
    assert replay([(0, 50 * MIB)], options, capacity=100 * MIB).refused is None
    assert replay([(0, 52 * MIB)], options, capacity=100 * MIB).refused is not None


def test_an_expandable_segment_grows_in_pages() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    assert reserved_mib((0, 0.5), options=EXPANDABLE) == 2
    assert reserved_mib((0, 1.5), options=EXPANDABLE) == 20
    assert reserved_mib((0, 21), options=EXPANDABLE) == 40
    # 12 + 24 = 36 of 40 in one segment; segments apart would be 12 + 24.
    assert reserved_mib((0, 12), (1, 24), options=EXPANDABLE) == 40
    found = replay([(0, 12 * MIB), (1, 24 * MIB), (2, 512)], EXPANDABLE)
    assert found.segments == 2  # one for each pool


def test_an_expandable_segment_fills_what_segments_leave() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    events = ((0, 12), (1, 12), (0, -12), (1, -12), (2, 24))
    assert reserved_mib(*events) == 48
    assert reserved_mib(*events, options=EXPANDABLE) == 40  # 24 fit: 12 + 12 have merged


def test_an_expandable_block_grows_from_the_free_end() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    # 30 in 40: the free 10 at the end and 20 new make room for 25.
    assert reserved_mib((0, 30), (1, 25), options=EXPANDABLE) == 60


def test_the_growing_end_is_kept_for_what_fits_nowhere_else() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    # Free: a hole of 12, and 10 at the end, which counts as large as it can grow. So 9 go into the hole, and 25
    # need 15 more at the end: one page. In the end, 9 would leave 1, and 25 would need two.
    assert reserved_mib((0, 12), (1, 18), (0, -12), (2, 9), (3, 25), options=EXPANDABLE) == 60


def test_blocks_of_expandable_segments_are_split_to_512_bytes() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    assert replay([(0, 19 * MIB + MIB // 2)], EXPANDABLE).peak_allocated == 19 * MIB + MIB // 2


def test_pages_are_taken_from_the_middle_of_a_segment_and_put_back() -> None:
    """Six blocks of 10 in three pages; the second page is free and given back, then the hole is filled."""
    allocator = Allocator(EXPANDABLE, capacity=80 * MIB)
    blocks = [allocator.allocate(10 * MIB) for _ in range(6)]
    assert allocator.reserved == 60 * MIB
    for block in blocks[2:4]:
        assert block is not None
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 40 * MIB)
    again = allocator.allocate(20 * MIB)
    assert again is not None and blocks[1] is not None and again.address == blocks[1].address + 10 * MIB
    assert allocator.reserved == 60 * MIB


def test_a_page_with_a_block_in_use_stays() -> None:
    """expandable segments: find_expandable_block, map_block, unmap_block."""
    allocator = Allocator(EXPANDABLE)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert first is not None and second is not None
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # the first page goes, the second holds 10 of the second block
