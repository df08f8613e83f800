"""Nsight Systems reports, exported to SQLite (`nsys export --type sqlite`): kernels, copies, calls, NVTX ranges.

A report may hold several processes; each that used a device is a rank. Names of tables and columns are those of the
exporter's documented schema (2020 to 2026); a table or column that is not there costs what it would have told.

NVTX ranges stand for what torch.profiler's annotations and operators are: `step 12`, `iteration 12` and ProfilerStep#12
are steps, `forward`, `backward`, `optimizer` and `data` phases, torch's own (`torch.autograd.profiler.emit_nvtx`)
operators. The file is opened for reading only, and nothing that it defines is run.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from dsprof.trace import Trace
from dsprof.trace.kineto import CommNames, Events, TraceError, events_of, trace_rows_of

from .kineto import ImportedFile, keep_rows, make_trace
from .rank_names import rank_in

DESCRIPTION: Final = "a report of Nsight Systems (SQLite)"

MAGIC: Final = b"SQLite format 3\x00"
KERNELS, COPIES, FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES: Final = "NVTX_EVENTS"
STRINGS: Final = "StringIds"
TELLING: Final = (KERNELS, CALLS, RANGES)
PUSH_POP, START_END = 59, 60
"""Kinds of NVTX_EVENTS that last."""
COPY_KINDS: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
VERSION: Final = re.compile(r"_v\d+$")
"""How the names of runtime calls end."""
STEP: Final = re.compile(
    r"(?:ProfilerStep|(?:train(?:ing)?)?[ _-]?(?:step|iter(?:ation)?))[ _#:=-]*(\d{1,9})$", re.IGNORECASE
)
UNNUMBERED_STEP: Final = re.compile(r"(train(ing)?[ _-]?)?(step|iter(ation)?)$", re.IGNORECASE)
PHASES: Final = (
    (re.compile(r"(data|batch|input|loader|dataloader|get[_ -]?batch|data[_ -]?load(ing|er)?)$", re.IGNORECASE),
     "enumerate(DataLoader)#NVTX"),
    (re.compile(r"(optim(izer)?|update)([_ .:-]?step)?$", re.IGNORECASE), "Optimizer.step#NVTX"),
    (re.compile(r"backward([_ .:-]?(pass|step|compute))?$", re.IGNORECASE),
     "autograd::engine::evaluate_function: NVTX"),
)  # fmt: skip
"""What ranges are often called -> what torch.profiler calls that."""
OPERATOR: Final = re.compile(r"([\w:.]+::[^,]*|\w+Backward\d*), ")
"""torch's own ranges have arguments behind the name."""
MOST_ROWS: Final = 20_000_000
MOST_NAMES: Final = 1 << 20
MOST_TEXT: Final = 4096
MOST_STEPS: Final = 50_000_000
"""Thousands of instructions of SQLite's machine in one query."""


def recognizes(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return False
        with closing(_open(path)) as database:
            return any(table in _tables(database) for table in TELLING)
    except (OSError, sqlite3.Error):
        return False


def read(path: Path) -> Trace:
    return read_all([path], path, str(path))


def read_all(paths: Sequence[Path], named: Path, where: str, comm_kernels: Sequence[str] = ()) -> Trace:
    """The reports of one job, of one process each or of several. Raises RunError."""
    names = CommNames(comm_kernels)
    notes: list[str] = []
    found = [(path, *_processes(path)) for path in sorted(paths)]
    first = _first_ranks([(path, len(processes)) for path, processes, _ in found], notes)

    def files(folder: Path) -> list[ImportedFile]:
        read = []
        for number, (path, processes, refused) in enumerate(found):
            if refused:
                read.append(ImportedFile(path, refused=refused))
            for at, process in enumerate(processes):
                one = _read_process(path, process, folder / f"{number}.{at}.arrow", names)
                one.rank = first[path] + at
                one.notes += notes
                notes.clear()
                read.append(one)
        return read

    return make_trace(files, named, where, "nsight")


def _first_ranks(reports: list[tuple[Path, int]], notes: list[str]) -> dict[Path, int]:
    """The rank of each report's first process. One process a report: the number in the file's name, if all have one."""
    told = {path: rank_in(path.name) for path, _ in reports}
    if all(count <= 1 for _, count in reports) and None not in told.values() and len({*told.values()}) == len(told):
        return {path: rank or 0 for path, rank in told.items()}
    found, following = {}, 0
    for path, count in reports:
        found[path] = following
        following += count
    if following > 1:
        notes.append(
            "which rank a process is of is not in such a report: they are numbered in the order of the files' names "
            "and of the devices that they used; name each file rank<N>.sqlite where that is wrong"
        )
    return found


# --- SQLite ---------------------------------------------------------------------------------------


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    database.text_factory = lambda text: text.decode("utf-8", "replace")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
    database.execute("PRAGMA trusted_schema = OFF")  # a view or a generated column may call functions
    database.execute("PRAGMA query_only = ON")
    left = [MOST_STEPS]

    def count() -> int:
        left[0] -= 1
        return left[0] < 0

    database.set_progress_handler(count, 1000)
    return database


def _tables(database: sqlite3.Connection) -> set[str]:
    return {
        str(name) for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 10000")
    }


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}


def _rows(
    database: sqlite3.Connection, table: str, wanted: Sequence[str], where: str = "", values: Sequence[Any] = (),
    needed: Sequence[str] = (),
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Rows of a table by its columns; None for a column that is not there. Nothing without the table, or without one of
    the columns that are `needed`."""
    if table not in _tables(database):
        return
    there = _columns(database, table)
    if not set(needed) <= there:
        return
    chosen = ", ".join(f'"{name}"' if name in there else "NULL" for name in wanted)
    query = f"SELECT {chosen} FROM {table} {where} LIMIT {MOST_ROWS + 1}"
    for count, row in enumerate(database.execute(query, tuple(values))):
        if count >= MOST_ROWS:
            raise TraceError(f"more than {MOST_ROWS:,} rows of {table}", "trace fewer steps")
        yield row


# --- one report -----------------------------------------------------------------------------------


def _processes(path: Path) -> tuple[list[int | None], str]:
    """The processes that used a device, in the order of their devices, and why there are none. None: the report does
    not tell processes apart."""
    try:
        with closing(_open(path)) as database:
            tables = _tables(database)
            device: dict[int, int] = {}
            for table in (KERNELS, COPIES):
                if table in tables and {"globalPid", "deviceId"} <= _columns(database, table):
                    query = f"SELECT globalPid, min(deviceId) FROM {table} GROUP BY globalPid LIMIT 4096"
                    for process, first in database.execute(query):
                        if type(process) is int and type(first) is int:
                            device[process] = min(device.get(process, first), first)
            return [*sorted(device, key=lambda process: (device[process], process))] or [None], ""
    except sqlite3.Error as error:
        return [], f"its database is damaged ({str(error)[:120]})"


def _read_process(path: Path, process: int | None, target: Path, names: CommNames) -> ImportedFile:
    try:
        with closing(_open(path)) as database:
            events = _events(database, process, names)
        if not (len(events.device) or len(events.calls) or len(events.ops)):
            needed = "no kernel, no runtime call and no NVTX range"
            return ImportedFile(path, refused=f"holds {needed}", advice="profile with `nsys profile --trace=cuda,nvtx`")
        return keep_rows(path, events, trace_rows_of(events), target)
    except sqlite3.Error as error:
        return ImportedFile(path, refused=f"its database is damaged ({str(error)[:120]})", advice="export it again")
    except TraceError as error:
        return ImportedFile(path, refused=str(error), advice=error.advice)
    except MemoryError:
        return ImportedFile(path, refused="there was not enough memory to read it")


def _events(database: sqlite3.Connection, process: int | None, names: CommNames) -> Events:
    strings = _Strings(database)
    begun = [row[0] for table in (*TELLING, COPIES, FILLS) for row in _extent(database, table)]
    base = min(begun, default=0)
    about = _about(database)
    about["baseTimeNanoseconds"] = max(base + about.pop("session_ns", 0), 0)
    return events_of(_all(database, process, strings, base), about, comm=names)


def _extent(database: sqlite3.Connection, table: str) -> Iterator[tuple[int]]:
    if table in _tables(database) and "start" in _columns(database, table):
        for (start,) in database.execute(f"SELECT min(start) FROM {table}"):
            if type(start) is int:
                yield (start,)


def _about(database: sqlite3.Connection) -> dict[str, Any]:
    """The host's name, the device's, and when the session began."""
    found: dict[str, Any] = {}
    for name, value in _rows(database, "TARGET_INFO_SYSTEM_ENV", ("name", "value")):
        if name == "Hostname" and isinstance(value, str):
            found["host_name"] = value
    for (epoch,) in _rows(database, "TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if type(epoch) is int and 0 < epoch < 1 << 62:
            found["session_ns"] = epoch
    for (name,) in _rows(database, "TARGET_INFO_GPU", ("name",)):
        if isinstance(name, str):
            found.setdefault("deviceProperties", [{"name": name}])
    return found


class _Strings:
    """Names that rows tell by number."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._known: dict[int, str] = {}
        for number, value in _rows(database, STRINGS, ("id", "value")):
            if isinstance(value, str) and len(self._known) < MOST_NAMES:
                self._known[number] = value[:MOST_TEXT]

    def of(self, number: Any, otherwise: str = "") -> str:
        return self._known.get(number, otherwise)


def _all(database: sqlite3.Connection, process: int | None, strings: _Strings, base: int) -> Iterator[dict[str, Any]]:
    """Events as torch.profiler's JSON has them."""

    def event(category: str, name: str, thread: Any, start: Any, end: Any, args: dict[str, Any]) -> Iterator[Any]:
        if type(start) is int and type(end) is int and base <= start <= end < 1 << 62 and name:
            yield {
                "ph": "X", "cat": category, "name": name, "tid": thread, "ts": (start - base) / 1e3,
                "dur": (end - start) / 1e3, "args": args,
            }  # fmt: skip

    def of_device(table: str) -> tuple[str, list[int]]:
        known = process is not None and table in _tables(database) and "globalPid" in _columns(database, table)
        return ("WHERE globalPid = ?", [process]) if known and process is not None else ("", [])

    def of_threads(table: str) -> str:
        known = process is not None and "globalTid" in _columns(database, table)
        return f"WHERE (globalTid >> 24) = {process >> 24}" if known and process is not None else ""

    placed = ("deviceId", "streamId", "correlationId")
    columns = ("start", "end", "demangledName", "shortName", *placed)
    for start, end, long, short, *place in _rows(database, KERNELS, columns, *of_device(KERNELS)):
        name = strings.of(long) or strings.of(short, "kernel")
        yield from event("kernel", name, 0, start, end, _place(place))
    for start, end, kind, size, *place in _rows(
        database, COPIES, ("start", "end", "copyKind", "bytes", *placed), *of_device(COPIES)
    ):
        name = f"Memcpy {COPY_KINDS.get(kind, 'other')}"
        yield from event("gpu_memcpy", name, 0, start, end, _place(place, size))
    for start, end, size, *place in _rows(database, FILLS, ("start", "end", "bytes", *placed), *of_device(FILLS)):
        yield from event("gpu_memset", "Memset (Device)", 0, start, end, _place(place, size))
    for start, end, number, thread, corr in _rows(
        database, CALLS, ("start", "end", "nameId", "globalTid", "correlationId"), of_threads(CALLS)
    ):
        name = VERSION.sub("", strings.of(number, "cudaCall"))
        args = {"correlation": corr} if type(corr) is int else {}
        yield from event("cuda_runtime", name, _thread(thread), start, end, args)
    yield from _ranges(database, strings, of_threads(RANGES), event)


Make = Callable[[str, str, Any, Any, Any, dict[str, Any]], Iterator[dict[str, Any]]]


def _ranges(database: sqlite3.Connection, strings: _Strings, mine: str, event: Make) -> Iterator[dict[str, Any]]:
    """Steps, and what is in none or one of them: operators; what holds several, such as an epoch: an annotation."""
    steps: list[int] = []
    number = 0
    columns = ("start", "end", "eventType", "text", "textId", "globalTid")
    for only_steps in (True, False):
        for start, end, kind, text, name_id, thread in _rows(
            database, RANGES, columns, f"{mine} ORDER BY start", needed=("start",)
        ):
            if kind not in (PUSH_POP, START_END) or type(start) is not int or type(end) is not int:
                continue
            name = text if isinstance(text, str) and text else strings.of(name_id)
            called, unnumbered = _called(name[:MOST_TEXT], number)
            if called.startswith("ProfilerStep#") != only_steps:
                continue
            if only_steps:
                number += unnumbered
                steps.append(start)
            within = bisect_left(steps, end) - bisect_left(steps, start)
            category = "user_annotation" if within > 1 and not only_steps else "Operator"
            yield from event(category, called, _thread(thread), start, end, {})


def _called(name: str, step: int) -> tuple[str, bool]:
    """A range as torch.profiler would call it, and whether it is a step without a number, which `step` is then."""
    told = STEP.match(name)
    if told is not None:
        return f"ProfilerStep#{int(told[1])}", False
    if UNNUMBERED_STEP.match(name):
        return f"ProfilerStep#{step}", True
    for pattern, called in PHASES:
        if pattern.match(name):
            return called, False
    operator = OPERATOR.match(name)
    return (operator[1] if operator is not None else name), False


def _place(place: Sequence[Any], size: Any = None) -> dict[str, Any]:
    device, stream, corr = (one if type(one) is int and 0 <= one < 1 << 31 else None for one in place)
    found = {"device": device or 0, "stream": stream or 0}
    if corr is not None:
        found["correlation"] = corr
    if type(size) is int and 0 <= size < 1 << 62:
        found["bytes"] = size
    return found


def _thread(told: Any) -> int:
    """The thread's number, of a serialized one."""
    return told & 0xFFFFFF if type(told) is int else 0
