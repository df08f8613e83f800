"""Follows the records of a capture that is being written: its files are live mappings."""

from __future__ import annotations

import functools
import io
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsprof import regular_files
from dsprof.ondisk import (
    CHUNK_HEADER_BYTES,
    CHUNK_RECORDS,
    COMMON_FIELDS,
    COUNTERS,
    COUNTERS_BYTES,
    COUNTERS_HEADER,
    COUNTERS_MAGIC,
    COUNTERS_NAME,
    FAMILY_FIELDS,
    LARGEST_FACTS,
    LARGEST_META,
    LARGEST_NAMES,
    LARGEST_STACKS,
    NO_SEQ,
    RECORD_BYTES,
    Family,
    Flag,
    State,
    chunk_name,
    layout,
    offset,
    unescape_name,
)
from dsprof.schema import CAPTURE_OFF, CAPTURE_ON, DTYPES, HOST_SYNC, STACKS_FILE, Kind

from .frames import parse_stacks
from .waiting import Communication, MessageKey, RankState

FIRST_AHEAD, MOST_AHEAD = 64, 4096
"""Slots that are read at once: few of a rank that stands still, as what it reads is counted as its work."""
MOST_FOLLOWED: Final = 256
"""Records under way whose end is looked for."""
MOST_CHUNKS: Final = 8
"""Of the newest records that are looked at for what a rank has issued."""
MOST_RECENT: Final = 4096
"""Communications whose contents are compared between ranks."""
LONGEST_NUMBER: Final = 10
"""An id of a name has fewer digits."""
SAMPLES: Final = bytes([Kind.GAUGE, Kind.MEM, Kind.PAUSE])
"""Kinds that are no progress: side threads sample a job that stands still, too."""
FOLLOWED: Final = bytes([Kind.COMM, Kind.WAIT, Kind.PHASE, Kind.MARK])

_KIND, _STATE = offset(Family.SPAN, "kind"), offset(Family.SPAN, "state")
_EMPTY, _BEGUN = int(State.EMPTY), bytes([State.BEGUN])
_FAMILY, _GROUP = offset(Family.SPAN, "family"), offset(Family.COLLECTIVE, "group")
_MESSAGE: Final = tuple(
    (offset(Family.P2P, name), struct.calcsize(dict((*COMMON_FIELDS, *FAMILY_FIELDS[Family.P2P]))[name]))
    for name in ("name", "group", "peer", "tag")
)
"""Where a message's fields are that tell from whom to whom it is, and their sizes."""
_CHUNK: Final = re.compile(r"chunk-(\d{5,10})\.bin")


@dataclass(frozen=True)
class Record:
    """A record as it was read; ids of names are as in names.txt."""

    kind: Kind
    state: State
    start_ns: int
    end_ns: int
    thread: int
    name: int
    flags: int
    family: Family
    fields: tuple[Any, ...]

    def of(self, field: str) -> Any:
        """A field of its family."""
        return self.fields[_places(self.family)[field]]


class Tail:
    """The records of one capture folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chunk = 0
        self._slot = 0
        """The first that was not in use when it was read last."""
        self._open: dict[tuple[int, int], bytes] = {}
        """Chunk and slot of the newest that were under way -> how they were then."""

    def follow(self) -> bool:
        """Whether anything has begun or ended since the last look. Raises OSError where there is nothing to read."""
        moved = False
        for place, before in list(self._open.items()):
            now = self._read(*place, 1)
            if now[_STATE : _STATE + 1] != _BEGUN or now[:8] != before[:8]:
                del self._open[place]
                moved = True
        ahead = FIRST_AHEAD
        while True:
            block = self._read(self._chunk, self._slot, min(ahead, CHUNK_RECORDS - self._slot))
            if not block and (later := [one for one in self._chunks() if one > self._chunk]):
                self._chunk, self._slot, moved = min(later), 0, True  # given up, or moved into the run folder
                continue
            ahead = min(2 * ahead, MOST_AHEAD)
            states = block[_STATE::RECORD_BYTES]
            used = len(states.rstrip(b"\0"))  # one that was taken and not written yet is passed over
            if used:
                kinds = block[_KIND : used * RECORD_BYTES : RECORD_BYTES]
                moved = moved or bool(kinds.translate(None, SAMPLES + b"\0"))
                self._note_open(block, states[:used], kinds)
                self._slot += used
            if self._slot < CHUNK_RECORDS and (used < len(states) or not used):
                return moved
            if self._slot >= CHUNK_RECORDS:
                following = min((one for one in self._chunks() if one > self._chunk), default=None)
                if following is None:
                    return moved
                self._chunk, self._slot = following, 0

    def state(self, rank: int, members: Any) -> RankState:
        """How far the rank is: `members(group)` are the global ranks of a group. Raises OSError."""
        names = self._names()
        telling = _Telling()
        chunks = sorted(self._chunks(), reverse=True)
        for chunk in chunks[:MOST_CHUNKS]:
            telling.add(self._read(chunk, 0, CHUNK_RECORDS))
        whole = len(chunks) <= MOST_CHUNKS and (not chunks or len(chunks) == chunks[0] + 1)
        return make_state(rank, telling.found[::-1], names, members, whole)

    def is_off(self) -> bool:
        """Whether the rank records nothing for now, or could not write all that it was to: then its silence says
        nothing. Raises OSError."""
        names = self._names()
        marks = {number for number, name in names.items() if name in (CAPTURE_ON, CAPTURE_OFF)}
        if marks:
            for chunk in sorted(self._chunks(), reverse=True)[:MOST_CHUNKS]:
                for record in reversed(self._records(chunk, bytes([Kind.MARK]))):
                    if record.name in marks:
                        return names[record.name] == CAPTURE_OFF
        return False

    def dropped(self) -> int:
        """Records that could not be written; 0 where that is not known."""
        try:
            page = regular_files.read_bytes(self.folder / COUNTERS_NAME, COUNTERS_BYTES)
        except OSError:
            return 0
        if page[:8] != COUNTERS_MAGIC or len(page) < COUNTERS_HEADER.size + 8 * len(COUNTERS):
            return 0
        at = COUNTERS_HEADER.size + 8 * COUNTERS.index("dropped")
        return int.from_bytes(page[at : at + 8], "little")

    def facts(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of the kinds that the rank has stated so far."""
        found = []
        try:
            with regular_files.open_file(self.folder / "facts.jsonl", LARGEST_FACTS) as file:
                for line in io.TextIOWrapper(file, "utf-8", "replace"):
                    if any(f'"fact": "{kind}"' in line for kind in kinds):
                        try:
                            found.append(regular_files.parse_json(line))
                        except ValueError:  # a line that is being written
                            continue
        except OSError:
            return []
        return [fact for fact in found if isinstance(fact, dict) and fact.get("fact") in kinds]

    def lock_stacks(self) -> list[dict[str, Any]]:
        """Threads as they were written while one held the interpreter's lock; none where that was not so."""
        try:
            return parse_stacks(regular_files.read_text(self.folder / STACKS_FILE, LARGEST_STACKS))
        except OSError:
            return []

    def meta(self) -> dict[str, Any]:
        """meta.json; empty where it is not there yet."""
        try:
            found = regular_files.read_json(self.folder / "meta.json", LARGEST_META)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def newest(self, kinds: bytes, most: int, chunks: int = MOST_CHUNKS) -> list[Record]:
        """The newest records of the kinds in the newest chunks, at most so many, in the order of their slots. Raises
        OSError."""
        found: list[Record] = []
        for chunk in sorted(self._chunks(), reverse=True)[:chunks]:
            if len(found) >= most:
                break
            found = self._records(chunk, kinds, most - len(found)) + found
        return found

    # --- reading

    def _chunks(self) -> list[int]:
        return [int(match[1]) for name in os.listdir(self.folder) if (match := _CHUNK.fullmatch(name))]

    def _read(self, chunk: int, slot: int, count: int) -> bytes:
        """So many records from a slot on; nothing of a chunk that was given up."""
        try:
            file = regular_files.open_file(self.folder / chunk_name(chunk))
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise
            return b""
        with file:
            return os.pread(file.fileno(), count * RECORD_BYTES, CHUNK_HEADER_BYTES + slot * RECORD_BYTES)

    def _note_open(self, block: bytes, states: bytes, kinds: bytes) -> None:
        at = states.find(_BEGUN)
        while at >= 0:
            if kinds[at] in FOLLOWED:
                self._open[self._chunk, self._slot + at] = block[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
            at = states.find(_BEGUN, at + 1)
        while len(self._open) > MOST_FOLLOWED:
            del self._open[next(iter(self._open))]

    def _records(self, chunk: int, kinds: bytes, most: int = CHUNK_RECORDS) -> list[Record]:
        """The last ones of the kinds, in the order of their slots."""
        content = self._read(chunk, 0, CHUNK_RECORDS)
        every = content[_KIND::RECORD_BYTES][: len(content) // RECORD_BYTES]
        slots = [match.start() for match in re.finditer(b"[" + re.escape(kinds) + b"]", every)]
        found = []
        for slot in slots[-most:]:
            at = slot * RECORD_BYTES
            if content[at + _STATE] != _EMPTY:
                record = _decode(content[at : at + RECORD_BYTES])
                if record is not None:
                    found.append(record)
        return found

    def _names(self) -> dict[int, str]:
        names = {}
        for line in regular_files.read_bytes(self.folder / "names.txt", LARGEST_NAMES).split(b"\n")[:-1]:
            number, tab, text = line.partition(b"\t")
            if tab and number.isdigit() and len(number) < LONGEST_NUMBER:
                names[int(number)] = unescape_name(text.decode("utf-8", "replace"))
        return names


class _Telling:
    """Of a rank's records, the newest first, those that tell how far it is: all that are under way, the newest
    communications, and of the older ones the last in each group, or to each rank. The others are not decoded: there may
    be a hundred thousand."""

    def __init__(self) -> None:
        self.found: list[Record] = []
        self._seen: set[tuple[bytes, ...]] = set()
        self._communications = 0

    def add(self, content: bytes) -> None:
        """A chunk, older than those before."""
        kinds, states = content[_KIND::RECORD_BYTES], content[_STATE::RECORD_BYTES]
        for slot in range(min(len(kinds), len(states)) - 1, -1, -1):
            kind, state = kinds[slot], states[slot]
            under_way = state == State.BEGUN
            if state == _EMPTY or kind not in FOLLOWED or not (under_way or kind == Kind.COMM):
                continue
            record = content[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
            if kind == Kind.COMM:
                self._communications += 1
                whose = _whose(record)
                new = whose not in self._seen
                self._seen.add(whose)
                if self._communications > MOST_RECENT and not (under_way or new):
                    continue
            decoded = _decode(record)
            if decoded is not None:
                self.found.append(decoded)


def _whose(record: bytes) -> tuple[bytes, ...]:
    """What the numbers of a communication go on in: a group, or messages between two ranks."""
    family = record[_FAMILY]
    if family == Family.COLLECTIVE:
        return (record[_GROUP : _GROUP + 2],)
    return tuple(record[at : at + size] for at, size in _MESSAGE)


@functools.cache
def _places(family: Family) -> dict[str, int]:
    """Where `layout(family).unpack` has each field."""
    return {name: i for i, (name, _) in enumerate(f for f in (*COMMON_FIELDS, *FAMILY_FIELDS[family]) if f[0])}


def _decode(content: bytes) -> Record | None:
    """A record; None of one that is torn."""
    try:
        family = Family(content[offset(Family.SPAN, "family")])
        values = layout(family).unpack(content)
        start_ns, end_ns, thread, name, kind, state, flags, _ = values[:8]
        state = State(state)
        return Record(Kind(kind), state, start_ns, end_ns, thread, name, flags, family, values)
    except ValueError:
        return None


def make_state(rank: int, records: Sequence[Record], names: dict[int, str], members: Any, whole: bool) -> RankState:
    """How far a rank is that wrote these records, in their order. `whole`: they are all that it wrote."""
    issued: dict[str, int] = {}
    messages: dict[MessageKey, int] = {}
    recent: dict[tuple[str, int], Communication] = {}
    opened: list[Communication] = []
    unseen: dict[str, Communication] = {}
    """The last collective of each group, where nobody sees its end, as on a device."""
    waited: set[tuple[object, ...]] = set()
    phases, waiting, device_wait = [], False, ""
    for record in records:
        under_way = record.state == State.BEGUN
        if record.kind is Kind.MARK:
            if under_way and names.get(record.name) == HOST_SYNC:
                device_wait = names.get(record.of("purpose"), "?")
            continue
        if record.kind is Kind.PHASE:
            if under_way:
                phases.append(names.get(record.name, "?"))
            continue
        operation = _operation(record, names, members)
        if operation is None:
            waiting |= under_way and record.kind is Kind.WAIT
            continue
        if record.kind is Kind.WAIT:
            if under_way:
                waiting = True
                waited.add(_identity(operation))
            continue
        if operation.peer is None:
            issued[operation.group] = max(issued.get(operation.group, 0), operation.seq + 1)
            if not record.flags & Flag.ENGINE:  # which compares the contents itself
                recent[operation.group, operation.seq] = operation
            unseen.pop(operation.group, None)
            if record.state == State.DONE and not record.end_ns:
                unseen[operation.group] = operation
        else:
            key = (operation.group, operation.peer, operation.tag, operation.name)
            messages[key] = max(messages.get(key, 0), operation.seq + 1)
        if under_way:
            opened.append(operation)
            waiting |= not record.flags & Flag.ASYNC and operation.peer is None
    # DDP's reducer waits inside C++, for the buckets that its backward issued; a device does what it was given in turn.
    waiting |= bool(opened) and "backward" in phases
    waiting |= bool(device_wait) and bool(opened or unseen)
    marked = tuple(replace(one, waited=_identity(one) in waited) for one in (*opened, *unseen.values()))
    return RankState(rank, marked, issued, messages, recent, whole, waiting, tuple(phases), device_wait)


def _identity(operation: Communication) -> tuple[object, ...]:
    return (operation.group, operation.seq, operation.peer, operation.tag)


def _operation(record: Record, names: dict[int, str], members: Any) -> Communication | None:
    """What a record communicates or waits for; None where it has no number."""
    if record.family not in (Family.COLLECTIVE, Family.P2P) or record.of("seq") == NO_SEQ:
        return None
    group = names.get(record.of("group"), "?")
    size, dtype = record.of("bytes"), record.of("dtype")
    operation = Communication(
        names.get(record.name, "?"),
        group,
        record.of("seq"),
        record.start_ns,
        size if size >= 0 else None,
        (DTYPES[dtype] or None) if dtype < len(DTYPES) else None,
    )
    if record.family is Family.COLLECTIVE:
        return replace(operation, root=record.of("root") if record.of("root") >= 0 else None)
    of_group, peer = members(group), record.of("peer")
    known = of_group is not None and 0 <= peer < len(of_group)
    return replace(operation, peer=of_group[peer] if known else peer, tag=record.of("tag"))
