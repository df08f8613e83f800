"""Reading a capture folder back, and opening both kinds of recorder, for tests of what a rank writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsprof import ondisk, schema
from dsprof.collectors import native
from dsprof.collectors.native import build, layout
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.record import LIMIT_BYTES, Recorder
from dsprof.ondisk import NO_SEQ, Family, Flag, State
from dsprof.schema import Kind
from dsprof.trace.records import decode

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
    p2p: bool = False
    root: int = -1
    stage: int = -1
    microbatch: int = -1
    module: str = ""
    purpose: str = ""
    lane: str = ""
    site: str = ""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What does not depend on the clock, nor on who recorded it."""
        flags = self.flags & ~Flag.START_MEASURED
        return (self.kind.name, self.name, self.group, self.seq, self.bytes, self.dtype, self.peer, self.tag,
                self.root, self.p2p, self.stage, self.microbatch, self.purpose, flags)  # fmt: skip


def read_names(folder: Path) -> dict[int, str]:
    names = {0: ""}
    for line in (folder / "names.txt").read_text().splitlines():
        number, _, name = line.partition("\t")
        names[int(number)] = ondisk.unescape_name(name)
    return names


def read_rows(folder: Path) -> list[Row]:
    """Every record of a capture in the order of its slots; also checks the chunk headers."""
    names = read_names(folder)
    rows = []
    for index, path in enumerate(sorted(folder.glob("chunk-*.bin"))):
        assert path.name == ondisk.chunk_name(index)
        data = path.read_bytes()
        header = ondisk.CHUNK_HEADER.unpack_from(data)
        assert header[:5] == (
            ondisk.CHUNK_MAGIC,
            ondisk.FORMAT_VERSION,
            ondisk.RECORD_BYTES,
            ondisk.CHUNK_RECORDS,
            index,
        )
        raw = np.frombuffer(data, np.uint8, ondisk.CHUNK_RECORDS * ondisk.RECORD_BYTES, ondisk.CHUNK_HEADER_BYTES)
        rows += [_row(record, names) for record in decode(raw.reshape(-1, ondisk.RECORD_BYTES), ondisk.FORMAT_VERSION)]
    return rows


def _row(record: np.void, names: dict[int, str]) -> Row:
    value = float(record["value"])
    return Row(
        kind=Kind(record["kind"]),
        name=names[int(record["name"])],
        state=State(record["state"]),
        start_ns=int(record["start_ns"]),
        end_ns=int(record["end_ns"]),
        value=None if np.isnan(value) else value,
        issue_ns=max(int(record["issue_ns"]), 0),
        host_ns=max(int(record["host_ns"]), 0),
        bytes=int(record["bytes"]),
        group=names[int(record["group"])],
        seq=int(record["seq"]) if record["seq"] >= 0 else NO_SEQ,
        peer=int(record["peer"]),
        tag=int(record["tag"]),
        dtype=schema.DTYPES[int(record["dtype"])],
        flags=Flag(int(record["flags"])),
        thread=int(record["thread"]),
        p2p=record["family"] == Family.P2P,
        root=int(record["root"]),
        stage=int(record["stage"]),
        microbatch=int(record["microbatch"]),
        module=names[int(record["module"])],
        purpose=names[int(record["purpose"])],
        lane=names[int(record["lane"])],
        site=names[int(record["site"])],
    )


def has_compiler() -> bool:
    return bool(shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++") or shutil.which("clang++"))


STRICT = ("-Wall", "-Wextra", "-Werror")
"""With these the helper is compiled for tests; a user's build never fails for a warning."""


def build_helper() -> Path:
    """Where the native helper is, built now if need be; skips the test where there is no compiler."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "WARNINGS", STRICT)
        return build.ensure(Path(sys.executable), print)


def compile_program(source: str, folder: Path, *flags: str) -> Path:
    """A C++ program, which may include the helper's headers; skips the test where there is no compiler."""
    compiler = build._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "layout.hpp").write_text(layout.header())
    (folder / "program.cpp").write_text(source)
    includes = [f"-I{each}" for each in (folder, Path(build.__file__).parent, sysconfig.get_path("include"))]
    command = [*compiler, "-std=c++20", "-pthread", *flags, *includes, "program.cpp", "-o", "program"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder / "program"


PATIENT_S = 60.0
"""Loops that only record are faster than a busy machine makes chunks."""


def open_recorder(
    kind: str, folder: Path, limit_bytes: int = LIMIT_BYTES, create: bool = True, copied: bool = False
) -> Recorder:
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    if kind == "python":
        return PyRecorder(folder, limit_bytes, copied, PATIENT_S)
    import torch  # noqa: F401  (the helper is for the torch of this process)

    said: list[str] = []
    helper = native.load(said.append)
    assert helper is not None, said
    return helper.open(folder, limit_bytes, copied, PATIENT_S)
