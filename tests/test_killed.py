"""What is left of a capture whose process was killed, or whose files were cut."""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
import signal
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch  # noqa: F401  (the native helper is for the torch of this process)
from captures import open_recorder

from dsprof import ondisk
from dsprof.collectors.recorder.chunks import CHUNK_BYTES
from dsprof.ondisk import CHUNK_HEADER_BYTES, CHUNK_RECORDS, RECORD_BYTES, State
from dsprof.schema import Kind
from dsprof.trace.capture import Capture, read_capture
from dsprof.trace.derive import trace_rows

THREADS = 3
ROUNDS = 25
SLOT = struct.Struct("<Q")


def write_until_killed(
    kind: str, folder: Path, limit_bytes: int, committed: mmap.mmap, count: int, reached: int
) -> None:
    """Each thread writes spans whose values are 1, 2, ... and says in `committed` how many it has written, and of how
    many the end. When they have written `count`, `reached` is told."""
    recorder = open_recorder(kind, folder, limit_bytes)
    names = [recorder.intern(f"thread {thread}") for thread in range(THREADS)]

    def write(thread: int) -> None:
        number = 0
        while True:
            number += 1
            handle = recorder.begin(Kind.MARK, names[thread], number, float(number))
            committed[16 * thread : 16 * thread + 8] = SLOT.pack(number)
            recorder.end(handle)
            committed[16 * thread + 8 : 16 * thread + 16] = SLOT.pack(number)
            if thread == 0:
                if number % 100 == 0:
                    recorder.count_step()
                    recorder.count_error("a hook", ValueError(str(number)))
                if number == count:
                    os.write(reached, b"!")

    for thread in range(1, THREADS):
        threading.Thread(target=write, args=(thread,), daemon=True).start()
    write(0)


def kill_one(kind: str, folder: Path, limit_bytes: int, count: int) -> list[tuple[int, int]]:
    """Of each thread of the killed process: how many spans it had begun, and ended."""
    committed = mmap.mmap(-1, 16 * THREADS)
    told, reached = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(kind, folder, limit_bytes, committed, count, reached)
        finally:
            os._exit(1)
    os.close(reached)
    try:
        assert os.read(told, 1) == b"!"
        os.kill(child, signal.SIGKILL)
    finally:
        os.close(told)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return [
        (SLOT.unpack_from(committed, 16 * thread)[0], SLOT.unpack_from(committed, 16 * thread + 8)[0])
        for thread in range(THREADS)
    ]


def test_a_kill_at_any_moment_loses_no_committed_record_and_tears_one_a_thread_at_most(
    kind: str, tmp_path: Path
) -> None:
    draw = random.Random(11)
    for attempt in range(ROUNDS):
        # About the size of a chunk, too: the next one is being made, or the oldest removed.
        count = draw.choice([draw.randrange(1, 50), draw.randrange(50, 2000), draw.randrange(2500, 6000)])
        folder = tmp_path / str(attempt)
        written = kill_one(kind, folder, 64 * CHUNK_BYTES, count)
        capture = read_capture(folder)
        assert capture.damaged <= THREADS
        assert (capture.gaps, capture.dropped) == ([], 0)
        for thread, (begun, ended) in enumerate(written):
            number = next(number for number, name in capture.names.items() if name == f"thread {thread}")
            mine = capture.records[capture.records["name"] == number]
            values = mine["bytes"].tolist()
            assert values[:begun] == list(range(1, begun + 1))
            assert len(values) <= begun + 1
            done = mine["state"] == State.DONE
            assert done[:ended].all()
            assert (mine["end_ns"][:ended] >= mine["start_ns"][:ended]).all()
            assert (~done).sum() <= 1
        assert capture.counters is not None
        counted = capture.counters.counts["steps"]
        assert written[0][1] // 100 - 1 <= counted <= written[0][0] // 100 + 1
        (said,) = capture.errors or [""]
        times = re.fullmatch(r"a hook: ValueError: 100(?: \((\d+) times\))?", said)
        assert counted - 1 <= (int(times[1] or 1) if times else 0) <= counted
        shutil.rmtree(folder)


def test_a_kill_at_the_size_limit_leaves_the_first_and_the_newest(kind: str, tmp_path: Path) -> None:
    draw, looked_at = random.Random(12), 0
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        written = kill_one(kind, folder, 4 * CHUNK_BYTES, draw.randrange(2, 4) * CHUNK_RECORDS)
        capture = read_capture(folder)
        if capture.dropped:  # the machine stood still for longer than a record waits for its chunk
            continue
        looked_at += 1
        assert all("meta.json" in problem for problem in capture.problems)
        assert capture.records["bytes"][0] == 1
        (gap,) = capture.gaps
        newest = capture.records[gap.before :]
        assert len(newest) >= CHUNK_RECORDS // 2
        for thread, (begun, _) in enumerate(written):
            number = next(number for number, name in capture.names.items() if name == f"thread {thread}")
            values = newest["bytes"][newest["name"] == number].tolist()  # none, of a thread that got no core meanwhile
            assert values == list(range(values[0], values[-1] + 1)) if values else True
            assert not values or begun <= values[-1] <= begun + 1
        shutil.rmtree(folder)
        if looked_at == 3:
            return
    raise AssertionError(f"{looked_at} of 12 captures had no record dropped")


# --- files that were cut ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small capture, of which the last thing is under way."""
    folder = tmp_path_factory.mktemp("whole") / "rank00000.0.host.1"
    recorder = open_recorder("python", folder)
    forward = recorder.intern("forward")
    for number in range(5):
        recorder.put(Kind.PHASE, forward, 100 * number + 1, 100 * number + 50)
    recorder.begin(Kind.PHASE, recorder.intern("backward"))
    recorder.note_error("a hook", "ValueError: odd")
    (folder / "meta.json").write_text('{"rank": 0, "closed": false, "dropped": 0, "errors": []}')
    (folder / "facts.jsonl").write_text('{"fact": "process", "cores": 2}\n{"fact": "device"}\n')
    return folder


def cuts(whole: Path, folder: Path, name: str, lengths: Iterable[int]) -> list[Capture]:
    """The capture with this file cut to each of these lengths."""
    shutil.copytree(whole, folder)
    content = (whole / name).read_bytes()
    found = []
    for length in lengths:
        (folder / name).write_bytes(content[:length])
        found.append(read_capture(folder))
    return found


def test_a_chunk_cut_at_every_byte_gives_every_whole_record(whole: Path, tmp_path: Path) -> None:
    end = CHUNK_HEADER_BYTES + 6 * RECORD_BYTES
    # Every byte of the header, whose page is filled up with zeros, and of the records.
    lengths = [*range(128), *range(128, CHUNK_HEADER_BYTES, 64), *range(CHUNK_HEADER_BYTES - 8, end + 65)]
    for length, capture in zip(lengths, cuts(whole, tmp_path / "cut", "chunk-00000.bin", lengths), strict=True):
        records = max(length - CHUNK_HEADER_BYTES, 0) // RECORD_BYTES
        assert len(capture.records) == min(records, 6)
        assert capture.damaged == 0
        partly = length < CHUNK_HEADER_BYTES or (length - CHUNK_HEADER_BYTES) % RECORD_BYTES
        assert bool(capture.problems) == bool(partly), (length, capture.problems)
        if partly:
            continue
        rows = trace_rows(capture, 0, 0)
        assert (rows["source"] == "measured").sum() == min(records, 6)
        assert rows.loc[~rows["ended"].astype(bool), "name"].tolist() == ["backward"] * (records >= 6)


OTHERS: dict[str, Callable[[Capture], object]] = {
    "names.txt": lambda capture: capture.names,
    "meta.json": lambda capture: capture.meta,
    "facts.jsonl": lambda capture: capture.facts,
    "counters.bin": lambda capture: capture.counters,
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_files_cut_at_every_byte_cost_only_what_is_in_them(name: str, whole: Path, tmp_path: Path) -> None:
    original = read_capture(whole)
    size = (whole / name).stat().st_size
    *cut, last = cuts(whole, tmp_path / whole.name, name, [*range(min(size, 400)), *range(400, size, 50), size])
    assert OTHERS[name](last) == OTHERS[name](original)
    for capture in cut:
        assert len(capture.records) + capture.damaged == 6
        if name != "names.txt":
            assert capture.damaged == 0
        for number, text in capture.names.items():
            assert original.names[number] == text
    assert any(OTHERS[name](capture) != OTHERS[name](original) for capture in cut)


@pytest.mark.parametrize("name", ["chunk-00000.bin", "names.txt", "counters.bin", "meta.json", "facts.jsonl"])
def test_a_file_with_any_byte_overwritten_raises_nothing(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "overwritten"
    shutil.copytree(whole, folder)
    content = (whole / name).read_bytes()[: CHUNK_HEADER_BYTES + 6 * RECORD_BYTES]
    draw = random.Random(13)
    places = [*range(min(len(content), 128)), *range(max(len(content) - 6 * RECORD_BYTES, 128), len(content))]
    for place in places:
        changed = bytearray(content)
        changed[place] = draw.randrange(256)
        (folder / name).write_bytes(changed)
        capture = read_capture(folder)
        assert len(capture.records) <= 6
    changed = bytearray(content)
    changed[ondisk.CHUNK_HEADER.size : ondisk.CHUNK_HEADER.size + ondisk.CHUNK_PLACE.size] = b"\xff" * 24
    (folder / name).write_bytes(changed)
    read_capture(folder)
