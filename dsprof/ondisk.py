"""What a capture is on disk: the record's layout, and the files around the records.

Standard library only: it is imported inside training processes as well as by the analyzer.

A capture is a folder `capture/rank00003.<restart>.<host>.<pid>/` holding

    meta.json          who wrote it (see `dsprof.collectors.capture.files`)
    names.txt          one line a name: its id, a tab, the escaped name
    chunk-00000.bin    a header page, then fixed-size records; chunk-00001.bin follows, and so on
    counters.bin       what was dropped, and which hooks failed, as it stands
    facts.jsonl        one-off facts: how DDP, the DataLoader, ... were configured, and where
    stacks.txt         Python stacks, where native code held the interpreter's lock for long

Records are written at their begin and completed at their end, so a record whose `end_ns` is 0 is
evidence of what was under way when the process ended.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from .schema import Kind

FORMAT_VERSION: Final = 4
"""Version of the record layout. The native helper is built against it and refuses another one."""
READABLE_FORMATS: Final = (1, 2, 3, 4)
"""What can be read (`dsprof.trace.records`). Formats 1 to 3 had one layout whose fields changed their meaning."""

# --- the record -------------------------------------------------------------------------------


class Family(enum.IntEnum):
    """Which fields a record has beside COMMON_FIELDS."""

    SPAN = 1
    """A phase, a module, an action of a pipeline, a pause, a mark; a wait for something that is no communication."""
    COLLECTIVE = 2
    """And a wait for one: it names which."""
    P2P = 3
    """A send or a receive, and a wait for one."""
    KERNEL = 4
    """A kernel, a copy, a launch: what a device or a lane of its own does; what a phase or a wait of the host is
    on a device's stream."""
    SAMPLE = 5
    """A sample of memory or of a gauge."""


class State(enum.IntEnum):
    EMPTY = 0
    BEGUN = 1
    """Under way; what is still so when the process is gone never ended."""
    DONE = 2
    """Over; or, with `end_ns` 0, issued to where its end is not seen, such as a device's stream."""


class Flag(enum.IntFlag):
    START_MEASURED = 1
    """`start_ns` is when the backend began, not merely when the call was issued."""
    ASYNC = 2
    """The caller did not wait inside the call."""
    ENGINE = 8
    """dsprof's engine recorded it, which names and brackets its waits itself."""
    GRAD = 16
    """A forward with gradients on."""
    DEVICE = 32
    """Its times are a device's: those of events on its streams, by its clock (DEVICE_CLOCK)."""


Field = tuple[str, str]
"""Name and struct code; without a name, padding. Every field is aligned to its size."""

COMMON_FIELDS: Final[tuple[Field, ...]] = (
    ("start_ns", "q"),  # monotonic clock; for a communication a bound unless flag START_MEASURED
    ("end_ns", "q"),  # 0: it has not ended, or (state DONE) nothing told its end
    ("thread", "I"),  # OS thread id
    ("name", "H"),  # id in names.txt, as are lane, group, module, purpose and site: 0 is none
    ("kind", "B"),
    ("state", "B"),  # stored last, so that a reader never sees half a record
    ("flags", "B"),
    ("family", "B"),
)
FAMILY_FIELDS: Final[dict[Family, tuple[Field, ...]]] = {
    Family.SPAN: (
        ("lane", "H"),  # 0: the thread's
        ("stage", "h"),  # position in a pipeline, as is micro-batch: -1 is none
        ("microbatch", "h"),
        ("value", "d"),  # NaN: none
        ("bytes", "q"),  # -1: not applicable
        ("corr", "q"),  # -1: none
        ("module", "H"),
        ("purpose", "H"),
        ("site", "H"),
        ("", "2x"),
    ),
    Family.COLLECTIVE: (
        ("dtype", "B"),  # index into DTYPES
        ("", "x"),
        ("host_ns", "I"),  # time the issuing thread spent in the call, to 4.29 s; 0: unknown
        ("issue_ns", "q"),
        ("bytes", "q"),
        ("seq", "I"),  # number in the group, from 0; or NO_SEQ
        ("group", "H"),  # the process group's name
        ("root", "h"),  # rank in the group, -1: none
        ("stage", "h"),
        ("microbatch", "h"),
        ("module", "H"),
        ("purpose", "H"),
    ),
    Family.P2P: (
        ("dtype", "B"),
        ("", "x"),
        ("module", "H"),
        ("purpose", "H"),
        ("issue_ns", "q"),
        ("bytes", "q"),
        ("seq", "I"),  # number in (group, source, destination, tag), from 0; or NO_SEQ
        ("group", "H"),
        ("peer", "h"),  # rank in the group of the other side
        ("tag", "i"),  # -1: none
        ("stage", "h"),
        ("microbatch", "h"),
    ),
    Family.KERNEL: (
        ("lane", "H"),  # such as a device's stream
        ("stage", "h"),
        ("microbatch", "h"),
        ("issue_ns", "q"),  # 0: unknown
        ("bytes", "q"),
        ("corr", "q"),  # of a launch and what it launched
        ("module", "H"),
        ("purpose", "H"),
        ("value", "f"),
    ),
    Family.SAMPLE: (
        ("lane", "H"),
        ("stage", "h"),
        ("microbatch", "h"),
        ("value", "d"),
        ("bytes", "q"),
        ("", "8x"),
        ("module", "H"),
        ("purpose", "H"),
        ("", "4x"),
    ),
}


def layout(family: Family) -> struct.Struct:
    """A record of this family."""
    return struct.Struct("<" + "".join(code for _, code in (*COMMON_FIELDS, *FAMILY_FIELDS[family])))


def offset(family: Family, field: str) -> int:
    """Where a record of this family has that field. Raises ValueError."""
    fields = (*COMMON_FIELDS, *FAMILY_FIELDS[family])
    at = [name for name, _ in fields].index(field)
    return struct.calcsize("<" + "".join(code for _, code in fields[:at]))


RECORD_BYTES: Final = 64
assert all(layout(family).size == RECORD_BYTES for family in Family)

USUAL_FAMILY: Final = {
    Kind.COMM: Family.COLLECTIVE,
    Kind.COPY: Family.KERNEL,
    Kind.KERNEL: Family.KERNEL,
    Kind.LAUNCH: Family.KERNEL,
    Kind.MEM: Family.SAMPLE,
    Kind.GAUGE: Family.SAMPLE,
}
"""Of each kind that is not usually a SPAN. A send or a receive is P2P, and a wait has the family of what it is for."""
FAMILIES: Final = {
    kind: (Family.COLLECTIVE, Family.P2P) if kind is Kind.COMM
    else tuple(Family)[:4] if kind is Kind.WAIT
    else (USUAL_FAMILY.get(kind, Family.SPAN),)
    for kind in Kind
}  # fmt: skip
"""Those that a record of each kind can have."""

NO_SEQ: Final = 2**32 - 1
"""`seq` of a communication without a number."""
MAX_NAMES: Final = 2**16 - 1
"""Ids are from 1 to this."""
TOO_MANY_NAMES: Final = "(too many names)"
"""Every further name is recorded as this one, which takes the last id."""

LARGEST_PLACE: Final = 2**15 - 1
"""Of stages, micro-batches and ranks in a group that a record has room for."""

# --- the chunk --------------------------------------------------------------------------------

CHUNK_MAGIC: Final = b"dsprofch"
CHUNK_HEADER_BYTES: Final = 4096
CHUNK_RECORDS: Final = 16384
"""Records a chunk: 1 MiB of them. File space is reserved before it is mapped."""

CHUNK_HEADER: Final = struct.Struct("<8sIIIIQ")
"""magic, FORMAT_VERSION, RECORD_BYTES, CHUNK_RECORDS, index of this chunk, pid."""
CHUNK_PLACE: Final = struct.Struct("<QQQ")
"""Behind CHUNK_HEADER: how many chunks at the beginning are kept for good, how many behind those had been given up for
the size limit when this one was made, and how many steps the process had counted when this one's first record was
written. All 0 in older captures."""
CHUNK_FINISHED: Final = struct.Struct("<Q")
"""Behind CHUNK_PLACE: 1 where the process has let go of the chunk, into which nothing is written any more. Only of a
capture that is copied."""
CHUNK_FINISHED_AT: Final = CHUNK_HEADER.size + CHUNK_PLACE.size

KEPT_SHARE: Final = 4
"""At the size limit the first 1 / KEPT_SHARE of it stays, and of the rest the oldest chunk makes room for the next."""


def kept_chunks(limit_chunks: int) -> int:
    """How many chunks at the beginning stay, of as many as the size limit has room for. Of fewer than three all stay,
    and then nothing more is written: giving one up takes one that is being written and one that is prepared."""
    return limit_chunks if limit_chunks < 3 else max(1, limit_chunks // KEPT_SHARE)


LARGEST_CHUNK: Final = CHUNK_HEADER_BYTES + CHUNK_RECORDS * RECORD_BYTES
LARGEST_NAMES: Final = 256 << 20
"""Bytes of names.txt, of facts.jsonl, of stacks.txt and of meta.json that are read."""
LARGEST_FACTS: Final = 256 << 20
LARGEST_STACKS: Final = 16 << 20
LARGEST_META: Final = 16 << 20

# --- the counters -----------------------------------------------------------------------------

COUNTERS_NAME: Final = "counters.bin"
COUNTERS_MAGIC: Final = b"dsprofct"
COUNTERS_BYTES: Final = 4096
COUNTERS_HEADER: Final = struct.Struct("<8sII")
"""magic, version 1, errors that found no room in the table."""
COUNTERS: Final = ("dropped", "given_up", "waits", "wait_ns", "prepared", "prepare_ns", "steps")
"""Counted from 0, 8 bytes each, behind COUNTERS_HEADER: records that could not be written; chunks given up for the size
limit; hooks that found the next chunk not ready, and how long they waited for it; chunks that were made, and how long
that took; steps that the process counted."""
ERROR_TABLE: Final = 128
"""Where the table of hooks that failed begins."""
ERROR_HOOK_BYTES: Final = 48
ERROR_SAID_BYTES: Final = 184
ERROR_ENTRY: Final = struct.Struct(f"<Q{ERROR_HOOK_BYTES}s{ERROR_SAID_BYTES}s")
"""How often (written last, 0: none), which hook, and what its first error said; UTF-8, filled up with zeros."""
MOST_ERRORS: Final = (COUNTERS_BYTES - ERROR_TABLE) // ERROR_ENTRY.size
"""Hooks that the table has room for."""


def counter_text(field: bytes) -> str:
    """A text of ERROR_ENTRY."""
    return field.rstrip(b"\0").decode(errors="replace")


def describe_failure(hook: str, count: int, said: str) -> str:
    """A hook that failed, in a line."""
    return f"{hook}: {said}" + (f" ({count} times)" if count > 1 else "")


def chunk_name(index: int) -> str:
    return f"chunk-{index:05d}.bin"


def escape_name(name: str) -> str:
    """Make `name` fit one line of names.txt; `unescape_name` is its inverse."""
    return name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def unescape_name(text: str) -> str:
    out, escaped = [], False
    for char in text:
        if escaped:
            out.append({"n": "\n", "r": "\r"}.get(char, char))
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            out.append(char)
    return "".join(out)
