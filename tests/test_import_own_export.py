"""`dsprof export` and back: the same finding of the same ranks."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.importers import import_trace, own_export
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
    path = folder / f"job{ENDINGS[to]}"
    path.write_bytes(exported(to))
    return import_trace(path)


@cache
def exported(to: Any) -> bytes:
    file = io.BytesIO()
    assert export.write(to, original(), file, Selection((0, 1, 2))) > 0
    return file.getvalue()


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


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("start_ns", pa.array(["x"]), "its column `start_ns` holds string, no int64"),
        ("kind", pa.array([[1]]), "its column `kind` holds list<element: int64>, no category"),
        ("module", pa.array([{"a": 1}]), "its column `module` holds struct<a: int64>, no category"),
        ("seq", pa.array([1 << 40]), "cannot be read"),
    ],
)
def test_a_table_with_a_column_of_another_type_is_a_sentence(
    tmp_path: Path, column: str, values: pa.Array, said: str
) -> None:
    back(tmp_path, "parquet")
    table = pq.read_table(tmp_path / "job.parquet").slice(0, 1)
    table = table.set_column(table.schema.get_field_index(column), column, values)
    pq.write_table(table, tmp_path / "job.parquet")
    with pytest.raises(RunError, match=f"job.parquet: {re.escape(said)}.*; export it again"):
        import_trace(tmp_path / "job.parquet")


def test_a_table_of_more_rows_than_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_export, "MOST_ROWS", 100)
    with pytest.raises(RunError, match=r"[\d,]+ rows; export fewer steps or ranks, by --steps or --ranks"):
        back(tmp_path, "parquet")


def test_what_nests_too_deep_is_a_sentence(tmp_path: Path) -> None:
    back(tmp_path, "parquet")
    path = tmp_path / "job.parquet"
    about = {b"dsprof.export": b"[" * 100_000}
    pq.write_table(pq.read_table(path).replace_schema_metadata(about), path)
    with pytest.raises(RunError, match=r"cannot be read .*; export it again"):
        import_trace(path)
