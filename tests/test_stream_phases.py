"""What a rank's device took for the phases that its host launched, from made-up rows."""

from __future__ import annotations

import pandas as pd

from dsprof.analyzer.work.stream_phases import STREAM_PHASES, no_stream_phases, stream_phases
from dsprof.schema import COLUMNS

MS = 1_000_000


def rows(*told: tuple[str, str, str, int, float, float, float | None, str]) -> pd.DataFrame:
    """kind, name, lane, step, start, length and launch in ms, source."""
    names = ("kind", "name", "lane", "step", "start_ns", "dur_ns", "issue_ns", "source")
    table = pd.DataFrame(told, columns=list(names))
    for name in ("start_ns", "dur_ns", "issue_ns"):
        table[name] = (table[name].astype("Float64") * MS).round().astype("Int64")
    table = table.assign(rank=3, thread=1, restart=0, ended=True)
    return table.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def found(table: pd.DataFrame) -> list[tuple[int, str, float, float]]:
    return [
        (int(row.step), str(row.name_), row.start_ns / MS, row.ms)
        for row in stream_phases(table, 3).rename(columns={"name": "name_"}).itertuples()
    ]


def test_phases_that_were_timed_and_those_whose_kernels_were_traced() -> None:
    """In step 0 events timed a forward, which waited 2 ms on its stream; in step 1 two kernels were traced."""
    table = rows(
        ("kernel", "forward", "cuda.7", 0, 10, 20, 5, "measured"),
        ("wait", "event", "cuda.7", 0, 12, 2, None, "measured"),
        ("phase", "forward", "main", 0, 5, 3, None, "measured"),
        ("phase", "forward", "main", 1, 50, 10, None, "measured"),
        ("kernel", "gemm", "cuda.7", 1, 60, 4, 52, "imported"),
        ("kernel", "gemm", "cuda.7", 1, 70, 5, 58, "imported"),
        ("kernel", "later", "cuda.7", 1, 80, 6, 61, "imported"),
    )
    assert found(table) == [(0, "forward", 5, 18), (1, "forward", 50, 9)]


def test_a_rank_without_a_device_has_none() -> None:
    table = stream_phases(rows(("phase", "forward", "main", 0, 5, 3, None, "measured")), 0)
    assert table.empty
    assert dict(table.dtypes.astype(str)) == dict(STREAM_PHASES)
    joined = pd.concat([no_stream_phases(), table], ignore_index=True)
    assert dict(joined.dtypes.astype(str)) == dict(STREAM_PHASES)
