"""The CUDA caching allocator, replayed: how many bytes it takes from the driver for a list of allocations and frees.

    round     a request becomes whole blocks of 512 B
    find      the smallest free block of its stream and pool (small: up to 1 MiB) that is large enough
    take      if there is none, a segment from the driver: 2 MiB, 20 MiB or, from 10 MiB on, a multiple of 2 MiB
    split     what is left of the block goes back, unless too little is left
    merge     a freed block joins its free neighbours in the segment; segments are kept until memory runs out

Source of every rule: c10/cuda/CUDACachingAllocator.cpp (as of 2026; constants checked in the headers of torch 2.13), whose functions are named beside it.
Not replayed: CUDA graphs' and user's own pools, and frees that wait for another stream (``record_stream``), so
active bytes are allocated bytes. Two segments' addresses are taken to ascend in the order they were taken;
the driver does not promise that, and it decides which of two free blocks of one size is used.
"""

from __future__ import annotations

from memcalc.allocator_blocks import Block, Pool, grown, link
from memcalc.allocator_options import BLOCK, MIB, MIN_LARGE_ALLOC, AllocatorOptions

__all__ = ["Allocator"]

SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
ROUND_LARGE = 2 * MIB  # kRoundLarge
_UNLIMITED = 2**62


class Allocator:
    """One device's allocator. ``capacity`` is what the driver can give in all, in bytes; None for any amount."""

    def __init__(self, options: AllocatorOptions, capacity: int | None = None) -> None:
        self.options = options
        self.capacity = _UNLIMITED if capacity is None else capacity
        fraction = options.per_process_memory_fraction
        self.limit = None if capacity is None or fraction is None else int(fraction * capacity)
        self.allocated = self.reserved = self.segments = 0
        self.by_stream: dict[int, int] = {}
        """Reserved bytes of each stream's segments."""
        self._pools = {True: Pool(SMALL_SEGMENT), False: Pool(options.large_segment)}
        self._max_split = options.max_split_size or _UNLIMITED
        self._limited = options.expandable_segments or self._max_split < _UNLIMITED
        """Not every block that is large enough may be taken."""
        self._rounds_up = any(options.roundup_power2_divisions)
        self._top = 0  # next address never used before
        self.next_address: int | None = None
        """Where the driver puts the next segment, if that is known; otherwise behind all others."""
        self._collects = self.limit is not None and options.garbage_collection_threshold > 0

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """A block of at least ``size`` bytes, or None when the device is full even without the cache (``malloc``)."""
        size = self.options.round(size) if self._rounds_up else -(-(size or 1) // BLOCK) * BLOCK
        pool = self._pools[size <= SMALL_SIZE]
        block = self._find(pool, size, stream)
        if block is None:
            if self._collects:
                self._collect_garbage()
            block = self._take(size, stream)
            if block is None and self._release_oversize(pool, size, stream):
                block = self._take(size, stream)
            if block is None:
                self.empty_cache()
                block = self._take(size, stream)
            if block is None:
                return None
        if self._splits(block, size):
            rest = Block(block.address + size, block.size - size, stream, block.small)
            block.size = size
            link(rest, block.next)
            link(block, rest)
            pool.add(rest)
        block.used = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with its free neighbours (``free_block``)."""
        block.used = False
        self.allocated -= block.size
        pool = self._pools[block.small]
        self._merge(block, pool)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment without a block in use back to the driver (``release_cached_blocks``)."""
        for pool in (self._pools[False], self._pools[True]):
            for block in pool.blocks():
                if self.options.expandable_segments:
                    self._unmap(block, pool)
                elif block.whole:
                    self._release(block, pool)

    def release(self, address: int) -> None:
        """Give the segment at an address back to the driver, if no block of it is in use."""
        for pool in self._pools.values():
            for block in pool.blocks():
                if block.address == address and block.whole and block.mapped:
                    self._release(block, pool)

    def segment_size(self, size: int) -> int:
        """Bytes taken from the driver for a rounded request (``get_allocation_size``)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_ALLOC:
            return self.options.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def _find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """``get_free_block``: best fit within the rules for blocks that may not be split."""
        pool.searches += self._collects
        free = pool.free.get(stream)
        if not free:
            return None
        if not self._limited:
            return free.take((size,))
        candidates = free.following((size,))
        block = next(candidates, None)
        if block is None:
            return None
        if self.options.expandable_segments:
            # A block that can grow counts as large as it can become.
            for other in candidates:
                if grown(other) >= grown(block):
                    break
                block = other
        if size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + self.options.max_non_split_rounding:
            return None
        return free.take((block.size, block.address))

    def _splits(self, block: Block, size: int) -> bool:
        """``should_split``."""
        rest = block.size - size
        if block.small or self.options.expandable_segments:
            return rest >= BLOCK
        return size < self._max_split and rest > SMALL_SIZE

    def _merge(self, block: Block, pool: Pool) -> None:
        """``try_merge_blocks`` with both neighbours; ``block`` itself is in no pool."""
        before, after = block.prev, block.next
        if before is not None and not before.used and before.mapped == block.mapped:
            pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if before.prev is not None:
                before.prev.next = block
        if after is not None and not after.used and after.mapped == block.mapped:
            pool.remove(after)
            block.size += after.size
            link(block, after.next)

    def _count(self, size: int, stream: int) -> None:
        self.reserved += size
        self.by_stream[stream] = self.by_stream.get(stream, 0) + size

    def _take(self, size: int, stream: int) -> Block | None:
        """``alloc_block``: memory from the driver, or None when there is no more."""
        segment = self.segment_size(size)
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        if self.options.expandable_segments:
            return self._grow(size, stream)
        if self.reserved + segment > self.capacity:
            return None
        address = self._top if self.next_address is None else self.next_address
        self.next_address = None
        block = Block(address, segment, stream, size <= SMALL_SIZE)
        self._top = max(self._top, address + segment)
        self.segments += 1
        self._count(segment, stream)
        return block

    def _release(self, block: Block, pool: Pool) -> None:
        pool.remove(block)
        self.segments -= 1
        self._count(-block.size, block.stream)

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """``release_available_cached_blocks``: first the blocks that are never split, as many as are needed."""
        free = pool.free.get(stream)
        if not free or self._max_split == _UNLIMITED or self.options.expandable_segments:
            return False
        wanted = max(size, self._max_split)
        block = next(free.following((wanted,)), None)
        if block is not None:
            self._release(block, pool)
            return True
        released = 0
        while free and released < wanted and free.largest.size >= self._max_split:
            released += free.largest.size
            self._release(free.largest, pool)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """``garbage_collect_cached_blocks``: whole free segments of at least average age, until enough are gone."""
        pool = self._pools[False]
        target = self.reserved - int(self.options.garbage_collection_threshold * (self.limit or 0))
        blocks = [] if self.options.expandable_segments else [block for block in pool.blocks() if block.whole]
        while target > 0 and blocks:
            mean = sum(pool.searches - block.born for block in blocks) / len(blocks)
            for block in blocks:
                if pool.searches - block.born >= mean:
                    target -= block.size
                    self._release(block, pool)
            blocks = [block for block in blocks if pool.searches - block.born < mean]

    def _grow(self, size: int, stream: int) -> Block | None:
        """``try_allocate_expandable_block``: pages at the lowest address where they make a block large enough."""
        pool = self._pools[size <= SMALL_SIZE]
        block = self._room(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size), pool):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map(following, min(size - block.size, following.size), pool):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int, stream: int) -> Block:
        """``find_expandable_block``: where free and unmapped blocks in a row are large enough, or a new segment."""
        for _, block in pool.unmapped.get(stream, []):
            first = block.prev if block.prev is not None and not block.prev.used else block
            room, at = 0, first
            while at is not None and not at.used and room < size:
                room += at.size
                at = at.next  # type: ignore[assignment]
            if room >= size:
                return first
        # Addresses for 9/8 of the device (ExpandableSegment's constructor).
        space = -(-max(self.capacity * 9 // 8, size) // pool.page) * pool.page
        address = -(-self._top // pool.page) * pool.page
        self._top = address + space
        block = Block(address, space, stream, size <= SMALL_SIZE, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int, pool: Pool) -> bool:
        """``map_block``: put whole pages behind the first ``size`` bytes of an unmapped block."""
        mapped = -(-size // pool.page) * pool.page
        if self.reserved + mapped > self.capacity:
            return False
        pool.remove(block)
        self.segments += block.whole
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, block.stream, block.small, mapped=False)
            link(rest, block.next)
            link(block, rest)
            pool.add(rest)
            block.size = mapped
        self._merge(block, pool)
        pool.add(block)
        self._count(mapped, block.stream)
        return True

    def _unmap(self, block: Block, pool: Pool) -> None:
        """``unmap_block``: take away the pages that lie wholly within a free block."""
        start = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            before = Block(block.address, start - block.address, block.stream, block.small)
            if block.prev is not None:
                link(block.prev, before)
            link(before, block)
            pool.add(before)
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, block.stream, block.small)
            link(after, block.next)
            link(block, after)
            pool.add(after)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge(block, pool)
        self._count(start - end, block.stream)
        if block.whole:
            self.segments -= 1
        else:
            pool.add(block)
