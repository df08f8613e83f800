"""Captures of formats 1 to 3, whose one layout had fields that changed their meaning: records written literally."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from records import of

from dsprof import ondisk
from dsprof.ondisk import Flag, State
from dsprof.schema import Kind
from dsprof.trace.capture import read_capture
from dsprof.trace.derive import trace_rows
from dsprof.trace.records import WAS_P2P

MS = 1_000_000
NONE = 2**32 - 1
NAMES = (
    "all_reduce",
    "recv",
    "wait",
    "forward",
    "optimizer",
    "F",
    "read",
    "0",
    "gradient",
    "blocks.3",
    "io.nvme",
    "sharding",
)
ID = {name: number for number, name in enumerate(NAMES, 1)}
LAYOUT = struct.Struct("<qqqqIIIIiiIBBBB")


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def record(kind: Kind, name: str, start: float, end: float, **more: Any) -> bytes:
    """A record as format 3 has it, with the fields that differ from the usual; texts are names."""
    usual = {"aux": 0, "bytes": -1, "thread": 7, "group": 0, "seq": 0, "peer": -1, "tag": -1, "host_ns": 0, "dtype": 0}
    fields = {**usual, "flags": 0, **{k: ID[v] if isinstance(v, str) else v for k, v in more.items()}}
    return LAYOUT.pack(
        round(start * MS), round(end * MS), fields["aux"], fields["bytes"], ID[name], fields["thread"], fields["group"],
        fields["seq"], fields["peer"], fields["tag"], fields["host_ns"], kind, State.DONE, fields["dtype"],
        fields["flags"],
    )  # fmt: skip


def capture_folder(path: Path, *records: bytes, version: int = 3) -> Path:
    path.mkdir(parents=True)
    (path / "names.txt").write_text("".join(f"{number}\t{name}\n" for name, number in ID.items()))
    (path / "meta.json").write_text(json.dumps({"closed": True, "world_size": 2}))
    header = ondisk.CHUNK_HEADER.pack(ondisk.CHUNK_MAGIC, version, 64, ondisk.CHUNK_RECORDS, 0, 1)
    body = header.ljust(ondisk.CHUNK_HEADER_BYTES, b"\0") + b"".join(records)
    whole = ondisk.CHUNK_HEADER_BYTES + ondisk.CHUNK_RECORDS * 64
    (path / "chunk-00000.bin").write_bytes(body.ljust(whole, b"\0"))
    return path


def rows_of(tmp_path: Path, *records: bytes, version: int = 3) -> pd.DataFrame:
    capture = read_capture(capture_folder(tmp_path / "rank00000.0.host.1", *records, version=version))
    assert (capture.damaged, capture.problems, capture.format_version) == (0, [], version)
    return trace_rows(capture, 0, 0)


ENGINE = {"flags": Flag.ENGINE, "seq": NONE, "tag": 0}


def test_what_c10d_did(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        record(Kind.COMM, "all_reduce", 1, 4, aux=1 * MS, bytes=400, group="0", seq=7, dtype=7, host_ns=5),
        record(Kind.WAIT, "all_reduce", 2, 4, group="0", seq=7),
        record(Kind.COMM, "recv", 4, 6, aux=4 * MS, group="0", seq=2, peer=1, tag=5, flags=WAS_P2P),
        record(Kind.WAIT, "recv", 5, 6, group="0", seq=2, peer=1, tag=5, flags=WAS_P2P),
        record(Kind.WAIT, "wait", 6, 7, seq=NONE),
    )
    assert of(rows, "kind", "name", "group", "seq", "peer", "tag", "bytes", "host_ns", "stage") == [
        ("comm", "all_reduce", "0", 7, None, None, 400, 5, None),
        ("wait", "all_reduce", "0", 7, None, None, None, None, None),
        ("comm", "recv", "0", 2, 1, 5, None, 0, None),
        ("wait", "recv", "0", 2, 1, 5, None, None, None),
        ("wait", "wait", None, None, None, None, None, None, None),
    ]


def test_what_the_engine_recorded(tmp_path: Path) -> None:
    place = 2 << 16 | 5
    rows = rows_of(
        tmp_path,
        record(Kind.COMM, "all_reduce", 1, 4, aux=1 * MS, group="0", seq=0, peer=place, tag="blocks.3",
               host_ns="gradient", flags=Flag.ENGINE),
        record(Kind.WAIT, "recv", 4, 5, group="0", seq=3, peer=place, tag=1, flags=Flag.ENGINE | WAS_P2P),
        record(Kind.PIPE, "F", 5, 6, **{**ENGINE, "peer": place}),
        record(Kind.COPY, "read", 6, 7, **{**ENGINE, "peer": 0, "group": "io.nvme", "aux": bits(3.0)}),
    )  # fmt: skip
    assert of(rows, "name", "lane", "stage", "microbatch", "group", "seq", "peer", "module", "purpose") == [
        ("all_reduce", "comm.0", 2, 5, "0", 0, None, "blocks.3", "gradient"),
        ("recv", "main", 2, 5, "0", 3, 1, None, None),
        ("F", "main", 2, 5, None, None, None, None, None),
        ("read", "io.nvme", 0, 0, None, None, None, None, None),
    ]
    assert rows["value"].tolist()[3] == 3.0


@pytest.mark.parametrize(("version", "named"), [(1, None), (2, None), (3, "0")])
def test_before_format_3_a_wait_named_nothing(tmp_path: Path, version: int, named: str | None) -> None:
    records = [
        record(Kind.WAIT, "all_reduce", 1, 2, group="0", seq=4),
        record(Kind.PHASE, "forward", 2, 3, flags=Flag.GRAD, aux=bits(32.0)),
        record(Kind.PHASE, "optimizer", 3, 4, aux=bits(-0.0)),
    ]
    rows = rows_of(tmp_path, *records, version=version)
    rows = rows[rows["source"] == "measured"]
    number, grad = (None, None) if named is None else (4, True)
    assert of(rows, "name", "seq", "grad", "value") == [
        ("all_reduce", number, None, None), ("forward", None, grad, 32.0), ("optimizer", None, None, 0.0),
    ]  # fmt: skip


def test_what_fsdp2_did_had_a_name_that_a_module_could_have(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, record(Kind.MODULE, "sharding", 1, 2), record(Kind.MARK, "sharding", 2, 2))
    assert of(rows, "kind", "name") == [("module", "FSDP::sharding"), ("mark", "sharding")]


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    good = record(Kind.PHASE, "forward", 1, 2)
    torn = [
        record(Kind.PHASE, "forward", 2, 1),
        record(Kind.PIPE, "F", 2, 3, flags=Flag.ENGINE, peer=-1, tag=0),
        record(Kind.PIPE, "F", 2, 3, flags=Flag.ENGINE, peer=0, tag=99),
        record(Kind.PIPE, "F", 2, 3, flags=Flag.ENGINE, peer=0, tag=0, host_ns=99),
    ]
    read = read_capture(capture_folder(tmp_path / "rank00000.0.host.1", good, *torn))
    assert (len(read.records), read.damaged) == (1, 4)


def test_a_format_to_come_is_refused(tmp_path: Path) -> None:
    read = read_capture(capture_folder(tmp_path / "rank00000.0.host.1", version=5))
    assert "chunk-00000.bin: format 5, this dsprof reads 4" in read.problems
