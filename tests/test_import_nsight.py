"""Reports of Nsight Systems exported to SQLite, made by its documented schema."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dsprof.analyzer import analyze
from dsprof.importers import import_trace
from dsprof.run import RunError
from dsprof.trace import Trace

MS = 1_000_000
SCHEMA = """
create table StringIds (id integer primary key, value text);
create table CUPTI_ACTIVITY_KIND_KERNEL (start integer, end integer, deviceId integer, streamId integer,
    correlationId integer, globalPid integer, demangledName integer, shortName integer);
create table CUPTI_ACTIVITY_KIND_MEMCPY (start integer, end integer, deviceId integer, streamId integer,
    correlationId integer, globalPid integer, bytes integer, copyKind integer);
create table CUPTI_ACTIVITY_KIND_RUNTIME (start integer, end integer, globalTid integer, correlationId integer,
    nameId integer);
create table NVTX_EVENTS (start integer, end integer, eventType integer, text text, textId integer, globalTid integer);
create table TARGET_INFO_SYSTEM_ENV (name text, value text);
create table TARGET_INFO_SESSION_START_TIME (utcEpochNs integer);
create table TARGET_INFO_GPU (name text);
"""
NAMES = {1: "gemm", 2: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 3: "cudaLaunchKernel_v7000",
         4: "forward", 5: "adam"}  # fmt: skip


def report(path: Path, *, processes: int = 1, late_ms: tuple[int, ...] = (0,), steps: int = 6) -> Path:
    """Of each process six steps of 100 ms: 40 ms of work, an all-reduce that ends at 80 ms, an optimizer. Process N is
    `late_ms[N]` later at its all-reduce."""
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    database.executemany("insert into StringIds values (?, ?)", NAMES.items())
    database.execute("insert into TARGET_INFO_SYSTEM_ENV values ('Hostname', 'node7')")
    database.execute("insert into TARGET_INFO_SESSION_START_TIME values (1790000000000000000)")
    database.execute("insert into TARGET_INFO_GPU values ('NVIDIA H100')")
    for number in range(processes):
        pid = (100 + number) << 24
        thread = pid | 7
        database.execute("insert into NVTX_EVENTS values (0, ?, 59, 'epoch 0', null, ?)", (steps * 100 * MS, thread))
        for step in range(steps):
            base, corr = 1000 + step * 100 * MS, 10 * step
            late = late_ms[number] * MS
            ranges = [(0, 99, f"iteration {step}", None), (1, 30, None, 4), (31, 39, "aten::linear, seq = 4", None),
                      (90, 98, "optimizer", None)]  # fmt: skip
            kernels = [(2, 42 + late // MS, 1, 7), (42 + late // MS, 80, 2, 20), (91, 98, 5, 7)]
            for start, end, text, name in ranges:
                row = base + start * MS, base + end * MS, 59, text, name, thread
                database.execute("insert into NVTX_EVENTS values (?, ?, ?, ?, ?, ?)", row)
            for at, (start, end, name, stream) in enumerate(kernels):
                launch = base + (start if at != 1 else 40) * MS - 20_000
                row = launch, launch + 5_000, thread, corr + at, 3
                database.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, ?, ?, ?)", row)
                kernel = base + start * MS, base + end * MS, number, stream, corr + at, pid, name, name
                database.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?, ?, ?, ?, ?)", kernel)
            copy = base + MS, base + 2 * MS, number, 7, -1, pid, 4096, 1
            database.execute("insert into CUPTI_ACTIVITY_KIND_MEMCPY values (?, ?, ?, ?, ?, ?, ?, ?)", copy)
    database.commit()
    database.close()
    return path


def shown(trace: Trace, rank: int, kinds: str, *columns: str) -> list[list[Any]]:
    rows = trace.read(rank)
    rows = rows.loc[rows["kind"].isin(kinds.split()) & (rows["step"] == 1), list(columns)].astype(object)
    return rows.where(rows.notna(), None).to_numpy().tolist()


def test_a_report_of_one_process(tmp_path: Path) -> None:
    trace = import_trace(report(tmp_path / "report.sqlite"))
    epoch = 1_790_000_000_000_000_000 + 1000 + 100 * MS
    assert shown(trace, 0, "step kernel comm copy", "kind", "name", "lane", "start_ns", "dur_ns", "issue_ns") == [
        ["step", "step", "main", epoch, 99 * MS, None],
        ["copy", "Memcpy HtoD", "cuda.7", epoch + MS, MS, None],
        ["kernel", "gemm", "cuda.7", epoch + 2 * MS, 40 * MS, epoch + 2 * MS - 20_000],
        ["kernel", "aten::linear", "main", epoch + 31 * MS, 8 * MS, None],  # nothing is launched meanwhile
        ["comm", "all_reduce", "cuda.20", epoch + 42 * MS, 38 * MS, epoch + 40 * MS - 20_000],
        ["kernel", "adam", "cuda.7", epoch + 91 * MS, 7 * MS, epoch + 91 * MS - 20_000],
    ]
    assert shown(trace, 0, "launch", "name", "lane", "corr") == [
        ["cudaLaunchKernel", "main", 10 + at] for at in range(3)
    ]
    assert shown(trace, 0, "phase", "name") == [["forward"], ["optimizer"]]
    assert trace.read(0).query("kind == 'mark'")["name"].tolist() == ["epoch 0"]
    assert (trace.run.imported, trace.run.ranks[0].host) == ("nsight", "node7")
    assert trace.run.facts[0]["device"] == "NVIDIA H100"


def test_the_processes_of_a_report_are_ranks_and_the_late_one_is_found(tmp_path: Path) -> None:
    trace = import_trace(report(tmp_path / "node.sqlite", processes=4, late_ms=(0, 0, 25, 0)))
    assert trace.ranks == (0, 1, 2, 3)
    late = [one for one in analyze(trace).findings if one.code == "rank.straggler"]
    assert [one.where.ranks for one in late] == [(2,)]
    (warning,) = (text for text in trace.run.facts[0]["warnings"] if "which rank" in text)
    assert "the devices that they used" in warning


def test_a_report_a_rank(tmp_path: Path) -> None:
    for rank in (3, 1):
        report(tmp_path / f"job.rank{rank}.sqlite")
    assert import_trace(tmp_path).ranks == (1, 3)


@pytest.mark.parametrize(
    ("drop", "left"),
    [("NVTX_EVENTS", "kernel"), ("CUPTI_ACTIVITY_KIND_RUNTIME", "kernel"), ("StringIds", "kernel"),
     ("CUPTI_ACTIVITY_KIND_KERNEL", "launch")],
)  # fmt: skip
def test_a_table_that_is_missing_costs_what_it_tells(tmp_path: Path, drop: str, left: str) -> None:
    path = report(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as database:
        database.execute(f"drop table {drop}")
    rows = import_trace(path).read(0)
    assert len(rows)
    assert left == "launch" or (rows["kind"] == left).any()


def test_damaged_and_foreign_databases_are_a_sentence(tmp_path: Path) -> None:
    path = report(tmp_path / "report.sqlite")
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(RunError, match=r"report.sqlite: (its database is damaged|.*not a trace that dsprof knows)"):
        import_trace(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("create table songs (name text)")
    with pytest.raises(RunError, match="not a trace that dsprof knows"):
        import_trace(other)
    empty = tmp_path / "empty.sqlite"
    with sqlite3.connect(empty) as database:
        database.executescript(SCHEMA)
    with pytest.raises(RunError, match=r"holds no kernel, no runtime call and no NVTX range; profile with `nsys"):
        import_trace(empty)


def test_what_a_database_defines_is_not_run(tmp_path: Path) -> None:
    """A column that is computed when it is read, and a view in the place of a table."""
    path = tmp_path / "report.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(
            SCHEMA.replace("create table NVTX_EVENTS", "create table OTHER")
            + "create view NVTX_EVENTS as with recursive t(x) as (select 1 union all select x + 1 from t) select x as"
            " start, x as end, 59 as eventType, 'a' as text, 0 as textId, 1 as globalTid from t;"
        )
    with pytest.raises(RunError, match="holds no kernel"):
        import_trace(path)


@pytest.mark.parametrize(
    ("table", "column", "kernels"),
    [("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid", 18), ("NVTX_EVENTS", "globalTid", 18), ("NVTX_EVENTS", "start", 12),
     ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid", 18)],
)  # fmt: skip
def test_a_column_that_is_not_there_costs_what_it_would_have_told(
    tmp_path: Path, table: str, column: str, kernels: int
) -> None:
    path = report(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"alter table {table} drop column {column}")
    rows = import_trace(path).read(0)
    assert len(rows[rows["kind"] == "kernel"]) == kernels


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    path = report(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("update StringIds set value = cast(x'67656dff6d' as text) where id = 1")
        database.commit()
    assert "gem\ufffdm" in import_trace(path).read(0)["name"].tolist()


def test_a_copy_before_the_first_kernel_is_kept(tmp_path: Path) -> None:
    path = report(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database:
        pid = 100 << 24
        database.execute("insert into CUPTI_ACTIVITY_KIND_MEMCPY values (-900, 100, 0, 7, -1, ?, 4096, 1)", (pid,))
        database.commit()
    assert len(import_trace(path).read(0).query("kind == 'copy'")) == 7


def test_a_pattern_that_is_none_is_refused_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--comm-kernels: "):
        import_trace(report(tmp_path / "rank0.sqlite"), ["("])
