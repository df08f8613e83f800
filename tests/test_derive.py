"""What is derived from records: fields by their format, nested phases, steps, waits inside C++, purposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import MS, write_capture

from dsprof.capture import RECORD_DTYPE, Capture, read_capture
from dsprof.derive import trace_rows
from dsprof.schema import NO_SEQ, Flag, Kind, State

Record = tuple[Kind, str, float, float | None, dict[str, Any]]


def capture_of(*records: Record, version: int = 3, facts: list[dict[str, Any]] | None = None) -> Capture:
    """One rank; kind, name, start and end in ms (None: never ended), and the fields that differ from the usual.

    Texts become ids of names; `value` is a float for `aux`.
    """
    names: dict[str, int] = {}

    def intern(name: str) -> int:
        return names.setdefault(name, len(names) + 1)

    array = np.zeros(len(records), RECORD_DTYPE)
    for row, (kind, name, start, end, more) in zip(array, records, strict=True):
        usual: dict[str, Any] = {"peer": -1, "tag": -1, "seq": 0, "bytes": -1, "thread": 7}
        if kind is Kind.WAIT and version >= 3:
            usual["seq"] = NO_SEQ
        if kind is Kind.COMM:
            usual |= {"aux": round(start * MS), "group": "0", "bytes": 8, "dtype": 7}
        fields = {**usual, **more}
        if "value" in fields:
            fields["aux"] = int(np.float64(fields.pop("value")).view(np.int64))
        fields |= {"kind": kind, "state": State.BEGUN if end is None else State.DONE}
        fields |= {"start_ns": round(start * MS), "end_ns": round((end or 0) * MS)}
        for field, value in {**fields, "name": name}.items():
            row[field] = intern(value) if isinstance(value, str) else int(value)
    meta = {"closed": True, "native": True, "world_size": 2}
    by_number = {number: name for name, number in names.items()}
    return Capture(Path("rank00000.0.host.1"), array, by_number, meta, facts or [], format_version=version)


def of(rows: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Those columns, with None for null."""
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows[list(columns)].to_numpy(object)]


def derive(*records: Record, version: int = 3, facts: list[dict[str, Any]] | None = None) -> pd.DataFrame:
    return trace_rows(capture_of(*records, version=version, facts=facts), 0, 0)


# --- fields -------------------------------------------------------------------------------------


def test_a_wait_names_what_it_waited_for() -> None:
    rows = derive(
        (Kind.WAIT, "all_reduce", 1, 2, {"group": "0", "seq": 7}),
        (Kind.WAIT, "recv", 2, 3, {"group": "dp", "seq": 0, "peer": 1, "tag": 5, "flags": Flag.P2P}),
        (Kind.WAIT, "wait", 3, 4, {}),
    )
    assert of(rows, "name", "group", "seq", "peer", "tag", "root") == [
        ("all_reduce", "0", 7, None, None, None),
        ("recv", "dp", 0, 1, 5, None),
        ("wait", None, None, None, None, None),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_before_format_3_a_wait_names_nothing(version: int) -> None:
    rows = derive((Kind.WAIT, "all_reduce", 1, 2, {}), (Kind.PHASE, "forward", 2, 3, {}), version=version)
    assert of(rows, "group", "seq", "grad") == [(None, None, None), (None, None, None)]


def test_the_root_of_a_collective_is_no_peer() -> None:
    rows = derive(
        (Kind.COMM, "broadcast", 1, 2, {"peer": 1}),
        (Kind.COMM, "all_reduce", 2, 3, {"seq": 1}),
        (Kind.COMM, "send", 3, 4, {"peer": 1, "tag": 2, "flags": Flag.P2P}),
        (Kind.COMM, "gather", 4, 5, {"seq": 2}),
    )
    assert of(rows, "name", "root", "peer", "tag") == [
        ("broadcast", 1, None, None), ("all_reduce", None, None, None), ("send", None, 1, 2),
        ("gather", None, None, None),
    ]  # fmt: skip


def test_a_forward_says_whether_gradients_were_on() -> None:
    rows = derive(
        (Kind.PHASE, "forward", 1, 2, {"flags": Flag.GRAD}),
        (Kind.PHASE, "forward", 2.1, 3, {}),
        (Kind.PHASE, "optimizer", 3, 4, {"value": 2.0}),
    )
    measured = rows[rows["source"] == "measured"]
    assert of(measured, "name", "grad", "value") == [
        ("forward", True, None), ("forward", False, None), ("optimizer", None, 2.0),
    ]  # fmt: skip


def test_an_action_of_a_pipeline_schedule_has_its_place() -> None:
    rows = derive((Kind.PIPE, "F", 1, 2, {"peer": 2 << 16 | 5, "tag": 0, "flags": Flag.ENGINE, "seq": NO_SEQ}))
    columns = ("kind", "name", "stage", "microbatch", "lane", "group", "seq", "peer", "module")
    assert of(rows, *columns) == [("pipe", "F", 2, 5, "main", None, None, None, None)]


def test_records_of_format_3_are_read_back_whole(tmp_path: Path) -> None:
    capture = capture_of(
        (Kind.WAIT, "recv", 2, 3, {"group": "dp", "seq": 3, "peer": -1, "tag": 5, "flags": Flag.P2P}),
        (Kind.WAIT, "wait", 3, 4, {}),
        (Kind.COMM, "broadcast", 4, 5, {"peer": 1, "flags": Flag.START_MEASURED | Flag.ASYNC}),
        (Kind.PHASE, "forward", 5, 6, {"flags": Flag.GRAD}),
        (Kind.MARK, "backward_done", 6, 6, {}),
        (Kind.PIPE, "F", 6, 7, {"peer": 0, "tag": 0, "flags": Flag.ENGINE, "seq": NO_SEQ}),
    )
    folder = write_capture(capture, tmp_path)
    read = read_capture(folder)
    assert np.array_equal(read.records, capture.records)
    assert (read.damaged, read.problems, read.format_version) == (0, [], 3)
    chunk = folder / "chunk-00000.bin"
    content = bytearray(chunk.read_bytes())
    content[8:12] = (2).to_bytes(4, "little")
    chunk.write_bytes(content)
    assert read_capture(folder).format_version == 2
