"""Perfetto traces of torch's profiler give the rows that its JSON gives."""

from __future__ import annotations

import gzip
from pathlib import Path

import kineto_traces as kt
import pandas as pd
import pytest
from perfetto_traces import annotation, as_torch_writes, field, packet

from dsprof.analyzer import analyze
from dsprof.importers import import_trace
from dsprof.run import RunError
from dsprof.trace.kineto import PerfettoTrace, looks_like_perfetto

ARGS = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1000, "dtype": "Float",
        "Group size": 2, "Process Group Ranks": "[0, 1]"}  # fmt: skip
BASE = 1_790_000_000_000_000_000


def traces(folder: Path, steps: int = 8) -> tuple[Path, Path]:
    """The same two ranks as JSON and as Perfetto's; rank 1 comes late."""
    for name in ("json", "perfetto"):
        (folder / name).mkdir()
    for rank, late in enumerate((0, 140)):
        events = kt.training(steps=steps, late_us=late, args=ARGS)
        kt.write(folder / "json", kt.as_kineto(events, baseTimeNanoseconds=BASE), f"rank{rank}.pt.trace.json")
        (folder / "perfetto" / f"rank{rank}.pftrace").write_bytes(as_torch_writes(events, BASE))
    return folder / "json", folder / "perfetto"


def test_the_rows_are_those_of_the_json(tmp_path: Path) -> None:
    one, other = (import_trace(folder) for folder in traces(tmp_path))
    for rank in (0, 1):
        mine, theirs = (trace.read(rank).drop(columns=["thread", "lane"]) for trace in (one, other))
        pd.testing.assert_frame_equal(mine, theirs, check_categorical=False)
        lanes = other.read(rank)["lane"]
        assert {"main", "cuda.7", "cuda.20"} <= set(lanes)
    assert [(one.code, one.where.ranks) for one in analyze(other).findings] == [
        (found.code, found.where.ranks) for found in analyze(one).findings
    ]


def test_gzipped_and_cut_off(tmp_path: Path) -> None:
    _, folder = traces(tmp_path)
    whole = (folder / "rank0.pftrace").read_bytes()
    (tmp_path / "rank0.pftrace.gz").write_bytes(gzip.compress(whole))
    trace = import_trace(tmp_path / "rank0.pftrace.gz")
    assert trace.run.facts[0]["warnings"] == []
    (tmp_path / "rank0.pftrace").write_bytes(whole[: len(whole) * 3 // 4 + 1])
    trace = import_trace(tmp_path / "rank0.pftrace")
    assert trace.run.facts[0]["warnings"] == ["breaks off within a packet: its last events are missing"]


def slices(folder: Path, *packets: bytes) -> list[tuple[str, int, int]]:
    (folder / "t.pftrace").write_bytes(b"".join(packets))
    found = PerfettoTrace(folder / "t.pftrace", {"x"})
    return [(one.name, one.start_ns, one.dur_ns) for one in found.slices]


def edge(when: int, kind: int, name: str = "", *more: bytes) -> bytes:
    return packet(
        field(8, when), field(10, 1), field(11, field(9, kind) + field(11, 5) + field(23, name) + b"".join(more))
    )


def test_ends_belong_to_begins_by_time(tmp_path: Path) -> None:
    """Torch writes all begins first; what begins as another ends is not inside it."""
    begins = [edge(0, 1, "a"), edge(10, 1, "b"), edge(12, 1, "c")]
    ends = [edge(10, 2), edge(30, 2), edge(20, 2)]
    assert slices(tmp_path, *begins, *ends) == [("a", 0, 10), ("b", 10, 20), ("c", 12, 8)]
    in_order = [edge(0, 1, "a"), edge(10, 1, "b"), edge(10, 2), edge(30, 2)]
    assert slices(tmp_path, *in_order) == [("a", 0, 30), ("b", 10, 0)]
    assert slices(tmp_path, edge(5, 1, "never ends"), edge(9, 3, "moment")) == [("moment", 9, 0)]


def test_annotations_of_all_kinds(tmp_path: Path) -> None:
    for value in (5, -3, 0.5, "word", [1, 2]):
        told = field(4, annotation("x", value)) + field(4, annotation("unwanted", 1))
        (tmp_path / "t.pftrace").write_bytes(edge(1, 3, "e", told))
        assert PerfettoTrace(tmp_path / "t.pftrace", {"x"}).slices[0].args == {"x": value}


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a", b"\x0a" + b"\xff" * 11, b"\x0a\x02\x08\x01", b"\x0a\x05\x5a\x7f\x00\x00\x00",
     packet(field(60, b"\xff" * 12)), b"PK\x03\x04" * 8],
)  # fmt: skip
def test_what_is_no_such_trace_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.pftrace").write_bytes(data)
    assert isinstance(looks_like_perfetto(tmp_path / "t.pftrace"), bool)
    with pytest.raises(RunError):
        import_trace(tmp_path / "t.pftrace")


def test_a_file_that_ends_before_a_packets_length_is_looked_at_once(tmp_path: Path) -> None:
    """A search that went on where the last packet began would find the same ones again, for ever."""
    (tmp_path / "t.pftrace").write_bytes(bytes.fromhex("0a 88 00 0d 08 00 08 00 08 80 00 0a"))
    assert not looks_like_perfetto(tmp_path / "t.pftrace")


CLEARED, UUID, PARENT, PID, TID, KIND, TRACK = 13, 1, 5, 1, 2, 9, 11


@pytest.mark.parametrize(
    "strange",
    [
        packet(field(CLEARED, b"abc")),
        packet(field(60, field(UUID, b"abc") + field(PARENT, b"abc") + field(3, field(PID, b"abc")))),
        packet(field(60, field(UUID, 5) + field(4, field(PID, b"abc") + field(TID, b"abc")))),
        edge(1, 3, "kind", field(KIND, b"abc")),
        edge(1, 3, "track", field(TRACK, b"abc")),
        edge(1, 3, "double", field(44, b"abc")),
        edge(1, 3, "annotation", field(4, field(10, "x") + field(5, b"abc"))),
        edge(1, 3, "integer", field(4, field(10, "stream") + field(3, b"abc"))),
    ],
    ids=["flags", "process", "thread", "kind", "track", "double", "annotation", "stream"],
)
def test_a_field_of_another_kind_than_it_should_be_costs_itself(tmp_path: Path, strange: bytes) -> None:
    """So protobuf's own readers do: bytes where a number should be are as if the field were not there."""
    begun = field(8, 10) + field(10, 1) + field(11, field(9, 1) + field(11, 5) + field(23, "aten::mm"))
    end = packet(field(8, 30) + field(10, 1) + field(11, field(9, 2) + field(11, 5)))
    (tmp_path / "t.pftrace").write_bytes(packet(begun) + end + strange)
    assert ("aten::mm", 10, 20) in [
        (one.name, one.start_ns, one.dur_ns) for one in PerfettoTrace(tmp_path / "t.pftrace", {"x"}).slices
    ]
    assert import_trace(tmp_path / "t.pftrace").ranks == (0,)
