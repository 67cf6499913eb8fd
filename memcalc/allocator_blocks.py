"""Blocks of the CUDA caching allocator, and the pools that keep the free ones in order.

Source: ``Block``, ``BlockPool`` and their comparators in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Block", "Pool", "grown", "link"]


class Block:
    """A piece of a segment, in use or free; of an expandable segment also one without memory behind it."""

    __slots__ = ("address", "born", "mapped", "next", "prev", "size", "small", "stream", "used")

    def __init__(self, address: int, size: int, stream: int, small: bool, mapped: bool = True) -> None:
        self.address, self.size, self.stream, self.small, self.mapped = address, size, stream, small, mapped
        self.used = False
        self.prev: Block | None = None
        self.next: Block | None = None
        self.born = 0
        """Searches made in the pool before this block was put there: its age for garbage collection."""

    @property
    def whole(self) -> bool:
        """Whether it is its segment's only block."""
        return self.prev is None and self.next is None


class Pool:
    """Free blocks of one pool, by stream: with memory ordered by size and address, without it by address."""

    __slots__ = ("free", "page", "searches", "unmapped")

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0

    def add(self, block: Block) -> None:
        if block.mapped:
            block.born = self.searches
            insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))
        else:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            free = self.free[block.stream]
            del free[bisect_left(free, (block.size, block.address))]
        else:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]

    def blocks(self) -> list[Block]:
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]


def link(first: Block, second: Block | None) -> None:
    first.next = second
    if second is not None:
        second.prev = first


def grown(block: Block) -> int:
    """The size an expandable block can become."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
