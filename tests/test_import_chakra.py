"""Chakra execution traces, made by its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perfetto_traces import field, varint

from dsprof.importers import import_trace
from dsprof.run import RunError


def message(*fields: bytes) -> bytes:
    data = b"".join(fields)
    return varint(len(data)) + data


def node(number: int, name: str, kind: int, start: int, length: int, **attributes: Any) -> bytes:
    told = []
    for key, value in attributes.items():
        what = 27 if isinstance(value, bool) else 9 if isinstance(value, int) else 29
        told.append(field(10, field(1, key) + field(what, int(value) if isinstance(value, bool) else value)))
    return message(field(1, number), field(2, name), field(3, kind), field(6, start), field(7, length), *told)


def trace(path: Path, timed: bool = True) -> Path:
    at = (lambda us: us) if timed else (lambda us: 0)
    nodes = [
        node(1, "aten::linear", 4, at(10), at(30), is_cpu_op=True),
        node(2, "gemm", 4, at(50), at(100), is_cpu_op=False, stream=7),
        node(3, "c10d::all_reduce", 7, at(160), at(40), is_cpu_op=False, comm_type=0, comm_size=4096, pg_name="dp"),
        node(4, "metadata", 1, at(5), at(1)),
    ]
    path.write_bytes(message(field(1, "0.0.4")) + b"".join(nodes))
    return path


def test_nodes_are_operators_kernels_and_collectives(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path / f"et.{rank}.et")
    found = import_trace(tmp_path)
    assert (found.ranks, found.run.imported) == ((0, 1), "chakra")
    rows = found.read(1)
    assert rows.query("kind == 'phase'")["name"].tolist() == ["forward"]  # of the operator
    columns = ["kind", "name", "lane", "start_ns", "dur_ns", "group", "bytes"]
    rows = rows.loc[rows["kind"].isin(["kernel", "comm"]), columns].astype(object)
    assert rows.where(rows.notna(), None).to_numpy().tolist() == [
        ["kernel", "gemm", "cuda.7", 50_000, 100_000, None, None],
        ["comm", "all_reduce", "cuda.0", 160_000, 40_000, "dp", 4096],
    ]


def test_a_workload_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none of its nodes has a time: it is a workload for a simulator; convert a"):
        import_trace(trace(tmp_path / "llama.0.et", timed=False))


def test_one_that_breaks_off_costs_its_tail(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank0.et")
    path.write_bytes(path.read_bytes()[:-3])
    found = import_trace(path)
    assert found.run.facts[0]["warnings"][0] == "breaks off within a node: its last nodes are missing"
    path.write_bytes(b"\x05\x0a\x03abc\xff\xff\xff\xff\x7f")
    with pytest.raises(RunError, match="a node of 34,359,738,367 bytes, as no trace has"):
        import_trace(path)


def test_a_pattern_that_is_none_is_refused_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--comm-kernels: "):
        import_trace(trace(tmp_path / "rank0.et"), ["("])
