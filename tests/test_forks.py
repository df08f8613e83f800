"""A process that forks while one of its threads holds a lock of the Python recorder: the child has no such thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import read_rows

from dsprof.collectors.capture import session
from dsprof.collectors.loop.backward import BackwardDone
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.wait_targets import Target
from dsprof.schema import Kind

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[PyRecorder]:
    recorder = PyRecorder(tmp_path)
    yield recorder
    recorder.close()


def locks(recorder: PyRecorder, backward: BackwardDone) -> list[Any]:
    """Every lock that a hook may take."""
    owners = (recorder, recorder.groups, recorder.targets, recorder._counters, backward)
    return [*(owner._lock for owner in owners), recorder._chunks._making, session._lock]


@contextmanager
def held_elsewhere(held: list[Any]) -> Iterator[None]:
    """Another thread holds them."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in held:
                stack.enter_context(lock)
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def status_of_child(work: Callable[[], None]) -> int:
    """0: it did the work. What waits for ever is killed after a minute."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_no_hook_of_the_child_waits(recorder: PyRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick, backward = recorder.intern("tick"), BackwardDone(recorder)
    monkeypatch.setattr(backward, "_task", lambda: 5)  # as within a backward

    def work() -> None:
        recorder.disarm_after_fork()
        assert recorder.group("new") == 0
        assert recorder.number("new") == 0
        recorder.groups.renew()
        recorder.intern("child")
        recorder.targets.remember_tensors(torch.ones(2), Target(1, 1, 0, -1, -1, False))
        recorder.note_error("a hook", "failed")
        recorder.mark(Kind.MARK, tick)
        backward.watch(cpu=True)
        with session._lock:
            recorder.close()

    with held_elsewhere(locks(recorder, backward)):
        assert status_of_child(work) == 0
    assert read_rows(tmp_path) == []
    recorder.mark(Kind.MARK, tick)
    assert [row.name for row in read_rows(tmp_path)] == ["tick"]
    assert recorder.errors == 0


def test_a_thread_that_forks_inside_leaves_what_it_entered(recorder: PyRecorder) -> None:
    """A signal's handler may fork while its thread is in a hook, and the child return from it."""

    def work() -> None:
        for lock in locks(recorder, backward):
            assert lock.acquire(blocking=False)

    backward = BackwardDone(recorder)
    child = 0
    with ExitStack() as stack:
        for lock in locks(recorder, backward):
            stack.enter_context(lock)
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
