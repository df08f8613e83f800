"""Records as arrays: every field that any family has, whichever format they were written in.

What does not apply to a record is ABSENT: 0 of ids of names, of kinds of states and of flags, NaN of a value, 0 of an
end that nobody saw, else -1.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from dsprof.ondisk import (
    COMMON_FIELDS,
    FAMILIES,
    FAMILY_FIELDS,
    FORMAT_VERSION,
    NO_SEQ,
    RECORD_BYTES,
    Family,
    Field,
    Flag,
    State,
    offset,
)
from dsprof.schema import DTYPES, Kind

Array = npt.NDArray[np.void]
Bool = npt.NDArray[np.bool_]

FIELDS: Final = {
    "start_ns": "i8", "end_ns": "i8", "thread": "i8", "name": "i4", "kind": "u1", "state": "u1", "flags": "u1",
    "family": "u1", "lane": "i4", "stage": "i4", "microbatch": "i4", "module": "i4", "purpose": "i4", "site": "i4",
    "value": "f8", "bytes": "i8", "corr": "i8", "dtype": "u1", "host_ns": "i8", "issue_ns": "i8", "seq": "i8",
    "group": "i4", "root": "i4", "peer": "i4", "tag": "i4", "grad": "i1",
}  # fmt: skip
"""Of a decoded record. Beside those of `ondisk.COMMON_FIELDS` and `ondisk.FAMILY_FIELDS` there is `grad`: 1 where a
forward had gradients on, 0 where not, -1 where it is not known, or no forward."""
DECODED: Final = np.dtype(list(FIELDS.items()))
ABSENT: Final = {
    "value": np.nan, "bytes": -1, "corr": -1, "stage": -1, "microbatch": -1, "host_ns": -1, "issue_ns": -1, "seq": -1,
    "root": -1, "peer": -1, "tag": -1, "grad": -1,
}  # fmt: skip
IDS: Final = ("name", "lane", "group", "module", "purpose", "site")
"""Fields that are ids of names."""


def empty(count: int) -> Array:
    """So many records of which nothing applies."""
    records = np.zeros(count, DECODED)
    for name, value in ABSENT.items():
        records[name] = value
    return records


def _numpy(fields: tuple[Field, ...]) -> np.dtype[np.void]:
    """The named fields, where struct puts them."""
    codes = ["<" + "".join(code for _, code in fields[:i]) for i in range(len(fields))]
    named = [i for i, (name, _) in enumerate(fields) if name]
    return np.dtype(
        {
            "names": [fields[i][0] for i in named],
            "formats": ["<" + fields[i][1] for i in named],
            "offsets": [struct.calcsize(codes[i]) for i in named],
            "itemsize": RECORD_BYTES,
        }
    )


LAYOUTS: Final = {family: _numpy((*COMMON_FIELDS, *FAMILY_FIELDS[family])) for family in Family}
"""Format 4: each family as it lies in the file."""
STATE_AT: Final = offset(Family.SPAN, "state")


def decode(content: npt.NDArray[np.uint8], version: int) -> Array:
    """The records that were begun, of RECORD_BYTES each, as `[:, RECORD_BYTES]` bytes of a file of that format."""
    records = _decode_before_families(content, version) if version < FORMAT_VERSION else _decode(content)
    # The state is stored last: an end without it may be half written.
    records["end_ns"][records["state"] == State.BEGUN] = 0
    return records


def _decode(content: npt.NDArray[np.uint8]) -> Array:
    content = content[content[:, STATE_AT] != State.EMPTY]
    records = empty(len(content))
    head = content.view(_numpy(COMMON_FIELDS)).reshape(-1)
    for name, _ in COMMON_FIELDS:
        records[name] = head[name]
    for family, layout in LAYOUTS.items():
        mine = np.flatnonzero(records["family"] == family)
        found = np.ascontiguousarray(content[mine]).view(layout).reshape(-1)
        for name, _ in FAMILY_FIELDS[family]:
            if name:
                records[name][mine] = found[name]
    comm = records["kind"] == Kind.COMM
    records["seq"][records["seq"] == NO_SEQ] = -1
    records["issue_ns"][~comm & (records["issue_ns"] == 0)] = -1
    records["host_ns"][records["host_ns"] == 0] = -1
    forward = (records["kind"] == Kind.PHASE) & (records["family"] == Family.SPAN)
    records["grad"][forward] = (records["flags"][forward] & Flag.GRAD) != 0
    return records


def encode(records: Array) -> bytes:
    """As they lie in a file of today's format."""
    content = np.zeros((len(records), RECORD_BYTES), np.uint8)
    for family, layout in LAYOUTS.items():
        mine = np.flatnonzero(records["family"] == family)
        raw = np.zeros(len(mine), layout)
        for name in layout.names or ():
            values = records[name][mine]
            if name in ("host_ns", "issue_ns"):
                values = np.maximum(values, 0)
            raw[name] = np.where(values < 0, NO_SEQ, values) if name == "seq" else values
        content[mine] = raw.view(np.uint8).reshape(-1, RECORD_BYTES)
    return content.tobytes()


def plausible(records: Array, names: dict[int, str]) -> Bool:
    """Which records can have been written by a collector: a torn or overwritten one is recognized by its fields."""
    known = np.zeros(2**17, bool)
    known[[number for number in names if number < len(known)]] = True
    start, end, kind, state = records["start_ns"], records["end_ns"], records["kind"], records["state"]
    fits = np.zeros((256, 256), bool)
    for of, families in FAMILIES.items():
        fits[of, families] = True
    found: Bool = (
        ((state == State.BEGUN) | (state == State.DONE))
        & fits[kind, records["family"]]
        & (start > 0) & ((end == 0) | (end >= start))
        & known[np.clip(records["name"], 0, len(known) - 1)]
        & (records["dtype"] < len(DTYPES))
    )  # fmt: skip
    for name in IDS[1:]:
        ids = records[name]
        found &= (ids == 0) | ((ids > 0) & (ids < len(known)) & known[np.clip(ids, 0, len(known) - 1)])
    return found


# --- formats 1 to 3 -----------------------------------------------------------------------------

BEFORE_FAMILIES: Final = np.dtype(
    [
        ("start_ns", "<i8"), ("end_ns", "<i8"), ("aux", "<i8"), ("bytes", "<i8"), ("name", "<u4"), ("thread", "<u4"),
        ("group", "<u4"), ("seq", "<u4"), ("peer", "<i4"), ("tag", "<i4"), ("host_ns", "<u4"), ("kind", "u1"),
        ("state", "u1"), ("dtype", "u1"), ("flags", "u1"),
    ]
)  # fmt: skip
"""Their one layout. `aux` is when a communication was issued, and of anything else the bits of its value."""
WAS_P2P: Final = 4
"""Their flag of a send or a receive."""
WAITS_NAMED: Final = 3
"""The first format in which a wait names what it waited for, a forward says whether gradients were on, and a
collective with a root names it."""


def _decode_before_families(content: npt.NDArray[np.uint8], version: int) -> Array:
    """Where the engine recorded, `peer` was stage << 16 | micro-batch, `tag` the module or, of p2p, the peer, `host_ns`
    the purpose, and `group` of what was neither a communication nor a wait the lane."""
    old = np.ascontiguousarray(content).view(BEFORE_FAMILIES).reshape(-1)
    old = old[old["state"] != State.EMPTY]
    records = empty(len(old))
    for name in ("start_ns", "end_ns", "thread", "name", "kind", "state", "bytes", "dtype"):
        records[name] = old[name]
    records["flags"] = old["flags"] & ~np.uint8(WAS_P2P)
    kind = old["kind"]
    comm, wait = kind == Kind.COMM, kind == Kind.WAIT
    engine, p2p = (old["flags"] & Flag.ENGINE) != 0, (old["flags"] & WAS_P2P) != 0
    recent = version >= WAITS_NAMED
    has_number = (old["seq"] != NO_SEQ) & (comm | (wait & (engine | (recent & (old["group"] != 0)))))
    communicates = comm | (wait & (has_number | (old["group"] != 0)))
    records["family"] = Family.SPAN
    for of, families in FAMILIES.items():
        records["family"][kind == of] = families[0]
    records["family"][wait & ~communicates] = Family.SPAN
    records["family"][wait & communicates] = Family.COLLECTIVE
    records["family"][communicates & p2p] = Family.P2P

    def put(name: str, values: npt.NDArray[np.generic], applies: Bool) -> None:
        records[name][applies] = values[applies]

    put("seq", old["seq"], has_number)
    put("group", old["group"], communicates)
    put("lane", old["group"], engine & ~communicates & ~wait)
    put("issue_ns", old["aux"], comm)
    put("value", old["aux"].copy().view("<f8") + 0.0, ~comm & (old["aux"] != 0))
    put("host_ns", old["host_ns"], comm & ~engine)
    put("purpose", old["host_ns"], engine)
    put("module", old["tag"], engine & ~p2p)
    put("stage", old["peer"] >> 16, engine)
    put("microbatch", old["peer"] & 0xFFFF, engine)
    put("peer", np.where(engine, old["tag"], old["peer"]), communicates & p2p)
    put("tag", old["tag"], communicates & p2p & ~engine)
    if recent:
        put("root", old["peer"], comm & ~engine & ~p2p)
        put("grad", (old["flags"] & Flag.GRAD) != 0, kind == Kind.PHASE)
    # A torn record: told by a place that is none.
    records["kind"][engine & (old["peer"] < 0)] = 0
    return records
