"""Both recorders write the same files and never fail the job."""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_python
import pytest
import torch  # noqa: F401  (the native helper is for the torch of this process)
from captures import open_recorder, read_names, read_rows

from dsprof import ondisk
from dsprof.collectors.recorder import record
from dsprof.collectors.recorder.chunks import CHUNK_BYTES
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.record import Recorder
from dsprof.ondisk import CHUNK_RECORDS, State
from dsprof.schema import Kind

Open = Callable[..., Recorder]


@pytest.fixture
def opened(kind: str, tmp_path: Path) -> Iterator[Open]:
    """Opens a recorder of the kind under test in tmp_path / "capture"; it is closed after the test."""
    recorders: list[Recorder] = []

    def open_one(limit_bytes: int = record.LIMIT_BYTES) -> Recorder:
        recorders.append(open_recorder(kind, tmp_path / "capture", limit_bytes))
        return recorders[-1]

    yield open_one
    for recorder in recorders:
        recorder.close()


def test_put_stores_every_field(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    recorder.put(Kind.PAUSE, recorder.intern("gc"), 100, 250, 2.0, 64)
    (row,) = read_rows(tmp_path / "capture")
    assert (row.kind, row.name, row.state) == (Kind.PAUSE, "gc", State.DONE)
    assert (row.start_ns, row.end_ns, row.value, row.bytes) == (100, 250, 2.0, 64)
    assert (row.group, row.peer, row.tag, row.dtype, row.flags) == ("", -1, -1, "", 0)
    assert row.thread == threading.get_native_id()


def test_put_without_value_and_bytes(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    recorder.put(Kind.PHASE, recorder.intern("data"), 100, 250)
    (row,) = read_rows(tmp_path / "capture")
    assert (row.value, row.bytes) == (None, -1)


def test_begin_is_readable_before_its_end(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    before = time.perf_counter_ns()
    handle = recorder.begin(Kind.PHASE, recorder.intern("forward"), 32, 8.0)
    (row,) = read_rows(tmp_path / "capture")
    assert (row.state, row.end_ns, row.bytes, row.value) == (State.BEGUN, 0, 32, 8.0)
    recorder.end(handle)
    (row,) = read_rows(tmp_path / "capture")
    assert row.state is State.DONE
    assert before <= row.start_ns <= row.end_ns <= time.perf_counter_ns()
    assert (row.bytes, row.value) == (32, 8.0)


def test_end_may_set_value_and_bytes(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    recorder.end(recorder.begin(Kind.PHASE, recorder.intern("forward")), 5.5, 1000)
    (row,) = read_rows(tmp_path / "capture")
    assert (row.value, row.bytes) == (5.5, 1000)


def test_mark_is_an_instant(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    recorder.mark(Kind.GAUGE, recorder.intern("loss"), 0.25)
    (row,) = read_rows(tmp_path / "capture")
    assert (row.kind, row.value, row.state) == (Kind.GAUGE, 0.25, State.DONE)
    assert row.start_ns == row.end_ns > 0


def test_wait_for_nothing_known_has_no_target(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    wait = recorder.intern("wait")
    recorder.end(recorder.begin(Kind.WAIT, wait))
    recorder.end(recorder.begin_wait(wait, object()))
    recorder.put(Kind.WAIT, wait, 100, 250)
    assert recorder.target(None) is None
    recorder.stands_for_issued(None)
    for row in read_rows(tmp_path / "capture"):
        assert (row.kind, row.name, row.state) == (Kind.WAIT, "wait", State.DONE)
        assert (row.group, row.seq, row.peer, row.tag, row.flags) == ("", ondisk.NO_SEQ, -1, -1, 0)
    assert recorder.errors == 0


def test_waits_are_passed_over_where_the_engine_tells_of_them(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    wait = recorder.intern("wait")
    recorder.pass_over(record.CALLS_AND_WAITS)
    assert recorder.begin_wait(wait, None) == 0
    recorder.pass_over(record.CALLS)
    assert recorder.begin_wait(wait, None) != 0
    recorder.pass_over(record.NOTHING)
    assert len(read_rows(tmp_path / "capture")) == 1


def test_blocking_call_that_issues_nothing_is_no_wait(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    for _ in range(2):
        recorder.enter_blocking()
    for _ in range(2):
        recorder.leave_blocking()
    assert read_rows(tmp_path / "capture") == []


def test_handle_zero_is_ignored(opened: Open, tmp_path: Path) -> None:
    opened().end(0)
    assert read_rows(tmp_path / "capture") == []


def test_names_are_written_once_and_at_once(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    odd = "a\tb\\n\nüñ\r"
    assert [recorder.intern("forward"), recorder.intern(odd), recorder.intern("forward")] == [1, 2, 1]
    assert read_names(tmp_path / "capture") == {0: "", 1: "forward", 2: odd}


def test_a_name_that_is_no_unicode_is_recorded(opened: Open, tmp_path: Path) -> None:
    assert opened().intern("\udcff") == 1
    assert read_names(tmp_path / "capture")[1]


def test_names_beyond_the_limit_share_one(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    for number in range(ondisk.MAX_NAMES - 1):
        recorder.intern(f"name {number}")
    assert recorder.intern("one more") == recorder.intern("and another") == ondisk.MAX_NAMES == 65_535
    assert recorder.intern("name 7") == 8
    assert read_names(tmp_path / "capture")[ondisk.MAX_NAMES] == "(too many names)"


def test_records_roll_over_into_new_chunks(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name = recorder.intern("tick")
    whole_run = recorder.begin(Kind.PHASE, recorder.intern("whole run"))
    for number in range(3 * CHUNK_RECORDS + 5):
        recorder.put(Kind.MARK, name, number + 1, number + 1)
    recorder.end(whole_run, 1.5)  # in a chunk that is no longer resident
    first, *ticks = read_rows(tmp_path / "capture")
    assert (first.state, first.value) == (State.DONE, 1.5)
    assert [row.start_ns for row in ticks] == list(range(1, 3 * CHUNK_RECORDS + 6))
    assert len(list((tmp_path / "capture").glob("chunk-*"))) == 4
    assert (recorder.records, recorder.dropped) == (3 * CHUNK_RECORDS + 6, 0)


def test_size_limit_stops_the_recording_and_counts(opened: Open, tmp_path: Path) -> None:
    recorder = opened(limit_bytes=2 * CHUNK_BYTES)
    name = recorder.intern("tick")
    for _ in range(2 * CHUNK_RECORDS + 10):
        recorder.mark(Kind.MARK, name)
    assert recorder.begin(Kind.MARK, name) == 0
    assert (recorder.records, recorder.dropped) == (2 * CHUNK_RECORDS, 11)
    assert len(read_rows(tmp_path / "capture")) == 2 * CHUNK_RECORDS


def test_folder_may_be_renamed_while_recording(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name = recorder.intern("tick")
    (tmp_path / "capture").rename(tmp_path / "renamed")
    for _ in range(CHUNK_RECORDS + 1):
        recorder.mark(Kind.MARK, name)
    recorder.intern("late")
    assert len(read_rows(tmp_path / "renamed")) == CHUNK_RECORDS + 1
    assert "late" in read_names(tmp_path / "renamed").values()


def test_threads_lose_nothing(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name = recorder.intern("tick")

    def write(thread: int) -> None:
        for number in range(6000):
            recorder.end(recorder.begin(Kind.PHASE, name), float(thread * 6000 + number + 1))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = read_rows(tmp_path / "capture")
    assert sorted(row.value or 0 for row in rows) == [float(i + 1) for i in range(24000)]
    assert {row.state for row in rows} == {State.DONE}


def test_closed_recorder_is_silent(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name = recorder.intern("tick")
    handle = recorder.begin(Kind.PHASE, name)
    recorder.close()
    recorder.end(handle)
    recorder.mark(Kind.MARK, name)
    assert recorder.begin(Kind.PHASE, name) == 0
    assert recorder.intern("new") == 0
    assert (recorder.records, recorder.dropped) == (1, 0)
    (row,) = read_rows(tmp_path / "capture")
    assert row.state is State.BEGUN


def test_handles_of_an_earlier_recorder_do_nothing(kind: str, tmp_path: Path) -> None:
    if kind == "python":
        pytest.skip("a PyRecorder's handles are its own")
    first = open_recorder(kind, tmp_path / "first")
    stale = first.begin(Kind.PHASE, first.intern("x"))
    first.close()
    second = open_recorder(kind, tmp_path / "second")
    second.begin(Kind.PHASE, second.intern("y"))
    second.end(stale)
    second.close()
    (row,) = read_rows(tmp_path / "second")
    assert row.state is State.BEGUN


def test_forked_child_does_not_write(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name = recorder.intern("tick")
    handle = recorder.begin(Kind.PHASE, name)
    child = os.fork()
    if child == 0:
        recorder.disarm_after_fork()
        recorder.end(handle)
        recorder.mark(Kind.MARK, name)
        recorder.intern("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (row,) = read_rows(tmp_path / "capture")
    assert row.state is State.BEGUN
    assert "child" not in read_names(tmp_path / "capture").values()


def test_missing_folder_raises(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        open_recorder(kind, tmp_path / "missing", create=False)


def test_full_disk_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = PyRecorder(tmp_path)
    name = recorder.intern("tick")
    recorder.mark(Kind.MARK, name)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    for _ in range(CHUNK_RECORDS + 2):
        recorder.mark(Kind.MARK, name)
    assert (recorder.records, recorder.dropped) == (CHUNK_RECORDS, 3)
    assert [path.name for path in tmp_path.glob("chunk*")] == ["chunk-00000.bin"]


# A process whose files may not grow to the size of a chunk: reserving one is refused as on a full disk.
SMALL_FILES = """
import resource, sys
from pathlib import Path
import torch
from captures import open_recorder
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.schema import Kind
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
recorder = open_recorder(sys.argv[1], Path(sys.argv[2]))
name = recorder.intern("tick")
for _ in range(CHUNK_RECORDS + 7):
    recorder.mark(Kind.MARK, name)
print(recorder.records, recorder.dropped)
"""


def test_file_that_cannot_grow_drops_and_counts(kind: str, tmp_path: Path) -> None:
    output = run_script(SMALL_FILES, kind, str(tmp_path / "capture"), str(CHUNK_BYTES - 1))
    assert output.split() == ["0", str(CHUNK_RECORDS + 7)]
    assert list((tmp_path / "capture").glob("chunk*")) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from captures import open_recorder
from dsprof.schema import Kind
recorder = open_recorder(sys.argv[1], Path(sys.argv[2]))
name = recorder.intern("tick")
recorder.begin(Kind.PHASE, recorder.intern("under way"))
for number in range(20000):
    recorder.put(Kind.MARK, name, number + 1, number + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_leaves_every_record(kind: str, tmp_path: Path) -> None:
    run_script(KILLED, kind, str(tmp_path / "capture"), code=-signal.SIGKILL)
    first, *rows = read_rows(tmp_path / "capture")
    assert (first.name, first.state, first.end_ns) == ("under way", State.BEGUN, 0)
    assert [row.start_ns for row in rows] == list(range(1, 20001))


def test_backward_depth_is_counted_for_each_thread(opened: Open) -> None:
    recorder = opened()
    depths = [recorder.enter_backward(), recorder.enter_backward()]
    other = threading.Thread(target=lambda: depths.append(recorder.enter_backward()))
    other.start()
    other.join()
    recorder.leave_backward()
    depths.append(recorder.enter_backward())
    assert depths == [1, 2, 1, 2]


def test_errors_are_counted_by_hook(opened: Open) -> None:
    recorder = opened()
    recorder.count_error("a wait", ValueError("odd\nand more"))
    recorder.count_error("forward", KeyError("x"))
    recorder.count_error("a wait", ValueError("another"))
    assert recorder.errors == 3
    assert recorder.failures() == [("a wait", 2, "ValueError: odd"), ("forward", 1, "KeyError: 'x'")]


def test_number_out_of_range_is_counted_not_raised(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    recorder.put(Kind.MARK, recorder.intern("tick"), 2**63, 2**63)
    assert recorder.errors == 1
    assert read_rows(tmp_path / "capture") == []


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
import torch
from captures import open_recorder, read_names
from dsprof.schema import Kind
recorder = open_recorder("python", Path(sys.argv[1]))
numbers, handled = [], []
def record(into, name):
    into.append(recorder.number("0"))
    recorder.mark(Kind.MARK, recorder.intern(name), float(len(into)))
depth = 0
def handler(*_):
    global depth
    if depth == 20:  # on a busy machine a hundred more come while one waits 5 ms for a chunk
        return
    depth += 1
    try:
        record(handled, f"handler {len(handled) % 100}")
    finally:
        depth -= 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
until = time.monotonic() + 2
while time.monotonic() < until:
    record(numbers, f"loop {len(numbers) % 1000}")
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(handled) > 100, len(handled)
assert sorted(numbers + handled) == list(range(len(numbers) + len(handled)))
assert recorder.errors == 0 and recorder.dropped <= len(handled) / 2, (recorder.errors, recorder.dropped, len(handled))
names = read_names(Path(sys.argv[1]))
assert {f"handler {n}" for n in range(100)} <= set(names.values())
"""


def test_a_signals_handler_may_record_in_the_middle_of_recording(tmp_path: Path) -> None:
    run_script(INTERRUPTED, str(tmp_path / "capture"))


def run_script(script: str, *arguments: str, code: int = 0) -> str:
    """Run `script` in a process of its own; its standard output."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = forked_python.run([sys.executable, "-c", script, *arguments], env=environment, capture_output=True)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_record_lies_in_the_file_as_the_schema_says(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    name, group, module, purpose, lane = map(recorder.intern, ("all_reduce", "g", "m", "p", "l"))
    kind, flags = int(Kind.COMM), int(ondisk.Flag.ASYNC)
    recorder.comm(kind, name, 100, 250, 50, 4096, group, 7, -1, 3, flags, 2, 5, module, purpose)
    recorder.comm(kind, name, 100, 0, 50, 4096, group, -1, 6, 3, 0, 2, 5, module, purpose)
    recorder.span(int(Kind.PIPE), name, 100, 250, 0, 1.5, 8, flags, lane, 2, 5, module, purpose)
    recorder.span(int(Kind.COPY), name, 100, 250, 50, 3.0, 8, 0, lane, 2, 5, module, purpose, 1 << 40)
    recorder.put(Kind.GAUGE, name, 100, 100, 0.25)
    content = (tmp_path / "capture" / "chunk-00000.bin").read_bytes()[ondisk.CHUNK_HEADER_BYTES :][: 5 * 64]
    common, here = struct.Struct("<qqIHBBBB"), threading.get_native_id()
    found = [(common.unpack_from(content, at), content[at + 26 : at + 64]) for at in range(0, 5 * 64, 64)]
    assert [head for head, _ in found] == [
        (100, 250, here, name, 4, 2, 2, 2), (100, 0, here, name, 4, 1, 0, 3), (100, 250, here, name, 6, 2, 2, 1),
        (100, 250, here, name, 7, 2, 0, 4), (100, 100, here, name, 11, 2, 0, 5),
    ]  # fmt: skip
    collective, p2p, span, copy, gauge = (rest for _, rest in found)
    assert struct.unpack("<BxIqqIHhhhHH", collective) == (3, 0, 50, 4096, 7, group, -1, 2, 5, module, purpose)
    assert struct.unpack("<BxHHqqIHhihh", p2p) == (3, module, purpose, 50, 4096, 2**32 - 1, group, 6, -1, 2, 5)
    assert struct.unpack("<HhhdqqHH4x", span) == (lane, 2, 5, 1.5, 8, -1, module, purpose)
    assert struct.unpack("<HhhqqqHHf", copy) == (lane, 2, 5, 50, 8, 1 << 40, module, purpose, 3.0)
    assert struct.unpack("<Hhhdq8xHH4x", gauge) == (0, -1, -1, 0.25, -1, 0, 0)


def test_the_context_of_a_thread_is_put_back_by_what_it_was(opened: Open) -> None:
    recorder = opened()
    purpose = recorder.intern("gradient")
    before, another = recorder.context(), recorder.make_context(2, 5, 0, purpose)
    assert before == recorder.make_context(-1, -1, 0, 0) != another
    recorder.set_context(another)
    assert recorder.context() == another
    recorder.set_context(before)
    assert recorder.context() == before
