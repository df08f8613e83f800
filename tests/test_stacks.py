"""Samples of the training thread's stack: the lines in which ranks differ, and what lies between the phases."""

from __future__ import annotations

import math
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding
from dsprof.collectors.hooking import statements
from dsprof.collectors.host import stack_samples
from dsprof.collectors.host.stack_samples import Samples, library_function

STACKS = {
    1: ["/home/me/train.py:40", "/home/me/model.py:12", "torch/nn/modules/linear.py:forward"],
    2: ["/home/me/train.py:40", "/home/me/model.py:31", "torch/_dynamo/eval_frame.py:compile_wrapper"],
    3: ["/home/me/train.py:41", "torch/_tensor.py:backward"],
    4: ["/home/me/train.py:44", "/home/me/train.py:58"],
}


def facts(ranks: int) -> list[dict[str, Any]]:
    return [
        {"fact": "stack", "rank": rank, "number": number, "frames": frames}
        for rank in range(ranks)
        for number, frames in STACKS.items()
    ]


def late(rank: int, step: int) -> list[tuple[float, int]]:
    """Every 10 ms of a step: of rank 1's forward of 90 ms, 50 are compilation; others take 40."""
    forward = 90 if rank == 1 else 40
    found = [(ms + 0.5, 2 if rank == 1 and ms < 50 else 1) for ms in range(2, forward, 10)]
    return [*found, *[(ms + 0.5, 3) for ms in range(forward, forward + 80, 10)]]


def test_the_line_by_which_a_late_rank_differs() -> None:
    job = Job(ranks=2, steps=24, forward=lambda rank, step: 90.0 if rank == 1 else 40.0, stacks=late, facts=facts(2))
    found = analyze(job.trace()).findings[0]
    assert (found.code, found.where.ranks) == ("rank.straggler", (1,))
    line = "model.py:31 → torch/_dynamo/eval_frame.py:compile_wrapper"
    assert f": {line} takes " in found.title
    assert found.title.endswith("more than on rank 0")
    (told,) = [item for item in found.evidence if item.metric == f"in {line} a step"]
    assert told.value == pytest.approx(50, rel=0.15)
    assert told.expected == 0
    assert found.fixes[0].title.startswith(f"look at {line}, in which rank 1 is ")
    assert found.fixes[0].patch == ({"file": "/home/me/model.py", "line": 31, "argument": None, "value": None},)


def test_where_all_lines_take_longer_none_is_told() -> None:
    """A slower machine: what it spends in each is in proportion."""

    def spread(rank: int, step: int) -> list[tuple[float, int]]:
        return [(ms + 0.5, 1 + ms // 10 % 3) for ms in range(0, 160 if rank == 1 else 120, 10)]

    job = Job(ranks=3, steps=24, forward=lambda rank, step: 60.0 if rank == 1 else 40.0,
              backward=lambda rank, step: 100.0 if rank == 1 else 80.0, stacks=spread, facts=facts(3))  # fmt: skip
    found = next(one for one in analyze(job.trace()).findings if one.code == "rank.straggler")
    assert " → " not in found.title


def two_callers(rank: int, step: int) -> list[tuple[float, int]]:
    """Both spend 40 ms of forward in helper.py:7, which another line calls on rank 1; that is 50 ms in b.py:26, too."""
    if rank == 0:
        return [(ms + 0.5, 1) for ms in range(2, 40, 5)] + [(ms + 0.5, 4) for ms in range(42, 182, 5)]
    found = [(ms + 0.5, 2 if ms < 42 else 3) for ms in range(2, 90, 5)]
    return [*found, *[(ms + 0.5, 4) for ms in range(92, 182, 5)]]


def stated(stacks: dict[int, list[str]]) -> list[dict[str, Any]]:
    return [
        {"fact": "stack", "rank": rank, "number": number, "frames": frames}
        for rank in range(2)
        for number, frames in stacks.items()
    ]


@pytest.mark.parametrize("inside", [False, True], ids=["beside what both call", "in what both call"])
def test_a_line_that_two_ranks_reach_by_different_callers_is_counted_as_one(inside: bool) -> None:
    """By call paths rank 1 is 90 ms longer below train.py:42, of which no line that it calls has most."""
    longer = "/j/helper.py:7" if inside else "/j/b.py:26"
    stacks = {
        1: ["/j/train.py:40", "/j/a.py:20", "/j/helper.py:7", "torch/functional.py:einsum"],
        2: ["/j/train.py:42", "/j/b.py:25", "/j/helper.py:7", "torch/functional.py:einsum"],
        3: ["/j/train.py:42", *(["/j/b.py:25"] if inside else []), longer],
        4: ["/j/train.py:48", "torch/_tensor.py:backward"],
    }
    job = Job(ranks=2, steps=24, forward=lambda rank, step: 90.0 if rank == 1 else 40.0, stacks=two_callers,
              facts=stated(stacks))  # fmt: skip
    found = analyze(job.trace()).findings[0]
    assert (found.code, found.where.ranks) == ("rank.straggler", (1,))
    name = longer.removeprefix("/j/")
    (told,) = [item for item in found.evidence if item.metric == f"in {name} a step"]
    assert told.value == pytest.approx(90 if inside else 50, rel=0.15)
    assert told.expected == pytest.approx(40 if inside else 0, rel=0.15)
    assert f": {name} takes " in found.title


def test_a_branch_that_calls_the_same_is_no_difference() -> None:
    """Rank 1 is late on a slower machine, and calls what all call from a line of its own."""
    stacks = {
        1: ["/j/train.py:40", "/j/model.py:12"],
        2: ["/j/train.py:42", "/j/model.py:12"],
        3: ["/j/train.py:40", "/j/model.py:13"],
        4: ["/j/train.py:42", "/j/model.py:13"],
        5: ["/j/train.py:40", "/j/model.py:14"],
        6: ["/j/train.py:42", "/j/model.py:14"],
    }

    def spread(rank: int, step: int) -> list[tuple[float, int]]:
        return [(ms + 0.5, 1 + rank + 2 * (ms // 5 % 3)) for ms in range(0, 150 if rank else 120, 5)]

    job = Job(ranks=2, steps=24, forward=lambda rank, step: 70.0 if rank == 1 else 40.0, stacks=spread,
              facts=stated(stacks))  # fmt: skip
    found = analyze(job.trace()).findings[0]
    assert (found.code, found.where.ranks) == ("rank.straggler", (1,))
    assert "train.py:42" not in found.title


def test_what_lies_between_the_phases_has_a_line() -> None:
    """30 ms between the optimizer and the next batch, which no phase covers."""

    def samples(rank: int, step: int) -> list[tuple[float, int]]:
        return [(ms + 0.5, 4) for ms in range(0, 30, 5)] + [(ms + 0.5, 3) for ms in range(72, 150, 10)]

    job = Job(ranks=2, steps=24, pause_before=30.0, stacks=samples, facts=facts(2))
    headline = analyze(job.trace()).verdict.headline
    assert "outside the phases of the loop, mostly between optimizer and data, in train.py:58" in headline


def test_the_line_of_a_transform_that_the_loop_waits_for() -> None:
    """30 ms of loading without workers, and most of it in one line of the dataset."""
    stacks = {
        1: ["/j/train.py:40", "/j/items.py:9", "PIL/Image.py:resize"],
        2: ["/j/train.py:40", "/j/items.py:7"],
        3: ["/j/train.py:44", "torch/_tensor.py:backward"],
    }

    def samples(rank: int, step: int) -> list[tuple[float, int]]:
        return [(ms + 0.5, 2 if ms < 5 else 1 if ms < 30 else 3) for ms in range(0, 160, 5)]

    def stalled(workers: int) -> Finding:
        loader = {"fact": "dataloader", "rank": 0, "number": 1, "num_workers": workers, "site": "/j/train.py:12"}
        job = Job(ranks=2, steps=24, data=lambda rank, step: 30.0, loader=1, stacks=samples,
                  facts=[*stated(stacks), loader])  # fmt: skip
        return next(one for one in analyze(job.trace()).findings if one.code == "data.stall")

    found = stalled(0)
    assert re.fullmatch(r"the loop waits \S+ ms of each step for input, mostly in items.py:9 → PIL/Image.py:resize.*",
                        found.title)  # fmt: skip
    (told,) = [item for item in found.evidence if item.metric.startswith("in items.py:9")]
    assert told.value == pytest.approx(25, rel=0.15)
    assert "items.py" not in stalled(2).title, "what the workers do is not seen there"


# --- the sampler --------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> tuple[Samples, list[tuple[Any, ...]], list[dict[str, Any]]]:
    """A sampler of this thread, what it recorded, and what it stated."""
    rows: list[tuple[Any, ...]] = []
    stated: list[dict[str, Any]] = []
    monkeypatch.setattr(statements, "_sink", stated.append)
    recorder = SimpleNamespace(intern=lambda name: 7, put=lambda *row: rows.append(row))
    capture: Any = SimpleNamespace(recorder=recorder, is_on=lambda: True)
    return Samples(capture), rows, stated


def test_each_stack_is_stated_once_and_each_sample_a_row(sampled: Any) -> None:
    samples, rows, stated = sampled
    ready, go_on = threading.Event(), threading.Event()

    def trains() -> None:
        samples.stepped()
        ready.set()
        go_on.wait(20)  # the line that is told

    thread = threading.Thread(target=trains)
    thread.start()
    ready.wait(20)
    deadline = time.monotonic() + 20
    while not any("Event" in str(one) or "wait" in str(one) for one in stated) and time.monotonic() < deadline:
        samples.sample()
    before = len(stated)
    samples.sample()
    samples.sample()
    go_on.set()
    thread.join()
    assert len(stated) == before
    line = trains.__code__.co_firstlineno + 3
    last = stated[-1]
    assert last["frames"][0] == f"{__file__}:{line}"
    assert last["frames"][1:] == ["threading.py:wait", "threading.py:wait"]
    assert rows[-1][4:] == rows[-2][4:] == (float(last["number"]), -1)
    recorded = len(rows)
    samples.sample()  # of a thread that has ended
    assert len(rows) == recorded


def test_costly_samples_are_taken_less_often(sampled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 0.5 ms, and as much again to wake up: as many are taken as 0.1 % of the time allows, and 7 more in
    each doubling of it, of which a job's last three quarters hold two, however long it is."""
    samples, *_ = sampled
    clock, spent = [100.0], iter(range(1_000_000))
    monkeypatch.setattr(stack_samples.time, "thread_time", lambda: next(spent) * 5e-4)
    monkeypatch.setattr(stack_samples.time, "monotonic", lambda: clock[0])
    looks = samples.looks(lambda: False)
    next(looks)
    next(looks)
    assert samples._pause_s == stack_samples.BEFORE_TRAINING_S, "no step was taken"
    assert next(spent) == 0, "so no sample either"
    samples.stepped()
    taken: list[float] = []
    while clock[0] < 100 + 1200:
        next(looks)
        taken.append(clock[0] - 100)
        clock[0] += samples._pause_s
    for length in (60, 300, 1200):
        of_all = sum(when < length for when in taken)
        assert of_all == pytest.approx(length + 7 * math.log2(1 + length), rel=0.1), "1 ms each"
        counted = sum(length / 4 < when < length for when in taken)
        assert counted == pytest.approx(0.75 * length + 14, rel=0.1)
    assert 0.5 * samples._pause_s <= samples.pause_s() <= 1.5 * samples._pause_s


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("/opt/bin/torchrun", "opt/bin/torchrun:main"),
        ("/opt/bin/jobs/train.py", ""),
        ("/opt/binary/train.py", ""),
    ],
)
def test_only_a_command_itself_is_no_script(monkeypatch: pytest.MonkeyPatch, file: str, function: str) -> None:
    """As for the line of a caller: what lies in a folder below, or beside, is the user's."""
    monkeypatch.setattr(stack_samples, "COMMANDS", frozenset(["/opt/bin"]))
    assert library_function(file, "main") == function
