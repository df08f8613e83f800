"""CPU time of DataLoader workers, as the training process sees it."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from dsprof.collectors.host import gc_and_cpu_time


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_process_without_children_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this process may have left children.
    monkeypatch.setattr("multiprocessing.process._children", set())
    assert gc_and_cpu_time.worker_seconds() is None


def test_children_count_while_they_run_and_after_they_ended() -> None:
    fork = multiprocessing.get_context("fork")
    sleeper = fork.Process(target=time.sleep, args=(60,), daemon=True)
    sleeper.start()
    try:
        before = gc_and_cpu_time.worker_seconds()
        assert before is not None
        worker = fork.Process(target=burn, args=(0.3,), daemon=True)
        worker.start()
        worker.join()
        after = gc_and_cpu_time.worker_seconds()
        assert after is not None
        assert after - before >= 0.25
    finally:
        sleeper.kill()
        sleeper.join()


def test_it_is_read_at_most_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = (100.0, 100.02, 100.04, 100.06, 100.1, 100.2)
    readings = iter([7.0, 8.0, 9.0])
    monkeypatch.setattr(gc_and_cpu_time, "worker_seconds", lambda: next(readings))
    worker_time = gc_and_cpu_time.WorkerTime(iter(moments).__next__)
    assert [worker_time.seconds() for _ in moments] == [7.0, None, None, 8.0, None, 9.0]
