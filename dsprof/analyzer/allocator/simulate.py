"""A recorded history, played by the twin: as it was, to prove it, and under other settings, to predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .alloc_conf import AllocatorSettings
from .caching_allocator import Allocator
from .history import ALLOC, AWAIT, COLLECTED, EMPTY, FAILED, FREE, REFUSED, Event, Recording
from .pool_blocks import Block
from .reserved import NO_LIMITS, Counts, Limits, ReservedMemory

BEYOND: Final = 1 << 50
"""Addresses of segments that the recording has not."""


@dataclass(frozen=True)
class Outcome:
    """What a history comes to under some settings; bytes.

    peak_reserved: the most that was held; when more was asked for to reach it, `active` was in use, `stranded` was free
                   and could not be given back, and `cached` could.
    peak_active:   the most that was in use.
    reserved:      at the end.
    device_calls:  how often memory was got from the device or given back, each a synchronous call.
    retries, ooms: how often the cache was given back for want of memory, and how often that was not enough.
    peak_at:       the event after which it held most; -1: it began so.
    """

    settings: AllocatorSettings
    peak_reserved: int
    peak_active: int
    active: int
    stranded: int
    cached: int
    reserved: int
    device_calls: int
    retries: int
    ooms: int
    peak_at: int


@dataclass(frozen=True)
class Proof:
    """How far the twin, under the recorded settings and from the recorded state on, does what was recorded."""

    segments: int
    segments_alike: int
    """In order and in size."""
    blocks: int
    blocks_alike: int
    """At the same address."""
    reserved: int
    reserved_twin: int
    """At the end."""

    @property
    def holds(self) -> bool:
        return (self.segments, self.blocks, self.reserved) == (
            self.segments_alike, self.blocks_alike, self.reserved_twin,
        )  # fmt: skip


def prove(recording: Recording, limits: Limits = NO_LIMITS) -> Proof:
    """Play a recording as it was. Only where a new segment lies is taken from it, since the device decides that; and,
    unless `limits` say what the process may take, which segments `garbage_collection_threshold` gave back."""
    play = _Play(recording, recording.settings, limits, as_recorded=True)
    play.run()
    made, told = play.made, recording.segments
    alike = sum(one == other for one, other in zip(made, told, strict=False)) if len(made) <= len(told) else 0
    return Proof(
        len(told), alike, sum(event.act == ALLOC for event in recording.events), play.alike, recording.end.reserved,
        play.counts.reserved,
    )  # fmt: skip


def replay(recording: Recording, settings: AllocatorSettings, limits: Limits = NO_LIMITS) -> Outcome:
    """Play a recording's program under `settings`, from a fresh allocator on: what was in use at its beginning is
    allocated first, in the order of its addresses."""
    play = _Play(recording, settings, limits, as_recorded=False)
    play.run()
    counts = play.counts
    return Outcome(
        settings, counts.peak_reserved, counts.peak_active, counts.active_at_peak, counts.stranded_at_peak,
        counts.cached_at_peak, counts.reserved,
        counts.device_allocs + counts.device_frees, counts.retries, counts.ooms, play.peak_at,
    )  # fmt: skip


def in_use_at(recording: Recording, event: int) -> dict[int, tuple[int, int]]:
    """Stack -> bytes in use just before `event` of what it had allocated, and in how many blocks, as recorded."""
    play = _Play(recording, recording.settings, NO_LIMITS, as_recorded=True)
    play.run(event)
    found: dict[int, tuple[int, int]] = {}
    for block, serial in play.blocks.values():
        if block.used and block.serial == serial:
            size, count = found.get(block.stack, (0, 0))
            found[block.stack] = size + block.size, count + 1
    return found


def pinned_at(recording: Recording, settings: AllocatorSettings, limits: Limits, event: int) -> dict[int, int]:
    """Stack -> bytes that were stranded just before `event` because of what it had allocated.

    What is free in a segment is shared among the blocks in use there, by their number: any of them keeps it.
    """
    play = _Play(recording, settings, limits, as_recorded=False)
    play.run(event)
    found: dict[int, int] = defaultdict(int)
    for free in play.allocator.free_blocks():
        left = free.size - free.releasable
        users = [block for block in _segment(free) if block.used] if left else []
        for block in users:
            found[block.stack] += left // len(users)
    return dict(found)


class _Play:
    """One pass over a recording's events."""

    def __init__(self, recording: Recording, settings: AllocatorSettings, limits: Limits, *, as_recorded: bool) -> None:
        self._recording, self._as_recorded = recording, as_recorded
        self.blocks: dict[int, tuple[Block, int]] = {}
        """Allocation -> its block, and which use of that block it is."""
        self.alike = 0
        self.peak_at = -1
        self._memory = ReservedMemory(limits, self._recorded_place if as_recorded else None)
        self.allocator = Allocator(settings, self._memory)
        if as_recorded:
            self._restore()
        else:
            self._allocate_afresh()
        self.made.clear()
        self.counts.device_allocs = 0

    @property
    def counts(self) -> Counts:
        return self._memory.counts

    @property
    def made(self) -> list[tuple[int, int]]:
        """What it got from the device since it began."""
        return self._memory.made

    def run(self, until: int | None = None) -> None:
        """Events up to `until`, or all."""
        allocator, blocks, counts = self.allocator, self.blocks, self.counts
        peak = counts.peak_reserved
        for number, event in enumerate(self._recording.events[:until]):
            act = event.act
            if act == ALLOC:
                block = allocator.malloc(event.size, event.stream, event.pool)
                if block is not None:
                    block.stack = event.stack
                    blocks[event.key] = block, block.serial
                    self.alike += block.start == event.address
                if counts.peak_reserved > peak:
                    peak, self.peak_at = counts.peak_reserved, number
            elif act in (FREE, AWAIT):
                given = blocks.get(event.key)
                if given is None or given[0].serial != given[1] or not given[0].used:
                    continue  # there was no memory for it, or it was freed with the rest of the cache
                if act == FREE:
                    del blocks[event.key]
                    allocator.free(given[0])
                else:
                    allocator.await_free(given[0])
            elif act == EMPTY:
                allocator.release_cached()
            elif act == FAILED:
                self._fail(event)
            elif act == REFUSED and self._as_recorded and self._memory.limits.allowed_bytes is None:
                self._memory.refuse_next = True
            elif act == COLLECTED and self._as_recorded and not allocator.collects:
                allocator.give_back(event.address)

    def _fail(self, event: Event) -> None:
        """What ran out of memory in the recording. What the program would have done with it is not known."""
        if self._as_recorded:
            self.allocator.release_cached()
        else:
            block = self.allocator.malloc(event.size, event.stream, event.pool)
            if block is not None:
                self.allocator.free(block)

    def _allocate_afresh(self) -> None:
        begin = self._recording.begin
        for start in begin.starts:
            piece, (_, held) = begin.pieces[start], begin.segment_of(start)
            block = self.allocator.malloc(piece.requested, held.stream, held.pool)
            if block is not None:
                self._keep(piece.key, piece.stack, piece.pending, block)

    def _restore(self) -> None:
        """The recorded state."""
        begin, allocator = self._recording.begin, self.allocator
        stretches: dict[tuple[str, bool, int], list[tuple[int, int]]] = defaultdict(list)
        used: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for start in begin.starts:
            piece = begin.pieces[start]
            used[begin.segment_of(start)[0]].append((start, piece.size, piece.requested))
        found: list[Block] = []
        for start in begin.segment_starts:
            held = begin.segments[start]
            if held.expandable:
                stretches[held.pool, held.small, held.stream].append((start, held.size))
            else:
                pool = self._memory.pool(held.pool, held.small)
                found += allocator.add_segment(pool, held.stream, start, held.size, used[start])
        for (name, small, stream), mapped in stretches.items():
            inside = [item for start, _ in mapped for item in used[start]]
            found += allocator.add_mapped(self._memory.pool(name, small), stream, mapped, inside)
        for block in found:
            piece = begin.pieces[block.start]
            self._keep(piece.key, piece.stack, piece.pending, block)

    def _keep(self, key: int, stack: int, pending: bool, block: Block) -> None:
        block.stack = stack
        self.blocks[key] = block, block.serial
        if pending:
            self.allocator.await_free(block)

    def _recorded_place(self, size: int) -> int:
        told, number = self._recording.segments, len(self.made)
        return told[number][0] if number < len(told) else BEYOND + number * size


def _segment(block: Block) -> Iterator[Block]:
    """All blocks of its segment."""
    while block.prev is not None:
        block = block.prev
    here: Block | None = block
    while here is not None:
        yield here
        here = here.next
