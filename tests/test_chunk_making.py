"""A chunk that is long in coming: no hook waits for more than a moment, nor with a lock; what is lost is counted."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captures import has_compiler
from test_record import run_script

from dsprof import ondisk
from dsprof.collectors.native import layout
from dsprof.collectors.recorder.chunks import LONGEST_WRITE_S, Chunks, make_chunk
from dsprof.collectors.recorder.counters import Counters
from dsprof.ondisk import CHUNK_RECORDS, Family, State
from dsprof.schema import Kind

HERE = Path(__file__).parent
CXX = os.environ.get("CXX") or "g++"


def test_the_native_helpers_chunks(tmp_path: Path) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    (tmp_path / "layout.hpp").write_text(layout.header())
    native = HERE.parent / "dsprof" / "collectors" / "native"
    flags = ["-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", f"-I{native}"]
    program = tmp_path / "chunk_making"
    subprocess.run([CXX, *flags, "-o", str(program), str(HERE / "chunk_making.cpp")], check=True)
    (tmp_path / "captures").mkdir()
    done = subprocess.run([program, tmp_path / "captures"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- their twin in Python -----------------------------------------------------------------------

LAYOUT = ondisk.layout(Family.SPAN)


class SlowMaker:
    """Makes chunks, but stands still while `gate` is closed."""

    def __init__(self) -> None:
        self.gate, self.standing = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, folder: int, index: int, kept: int, given_up: int) -> mmap.mmap:
        self.standing.set()
        assert self.gate.wait(60)
        return make_chunk(folder, index, kept, given_up)

    def close_gate(self) -> None:
        self.gate.clear()
        self.standing.clear()


class Capture:
    def __init__(self, folder: Path, maker: SlowMaker, patience_s: float, copied: bool = False) -> None:
        folder.mkdir()
        self.folder, self.now = folder, 0.0
        self.counters = Counters(os.open(folder, os.O_RDONLY))
        place = os.open(folder, os.O_RDONLY)
        self.chunks = Chunks(place, 64 << 20, self.counters, copied, patience_s, maker, lambda: self.now)

    def write(self, state: State = State.DONE) -> int:
        return self.chunks.write(LAYOUT, Family.SPAN, Kind.MARK, state, 0, 1, 5, 6, 0, -1, -1, 0.0, -1, -1, 0, 0, 0)

    def fill(self, records: int) -> None:
        assert all(self.write() for _ in range(records))

    def is_finished(self, number: int) -> bool:
        while self.chunks._under_way:  # chunks are handed over right after the newest one is there
            time.sleep(0.001)
        content = (self.folder / ondisk.chunk_name(number)).read_bytes()
        (value,) = ondisk.CHUNK_FINISHED.unpack_from(content, ondisk.CHUNK_FINISHED_AT)
        return bool(value)


Opened = Callable[..., Capture]


@pytest.fixture
def maker() -> SlowMaker:
    return SlowMaker()


@pytest.fixture
def opened(tmp_path: Path, maker: SlowMaker) -> Iterator[Opened]:
    captures: list[Capture] = []

    def make(patience_s: float, copied: bool = False) -> Capture:
        captures.append(Capture(tmp_path / "capture", maker, patience_s, copied))
        return captures[-1]

    yield make
    maker.gate.set()
    for capture in captures:
        capture.chunks.close()


def test_a_record_is_dropped_when_the_moment_is_over(opened: Opened, maker: SlowMaker) -> None:
    capture = opened(0.001)
    maker.close_gate()
    capture.fill(CHUNK_RECORDS)
    assert maker.standing.wait(60)
    assert not any(capture.write() for _ in range(1001))
    assert capture.counters["waits"] == 1  # then nobody waits for it any more
    assert (capture.chunks.dropped, capture.chunks.records) == (1001, CHUNK_RECORDS)
    maker.gate.set()
    dropped = 1001
    while not (handle := capture.write()):
        dropped += 1
    assert handle == CHUNK_RECORDS + dropped + 1
    assert capture.chunks.dropped == dropped


def test_a_wait_holds_up_nobody_else(opened: Opened, maker: SlowMaker) -> None:
    capture = opened(3600.0)
    maker.close_gate()
    capture.fill(CHUNK_RECORDS)
    handles: list[int] = []
    waiting = [threading.Thread(target=lambda: handles.append(capture.write())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert maker.standing.wait(60)
    assert handles == []
    maker.gate.set()  # by a thread that needs the interpreter's lock
    for thread in waiting:
        thread.join(60)
    assert sorted(handles) == [CHUNK_RECORDS + 1, CHUNK_RECORDS + 2, CHUNK_RECORDS + 3]
    assert capture.chunks.dropped == 0


def test_where_no_thread_can_be_had_records_are_dropped_until_one_can(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsprof.collectors.recorder import chunks

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    capture = opened(3600.0)
    with monkeypatch.context() as patched:
        patched.setattr(chunks._thread, "start_new_thread", refuse)
        capture.fill(CHUNK_RECORDS)
        assert not any(capture.write() for _ in range(10))
    assert capture.write() == CHUNK_RECORDS + 11
    assert capture.chunks.dropped == 10


@pytest.mark.parametrize("copied", [True, False])
def test_chunks_in_which_all_has_ended_are_handed_over(opened: Opened, copied: bool) -> None:
    capture = opened(3600.0, copied)
    late = capture.write(State.BEGUN)
    capture.fill(4 * CHUNK_RECORDS)
    assert [capture.is_finished(number) for number in range(4)] == [False, copied, False, False]
    capture.chunks.store(late, ondisk.offset(Family.SPAN, "state"), struct.Struct("<B"), State.DONE)
    capture.fill(CHUNK_RECORDS)
    assert [capture.is_finished(number) for number in range(4)] == [copied, copied, copied, False]


def test_a_slot_that_stays_empty_keeps_its_chunk_for_a_while(opened: Opened) -> None:
    capture = opened(3600.0, copied=True)
    assert capture.chunks.write(LAYOUT, Family.SPAN, 1 << 20, State.DONE, 0, 1, 5, 6, *(0,) * 9) == 0
    capture.fill(4 * CHUNK_RECORDS)
    assert [capture.is_finished(number) for number in range(2)] == [False, True]
    capture.now = LONGEST_WRITE_S + 1
    capture.fill(CHUNK_RECORDS)
    assert capture.is_finished(0)


# --- in a process of its own, whose disk stands still --------------------------------------------

SLOW_DISK = """
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int posix_fallocate(int file, off_t from, off_t bytes) {
  int (*real)(int, off_t, off_t) = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate64");
  while (!access(getenv("STANDS_STILL"), F_OK)) usleep(1000);
  return real(file, from, bytes);
}
int posix_fallocate64(int file, off_t from, off_t bytes) { return posix_fallocate(file, from, bytes); }
"""
WAITS = """
import os, sys, threading
from pathlib import Path
import torch
from captures import open_recorder
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.schema import Kind
stands_still = Path(os.environ["STANDS_STILL"])
recorder = open_recorder(sys.argv[1], Path(sys.argv[2]))
name = recorder.intern("tick")
stands_still.touch()
for number in range(CHUNK_RECORDS):
    recorder.mark(Kind.MARK, name)
calls = (
    lambda: recorder.mark(Kind.MARK, name),
    lambda: recorder.put(Kind.MARK, name, 1, 2),
    lambda: recorder.end(recorder.begin(Kind.PHASE, name)),
    lambda: recorder.end(recorder.begin_wait(name, None)),
    lambda: recorder.comm(4, name, 1, 2, 1, 8, 0, 0, -1, 3, 0, -1, -1, 0, 0),
    lambda: recorder.span(2, name, 1, 2, 0, None, -1, 0, 0, -1, -1, 0, 0),
)
threads = [threading.Thread(target=call) for call in calls]
for thread in threads:
    thread.start()
os.unlink(stands_still)  # they wait for what this thread does, which needs the interpreter's lock
for thread in threads:
    thread.join()
recorder.close()
print(recorder.records - CHUNK_RECORDS, recorder.dropped)
"""


def test_no_wait_holds_the_interpreters_lock(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "slow.c").write_text("#define _GNU_SOURCE\n" + SLOW_DISK)
    library = tmp_path / "slow.so"
    subprocess.run(
        [compiler, "-w", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "slow.c"), "-ldl"], check=True
    )
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("STANDS_STILL", str(tmp_path / "stands-still"))
    assert run_script(WAITS, kind, str(tmp_path / "capture")).split() == ["6", "0"]
