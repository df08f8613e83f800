"""The seam between capture and analysis: the trace table's columns and the on-disk record.

Standard library only: it is imported inside training processes as well as by the analyzer.

A capture is a folder `capture/rank00003.<restart>.<host>.<pid>/` holding

    meta.json          who wrote it (see `dsprof.collectors.session`)
    names.txt          one line a name: its id, a tab, the escaped name
    chunk-00000.bin    a header page, then fixed-size records; chunk-00001.bin follows, and so on
    facts.jsonl        one-off facts: how DDP, the DataLoader, ... were configured, and where

Records are written at their begin and completed at their end, so a record whose `end_ns` is 0 is
evidence of what was under way when the process ended.
"""

from __future__ import annotations

import datetime
import enum
import re
import secrets
import socket
import struct
from typing import Final

FORMAT_VERSION: Final = 3
"""Version of the record layout. The native helper is built against it and refuses another one."""
READABLE_FORMATS: Final = (1, 2, 3)
"""What can be read. Format 1 had no records of the engine. Before format 3 a wait did not name what it waited for, a
forward did not say whether gradients were on, and a broadcast did not name its root."""

# --- the record -------------------------------------------------------------------------------

RECORD_FIELDS: Final = (
    # name, struct code, numpy dtype, meaning
    ("start_ns", "q", "<i8", "monotonic clock; for a collective a bound unless flag START_MEASURED"),
    ("end_ns", "q", "<i8", "0: it has not ended, or (state DONE) nothing told its end"),
    ("aux", "q", "<i8", "comm: issue_ns; every other kind: a float64's bits (`value`; zero is -0.0), 0: none"),
    ("bytes", "q", "<i8", "payload; -1: not applicable"),
    ("name", "I", "<u4", "id in names.txt"),
    ("thread", "I", "<u4", "OS thread id"),
    ("group", "I", "<u4", "id in names.txt of the process group's name, 0: none. ENGINE, no comm or wait: the lane's"),
    ("seq", "I", "<u4", "number in the group (collectives) or in (group, src, dst, tag) (p2p), from 0; or NO_SEQ"),
    ("peer", "i", "<i4", "rank in the group: of the other side (P2P), else the root; -1: none. "
     "ENGINE: stage << 16 | micro-batch"),
    ("tag", "i", "<i4", "p2p tag; -1: none. ENGINE: id in names.txt of the module's name, 0: none; with P2P the peer"),
    ("host_ns", "I", "<u4", "comm: time the issuing thread spent in the call (to 4.29 s). ENGINE: id of the purpose"),
    ("kind", "B", "u1", "a `Kind`"),
    ("state", "B", "u1", "a `State`; stored last"),
    ("dtype", "B", "u1", "index into DTYPES; 0: none"),
    ("flags", "B", "u1", "a `Flag` set"),
)  # fmt: skip

RECORD: Final = struct.Struct("<" + "".join(code for _, code, _, _ in RECORD_FIELDS))
RECORD_BYTES: Final = 64
assert RECORD.size == RECORD_BYTES

NO_SEQ: Final = 2**32 - 1
"""`seq` of a wait that does not know what it waited for, and of an engine's record that has no number."""


class Kind(enum.IntEnum):
    """What a record is; the trace table's `kind` is its lower-case name."""

    STEP = 1
    PHASE = 2
    MODULE = 3
    COMM = 4
    WAIT = 5
    PIPE = 6
    COPY = 7
    KERNEL = 8
    LAUNCH = 9
    MEM = 10
    GAUGE = 11
    PAUSE = 12
    MARK = 13


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
    P2P = 4
    """A send or a receive: it has a peer, and its `seq` counts within (group, src, dst, tag)."""
    ENGINE = 8
    """Told by dsprof's engine or a pipeline schedule, with stage, micro-batch, module and purpose: some fields mean
    something else, see RECORD_FIELDS."""
    GRAD = 16
    """A forward with gradients on."""


DTYPES: Final = (
    "", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip
"""torch's ScalarType number + 1 -> name; anything later is stored as 0."""

LARGEST_PLACE: Final = 2**15 - 1
"""Of stages and micro-batches that a record and the table have room for."""

# --- the chunk --------------------------------------------------------------------------------

CHUNK_MAGIC: Final = b"dsprofch"
CHUNK_HEADER_BYTES: Final = 4096
CHUNK_RECORDS: Final = 16384
"""Records a chunk: 1 MiB of them. File space is reserved before it is mapped."""

CHUNK_HEADER: Final = struct.Struct("<8sIIIIQ")
"""magic, FORMAT_VERSION, RECORD_BYTES, CHUNK_RECORDS, index of this chunk, pid."""


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


# --- the run ----------------------------------------------------------------------------------


def new_run_id(name: str, now: datetime.datetime | None = None) -> str:
    """`<name>-<UTC>-<id>`, safe as a file name."""
    now = now or datetime.datetime.now(datetime.UTC)
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    return f"{safe}-{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def host_name() -> str:
    """This host's whole name, as a file name: ranks of one name share a clock, and `node.a` is not `node.b`."""
    return socket.gethostname().replace("/", "_") or "localhost"


def parse_ranks(text: str) -> list[range]:
    """The ranks that `0,2-3` names; nothing for an empty text, which means all. Raises ValueError on anything else."""
    chosen = []
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} is not a list of ranks; write ranks and ranges, such as 0,2-3")
        chosen.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


# --- names ------------------------------------------------------------------------------------

COLLECTIVE_NAMES: Final = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""c10d operator (without `c10d::`) -> the name in the trace. An operator not listed keeps its own."""

PHASES: Final = (
    "data", "loader_start", "forward", "loss", "backward", "clip", "optimizer", "between", "checkpoint", "compile",
)  # fmt: skip
"""`loader_start` is `iter(DataLoader)`: starting its workers. `checkpoint` is saving one, `compile` is torch.compile's
own work. Derived on merge are `loss` (last module to backward), `clip` (backward to optimizer) and, where no DataLoader
was seen, `between` (optimizer to the next forward): how the loop gets its input, perhaps. Where the engine trains,
`backward` and `optimizer` are its own `backward` and `step`, with what it waits for in them."""
LOADING: Final = ("data", "loader_start")
"""Phases in which the loop is in a DataLoader."""

SHARDING: Final = "sharding"
"""Name of the `module` rows in which FSDP2 works for one of its units, before or after its forward or backward."""

BUDGET_PARTS: Final = (
    "compute", "comm_exposed", "peer_wait", "bubble", "data", "optimizer", "offload", "pause", "other",
)  # fmt: skip

BACKWARD_DONE: Final = "backward_done"
"""Name of the `mark` row where the last gradient of a backward has been made, and DDP's reducer begins to wait."""

TIME_KINDS: Final = ("training", "evaluation", "checkpointing", "compilation", "startup", "rest")
"""What the run's wall time divides into."""

# --- the trace table --------------------------------------------------------------------------

COLUMNS: Final = {
    "rank": "int32",
    "restart": "int16",
    "step": "int32",
    "kind": "category",
    "name": "category",
    "lane": "category",
    "thread": "Int32",
    "depth": "Int32",
    "start_ns": "int64",
    "dur_ns": "Int64",
    "ended": "boolean",
    "issue_ns": "Int64",
    "host_ns": "Int64",
    "stage": "Int16",
    "microbatch": "Int16",
    "module": "category",
    "purpose": "category",
    "group": "category",
    "seq": "Int32",
    "peer": "Int32",
    "tag": "Int32",
    "root": "Int32",
    "bytes": "Int64",
    "dtype": "category",
    "value": "float64",
    "grad": "boolean",
    "corr": "Int64",
    "site": "category",
    "source": "category",
}
"""Column -> pandas dtype. `host_ns` is how long the issuing thread was inside the call.

`dur_ns` is null for what never ended (`ended` False: evidence of a hang or a kill) and for a collective on a device
whose end nobody measured (`ended` True)."""

SOURCES: Final = ("measured", "derived", "imported")
