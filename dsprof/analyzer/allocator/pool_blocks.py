"""Blocks and pools of the allocator twin."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from dsprof.trace.memory import NO_STACK


@dataclass(frozen=True)
class Range:
    """The addresses of an expandable segment, mapped by pages of `page` bytes from `start` on."""

    start: int
    page: int

    def page_after(self, address: int) -> int:
        return self.start + -(-(address - self.start) // self.page) * self.page

    def page_before(self, address: int) -> int:
        return self.start + (address - self.start) // self.page * self.page


class Block:
    """A part of a segment: `size` bytes from `start` on, of one pool and stream, between `prev` and `next`."""

    __slots__ = (
        "born",
        "mapped",
        "next",
        "pool",
        "prev",
        "range",
        "requested",
        "serial",
        "size",
        "stack",
        "start",
        "stream",
        "used",
    )

    def __init__(
        self, start: int, size: int, stream: int, pool: Pool, range: Range | None = None, mapped: bool = True
    ) -> None:
        self.start, self.size, self.stream, self.pool = start, size, stream, pool
        self.range, self.mapped = range, mapped
        self.used, self.requested = False, 0
        """Used is also what waits for another stream before it is free."""
        self.stack = NO_STACK
        """Where the program allocated it."""
        self.serial = 0
        """Which of all allocations it was given to: a block that is used again has another one."""
        self.born = 0
        """How often its pool had been searched when it came into it."""
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def is_whole(self) -> bool:
        """It is all of its segment."""
        return self.prev is None and self.next is None

    @property
    def releasable(self) -> int:
        """Bytes that can go back to the device while it is free."""
        if self.range is None:
            return self.size if self.prev is None and self.next is None else 0
        return max(self.range.page_before(self.end) - self.range.page_after(self.start), 0)

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest, as a block behind it."""
        rest = Block(self.start + size, self.size - size, self.stream, self.pool, self.range, self.mapped)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb(self, other: Block) -> None:
        """A neighbour, which is then no more."""
        if other is self.prev:
            self.start, self.prev = other.start, other.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.size += other.size

    def merge(self) -> None:
        """With free neighbours that are mapped, or unmapped, like it; they leave their pool."""
        for other in (self.prev, self.next):
            if other is not None and not other.used and other.mapped == self.mapped:
                if other.mapped:
                    self.pool.remove(other)
                else:
                    self.pool.remove_unmapped(other)
                self.absorb(other)


class Pool:
    """Free blocks of one pool: small ones (up to 1 MiB) and large ones are kept apart, and so are private pools."""

    def __init__(self, name: str, small: bool) -> None:
        self.name, self.small = name, small
        self.free: dict[int, list[tuple[int, int]]] = {}
        """Stream -> (size, address), in order."""
        self.unmapped: dict[int, list[int]] = {}
        """Stream -> addresses of expandable segments that are not mapped, in order."""
        self.at: dict[int, Block] = {}
        """By address, what is in either."""
        self.releasable = 0
        self.searches = 0

    def insert(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (block.size, block.start))
        self.at[block.start] = block
        block.born = self.searches
        self.releasable += block.releasable

    def remove(self, block: Block) -> None:
        free = self.free[block.stream]
        del free[bisect_left(free, (block.size, block.start))]
        del self.at[block.start]
        self.releasable -= block.releasable

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), block.start)
        self.at[block.start] = block

    def remove_unmapped(self, block: Block) -> None:
        starts = self.unmapped[block.stream]
        del starts[bisect_left(starts, block.start)]
        del self.at[block.start]

    def free_blocks(self) -> Iterator[Block]:
        """By stream, size and address."""
        for stream in sorted(self.free):
            for _, start in list(self.free[stream]):
                yield self.at[start]

    def age(self, block: Block) -> int:
        """How often the pool was searched since the block came into it."""
        return self.searches - block.born
