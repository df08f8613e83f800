"""Slices, moments and counters of a Perfetto trace (.pftrace, plain or gzipped), read from protobuf's wire format
without Perfetto's package: what torch's profiler writes of 2026 on, and `dsprof export`.

Packets are read one at a time. Ends belong to begins by time, not by their order in the file: torch writes all begins
of a kind before the ends. What is kept of a slice are the annotations that the caller names.

Numbers of fields: perfetto's protos/perfetto/trace/{trace_packet,track_event/*,interned_data/*}.proto.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from .protobuf import MOST_MESSAGE, Fields, Messages, double_of, fields_of, number_of, signed, text_of, varint
from .stream import TraceError, beginning_of

PACKET_TAG: Final = b"\x0a"
MOST_INTERNED: Final = 1 << 20
MOST_TRACKS: Final = 1 << 20
MOST_SLICES: Final = 8_000_000
MOST_LIST: Final = 4096
HEAD: Final = 1 << 16
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
STATE_CLEARED: Final = 1
TELLING: Final = (11, 12, 60)
"""Fields of a packet, of which one is in the first ones of such a trace: an event, interned names, a track."""


@dataclass
class Track:
    """name: its own, or its thread's. process: of itself, or of the track that it is in."""

    name: str = ""
    process: str = ""
    parent: int = 0
    pid: int | None = None
    tid: int | None = None


@dataclass(slots=True)
class Slice:
    """dur_ns: 0 of a moment; of a counter's sample `value` is not None."""

    name: str
    category: str
    track: int
    start_ns: int
    dur_ns: int = 0
    value: float | None = None
    args: dict[str, Any] = field(default_factory=dict)


def looks_like_perfetto(path: Path) -> bool:
    """Whether a file begins like a Perfetto trace. Never raises."""
    return _tells(beginning_of(path, HEAD))


def _tells(head: bytes) -> bool:
    at = 0
    while head.startswith(PACKET_TAG, at):
        try:
            length, begin = varint(head, at + len(PACKET_TAG))
            if begin < 0 or length > MOST_MESSAGE:
                return False
            whole = begin + length <= len(head)
            found = fields_of(head[begin : begin + length]) if whole else []
        except TraceError:
            return False
        if any(number in TELLING for number, _ in found):
            return True
        at = begin + length
    return False


class PerfettoTrace:
    """A file, read: `slices` in order of time, `tracks` by their number, `cut`: where it breaks off (empty: it is
    whole), `left_open`: how many slices never end. Raises TraceError and OSError. `wanted`: annotations that are kept,
    by name; `whole`: one more, whose text is not cut off."""

    def __init__(self, path: Path, wanted: Collection[str], whole: str = "") -> None:
        self.tracks: dict[int, Track] = {}
        self.slices: list[Slice] = []
        self.cut = ""
        self.left_open = 0
        self._wanted, self._whole = frozenset({*wanted, whole}), whole
        self._states: dict[int, _Sequence] = defaultdict(_Sequence)
        self._edges: dict[int, list[tuple[int, Slice | None]]] = defaultdict(list)
        packets = Messages(path, "packet", PACKET_TAG)
        for packet in packets:
            self._take(packet)
        if packets.breaks_off:
            self.cut = "breaks off within a packet: its last events are missing"
        self.left_open = sum(_end_slices(edges) for edges in self._edges.values())
        self._edges.clear()
        self.slices = [one for one in self.slices if one.dur_ns >= 0]
        self.slices.sort(key=lambda one: (one.start_ns, -one.dur_ns))

    def process_of(self, track: int) -> str:
        """What the process of a track is called; empty: it has none."""
        for _ in range(16):
            known = self.tracks.get(track)
            if known is None or known.process:
                return known.process if known else ""
            track = known.parent
        return ""

    def _take(self, packet: bytes) -> None:
        found = dict(fields_of(packet))  # of what is repeated in a packet nothing is used
        sequence = found.get(10, 0)
        state = self._states[sequence] if len(self._states) < MOST_TRACKS else _Sequence()
        if number_of(found.get(13)) & STATE_CLEARED:
            state.clear()
        if isinstance(found.get(12), bytes):
            state.intern(found[12])
        if isinstance(found.get(59), bytes):
            state.defaults(found[59])
        if isinstance(found.get(60), bytes):
            self._track(found[60])
        if isinstance(found.get(11), bytes):
            self._event(found[11], found.get(8, 0), state)

    def _track(self, data: bytes) -> None:
        track, uuid = Track(), 0
        for number, value in fields_of(data):
            if number == 1:
                uuid = number_of(value)
            elif number == 5:
                track.parent = number_of(value)
            elif number in (2, 10) and isinstance(value, bytes):
                track.name = text_of(value)
            elif number == 3 and isinstance(value, bytes):
                inner = dict(fields_of(value))
                track.pid = _number_told(inner.get(1))
                track.process = text_of(inner.get(6, b"")) or f"process {track.pid}"
            elif number == 4 and isinstance(value, bytes):
                inner = dict(fields_of(value))
                track.pid, track.tid = _number_told(inner.get(1)), _number_told(inner.get(2))
                track.name = text_of(inner.get(5, b"")) or track.name
        if len(self.tracks) >= MOST_TRACKS:
            raise TraceError(f"more than {MOST_TRACKS:,} tracks, as no trace has")
        self.tracks[uuid] = track

    def _event(self, data: bytes, when: Any, state: _Sequence) -> None:
        kind, name, category, track, value = 0, "", "", state.track, None
        args: dict[str, Any] = {}
        for number, content in fields_of(data):
            if number == 9:
                kind = number_of(content)
            elif number == 11:
                track = number_of(content)
            elif number == 10:
                name = state.names.get(content, "")
            elif number == 23:
                name = text_of(content)
            elif number == 3:
                category = category or state.categories.get(content, "")
            elif number == 22:
                category = category or text_of(content)
            elif number == 30:
                value = float(signed(content))
            elif number == 44:
                value = double_of(content)
            elif number == 4 and isinstance(content, bytes) and self._wanted:
                key, known = state.annotation(content, self._wanted, self._whole)
                if key:
                    args[key] = known
        if type(when) is not int or when >= 1 << 62:
            return
        if kind == SLICE_END:
            self._edges[track].append((when, None))
        elif kind in (SLICE_BEGIN, INSTANT, COUNTER):
            if len(self.slices) >= MOST_SLICES:
                raise TraceError(f"more than {MOST_SLICES:,} events; trace fewer steps")
            begun = Slice(name, category, track, when, -1 if kind == SLICE_BEGIN else 0, value, args)
            self.slices.append(begun)
            if kind == SLICE_BEGIN:
                self._edges[track].append((when, begun))


class _Sequence:
    """What the packets of one writer have told so far."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.names: dict[int, str] = {}
        self.categories: dict[int, str] = {}
        self._keys: dict[int, str] = {}
        self._strings: dict[int, str] = {}
        self.track = 0

    def intern(self, data: bytes) -> None:
        tables = {1: self.categories, 2: self.names, 3: self._keys, 29: self._strings}
        for number, content in fields_of(data):
            table = tables.get(number)
            if table is None or not isinstance(content, bytes):
                continue
            inner = dict(fields_of(content))
            if len(table) >= MOST_INTERNED:
                raise TraceError(f"more than {MOST_INTERNED:,} names, as no trace has")
            table[inner.get(1, 0)] = text_of(inner.get(2, b""))

    def defaults(self, data: bytes) -> None:
        of_events = dict(fields_of(data)).get(11)
        if isinstance(of_events, bytes):
            self.track = number_of(dict(fields_of(of_events)).get(11, self.track))

    def annotation(self, data: bytes, wanted: Collection[str], whole: str) -> tuple[str, Any]:
        """Its name and value; an empty name: it is not wanted."""
        found = fields_of(data)
        key = ""
        for number, content in found:
            if number == 10:
                key = text_of(content)
            elif number == 1:
                key = self._keys.get(content, "")
        if key and key == whole:
            return key, next((content.decode("utf-8", "replace") for number, content in found if number == 6), "")
        return (key, self._value(found)) if key in wanted else ("", None)

    def _value(self, found: Fields) -> Any:
        items: list[Any] = []
        for number, content in found:
            if number == 2:
                return bool(content)
            if number in (3, 7):
                return number_of(content)
            if number == 4:
                return signed(content)
            if number == 5:
                return double_of(content)
            if number in (6, 9):
                return text_of(content)
            if number == 17:
                return self._strings.get(content, "")
            if number == 12 and isinstance(content, bytes) and len(items) < MOST_LIST:
                inner = fields_of(content)
                items.append(None if any(one == 12 for one, _ in inner) else self._value(inner))
        return items


def _number_told(value: Any) -> int | None:
    """A field's number; None: it is not told."""
    return value if type(value) is int else None


def _end_slices(edges: list[tuple[int, Slice | None]]) -> int:
    """Give the slices of one track their ends, the innermost that is open first. How many have none. `edges`: when
    slices begin, and when one ends (None), as the file has them."""
    if any(later[0] < earlier[0] for earlier, later in pairwise(edges)):
        edges.sort(key=lambda edge: (edge[0], edge[1] is not None))  # what begins as another ends comes after it
    is_open, early = list[Slice](), Counter[int]()
    for when, begun in edges:
        if begun is None:
            if is_open:
                last = is_open.pop()
                last.dur_ns = when - last.start_ns
            else:  # of a slice that begins at the same moment, if of any
                early[when] += 1
        elif early[when]:
            early[when] -= 1
            begun.dur_ns = 0
        else:
            is_open.append(begun)
    return len(is_open)
