"""The twin: torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), without a device.

A request is rounded and served by the best-fitting free block of its pool and stream, else by a new segment; what a
block has left over becomes a block of its own. Freed neighbours merge. Where the device has no more, cached segments
are given back and it is tried again. With expandable segments there is one range of addresses a pool and stream, mapped
by pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from .alloc_conf import LEAST_BLOCK, MOST_SMALL, AllocatorSettings, segment_size
from .expandable import ExpandableSegments, best_of
from .pool_blocks import Block, Pool
from .reserved import ReservedMemory

DEFAULT_POOL: Final = "0.0"
DEFAULTS: Final = AllocatorSettings()


class Allocator:
    """One device's allocator. `memory`: of its device; None: of one without limits."""

    def __init__(self, settings: AllocatorSettings = DEFAULTS, memory: ReservedMemory | None = None) -> None:
        self.settings = settings
        self.memory = ReservedMemory() if memory is None else memory
        self.counts = self.memory.counts
        self._expandable = ExpandableSegments(self.memory)
        self._pending: dict[int, Block] = {}
        self._served = 0

    # --- what a program does ----------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool_id: str = DEFAULT_POOL) -> Block | None:
        """A block of at least `requested` bytes; None where the device has no more: an OOM."""
        size = self.settings.round_size(requested)
        pool = self.memory.pool(pool_id, size <= MOST_SMALL)
        if self.collects:
            pool.searches += 1
        block = self._best_fit(pool, stream, size) or self._grown(pool, stream, size)
        if block is None:
            self.counts.ooms += 1
            return None
        if self._splits(block, size):
            pool.insert(block.cut(size))
        self._use(block, requested)
        return block

    def _use(self, block: Block, requested: int) -> None:
        self._served += 1
        block.used, block.requested, block.serial = True, requested, self._served
        counts = self.counts
        counts.active += block.size
        if counts.active > counts.peak_active:
            counts.peak_active = counts.active

    def free(self, block: Block) -> None:
        """Give a block back to the cache, merged with its free neighbours."""
        self._pending.pop(block.start, None)
        self.counts.active -= block.size
        block.used = False
        block.merge()
        block.pool.insert(block)

    def await_free(self, block: Block) -> None:
        """`block` was freed, and another stream may still use it."""
        self._pending[block.start] = block

    def release_cached(self) -> None:
        """`torch.cuda.empty_cache`, and the last resort of an allocation: all free segments and pages go back."""
        for block in list(self._pending.values()):
            self.free(block)
        for pool in self.memory.pools_named(DEFAULT_POOL):
            self.release_pool(pool)

    def release_pool(self, pool: Pool) -> None:
        """Give back what is free in whole segments or pages."""
        for block in list(pool.free_blocks()):
            if block.range is not None:
                self._expandable.unmap(block)
            elif block.is_whole:
                self._give_back(block)

    def give_back(self, address: int) -> None:
        """The segment there, if it is free as a whole."""
        block = next((block for block in self.free_blocks() if block.start == address), None)
        if block is not None and block.is_whole:
            self._give_back(block)

    def releasable(self) -> int:
        """Bytes that `release_cached` would give back (pending blocks aside)."""
        return self.memory.releasable()

    def free_blocks(self) -> Iterator[Block]:
        return self.memory.free_blocks()

    # --- beginning in the middle ------------------------------------------------------------------

    def add_segment(
        self, pool: Pool, stream: int, start: int, size: int, used: Sequence[tuple[int, int, int]]
    ) -> list[Block]:
        """A segment that is there already, and its blocks in use: (address, size, requested), by address."""
        return self._fill(Block(start, size, stream, pool), used)

    def add_mapped(
        self, pool: Pool, stream: int, mapped: Sequence[tuple[int, int]], used: Sequence[tuple[int, int, int]]
    ) -> list[Block]:
        """An expandable segment that is there already: (address, size) of what is mapped, and its blocks in use."""
        found = []
        for block in self._expandable.restore(pool, stream, mapped):
            found += self._fill(block, [item for item in used if block.start <= item[0] < block.end])
        return found

    def _fill(self, block: Block, used: Sequence[tuple[int, int, int]]) -> list[Block]:
        pool, found = block.pool, []
        self.memory.take(block.start, block.size)
        end = block.end
        for start, size, requested in used:
            if start > block.start:
                gap, block = block, block.cut(start - block.start)
                pool.insert(gap)
            if start + size < end:
                block, after = block, block.cut(size)
            else:
                after = block
            self._use(block, requested)
            found.append(block)
            block = after
        if not block.used:
            pool.insert(block)
        return found

    # --- finding a block --------------------------------------------------------------------------

    def _best_fit(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The smallest free block that is large enough, taken out of its pool."""
        free = pool.free.get(stream)
        if not free:
            return None
        at = bisect_left(free, (size, 0))
        if at == len(free):
            return None
        block = pool.at[free[at][1]]
        if block.range is not None:
            at = self._best_expandable(pool, free, at)
            if at == len(free):
                return None
            block = pool.at[free[at][1]]
        most = self.settings.max_split_bytes
        if most is not None:
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + self.settings.max_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _best_expandable(self, pool: Pool, free: list[tuple[int, int]], at: int) -> int:
        """From place `at` on, which begins with a block of an expandable segment."""
        if self.settings.expandable:
            return best_of(pool, free, at)
        while at < len(free) and pool.at[free[at][1]].range is not None:
            at += 1
        return at

    def _splits(self, block: Block, size: int) -> bool:
        left = block.size - size
        if block.pool.small or self.settings.expandable:
            return left >= LEAST_BLOCK
        most = self.settings.max_split_bytes
        return (most is None or size < most) and left > MOST_SMALL

    # --- getting memory ---------------------------------------------------------------------------

    def _grown(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A block from new memory; where there is none, after cached segments were given back."""
        if self.collects:
            self._collect_garbage()
        block = self._new(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._new(pool, stream, size)
        if block is None:
            self.release_cached()
            self.counts.retries += 1
            block = self._new(pool, stream, size)
        return block

    def _new(self, pool: Pool, stream: int, size: int) -> Block | None:
        segment = segment_size(size)
        if self.memory.refuses(segment):
            return None
        if self.settings.expandable:
            return self._expandable.grown(pool, stream, size)
        if not self.memory.has(segment):
            return None
        block = Block(self.memory.address(segment), segment, stream, pool)
        self.memory.take(block.start, segment)
        return block

    # --- giving it back ---------------------------------------------------------------------------

    def _give_back(self, block: Block) -> None:
        """The whole free segment `block`."""
        block.pool.remove(block)
        self.memory.give_back(block)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Of segments that are never split, give back enough for `size`; whether that succeeded. What is of an
        expandable segment stays, and only what is smaller than that is looked at."""
        most = self.settings.max_split_bytes
        if most is None:
            return False
        wanted, free = max(size, most), pool.free.get(stream, [])
        at = bisect_left(free, (wanted, 0))
        if at < len(free) and pool.at[free[at][1]].range is None:
            self._give_back(pool.at[free[at][1]])
            return True
        released = 0
        while at > 0 and released < wanted and free[at - 1][0] >= most:
            at -= 1
            block = pool.at[free[at][1]]
            if block.range is None:
                released += block.size
                self._give_back(block)
        return released >= wanted

    @property
    def collects(self) -> bool:
        return self.settings.gc_threshold > 0 and self.memory.limits.allowed_bytes is not None

    def _collect_garbage(self) -> None:
        """Give back the segments that were not used for longest, where more than the threshold is reserved."""
        least = int(self.settings.gc_threshold * (self.memory.limits.allowed_bytes or 0))
        target = self.counts.reserved - least
        pool = self.memory.pool(DEFAULT_POOL, False)
        old = [block for block in pool.free_blocks() if block.is_whole]
        reclaimed = 0
        while target > reclaimed and old:
            mean = sum(map(pool.age, old)) / len(old)
            chosen = [block for block in old if block.range is None and pool.age(block) >= mean]
            if not chosen:
                return
            for block in chosen:
                reclaimed += block.size
                self._give_back(block)
            old = [block for block in old if block.range is not None or pool.age(block) < mean]
