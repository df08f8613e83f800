"""Traces of torch.profiler: one file a rank, any number of them, read each in a process of its own.

A file that breaks off costs its tail; one that cannot be read costs its rank, and a warning says why. The rank is what
the file says of itself (distributedInfo), else what its name says. Times are the epoch's, which the ranks of one host
share; where the ends of their collectives say that clocks are apart, each of them is one of its own, and the analyzer
aligns them. What is read, and what is not: docs/importing.md.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dsprof.names import new_run_id
from dsprof.run import RunError, RunInfo
from dsprof.trace import Trace, concat_rows
from dsprof.trace.kineto import (
    CommNames,
    Events,
    TraceError,
    TraceRows,
    looks_like_perfetto,
    looks_like_trace,
    read_events,
    trace_rows_of,
)
from dsprof.trace.load import EVERY_COLUMN

from .assemble import clock_names, collective_ends, rank_info, run_name
from .rank_names import rank_in, rank_of

Int = npt.NDArray[np.int64]

DESCRIPTION: Final = "a trace of torch.profiler (Chrome trace JSON or .pftrace)"

IN_PROCESSES_FROM: Final = 4 << 20
"""Bytes of all files together, compressed, from which on they are read by several processes."""
MOST_NAMED: Final = 4
RECORD_AGAIN: Final = "record it again, or copy it again"
RECORD_WITH_TORCH: Final = (
    "record one with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]), and write it by "
    "export_chrome_trace; or, of another tool, say what its events are in a mapping file (--mapping, docs/importing.md)"
)
SAFE_PATH: Final = "PYTHONSAFEPATH"
UNREADABLE: Final = (TraceError, OSError, MemoryError)
"""What reading a file may end with that costs this file alone."""


def recognizes(path: Path) -> bool:
    return looks_like_trace(path) or looks_like_perfetto(path)


@dataclass
class ImportedFile:
    """What reading one file gave: its rows as an Arrow file, and what `run.json` says of it. `refused`: why it gave
    nothing."""

    path: Path
    refused: str = ""
    advice: str = ""
    rows: tuple[Path, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    count: int = 0
    steps: tuple[int, int] = (-1, -1)
    """Numbers of the first one and the last."""
    seen_ns: tuple[int, int] = (0, 0)
    marked: bool = True
    has_device: bool = True
    numbered: tuple[int, int] = (0, 0)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    host: str = ""
    notes: list[str] = field(default_factory=list)
    ends: dict[str, Int] = field(default_factory=dict)
    """When its synchronizing collectives ended, in the order of their launch, by group and name."""


def read(path: Path) -> Trace:
    """The trace in a file. Raises RunError."""
    return read_all([path], path, str(path))


def read_all(paths: Sequence[Path], named: Path, where: str, comm_kernels: Sequence[str] = ()) -> Trace:
    """The traces in files, one a rank. `named`: what the run is called after; `where`: what was typed. `comm_kernels`:
    patterns of kernels that communicate (`names.comm_pattern`), beside those that are known. Raises RunError."""
    comm_names(comm_kernels)
    return make_trace(lambda folder: _read_all(sorted(paths), folder, tuple(comm_kernels)), named, where, "kineto")


def comm_names(comm_kernels: Sequence[str]) -> CommNames:
    """Which kernels communicate, with patterns of the user's. Raises RunError where one is no pattern."""
    try:
        return CommNames(comm_kernels)
    except ValueError as error:
        raise RunError(f"--comm-kernels: {error}") from error


def make_trace(read_files: Callable[[Path], list[ImportedFile]], named: Path, where: str, format_name: str) -> Trace:
    """The trace of files, one a rank, which `read_files` reads into the folder that it is given. Raises RunError."""
    folder = Path(tempfile.mkdtemp(prefix="dsprof-import-"))
    try:
        files = read_files(folder)
        good = _with_ranks(where, [one for one in files if not one.refused])
        if not good:
            one = files[0]
            raise RunError(f"{one.path}: {one.refused}; {one.advice or RECORD_AGAIN}")
        source = _Converted(folder, {one.rank: one.rows for one in good if one.rank is not None})
        return Trace(_info(named, good, [one for one in files if one.refused], format_name), source)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# --- files --------------------------------------------------------------------------------------


def _read_all(paths: list[Path], folder: Path, comm_kernels: tuple[str, ...]) -> list[ImportedFile]:
    work = [(path, folder / f"{number}.arrow", comm_kernels) for number, path in enumerate(paths)]
    size = sum(path.stat().st_size for path in paths)
    processes = min(len(paths), len(os.sched_getaffinity(0)))
    if processes < 2 or size < IN_PROCESSES_FROM:
        return [_convert(*one) for one in work]
    # A fork has all that is imported; of a process that runs other threads it may hold a lock of theirs for ever.
    start = "fork" if threading.active_count() == 1 and sys.version_info < (3, 12) else "spawn"
    with _nothing_from_here(), ProcessPoolExecutor(processes, mp_context=get_context(start)) as pool:
        return _in_pool(pool, work)


@contextmanager
def _nothing_from_here() -> Iterator[None]:
    """Processes that are started meanwhile import nothing from the working directory, as with `python -P`."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _in_pool(pool: Executor, work: list[tuple[Path, Path, tuple[str, ...]]]) -> list[ImportedFile]:
    found = []
    for one, future in [(one, pool.submit(_convert, *one)) for one in work]:
        try:
            found.append(future.result())
        except BrokenProcessPool:
            found.append(ImportedFile(one[0], refused="the process that read it was ended, perhaps for want of memory"))
    return found


def _convert(path: Path, target: Path, comm_kernels: tuple[str, ...]) -> ImportedFile:
    """Read one file, and write its rows to `target`. Never raises for what is wrong with the file."""
    try:
        events = read_events(path, CommNames(comm_kernels))
        if not (len(events.ops) or len(events.device) or len(events.calls) or len(events.annotations)):
            return ImportedFile(path, refused=_in_no_dialect(events), advice=RECORD_WITH_TORCH)
        found = trace_rows_of(events)
    except UNREADABLE as error:
        return refusal(path, error)
    return keep_rows(path, events, found, target)


def refusal(path: Path, error: Exception) -> ImportedFile:
    """Of a file whose reading ended with one of UNREADABLE."""
    if isinstance(error, TraceError):
        return ImportedFile(path, refused=str(error), advice=error.advice)
    if isinstance(error, OSError):
        return ImportedFile(path, refused=f"cannot be read ({error.strerror})")
    return ImportedFile(path, refused="there was not enough memory to read it")


def keep_rows(path: Path, events: Events, found: TraceRows, target: Path) -> ImportedFile:
    """Its rows, written to `target`, and what run.json says of it."""
    notes = [events.cut] if events.cut else []
    if events.odd:
        how_many = "1 event was" if events.odd == 1 else f"{events.odd:,} events were"
        notes.append(f"{how_many} left out: no JSON, or without a name or a possible time, such as {events.first_odd}")
    table = pa.Table.from_pandas(found.rows, preserve_index=False)
    try:
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        return ImportedFile(path, refused=f"its rows could not be kept in {target.parent} ({error}); set TMPDIR")
    about = events.about.get("distributedInfo")
    told = about if isinstance(about, dict) else {}
    return ImportedFile(
        path, rows=(target,), rank=rank_of(told.get("rank")), world_size=rank_of(told.get("world_size")),
        count=events.count, steps=(int(found.steps.number.min()), int(found.steps.number.max())),
        seen_ns=_seen(found), marked=found.steps.marked,
        has_device=found.has_device, numbered=found.numbered, groups=found.groups, versions=_versions(events.about),
        device=_device_name(events.about), host=_host(events.about), notes=notes, ends=collective_ends(found.rows),
    )  # fmt: skip


def _in_no_dialect(events: Events) -> str:
    if not events.count:
        return "breaks off before its first event ends" if events.cut else "holds no events"
    named = ", ".join(map(repr, events.unknown))
    what = f": their categories ({named}) are none of torch.profiler's" if named else ""
    return f"none of its {events.count:,} events is an operator, a kernel or an annotation{what}"


def _versions(about: dict[str, Any]) -> dict[str, str]:
    told = about.get("distributedInfo")
    found = {
        "torch": about.get("pytorch_version"),
        "nccl": told.get("nccl_version") if isinstance(told, dict) else None,
    }
    return {name: value[:40] for name, value in found.items() if isinstance(value, str)}


def _device_name(about: dict[str, Any]) -> str:
    told = about.get("deviceProperties")
    first = told[0] if isinstance(told, list) and told else None
    name = first.get("name") if isinstance(first, dict) else None
    return name[:80] if isinstance(name, str) else ""


def _host(about: dict[str, Any]) -> str:
    told = about.get("host_name")
    return told[:80] if isinstance(told, str) else ""


# --- ranks --------------------------------------------------------------------------------------


def _with_ranks(where: str, files: list[ImportedFile]) -> list[ImportedFile]:
    """By rank: what each says of itself, else what its name says. Raises RunError where that cannot be told."""
    if len(files) == 1 and files[0].rank is None and rank_in(files[0].path.name) is None:
        return [replace(files[0], rank=0)]
    # Where each lies in a folder of its own, that one's name may tell: rank_3/trace.json.
    apart = len({one.path.parent for one in files}) > 1

    def by_name(path: Path) -> int | None:
        rank = rank_in(path.name)
        return rank_in(path.parent.name) if rank is None and apart else rank

    named = [one if one.rank is not None else replace(one, rank=by_name(one.path)) for one in files]
    unknown = [one.path.name for one in named if one.rank is None]
    if unknown:
        raise RunError(
            f"{where}: which rank is {_some(unknown)} of? Neither the file (distributedInfo) nor its name tells; "
            "rename it to rank<N>.json"
        )
    by_rank: dict[int, list[ImportedFile]] = {}
    for one in named:
        by_rank.setdefault(one.rank or 0, []).append(one)
    return [_joined(where, of_rank) for _, of_rank in sorted(by_rank.items())]


def _joined(where: str, files: list[ImportedFile]) -> ImportedFile:
    """The windows of one rank, of steps that follow one another, as profilers with a schedule write them. Raises
    RunError where they do not."""
    files = sorted(files, key=lambda one: one.seen_ns)
    apart = all(
        earlier.seen_ns[1] <= later.seen_ns[0] and earlier.steps[1] < later.steps[0] and earlier.marked and later.marked
        for earlier, later in pairwise(files)
    )
    if not apart:
        names = _some([one.path.name for one in files])
        raise RunError(
            f"{where}: rank {files[0].rank} is there {len(files)} times ({names}), and not in windows of steps that "
            "follow one another; leave one of them"
        )
    first = files[0]
    if len(files) == 1:
        return first
    groups: dict[str, dict[str, Any]] = {}
    ends: dict[str, list[Int]] = {}
    for one in files:
        groups = {**one.groups, **groups}
        for key, of in one.ends.items():
            ends.setdefault(key, []).append(of)
    return replace(
        first, rows=tuple(path for one in files for path in one.rows), count=sum(one.count for one in files),
        steps=(first.steps[0], files[-1].steps[1]), seen_ns=(first.seen_ns[0], files[-1].seen_ns[1]),
        has_device=any(one.has_device for one in files),
        numbered=(sum(one.numbered[0] for one in files), sum(one.numbered[1] for one in files)),
        groups=groups, notes=[note for one in files for note in one.notes],
        ends={key: np.concatenate(of) for key, of in ends.items()},
    )  # fmt: skip


def _seen(found: TraceRows) -> tuple[int, int]:
    """When the first row begins, and when the last one ends."""
    if found.rows.empty:
        return 0, 0
    ends = found.rows["start_ns"] + found.rows["dur_ns"].fillna(0).astype("int64")
    return int(found.rows["start_ns"].min()), int(ends.max())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:MOST_NAMED])
    return shown + (", ..." if len(names) > MOST_NAMED else "")


# --- run.json -----------------------------------------------------------------------------------


def _info(path: Path, files: list[ImportedFile], refused: list[ImportedFile], format_name: str) -> RunInfo:
    clocks = clock_names([one.host for one in files], [one.ends for one in files])
    facts: list[dict[str, Any]] = []
    for one in files:
        notes = list(one.notes)
        if not one.marked:
            notes.append("no ProfilerStep in it, so all of it counts as one step: call profiler.step() after each one")
        facts.append(
            {"fact": "import", "rank": one.rank, "format": format_name, "file": one.path.name[:200], "warnings": notes,
             "device": one.device}
        )  # fmt: skip
        facts += [{"fact": "group", "rank": one.rank, "name": name, **about} for name, about in one.groups.items()]
    first = next(fact for fact in facts if fact["fact"] == "import")
    first["warnings"] += [f"{one.path.name[:200]} was left out: {one.refused}" for one in refused]
    first["warnings"] += list(_of_all(files, clocks))
    name = run_name(path.name.split(".")[0])
    told = max((one.world_size or 0 for one in files), default=0)
    return RunInfo(
        id=new_run_id(name), name=name, level="", command=["dsprof", "import", str(path)],
        world_size=max(told, 1 + max(one.rank or 0 for one in files)), facts=facts,
        versions={key: value for one in files for key, value in one.versions.items()},
        groups=_groups(files),
        ranks=[
            rank_info(one.rank or 0, one.count, one.steps[1], host=one.host, whole=not one.notes, clock=clock)
            for one, clock in zip(files, clocks, strict=True)
        ],
    )  # fmt: skip


def _groups(files: list[ImportedFile]) -> dict[str, dict[str, Any]]:
    """As the first file tells that knows each; of a group whose members nobody tells, those that took part."""
    found: dict[str, dict[str, Any]] = {}
    for one in files:
        for name, about in one.groups.items():
            known = found.setdefault(name, {**about, "ranks": list(about["ranks"])})
            known["ranks"] = known["ranks"] or about["ranks"]
    for name, about in found.items():
        if not about["ranks"]:
            about["ranks"] = sorted(one.rank or 0 for one in files if name in one.groups)
            about["size"] = about["size"] or len(about["ranks"])
        for one in files:
            if name in one.groups:
                one.groups[name] = about
    return found


def _of_all(files: list[ImportedFile], clocks: list[str]) -> Iterable[str]:
    """What is to be said of all of them together."""
    numbered, every = sum(one.numbered[0] for one in files), sum(one.numbered[1] for one in files)
    if every and numbered < every and len(files) > 1:
        yield (
            f"{every - numbered:,} of {every:,} communications have no number in the traces: those of one name and "
            "group are matched in the order of their launch, where all ranks have equally many"
        )
    if len(set(clocks)) > 1:
        yield f"the ranks read {len(set(clocks))} clocks, which were aligned by the ends of their collectives"


class _Converted:
    """Rows that lie in Arrow files, in a folder that goes when nobody needs it any more."""

    def __init__(self, folder: Path, files: dict[int, tuple[Path, ...]]) -> None:
        self._files = files
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._files))

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        rows = concat_rows([_rows_in(path, columns) for path in self._files[rank]], columns)
        return rows.assign(rank=np.int32(rank)) if "rank" in columns else rows


def _rows_in(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    with pa.memory_map(str(path)) as file:
        rows: pd.DataFrame = pa.ipc.open_file(file).read_all().select(list(columns)).to_pandas()
    return rows
