"""Blocks of the CUDA caching allocator, and the pools that keep the free ones in order.

Source: ``Block``, ``BlockPool`` and their comparators in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

__all__ = ["Block", "Ordered", "Pool", "grown", "link"]


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


Key = tuple[int, ...]
"""Where to look: a size, or a size and an address."""


class Ordered:
    """Free blocks by size and address, in lists of at most ``MOST`` each: of ten thousands in one, each that comes or goes would
    move half of the others.

    >>> free = Ordered()
    >>> for address in (3, 1, 2):
    ...     free.add(Block(address, 512, 0, True))
    >>> free.take((512,)).address, [block.address for block in free]
    (1, [2, 3])
    """

    __slots__ = ("_last", "_lists")
    MOST = 1000

    def __init__(self) -> None:
        self._lists: list[list[tuple[int, int, Block]]] = []
        self._last: list[tuple[int, int, Block]] = []
        """The last one of each list."""

    def __bool__(self) -> bool:
        return bool(self._lists)

    def __iter__(self) -> Iterator[Block]:
        return (block for items in self._lists for _, _, block in items)

    def add(self, block: Block) -> None:
        item = (block.size, block.address, block)
        at = bisect_left(self._last, item)
        if at < len(self._last):
            insort(self._lists[at], item)
        elif self._lists:
            at -= 1
            self._lists[at].append(item)
            self._last[at] = item
        else:
            self._lists.append([item])
            self._last.append(item)
        items = self._lists[at]
        if len(items) > self.MOST:
            half = len(items) // 2
            self._lists[at : at + 1] = [items[:half], items[half:]]
            self._last.insert(at, items[half - 1])

    def take(self, key: Key) -> Block | None:
        """Take out the first block that is not before ``key``."""
        at = bisect_left(self._last, key)
        if at == len(self._last):
            return None
        items = self._lists[at]
        index = bisect_left(items, key)
        block = items.pop(index)[2]
        if not items:
            del self._lists[at], self._last[at]
        elif index == len(items):
            self._last[at] = items[-1]
        return block

    def following(self, key: Key) -> Iterator[Block]:
        """Blocks from the first one that is not before ``key`` on."""
        at = bisect_left(self._last, key)
        if at < len(self._last):
            items = self._lists[at]
            yield from (block for _, _, block in islice(items, bisect_left(items, key), None))
            yield from (block for items in self._lists[at + 1 :] for _, _, block in items)

    @property
    def largest(self) -> Block:
        """The last block; raises IndexError where there is none."""
        return self._last[-1][2]


class Pool:
    """Free blocks of one pool, by stream: with memory ordered by size and address, without it by address."""

    __slots__ = ("free", "page", "searches", "unmapped")

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: dict[int, Ordered] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0

    def add(self, block: Block) -> None:
        if block.mapped:
            block.born = self.searches
            free = self.free.get(block.stream)
            if free is None:
                free = self.free[block.stream] = Ordered()
            free.add(block)
        else:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            self.free[block.stream].take((block.size, block.address))
        else:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]

    def blocks(self) -> list[Block]:
        return [block for stream in sorted(self.free) for block in self.free[stream]]


def link(first: Block, second: Block | None) -> None:
    first.next = second
    if second is not None:
        second.prev = first


def grown(block: Block) -> int:
    """The size an expandable block can become."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
