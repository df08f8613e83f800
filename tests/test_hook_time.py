"""What capturing takes is measured: hooks in one step of 64, samples after steps, side threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from armed import captured, train
from captures import build_helper, open_recorder

from dsprof.analyzer.budget.capture_overhead import measure_overhead
from dsprof.collectors.capture import hook_time
from dsprof.collectors.capture.hook_time import EVERY, FIRST, HookTime
from dsprof.collectors.capture.step_end import StepEnd
from dsprof.live.activity import name_thread
from dsprof.schema import Kind

JOB = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(150):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


class Recorder:
    """Stands for the native one; its hooks take 5 us a step, of 20 calls from Python."""

    def __init__(self) -> None:
        self.switched: list[bool] = []
        self.put_: list[tuple[str, float]] = []
        self.names: list[str] = []

    def intern(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def time_hooks(self, on: bool) -> tuple[int, int]:
        self.switched.append(on)
        return 5_000, 20

    def put(self, kind: int, name: int, start_ns: int, end_ns: int, value: float, bytes: int) -> None:
        assert kind == Kind.GAUGE
        self.put_.append((self.names[name], value))


def test_one_step_of_64_is_timed() -> None:
    recorder: Any = Recorder()
    end = StepEnd(lambda: 0)
    timed = HookTime(recorder, end, frame_ns=lambda: 100.0, side_threads=lambda: 0.25)
    on, steps = [], []
    for step in range(1, 200):
        end.taken = step
        if step >= timed.due:
            timed.after_step()
            (on if recorder.switched[-1] else steps).append(step)
    assert steps == [FIRST, FIRST + EVERY, FIRST + 2 * EVERY, FIRST + 3 * EVERY][: len(steps)]
    assert [step + 1 for step in on][: len(steps)] == steps, "from the end of the step before"
    assert recorder.put_[:3] == [
        ("hook_seconds", pytest.approx(7.1e-6)),  # 5 us, and 21 calls with their frames
        ("sample_seconds", 0.0),
        ("side_thread_seconds", 0.25),
    ]
    end.spent_ns = 3_000_000
    timed.close()
    assert recorder.put_[-2:] == [("sample_seconds", 0.003), ("side_thread_seconds", 0.25)]


def test_the_time_of_our_threads_alone() -> None:
    stop, started = threading.Event(), threading.Barrier(3)

    def works(name: str) -> None:
        name_thread(name)
        total = 0
        started.wait()
        while not stop.is_set():
            total += 1

    threads = [threading.Thread(target=works, args=(name,)) for name in ("dsprof-x", "other")]
    before = hook_time.side_thread_seconds()
    for thread in threads:
        thread.start()
    started.wait()
    try:
        while (ours := hook_time.side_thread_seconds()) <= before:
            pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ours > before


def test_threads_of_others_and_those_that_have_ended_are_not_counted(tmp_path: Path) -> None:
    for task, name in (("1", "dsprof-x"), ("2", "other"), ("3", "dsprof-y")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "comm").write_text(f"{name}\n")
        (tmp_path / task / "schedstat").write_text(f"{task}000000000 5 7\n")
    (tmp_path / "4").mkdir()  # it ended after the folder was listed
    assert hook_time.side_thread_seconds(str(tmp_path)) == 1.0 + 3.0


def test_the_helper_times_its_hooks_while_it_is_told_to(tmp_path: Path) -> None:
    build_helper()
    recorder: Any = open_recorder("native", tmp_path / "capture")
    try:
        name = recorder.intern("x")
        recorder.end(recorder.begin(Kind.PHASE, name))
        assert recorder.time_hooks(False) == (0, 0)
        recorder.time_hooks(True)
        for _ in range(1000):
            recorder.end(recorder.begin(Kind.PHASE, name))
        spent_ns, calls = recorder.time_hooks(False)
        assert calls == 1000
        assert 1000 * 20 < spent_ns < 1000 * 100_000
        recorder.end(recorder.begin(Kind.PHASE, name))
        assert recorder.time_hooks(False) == (spent_ns, calls)
    finally:
        recorder.close()


def test_what_the_job_does_between_is_not_counted(tmp_path: Path) -> None:
    """A forward that sleeps in every step: the hook is around it, and its time is the job's."""
    slow = JOB.replace("import torch\n", "import time, torch\n", 1).replace("range(150)", "range(6)")
    slow = slow.replace("torch.nn.Linear(4, 4)", "torch.nn.Sequential(torch.nn.Linear(4, 4))").replace(
        "optimizer =", "model.register_forward_pre_hook(lambda *_: time.sleep(0.2))\noptimizer =", 1
    )
    done = train(tmp_path, slow, native="1")
    assert done.returncode == 0, done.stderr
    gauges = [row.value for row in captured(tmp_path).rows if row.name == "hook_seconds"]
    assert len(gauges) == 1
    assert gauges[0] is not None
    assert 0 < gauges[0] < 0.1


def test_a_job_that_is_captured_says_what_that_took(tmp_path: Path) -> None:
    done = train(tmp_path, JOB, native="1")
    assert done.returncode == 0, done.stderr
    rows = captured(tmp_path).rows
    told = {name: [row.value for row in rows if row.name == name] for name in ("hook_seconds", "sample_seconds")}
    assert len(told["hook_seconds"]) == 3  # of steps 4, 68 and 132
    assert len(told["sample_seconds"]) == 4  # and at the end
    assert told["sample_seconds"] == sorted(told["sample_seconds"])
    taken = [row.value for row in rows if row.name == "steps_taken"]
    assert (taken[:3], taken[-1]) == ([1, 2, 3], 150), "the last steps, too"
    assert json.dumps(told)


def gauges(rank: int, *told: tuple[str, float, float]) -> pd.DataFrame:
    """Each of name, second, value."""
    return pd.DataFrame(
        [{"rank": rank, "kind": "gauge", "name": name, "start_ns": int(at * 1e9), "value": value}
         for name, at, value in told]
    )  # fmt: skip


def test_the_share_of_the_step() -> None:
    ordinary = pd.DataFrame({"rank": [0, 0, 1], "dur_ns": [9_000_000, 11_000_000, 10_000_000]})
    told = (
        ("hook_seconds", 1.0, 20e-6), ("hook_seconds", 5.0, 20e-6), ("hook_seconds", 9.0, 900e-6),
        ("sample_seconds", 1.0, 0.01), ("sample_seconds", 11.0, 0.02),
        ("side_thread_seconds", 1.0, 0.5), ("side_thread_seconds", 11.0, 0.53),
    )  # fmt: skip
    rows = pd.concat([gauges(0, *told), gauges(1, *told)])
    assert measure_overhead(rows, ordinary) == pytest.approx(0.2 + 0.1 + 0.3)
    assert measure_overhead(gauges(0, *told), ordinary) is None, "the other rank did not measure"
    assert measure_overhead(gauges(0, *told[:1], *told[3:4], *told[5:6]), ordinary[:2]) is None, (
        "one reading is no rate"
    )
    assert measure_overhead(rows, ordinary[:0]) is None
