"""What the twin got of its device, and where what is free of it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from .addresses import DeviceAddresses
from .pool_blocks import Block, Pool


@dataclass(frozen=True)
class Limits:
    """What the device has, and what the process may take of it (`set_per_process_memory_fraction`); None: no limit."""

    device_bytes: int | None = None
    allowed_bytes: int | None = None


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


class ReservedMemory:
    """`place` gives the address of a new segment of so many bytes; without one they lie where a device puts them."""

    def __init__(self, limits: Limits = NO_LIMITS, place: Callable[[int], int] | None = None) -> None:
        self.limits = limits
        self.counts = Counts()
        self.refuse_next = False
        """The device is to refuse the next request of memory once: it did so in the recording."""
        self.made: list[tuple[int, int]] = []
        """(address, bytes) of each segment that was got from the device, or stretch that was mapped."""
        self._addresses = DeviceAddresses()
        self.address = place or self._addresses.place
        self._pools: dict[tuple[str, bool], Pool] = {}

    # --- pools

    def pool(self, name: str, small: bool) -> Pool:
        found = self._pools.get((name, small))
        if found is None:
            found = self._pools[name, small] = Pool(name, small)
        return found

    def pools_named(self, name: str) -> list[Pool]:
        """Those that are there, the large one first."""
        return [self._pools[name, small] for small in (False, True) if (name, small) in self._pools]

    def free_blocks(self) -> Iterator[Block]:
        for pool in self._pools.values():
            yield from pool.free_blocks()

    def releasable(self) -> int:
        """Bytes that are free in whole segments or pages."""
        return sum(pool.releasable for pool in self._pools.values())

    # --- the device

    def refuses(self, size: int) -> bool:
        """Whether `size` more bytes are not to be had, whatever the device has."""
        allowed = self.limits.allowed_bytes
        if self.refuse_next or (allowed is not None and self.counts.reserved + size > allowed):
            self.refuse_next = False
            return True
        return False

    def has(self, more: int) -> bool:
        device = self.limits.device_bytes
        return device is None or self.counts.reserved + more <= device

    def take(self, start: int, size: int) -> None:
        counts = self.counts
        self.made.append((start, size))
        counts.device_allocs += 1
        counts.reserved += size
        if counts.reserved > counts.peak_reserved:
            counts.peak_reserved = counts.reserved
            counts.active_at_peak = counts.active
            counts.cached_at_peak = self.releasable()
            counts.stranded_at_peak = counts.reserved - size - counts.active - counts.cached_at_peak

    def give_back(self, block: Block) -> None:
        """What a block lies in: a whole segment, or whole pages."""
        if block.range is None:
            self._addresses.give_back(block.start)
        self.counts.reserved -= block.size
        self.counts.device_frees += 1
