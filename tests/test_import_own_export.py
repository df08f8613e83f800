"""`dsprof export` and back: the same finding of the same ranks."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.importers import import_trace
from dsprof.reports import export
from dsprof.reports.export import Selection
from dsprof.run import RunError
from dsprof.trace import Trace

ENDINGS = {"parquet": ".parquet", "chrome": ".trace.json", "perfetto": ".pftrace"}


@cache
def original() -> Analysis:
    """Rank 2 of three is late in its forward."""
    job = Job(ranks=3, steps=24, forward=lambda rank, step: 70 if rank == 2 else 40,
              facts=[{"fact": "dataloader", "rank": 0, "num_workers": 2}])  # fmt: skip
    return analyze(job.trace())


def back(folder: Path, to: Any) -> Trace:
    if to == "perfetto":
        pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    file = io.BytesIO()
    assert export.write(to, original(), file, Selection((0, 1, 2))) > 0
    path = folder / f"job{ENDINGS[to]}"
    path.write_bytes(file.getvalue())
    return import_trace(path)


@pytest.mark.parametrize("to", ENDINGS)
def test_what_was_exported_is_ranked_as_it_was(tmp_path: Path, to: str) -> None:
    trace = back(tmp_path, to)
    assert (trace.ranks, trace.run.world_size) == ((0, 1, 2), 3)
    assert [fact["num_workers"] for fact in trace.run.facts if fact["fact"] == "dataloader"] == [2]
    first, again = original().findings[0], analyze(trace).findings[0]
    assert (again.code, again.where.ranks) == (first.code, first.where.ranks) == ("rank.straggler", (2,))
    assert first.gain is not None
    assert again.gain is not None
    assert again.gain.ms == pytest.approx(first.gain.ms, rel=0.02)


@pytest.mark.parametrize("to", ["chrome", "perfetto"])
def test_rows_come_back_but_for_what_such_a_file_cannot_hold(tmp_path: Path, to: str) -> None:
    columns = ["kind", "name", "lane", "step", "start_ns", "dur_ns", "issue_ns", "group", "seq", "bytes", "value"]

    def chosen(trace: Trace) -> list[list[Any]]:
        rows = trace.read(1)
        rows = rows[rows["kind"].isin(["step", "phase", "comm", "wait", "pause"])][columns].astype(object)
        found = rows.where(rows.notna(), None).to_numpy().tolist()
        return sorted(found, key=lambda row: (row[4], str(row[0]), str(row[1])))

    assert chosen(back(tmp_path, to)) == chosen(original().trace)


def test_parquet_holds_all_rows(tmp_path: Path) -> None:
    pd.testing.assert_frame_equal(
        back(tmp_path, "parquet").read(2), original().trace.read(2), check_categorical=False, check_dtype=False
    )


def test_an_export_without_its_command_line(tmp_path: Path) -> None:
    """What it says of its run is in it, and no command, folder or warning."""
    file = io.BytesIO()
    export.write("chrome", original(), file, Selection((0,)))
    told = json.loads(file.getvalue())["dsprof"]
    assert told.keys() == {"schema", "name", "world_size", "level", "engine", "imported", "versions", "groups",
                           "facts", "ranks", "zero_ns"}  # fmt: skip


def test_damaged_exports_are_a_sentence(tmp_path: Path) -> None:
    back(tmp_path, "chrome")
    path = tmp_path / "job.trace.json"
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(RunError, match=r"job.trace.json: (holds no rows of a rank|cannot be read).*export it again"):
        import_trace(path)
    table = tmp_path / "job.parquet"
    back(tmp_path, "parquet")
    pq.write_table(pq.read_table(table).slice(0, 0), table)
    with pytest.raises(RunError, match="holds no rows; export it again"):
        import_trace(table)
