"""Reading a capture folder back, and opening both kinds of recorder, for tests of what a rank writes."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsprof import schema
from dsprof.collectors import native
from dsprof.collectors.native import build
from dsprof.collectors.record import LIMIT_BYTES, PyRecorder, Recorder
from dsprof.schema import Flag, Kind, State

RECORDERS = ("native", "python")


@dataclass(frozen=True)
class Row:
    """A record with its numbers turned back into names."""

    kind: Kind
    name: str
    state: State
    start_ns: int
    end_ns: int
    value: float | None
    issue_ns: int
    host_ns: int
    bytes: int
    group: str
    seq: int
    peer: int
    tag: int
    dtype: str
    flags: Flag
    thread: int

    @property
    def identity(self) -> tuple[Any, ...]:
        """What does not depend on the clock, nor on who recorded it."""
        flags = self.flags & ~Flag.START_MEASURED
        return (self.kind.name, self.name, self.group, self.seq, self.bytes, self.dtype, self.peer, self.tag, flags)


def read_names(folder: Path) -> dict[int, str]:
    names = {0: ""}
    for line in (folder / "names.txt").read_text().splitlines():
        number, _, name = line.partition("\t")
        names[int(number)] = schema.unescape_name(name)
    return names


def read_rows(folder: Path) -> list[Row]:
    """Every record of a capture in the order of its slots; also checks the chunk headers."""
    names = read_names(folder)
    rows = []
    for index, path in enumerate(sorted(folder.glob("chunk-*.bin"))):
        assert path.name == schema.chunk_name(index)
        data = path.read_bytes()
        header = schema.CHUNK_HEADER.unpack_from(data)
        assert header[:5] == (
            schema.CHUNK_MAGIC,
            schema.FORMAT_VERSION,
            schema.RECORD_BYTES,
            schema.CHUNK_RECORDS,
            index,
        )
        for slot in range(schema.CHUNK_RECORDS):
            values = schema.RECORD.unpack_from(data, schema.CHUNK_HEADER_BYTES + slot * schema.RECORD_BYTES)
            record = dict(zip((field[0] for field in schema.RECORD_FIELDS), values, strict=True))
            if record["state"] != State.EMPTY:
                rows.append(_row(record, names))
    return rows


def _row(record: dict[str, int], names: dict[int, str]) -> Row:
    kind = Kind(record["kind"])
    value = None if kind is Kind.COMM or not record["aux"] else struct.unpack("<d", struct.pack("<q", record["aux"]))[0]
    return Row(
        kind=kind,
        name=names[record["name"]],
        state=State(record["state"]),
        start_ns=record["start_ns"],
        end_ns=record["end_ns"],
        value=value,
        issue_ns=record["aux"] if kind is Kind.COMM else 0,
        host_ns=record["host_ns"],
        bytes=record["bytes"],
        group=names[record["group"]],
        seq=record["seq"],
        peer=record["peer"],
        tag=record["tag"],
        dtype=schema.DTYPES[record["dtype"]],
        flags=Flag(record["flags"]),
        thread=record["thread"],
    )


def has_compiler() -> bool:
    return bool(shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++") or shutil.which("clang++"))


def build_helper() -> None:
    """Make sure that the native helper is in the cache; skips the test where there is no compiler."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    build.ensure(Path(sys.executable), print)


def open_recorder(kind: str, folder: Path, limit_bytes: int = LIMIT_BYTES, create: bool = True) -> Recorder:
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    if kind == "python":
        return PyRecorder(folder, limit_bytes)
    said: list[str] = []
    helper = native.load(said.append)
    assert helper is not None, said
    return helper.open(folder, limit_bytes)
