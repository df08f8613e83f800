"""What `dsprof export` wrote, of any of its formats: a Parquet table, a Chrome trace, a Perfetto trace.

Parquet holds the rows as they are. In the others are the rows that have ended, memory and gauges, and of their columns
those that a slice tells (`dsprof.exported`). All ranks are on one clock.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dsprof.exported import ABOUT, COLLECTIVE, DETAILS, PARQUET, PROFILER_STEP, SINCE
from dsprof.names import new_run_id
from dsprof.run import RunError, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace
from dsprof.trace.kineto import ChromeEvents, PerfettoTrace, TraceError, head_of, looks_like_perfetto

from .assemble import rank_info, run_name
from .rank_names import rank_of
from .row_table import MOST_ROWS, RowTable

DESCRIPTION: Final = "what `dsprof export` wrote"

HEAD: Final = re.compile(rb'"dsprof"\s*:\s*\{\s*"schema"')
CATEGORIES: Final = {"gpu_memcpy": "copy", "cuda_runtime": "launch"}
"""Kinds that the Chrome trace calls as torch.profiler does."""
RANK: Final = re.compile(r"rank (\d{1,7})\b")
AGAIN: Final = re.compile(r" \(\d+\)$")
"""Behind the name of a lane's further tracks."""
OF_LANE: Final = re.compile(r"(.+) \((.+)\)$")
"""How a counter is called that is of a lane."""
WORDS: Final = frozenset(name for name, kind in COLUMNS.items() if kind == "category")
MOST: Final = 1 << 62
LARGEST: Final = {"int16": 1 << 15, "int32": 1 << 31, "int64": MOST}
"""Numbers of a column are below."""
MARKS: Final = "marks"
STEPS: Final = "steps"


def recognizes(path: Path) -> bool:
    if HEAD.search(head_of(path)):
        return True
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1":
                return PARQUET in (pq.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException):
        return False
    if not looks_like_perfetto(path):
        return False
    try:
        with path.open("rb") as file:  # the first packet is that of the first rank's process
            return re.search(rb"rank \d+", file.read(256)) is not None
    except OSError:
        return False


def read(path: Path) -> Trace:
    """Raises RunError."""
    try:
        with path.open("rb") as file:
            of_parquet = file.read(4) == b"PAR1"
        if of_parquet:
            return _parquet(path)
        about, tables, zero_ns = _perfetto(path) if looks_like_perfetto(path) else _chrome(path)
    except (TraceError, OSError, pa.ArrowException, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read ({str(error).splitlines()[0][:200]}); export it again") from error
    rows = {rank: _later(tables.pop(rank).table(), zero_ns).assign(rank=rank) for rank in sorted(tables)}
    if not rows:
        raise RunError(f"{path}: holds no rows of a rank; export it again")
    what = "what had not ended, and some columns, are not in such a file: export with --to parquet to keep all"
    return Trace.of(_info(path, about, rows, [what]), pd.concat([*rows.values()], ignore_index=True))


def _later(rows: pd.DataFrame, by_ns: int) -> pd.DataFrame:
    return rows.assign(**{name: rows[name] + by_ns for name in ("start_ns", "issue_ns", "arrival_ns")})


def _parquet(path: Path) -> Trace:
    schema = pq.read_schema(path)
    about = json.loads((schema.metadata or {}).get(PARQUET, b"{}"))
    there = [name for name in COLUMNS if name in schema.names]
    for name in there:
        of = schema.field(name).type
        if not _holds(COLUMNS[name], of.value_type if pa.types.is_dictionary(of) else of):
            raise RunError(f"{path}: its column `{name}` holds {str(of)[:60]}, no {COLUMNS[name]}; export it again")
    # What stays a dictionary takes no more memory than in the file, however often a word is there.
    words = [name for name in there if name in WORDS and not pa.types.is_null(schema.field(name).type)]
    with pq.ParquetFile(path, read_dictionary=words) as file:
        if file.metadata.num_rows > MOST_ROWS:
            raise RunError(
                f"{path}: {file.metadata.num_rows:,} rows; export fewer steps or ranks, by --steps or --ranks"
            )
        rows = file.read(columns=there).to_pandas(ignore_metadata=True)
    try:
        rows = rows.reindex(columns=list(COLUMNS)).astype(COLUMNS)
    except TypeError as error:  # of a number that its column cannot hold
        raise RunError(f"{path}: cannot be read ({str(error)[:200]}); export it again") from error
    rows = rows[(rows["rank"] >= 0) & (rows["rank"] < 1 << 20)]
    if rows.empty:
        raise RunError(f"{path}: holds no rows; export it again")
    by_rank = {int(rank): of_rank for rank, of_rank in rows.groupby("rank")}
    return Trace.of(_info(path, about if isinstance(about, dict) else {}, by_rank, []), rows)


def _holds(kind: str, of: pa.DataType) -> bool:
    """Whether what a Parquet file has of this type can be a column of the trace."""
    if pa.types.is_null(of):
        return True
    if kind == "category":
        return bool(pa.types.is_string(of) or pa.types.is_large_string(of))
    if kind == "boolean":
        return bool(pa.types.is_boolean(of))
    return bool(pa.types.is_integer(of) or (pa.types.is_floating(of) and kind == "float64"))


Tables = tuple[dict[str, Any], dict[int, RowTable], int]
"""What the file says of its run, rows by rank, and what is to be added to their times."""


def _chrome(path: Path) -> Tables:
    events = ChromeEvents(path)
    tables: dict[int, RowTable] = defaultdict(RowTable)
    lanes: dict[tuple[Any, Any], str] = {}
    for found in events.lists():
        for event in found:
            rank, name = rank_of(event.get("pid")), event.get("name")
            args = event.get("args")
            args = args if isinstance(args, dict) else {}
            if event.get("ph") == "M" and name == "thread_name" and len(lanes) < 1 << 20:
                lanes[str(event.get("pid")), str(event.get("tid"))] = str(args.get("name", ""))[:200]
            start, length = event.get("ts"), event.get("dur", 0)
            if rank is None or not isinstance(name, str) or start is None or not (_is_time(start) and _is_time(length)):
                continue
            category = str(event.get("cat", ""))
            kind, name = _as_dsprof(CATEGORIES.get(category, category), name, args)
            lane = lanes.get((str(rank), str(event.get("tid"))), "")
            row = _row(str(event.get("ph")), kind, name, lane, _ns(start), _ns(length), args)
            if row is not None:
                corr = args.get("correlation")
                if type(corr) is int and 0 <= corr < MOST:
                    row["corr"] = corr
                tables[rank].add(row)
    about = events.about.get(ABOUT)
    about = about if isinstance(about, dict) else {}
    zero = about.get("zero_ns", 0)
    return about, tables, zero if type(zero) is int and 0 <= zero < MOST else 0


def _as_dsprof(kind: str, name: str, args: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name of a step, and of a collective on a device, which the file calls as torch.profiler does."""
    collective = args.get(COLLECTIVE)
    if kind == "kernel" and isinstance(collective, str):
        return "comm", collective
    if kind == "user_annotation" and name.startswith(PROFILER_STEP):
        return "step", "step"
    return kind, name


def _perfetto(path: Path) -> Tables:
    trace = PerfettoTrace(path, {*DETAILS, *(called for _, called, _ in SINCE)}, whole=ABOUT)
    tables: dict[int, RowTable] = defaultdict(RowTable)
    about: dict[str, Any] = {}
    for one in trace.slices:
        told = one.args.get(ABOUT)
        if isinstance(told, str) and one.category == ABOUT:
            about = json.loads(told)
            continue
        named = RANK.match(trace.process_of(one.track))
        if named is None:
            continue
        track = trace.tracks[one.track].name if one.track in trace.tracks else ""
        phase = "C" if one.value is not None else "i" if one.category == "mark" and track == MARKS else "X"
        args = {"value": one.value} if one.value is not None else one.args
        name = track if one.value is not None else one.name
        row = _row(phase, one.category, name, track, one.start_ns, one.dur_ns, args)
        if row is not None:
            tables[int(named[1])].add(row)
    return about if isinstance(about, dict) else {}, tables, 0


def _row(
    phase: str, kind: str, name: str, track: str, start_ns: int, dur_ns: int, args: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A row of the trace; None: the event is none."""
    if phase == "C":
        of_lane = OF_LANE.match(name)
        lane = of_lane[2] if of_lane else "main"
        memory = lane.startswith("memory.")
        value = args.get("value")
        if not isinstance(value, (int, float)):
            return None
        row: dict[str, Any] = {"kind": "mem" if memory else "gauge", "name": of_lane[1] if of_lane else name,
                               "lane": lane, "start_ns": start_ns, "dur_ns": 0, "value": float(value)}  # fmt: skip
        return row
    if phase not in ("X", "i") or not kind:
        return None
    lane = "main" if track in ("", STEPS, MARKS) else AGAIN.sub("", track)
    row = {"kind": kind if phase == "X" else "mark", "name": name, "lane": lane, "start_ns": start_ns,
           "dur_ns": dur_ns, "ended": True}  # fmt: skip
    for column in DETAILS:
        found = _value(column, args.get(column))
        if found is not None:
            row[column] = found
    for column, called, sign in SINCE:
        since = args.get(called)
        if type(since) is int and abs(since) < MOST // 2:
            row[column] = start_ns + sign * since
    return row


def _value(column: str, value: Any) -> Any:
    """What an event tells of a column; None: nothing that can be."""
    if column in WORDS:
        return value if isinstance(value, str) else None
    if column == "value":
        return float(value) if isinstance(value, (int, float)) else None
    if column == "grad":
        return bool(value) if isinstance(value, int) else None
    return value if type(value) is int and -1 <= value < LARGEST[COLUMNS[column].lower()] else None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value * 1e3 < MOST


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)


# --- run.json -----------------------------------------------------------------------------------


def _info(path: Path, about: Mapping[str, Any], rows: Mapping[int, pd.DataFrame], warnings: list[str]) -> RunInfo:
    def told(key: str, kind: type) -> Any:
        value = about.get(key)
        return value if isinstance(value, kind) else kind()

    ranks = sorted(rows)
    facts = [fact for fact in told("facts", list) if isinstance(fact, dict) and isinstance(fact.get("fact"), str)]
    facts = [fact for fact in facts if rank_of(fact.get("rank")) in rows]
    first = {"fact": "import", "rank": ranks[0], "format": told("imported", str) or "dsprof", "file": path.name[:200],
             "warnings": warnings}  # fmt: skip
    hosts = {one["rank"]: one for one in told("ranks", list) if isinstance(one, dict) and type(one.get("rank")) is int}
    groups = {str(name): group for name, group in told("groups", dict).items() if _is_group(group)}
    name = run_name(told("name", str) or path.name.split(".")[0], "export")
    size = rank_of(about.get("world_size")) or 0
    return RunInfo(
        id=new_run_id(name), name=name, level=told("level", str), engine=told("engine", str) or "script",
        command=["dsprof", "import", str(path)], world_size=max(size, ranks[-1] + 1), facts=[first, *facts],
        groups=groups,
        versions={str(key): str(value) for key, value in told("versions", dict).items()},
        ranks=[
            rank_info(
                rank, len(rows[rank]), int(rows[rank]["step"].max()), host=str(hosts.get(rank, {}).get("host", "")),
                native=bool(hosts.get(rank, {}).get("native", True)), clock="one clock of all ranks",
            )
            for rank in ranks
        ],
    )  # fmt: skip


def _is_group(group: Any) -> bool:
    ranks = group.get("ranks") if isinstance(group, dict) else None
    return isinstance(ranks, list) and all(rank_of(rank) is not None for rank in ranks)
