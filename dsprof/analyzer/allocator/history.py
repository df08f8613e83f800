"""A recorded history, to be played again: what the program did, and the state it began with.

A snapshot holds the last state and what came before it. Undone backwards, event by event, the last state becomes the
first. Free memory needs no record: neighbours that are free are always one block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from dsprof.trace import Memory

from .alloc_conf import LARGE_SEGMENT, MOST_SMALL, SMALL_SEGMENT, AllocatorSettings
from .caching_allocator import DEFAULT_POOL

ALLOC, AWAIT, FREE, EMPTY, REFUSED, FAILED, COLLECTED = range(7)
"""What happens: an allocation; a block is freed that another stream may still use; it is free; the program gives the
cache back; the device refuses the memory that the next allocation wants; an allocation fails for good (an OOM); the
allocator gives back a segment by itself (where `garbage_collection_threshold` is set)."""


class Unplayable(Exception):
    """The history cannot be played again; the message says why."""


class Event(NamedTuple):
    """`key` names the allocation; `size` is what was asked for; `stack` is where."""

    act: int
    key: int
    size: int = 0
    stream: int = 0
    pool: str = DEFAULT_POOL
    address: int = 0
    stack: int = -1


@dataclass
class Piece:
    """A block in use: `size` bytes, of which `requested` were asked for."""

    size: int
    requested: int
    pending: bool
    stack: int
    key: int = -1


@dataclass(frozen=True)
class Held:
    """A segment; of an expandable one, a mapped stretch."""

    size: int
    stream: int
    pool: str
    small: bool
    expandable: bool


@dataclass
class AllocatorState:
    """What a device's allocator held: address -> segment, and address -> block in use; sorted addresses of both."""

    segments: dict[int, Held] = field(default_factory=dict)
    pieces: dict[int, Piece] = field(default_factory=dict)
    segment_starts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def segment_of(self, address: int) -> tuple[int, Held]:
        at = bisect_right(self.segment_starts, address) - 1
        start = self.segment_starts[at] if at >= 0 else 0
        held = self.segments.get(start)
        if held is None or address >= start + held.size:
            raise Unplayable("a block of the history lies in no segment")
        return start, held

    def add_segment(self, start: int, held: Held) -> None:
        at = bisect_left(self.segment_starts, start + held.size) - 1
        if at >= 0 and self.segment_starts[at] + self.segments[self.segment_starts[at]].size > start:
            raise Unplayable("its history gives back a segment that its last state still has")
        if held.expandable:
            start, held = self._joined(start, held)
        insort(self.segment_starts, start)
        self.segments[start] = held

    def _joined(self, start: int, held: Held) -> tuple[int, Held]:
        """A mapped stretch with those beside it, which are gone then."""
        at = bisect_left(self.segment_starts, start)
        for neighbour in self.segment_starts[max(at - 1, 0) : at + 1]:
            other = self.segments[neighbour]
            beside = neighbour + other.size == start or start + held.size == neighbour
            if beside and other.expandable and (other.stream, other.pool) == (held.stream, held.pool):
                self.drop_segment(neighbour)
                start, held = min(start, neighbour), replace(other, size=held.size + other.size)
        return start, held

    def drop_segment(self, start: int) -> None:
        del self.segment_starts[bisect_left(self.segment_starts, start)]
        del self.segments[start]

    def add(self, start: int, piece: Piece) -> None:
        insort(self.starts, start)
        self.pieces[start] = piece

    def drop(self, start: int) -> Piece:
        del self.starts[bisect_left(self.starts, start)]
        return self.pieces.pop(start)

    @property
    def reserved(self) -> int:
        return sum(held.size for held in self.segments.values())


@dataclass(frozen=True)
class Recording:
    """One device's history.

    events:       what the program did.
    begin, end:   the states before and after it.
    segments:     (address, size) of each segment that was allocated or mapped, in order.
    placed:       [alloc events], their addresses.
    peak_reserved: as recorded.
    oom_bytes:    what the device had for this process when it refused for good; None: it never did.
    retries, ooms: how often the cache was given back for want of memory, and for nothing.
    """

    device: int
    settings: AllocatorSettings
    events: list[Event]
    begin: AllocatorState
    end: AllocatorState
    segments: list[tuple[int, int]]
    peak_reserved: int
    oom_bytes: int | None
    retries: int
    ooms: int

    @property
    def is_whole(self) -> bool:
        """It begins with nothing in use."""
        return not self.begin.pieces


def devices(memory: Memory) -> list[int]:
    return sorted({*map(int, memory.segments["device"]), *map(int, memory.history["device"])})


def last_state(memory: Memory, device: int) -> AllocatorState:
    """What the snapshot holds of one device."""
    state = AllocatorState()
    chosen = (memory.segments["device"] == device).to_numpy(bool)
    of = memory.segments
    columns = (of[name].tolist() for name in ("address", "bytes", "stream", "pool", "small", "expandable"))
    for here, (address, *rest) in zip(chosen.tolist(), zip(*columns, strict=True), strict=True):
        if here:
            state.add_segment(address, Held(*rest))
    used = memory.blocks[chosen[memory.blocks["segment"].to_numpy(np.int64)] & (memory.blocks["state"] != "free")]
    of = used
    columns = (of[name].tolist() for name in ("address", "bytes", "requested", "state", "stack"))
    for address, size, requested, how, stack in zip(*columns, strict=True):
        state.add(address, Piece(size, requested, how == "pending", stack))
    return state


def record(memory: Memory, device: int, settings: AllocatorSettings) -> Recording:
    """The history of one device. Raises Unplayable."""
    history = memory.history[memory.history["device"] == device]
    if not len(history):
        raise Unplayable("no history was recorded (torch.cuda.memory._record_memory_history)")
    if history["action"].iloc[0] == "alloc":  # what it was given came before, perhaps as a segment of its own
        history = history.iloc[1:]
    end = last_state(memory, device)
    begin = _undone(history, last_state(memory, device), settings)
    return _played(memory, history, device, settings, begin, end)


# --- backwards ----------------------------------------------------------------------------------


def _undone(history: pd.DataFrame, state: AllocatorState, settings: AllocatorSettings) -> AllocatorState:
    """`state` before all of `history`."""
    if "free_completed" not in set(history["action"]) and "free_requested" in set(history["action"]):
        raise Unplayable("frees were not recorded to their end (skip_actions)")
    columns = (history[name].tolist() for name in ("action", "address", "bytes", "stream", "pool", "stack"))
    for action, address, size, stream, pool, stack in reversed(list(zip(*columns, strict=True))):
        piece = state.pieces.get(address)
        if action == "alloc":
            if piece is None or piece.requested != size:
                raise Unplayable("its history is not that of its last state (was recording stopped before the dump?)")
            state.drop(address)
        elif action == "free_requested":
            if piece is None:
                raise Unplayable("its history frees what its last state does not have")
            piece.pending = False
        elif action == "free_completed":
            if piece is not None:
                raise Unplayable("its history frees what its last state still has")
            state.add(address, Piece(settings.round_size(size), size, True, stack))
            _take_rest(state, address, settings)
        elif action in ("segment_alloc", "segment_map"):
            _unreserve(state, address, size)
        elif action in ("segment_free", "segment_unmap"):
            name = pool or DEFAULT_POOL
            unmapped = action == "segment_unmap"
            small = size % LARGE_SEGMENT != 0 if unmapped else size == SMALL_SEGMENT
            state.add_segment(address, Held(size, stream, name, small, unmapped))
    return state


def _take_rest(state: AllocatorState, address: int, settings: AllocatorSettings) -> None:
    """What could not be split off belongs to the block before it: in large pools, 1 MiB and less; of a block above
    `max_split_size_mb`, all of its segment. So of the block at `address` and the one before it.
    """
    start, held = state.segment_of(address)
    if held.small or held.expandable:
        return
    at = bisect_left(state.starts, address)
    end = start + held.size
    for place in (at - 1, at):
        if place < 0 or state.starts[place] < start:
            continue
        begin = state.starts[place]
        piece = state.pieces[begin]
        follows = state.starts[place + 1] if place + 1 < len(state.starts) else end
        gap = min(follows, end) - begin - piece.size
        if gap < 0:
            raise Unplayable("its history has two blocks at one place")
        unsplit = settings.max_split_bytes is not None and piece.size >= settings.max_split_bytes
        if gap <= MOST_SMALL or unsplit:
            piece.size += gap


def _unreserve(state: AllocatorState, address: int, size: int) -> None:
    """Take a segment, or a mapped stretch of an expandable one, away."""
    start, held = state.segment_of(address)
    if not held.expandable and (start, held.size) != (address, size):
        raise Unplayable("its history allocates a segment that its last state has not as such")
    place = bisect_left(state.starts, address)
    if place < len(state.starts) and state.starts[place] < address + size:
        raise Unplayable("its history has a block in a segment that was not there yet")
    state.drop_segment(start)
    for begin, length in ((start, address - start), (address + size, start + held.size - address - size)):
        if length > 0:
            state.add_segment(begin, Held(length, held.stream, held.pool, held.small, True))


# --- forwards -----------------------------------------------------------------------------------


def _played(
    memory: Memory,
    history: pd.DataFrame,
    device: int,
    settings: AllocatorSettings,
    begin: AllocatorState,
    end: AllocatorState,
) -> Recording:
    keys: dict[int, int] = {}
    for key, (address, piece) in enumerate(sorted(begin.pieces.items())):
        piece.key = keys[address] = key
    private = _private_segments(begin, end)
    emptying = _emptying(memory)
    events: list[Event] = []
    segments: list[tuple[int, int]] = []
    reserved = peak = begin.reserved
    freed: list[tuple[int, int, int]] = []
    """Segments given back since anything else happened: their stack, address, and what was reserved before."""
    oom_bytes, retries, ooms, number = None, 0, 0, len(keys)
    most = _peak(history, reserved)

    columns = (history[name].tolist() for name in ("action", "address", "bytes", "stream", "pool", "stack"))
    for action, address, size, stream, pool, stack in zip(*columns, strict=True):
        if action in ("segment_free", "segment_unmap"):
            freed.append((stack, address, reserved))
            reserved -= size
            continue
        if freed and action in ("segment_alloc", "segment_map", "oom") and not any(s in emptying for s, *_ in freed):
            if settings.gc_threshold > 0 and not settings.expandable:
                events += [Event(COLLECTED, -1, address=start) for _, start, _ in freed]
            elif action != "oom":
                # Who has room for it needs not give anything back first; then the program did so by itself.
                refused = freed[0][2] + size > most
                retries += refused
                events.append(Event(REFUSED if refused else EMPTY, -1))
            freed = []
        elif freed and action != "free_completed":  # giving back waits for what other streams use
            events.append(Event(EMPTY, -1))
            freed = []
        if action in ("segment_alloc", "segment_map"):
            segments.append((address, size))
            reserved += size
            peak = max(peak, reserved)
        elif action == "alloc":
            keys[address] = number
            name = pool or next((name for a, b, name in private if a <= address < b), DEFAULT_POOL)
            events.append(Event(ALLOC, number, size, stream, name, address, stack))
            number += 1
        elif action == "free_requested":
            events.append(Event(AWAIT, keys[address]))
        elif action == "free_completed":
            key = keys.pop(address)
            if events and events[-1].act == AWAIT and events[-1].key == key:
                events.pop()
            events.append(Event(FREE, key))
        elif action == "oom":
            ooms += 1
            retries += 1
            oom_bytes = reserved + address
            events.append(Event(FAILED, number, size, stream, pool or DEFAULT_POOL, 0, stack))
            number += 1
    if freed:
        events.append(Event(EMPTY, -1))
    return Recording(device, settings, events, begin, end, segments, peak, oom_bytes, retries, ooms)


def _private_segments(*states: AllocatorState) -> list[tuple[int, int, str]]:
    """(begin, end, pool) of the segments in private pools, for histories that do not name the pool."""
    held = {start: segment for state in states for start, segment in state.segments.items()}
    return [(at, at + one.size, one.pool) for at, one in sorted(held.items()) if one.pool != DEFAULT_POOL]


def _peak(history: pd.DataFrame, reserved: int) -> int:
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    change = history["action"].astype(object).map(signs).fillna(0).to_numpy(np.int64) * history["bytes"].to_numpy(
        np.int64
    )
    return reserved + max(int(np.cumsum(change).max(initial=0)), 0)


def _emptying(memory: Memory) -> set[int]:
    """Stacks in which the program itself gives the cache back."""
    functions = memory.stacks["function"].astype(str)
    found = memory.stacks["stack"][
        functions.isin(["empty_cache", "emptyCache"]) | functions.str.endswith("::emptyCache")
    ]
    return set(map(int, found))
