"""Expandable segments: one range of addresses a pool and stream, mapped by pages where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .alloc_conf import LARGE_SEGMENT, SMALL_SEGMENT
from .pool_blocks import Block, Pool, Range
from .reserved import ReservedMemory

RANGE_BYTES: Final = 1 << 42
"""Addresses of an expandable segment, where the device's size is not known."""


def best_of(pool: Pool, free: list[tuple[int, int]], at: int) -> int:
    """Of the free blocks from place `at` on the place of the one with the least room to grow, since a block counts with
    what could follow it."""

    def room(place: int) -> int:
        block = pool.at[free[place][1]]
        beyond = block.next
        return block.size + (beyond.size if beyond is not None and not beyond.mapped else 0)

    while pool.at[free[at][1]].range is not None and at + 1 < len(free) and room(at + 1) < room(at):
        at += 1
    return at


class ExpandableSegments:
    def __init__(self, memory: ReservedMemory) -> None:
        self._memory = memory

    def grown(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The lowest free and unmapped addresses that hold `size`, mapped where they are not; None where the device has
        no more."""
        block = self._room_to_map(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            beyond = block.next
            assert beyond is not None
            if not self._map(beyond, min(size - block.size, beyond.size)):
                return None
            block = beyond
        pool.remove(block)
        return block

    def unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        assert block.range is not None
        first, end = block.range.page_after(block.start), block.range.page_before(block.end)
        if first >= end:
            return
        pool = block.pool
        pool.remove(block)
        if end < block.end:
            pool.insert(block.cut(end - block.start))
        if first > block.start:
            rest = block.cut(first - block.start)
            pool.insert(block)
            block = rest
        self._memory.give_back(block)
        block.mapped = False
        block.merge()
        if not block.is_whole:
            pool.insert_unmapped(block)

    def restore(self, pool: Pool, stream: int, mapped: Sequence[tuple[int, int]]) -> list[Block]:
        """A segment that is there already: a block for each stretch (address, size) that is mapped, by address."""
        found = []
        rest: Block | None = self._add_range(pool, stream, mapped[0][0], self._range_bytes(pool))
        for start, size in mapped:
            assert rest is not None
            pool.remove_unmapped(rest)
            if start > rest.start:
                gap, rest = rest, rest.cut(start - rest.start)
                pool.insert_unmapped(gap)
            block, rest = rest, rest.cut(size) if size < rest.size else None
            if rest is not None:
                pool.insert_unmapped(rest)
            block.mapped = True
            found.append(block)
        return found

    def _room_to_map(self, pool: Pool, stream: int, size: int) -> Block:
        for start in pool.unmapped.get(stream, []):
            block = pool.at[start]
            before = block.prev
            if before is not None and not before.used:
                block = before
            room, beyond = 0, block
            last: Block | None = beyond
            while room < size and last is not None and not last.used:
                room += last.size
                last = last.next
            if room >= size:
                return block
        length = self._range_bytes(pool)
        return self._add_range(pool, stream, self._memory.address(length), length)

    def _range_bytes(self, pool: Pool) -> int:
        """An eighth more than the device has, so that pages can move to the end."""
        device = self._memory.limits.device_bytes
        length = RANGE_BYTES if device is None else device + device // 8
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        return -(-length // page) * page

    def _add_range(self, pool: Pool, stream: int, start: int, length: int) -> Block:
        """A new range of addresses, nothing of it mapped."""
        whole = Range(start, SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
        block = Block(start, length, stream, pool, range=whole, mapped=False)
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first `size` bytes of an unmapped block, in whole pages."""
        assert block.range is not None
        length = min(block.range.page_after(block.start + size) - block.start, block.size)
        if not self._memory.has(length):
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        self._memory.take(block.start, length)
        if length < block.size:
            rest = block.cut(length)
            rest.mapped = False
            pool.insert_unmapped(rest)
        block.mapped = True
        block.merge()
        pool.insert(block)
        return True
