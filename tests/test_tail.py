"""Following a capture that is being written, by either recorder."""

from __future__ import annotations

from pathlib import Path

import pytest
from captures import RECORDERS, build_helper, open_recorder

from dsprof.live.frames import in_words, parse_stacks, user_site
from dsprof.live.tail import Tail, _decode
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.schema import CAPTURE_OFF, Kind

both = pytest.mark.parametrize("kind", RECORDERS)
MEMBERS = {"0": [4, 5]}


def opened(kind: str, folder: Path):  # type: ignore[no-untyped-def]
    if kind == "native":
        build_helper()
    return open_recorder(kind, folder), Tail(folder)


@both
def test_what_begins_and_what_ends_is_progress(tmp_path: Path, kind: str) -> None:
    recorder, tail = opened(kind, tmp_path / "capture")
    try:
        name = recorder.intern("forward")
        assert not tail.follow()
        handle = recorder.begin(Kind.PHASE, name)
        assert tail.follow()
        assert not tail.follow()
        recorder.end(handle)
        assert tail.follow()
        assert not tail.follow()
    finally:
        recorder.close()


@both
def test_samples_are_no_progress(tmp_path: Path, kind: str) -> None:
    """A side thread takes them of a job that stands still, too."""
    recorder, tail = opened(kind, tmp_path / "capture")
    try:
        tail.follow()
        recorder.put(Kind.GAUGE, recorder.intern("cpu_seconds"), 1, 1, 2.0, -1)
        assert not tail.follow()
        recorder.mark(Kind.MARK, recorder.intern("here"))
        assert tail.follow()
    finally:
        recorder.close()


@both
def test_it_goes_on_from_chunk_to_chunk(tmp_path: Path, kind: str) -> None:
    recorder, tail = opened(kind, tmp_path / "capture")
    try:
        name = recorder.intern("x")
        for _ in range(CHUNK_RECORDS + 10):
            recorder.mark(Kind.MARK, name)
        assert tail.follow()
        assert not tail.follow()
        recorder.mark(Kind.MARK, name)
        assert tail.follow()
    finally:
        recorder.close()


@both
def test_how_far_a_rank_is(tmp_path: Path, kind: str) -> None:
    recorder, tail = opened(kind, tmp_path / "capture")
    try:
        reduce, send, group = recorder.intern("all_reduce"), recorder.intern("send"), recorder.group("0")
        for seq in range(3):
            end = 0 if seq == 2 else 20
            recorder.comm(Kind.COMM, reduce, 10, end, 10, 64, group, seq, -1, 7, 0, -1, -1, 0, 0)
        recorder.comm(Kind.COMM, send, 30, 0, 30, 8, group, 0, 1, 7, 0, -1, -1, 0, 0)
        recorder.comm(Kind.WAIT, reduce, 40, 0, 40, -1, group, 2, -1, 0, 0, -1, -1, 0, 0)
        recorder.begin(Kind.PHASE, recorder.intern("checkpoint"))
        state = tail.state(4, lambda group: MEMBERS.get(group))
    finally:
        recorder.close()
    assert state.issued == {"0": 3}
    assert state.messages == {("0", 5, -1, "send"): 1}
    assert [(one.name, one.seq, one.bytes, one.dtype, one.peer, one.waited) for one in state.open] == [
        ("all_reduce", 2, 64, "float32", None, True), ("send", 0, 8, "float32", 5, False),
    ]  # fmt: skip
    assert (state.waiting, state.phases, state.whole) == (True, ("checkpoint",), True)


@both
def test_of_many_records_only_those_that_tell_are_decoded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who decodes all of them is busy for a second, which looks like work of the rank."""
    monkeypatch.setattr("dsprof.live.tail.MOST_RECENT", 100)
    decoded = []
    monkeypatch.setattr("dsprof.live.tail._decode", lambda record: decoded.append(1) or _decode(record))
    recorder, tail = opened(kind, tmp_path / "capture")
    try:
        reduce, send, groups = recorder.intern("all_reduce"), recorder.intern("send"), ("0", "1")
        zero, one = (recorder.group(name) for name in groups)
        recorder.begin(Kind.PHASE, recorder.intern("forward"))
        recorder.comm(Kind.COMM, reduce, 1, 2, 1, 64, one, 4, -1, 7, 0, -1, -1, 0, 0)
        recorder.comm(Kind.COMM, send, 1, 2, 1, 64, zero, 8, 1, 7, 0, -1, -1, 0, 0)
        for seq in range(2000):
            recorder.comm(Kind.COMM, reduce, 10, 20, 10, 64, zero, seq, -1, 7, 0, -1, -1, 0, 0)
            recorder.end(recorder.begin(Kind.PHASE, recorder.intern("forward")))
        state = tail.state(4, lambda group: MEMBERS.get(group))
    finally:
        recorder.close()
    assert state.issued == {"0": 2000, "1": 5}
    assert state.messages == {("0", 5, -1, "send"): 9}
    assert state.phases == ("forward",)
    assert sum(decoded) == 103
    assert min(seq for group, seq in state.recent if group == "0") == 1900


def test_a_capture_that_is_switched_off_says_nothing(tmp_path: Path) -> None:
    recorder, tail = opened("python", tmp_path / "capture")
    try:
        assert not tail.is_off()
        recorder.mark(Kind.MARK, recorder.intern(CAPTURE_OFF), 3.0)
        assert tail.is_off()
    finally:
        recorder.close()


WRITTEN = """# training thread 0x00007f01
Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/ctypes/util.py", line 9 in find
  File "/home/me/train.py", line 33 in fetch
  File "/home/me/train.py", line 90 in <module>
"""


def test_stacks_that_were_written_without_the_lock() -> None:
    first, second = parse_stacks(WRITTEN)
    assert (first["trains"], second["trains"]) == (True, False)
    assert user_site(first["frames"]) == "/home/me/train.py:33"
    assert user_site(second["frames"]) is None
    assert in_words(first["frames"]) == "find (util.py:9) < fetch (train.py:33) < <module> (train.py:90)"
