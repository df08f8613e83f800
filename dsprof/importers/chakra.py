"""Chakra execution traces (mlcommons/chakra, `.et`), one file a rank: nodes with their times, as the converter makes
them of a PyTorch execution graph and a Kineto trace.

A file is a list of protobuf messages, each behind its length: the GlobalMetadata, then Nodes (schema/protobuf/
et_def.proto). Nodes have no thread, so all operators of the host count as the training thread's; kernels are on the
stream that they tell, if they do. A trace without times is a workload for a simulator, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from dsprof.run import RunError
from dsprof.trace import Trace
from dsprof.trace.kineto import CommNames, TraceError, beginning_of, events_of, trace_rows_of
from dsprof.trace.kineto.protobuf import Messages, fields_of, signed, text_of, varint

from .kineto import ImportedFile, keep_rows, make_trace
from .rank_names import last_number, rank_in

DESCRIPTION: Final = "a Chakra execution trace (.et)"

SUFFIXES: Final = (".et", ".et.gz", ".chakra")
HEAD: Final = 1 << 12
MOST_NODES: Final = 20_000_000
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes that are used; also METADATA (1), MEM_LOAD (2) and MEM_STORE (3), which say nothing of time."""
COLLECTIVES: Final = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip
"""By CollectiveCommType."""
MICROSECONDS: Final = 1 << 52
VERSION: Final = b"\x0a"
"""How the first message begins: with the field `version`."""


def recognizes(path: Path) -> bool:
    """By its name and its first message: the format has no magic number. Never raises."""
    if not path.name.lower().endswith(SUFFIXES):
        return False
    data = beginning_of(path, HEAD)
    try:
        length, begin = varint(data, 0)
    except TraceError:
        return False
    return 0 < length <= HEAD and begin > 0 and data[begin : begin + 1] == VERSION


def read(path: Path) -> Trace:
    return read_all([path], path, str(path))


def read_all(paths: Sequence[Path], named: Path, where: str, comm_kernels: Sequence[str] = ()) -> Trace:
    """Raises RunError."""
    names = CommNames(comm_kernels)
    ranks = {path: rank_in(path.name) for path in paths}
    if len(paths) > 1 and None in ranks.values():
        ranks = {path: last_number(path.name.removesuffix(".gz").rpartition(".")[0]) for path in paths}
        if None in ranks.values():
            raise RunError(f"{where}: which rank is each file of? Rename them to rank<N>.et")

    def files(folder: Path) -> list[ImportedFile]:
        found = [_read(path, folder / f"{number}.arrow", names) for number, path in enumerate(sorted(paths))]
        for one in found:
            one.rank = ranks[one.path] if ranks[one.path] is not None else 0
        return found

    return make_trace(files, named, where, "chakra")


def _read(path: Path, target: Path, names: CommNames) -> ImportedFile:
    messages = Messages(path, "node")
    try:
        events = events_of(_nodes(messages), {}, comm=names)
        if not (len(events.ops) or len(events.device)):
            return ImportedFile(
                path, refused="none of its nodes has a time: it is a workload for a simulator",
                advice="convert a recording: chakra_converter PyTorch, of a graph linked with a Kineto trace",
            )  # fmt: skip
        kept = keep_rows(path, events, trace_rows_of(events), target)
        if messages.breaks_off:
            kept.notes.append("breaks off within a node: its last nodes are missing")
        return kept
    except TraceError as error:
        return ImportedFile(path, refused=str(error), advice=error.advice)
    except OSError as error:
        return ImportedFile(path, refused=f"cannot be read ({error.strerror})")
    except MemoryError:
        return ImportedFile(path, refused="there was not enough memory to read it")


def _nodes(messages: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Nodes with a time, as torch.profiler's JSON would have them."""
    for number, message in enumerate(messages):
        if number > MOST_NODES:
            raise TraceError(f"more than {MOST_NODES:,} nodes; trace fewer steps")
        if not number:
            continue  # the metadata
        name, kind, start, length = "", 0, 0, 0
        told: dict[str, Any] = {}
        for field, value in fields_of(message):
            if field == 2:
                name = text_of(value)
            elif field == 3 and type(value) is int:
                kind = value
            elif field in (6, 7) and type(value) is int and value < MICROSECONDS:
                start, length = (value, length) if field == 6 else (start, value)
            elif field == 10 and isinstance(value, bytes):
                key, content = _attribute(value)
                told[key] = content
        if kind in (COMP, SEND, RECV, COLLECTIVE) and name and (start or length):
            yield _event(number, name, kind, start, length, told)


def _event(number: int, name: str, kind: int, start: int, length: int, told: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "tid": 1, "ts": start, "dur": length}
    on_host = told.get("is_cpu_op", kind == COMP and "stream" not in told)
    if kind == COMP and on_host:
        return {**event, "cat": "cpu_op"}
    stream = told.get("stream")
    args: dict[str, Any] = {"device": 0, "stream": stream if type(stream) is int and 0 <= stream < 1 << 31 else 0}
    if kind == COMP:
        return {**event, "cat": "kernel", "args": args}
    which = told.get("comm_type")
    called = COLLECTIVES[which] if type(which) is int and 0 <= which < len(COLLECTIVES) else name
    size, group = told.get("comm_size"), told.get("pg_name", told.get("comm_group"))
    if kind in (SEND, RECV):
        called = "send" if kind == SEND else "recv"
    args |= {"Collective name": called, "dtype": "Byte"}
    if type(size) is int and 0 <= size < 1 << 50:
        args["In msg nelems"] = size
    if isinstance(group, (str, int)) and not isinstance(group, bool) and str(group):
        args["Process Group Name"] = str(group)
    return {**event, "name": f"ncclKernel_{name}", "cat": "kernel", "args": args}


INTEGERS: Final = (7, 9, 11, 13)
"""int32, int64, uint32, uint64 of AttributeProto; what other numbers are is used by nothing here."""


def _attribute(data: bytes) -> tuple[str, Any]:
    key = ""
    content: Any = None
    for field, value in fields_of(data):
        if field == 1:
            key = text_of(value)
        elif field in INTEGERS:
            content = signed(value)
        elif field == 27:
            content = bool(value)
        elif field == 29:
            content = text_of(value)
    return key, content
