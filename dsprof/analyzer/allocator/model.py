"""The twin: torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), without a device.

A request is rounded and served by the best-fitting free block of its pool and stream, else by a new segment; what a
block has left over becomes a block of its own. Freed neighbours merge. Where the device has no more, cached segments
are given back and it is tried again. With expandable segments there is one range of addresses a pool and stream, mapped
by pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .addresses import DeviceAddresses
from .blocks import Block, Pool, Range
from .settings import LARGE_SEGMENT, LEAST_BLOCK, MOST_SMALL, SMALL_SEGMENT, AllocatorSettings, segment_size

DEFAULT_POOL: Final = "0.0"
RANGE_BYTES: Final = 1 << 42
"""Addresses of an expandable segment, where the device's size is not known."""


@dataclass(frozen=True)
class Limits:
    """What the device has, and what the process may take of it (`set_per_process_memory_fraction`); None: no limit."""

    device_bytes: int | None = None
    allowed_bytes: int | None = None


DEFAULTS: Final = AllocatorSettings()
NO_LIMITS: Final = Limits()


@dataclass
class Counts:
    """What happened so far; sizes in bytes."""

    reserved: int = 0
    active: int = 0
    peak_reserved: int = 0
    peak_active: int = 0
    active_at_peak: int = 0
    stranded_at_peak: int = 0
    cached_at_peak: int = 0
    """At the peak of `reserved`, before what it was reserved for: in use; free, but not to be given back since other
    parts of the segments (or pages) are in use; free for good."""
    device_allocs: int = 0
    device_frees: int = 0
    retries: int = 0
    ooms: int = 0


class Allocator:
    """One device's allocator. `place` gives the address of a new segment of so many bytes; by default the device's."""

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULTS,
        limits: Limits = NO_LIMITS,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings, self.limits = settings, limits
        self._addresses = DeviceAddresses()
        self.place = place or self._addresses.place
        self.counts = Counts()
        self.refuse_next = False
        """The device is to refuse the next request of memory once: it did so in the recording."""
        self.made: list[tuple[int, int]] = []
        """(address, bytes) of each segment that was got from the device, or stretch that was mapped."""
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._pending: dict[int, Block] = {}
        self._served = 0

    # --- what a program does ----------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool_id: str = DEFAULT_POOL) -> Block | None:
        """A block of at least `requested` bytes; None where the device has no more: an OOM."""
        size = self.settings.round_size(requested)
        pool = self.pool(pool_id, size <= MOST_SMALL)
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
        self._merge(block)
        block.pool.insert(block)

    def await_free(self, block: Block) -> None:
        """`block` was freed, and another stream may still use it."""
        self._pending[block.start] = block

    def release_cached(self) -> None:
        """`torch.cuda.empty_cache`, and the last resort of an allocation: all free segments and pages go back."""
        for block in list(self._pending.values()):
            self.free(block)
        for small in (False, True):
            for pool in [
                pool for (name, is_small), pool in self._pools.items() if is_small == small and name == DEFAULT_POOL
            ]:
                self.release_pool(pool)

    def release_pool(self, pool: Pool) -> None:
        """Give back what is free in whole segments or pages."""
        for block in list(pool.free_blocks()):
            if block.range is not None:
                self._unmap(block)
            elif block.is_whole:
                self._give_back(block)

    def give_back(self, address: int) -> None:
        """The segment there, if it is free as a whole."""
        for pool in self._pools.values():
            block = pool.at.get(address)
            if block is not None and block.mapped and block.is_whole:
                self._give_back(block)

    def releasable(self) -> int:
        """Bytes that `release_cached` would give back (pending blocks aside)."""
        return sum(pool.releasable for pool in self._pools.values())

    def free_blocks(self) -> Iterator[Block]:
        for pool in self._pools.values():
            yield from pool.free_blocks()

    def pool(self, pool_id: str, small: bool) -> Pool:
        found = self._pools.get((pool_id, small))
        if found is None:
            found = self._pools[pool_id, small] = Pool(pool_id, small)
        return found

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
        rest: Block | None = self.add_range(pool, stream, mapped[0][0], self._range_bytes(pool))
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
            found += self._fill(block, [item for item in used if start <= item[0] < start + size])
        return found

    def _fill(self, block: Block, used: Sequence[tuple[int, int, int]]) -> list[Block]:
        pool, found = block.pool, []
        self._reserve(block.start, block.size)
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
        """From place `at` on: the one with the least room to grow, since a block counts with what could follow it."""
        if not self.settings.expandable:
            while at < len(free) and pool.at[free[at][1]].range is not None:
                at += 1
            return at

        def room(place: int) -> int:
            block = pool.at[free[place][1]]
            beyond = block.next
            return block.size + (beyond.size if beyond is not None and not beyond.mapped else 0)

        while pool.at[free[at][1]].range is not None and at + 1 < len(free) and room(at + 1) < room(at):
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
        allowed = self.limits.allowed_bytes
        if self.refuse_next or (allowed is not None and self.counts.reserved + segment > allowed):
            self.refuse_next = False
            return None
        if self.settings.expandable:
            return self._expanded(pool, stream, size)
        if not self._fits(segment):
            return None
        block = Block(self.place(segment), segment, stream, pool)
        self._reserve(block.start, segment)
        return block

    def _fits(self, more: int) -> bool:
        device = self.limits.device_bytes
        return device is None or self.counts.reserved + more <= device

    def _reserve(self, start: int, more: int) -> None:
        counts = self.counts
        self.made.append((start, more))
        counts.device_allocs += 1
        counts.reserved += more
        if counts.reserved > counts.peak_reserved:
            counts.peak_reserved = counts.reserved
            counts.active_at_peak = counts.active
            counts.cached_at_peak = self.releasable()
            counts.stranded_at_peak = counts.reserved - more - counts.active - counts.cached_at_peak

    # --- giving it back ---------------------------------------------------------------------------

    def _give_back(self, block: Block) -> None:
        """The whole free segment `block`."""
        block.pool.remove(block)
        self._addresses.give_back(block.start)
        self.counts.reserved -= block.size
        self.counts.device_frees += 1

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Of segments that are never split, give back enough for `size`; whether that succeeded."""
        most = self.settings.max_split_bytes
        if most is None:
            return False
        wanted, free = max(size, most), pool.free.get(stream, [])
        at = bisect_left(free, (wanted, 0))
        if at < len(free):
            self._give_back(pool.at[free[at][1]])
            return True
        released = 0
        while released < wanted and free and free[-1][0] >= most:
            released += free[-1][0]
            self._give_back(pool.at[free[-1][1]])
        return released >= wanted

    @property
    def collects(self) -> bool:
        return self.settings.gc_threshold > 0 and self.limits.allowed_bytes is not None

    def _collect_garbage(self) -> None:
        """Give back the segments that were not used for longest, where more than the threshold is reserved."""
        least = int(self.settings.gc_threshold * (self.limits.allowed_bytes or 0))
        target = self.counts.reserved - least
        pool = self.pool(DEFAULT_POOL, False)
        old = [block for block in pool.free_blocks() if block.is_whole]
        reclaimed = 0
        while target > reclaimed and old:
            mean = sum(map(pool.age, old)) / len(old)
            chosen = [block for block in old if pool.age(block) >= mean]
            for block in chosen:
                reclaimed += block.size
                self._give_back(block)
            old = [block for block in old if pool.age(block) < mean]

    # --- expandable segments ----------------------------------------------------------------------

    def _expanded(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The lowest free and unmapped addresses that hold `size`, mapped where they are not."""
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
        return self.add_range(pool, stream, self.place(length), length)

    def _range_bytes(self, pool: Pool) -> int:
        """An eighth more than the device has, so that pages can move to the end."""
        device = self.limits.device_bytes
        length = RANGE_BYTES if device is None else device + device // 8
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        return -(-length // page) * page

    def add_range(self, pool: Pool, stream: int, start: int, length: int) -> Block:
        """A new range of addresses, nothing of it mapped."""
        whole = Range(start, SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
        block = Block(start, length, stream, pool, range=whole, mapped=False)
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first `size` bytes of an unmapped block, in whole pages."""
        assert block.range is not None
        length = min(block.range.page_after(block.start + size) - block.start, block.size)
        if not self._fits(length):
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        self._reserve(block.start, length)
        if length < block.size:
            rest = block.cut(length)
            rest.mapped = False
            pool.insert_unmapped(rest)
        block.mapped = True
        self._merge(block)
        pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
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
        self.counts.reserved -= block.size
        self.counts.device_frees += 1
        block.mapped = False
        self._merge(block)
        if not block.is_whole:
            pool.insert_unmapped(block)

    def _merge(self, block: Block) -> None:
        """With free neighbours that are mapped, or unmapped, like it."""
        pool = block.pool
        for other in (block.prev, block.next):
            if other is not None and not other.used and other.mapped == block.mapped:
                if other.mapped:
                    pool.remove(other)
                else:
                    pool.remove_unmapped(other)
                block.absorb(other)
