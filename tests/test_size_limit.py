"""At the size limit the oldest middle of a capture goes: what is written, and what is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch  # noqa: F401  (the native helper is for the torch of this process)
from captures import RECORDERS, build_helper, open_recorder, read_names
from jobs import profile
from records import Record, capture_of, derive, derived, of, phase
from synthetic import MS, Job, write_capture

from dsprof import ondisk
from dsprof.analyzer import analyze
from dsprof.analyzer.align.steps import captured_part, completed_steps, steps_taken
from dsprof.collectors.recorder.chunks import CHUNK_BYTES
from dsprof.collectors.recorder.record import Recorder
from dsprof.ondisk import CHUNK_RECORDS, State
from dsprof.run import RunFolder
from dsprof.schema import CAPTURE_GAP, Kind
from dsprof.trace import load, merge
from dsprof.trace.capture import Capture, Gap, read_capture
from dsprof.trace.counters import read_counters
from dsprof.trace.derive import trace_rows


@pytest.fixture(params=RECORDERS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Recorder]:
    if request.param == "native":
        build_helper()
    return lambda chunks: open_recorder(request.param, tmp_path / "capture", chunks * CHUNK_BYTES)


def chunks(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("chunk-")) for path in folder.glob("chunk-*.bin"))


def wait_until_prepared(folder: Path, number: int) -> None:
    """So many chunks have been made. A loop that only records may be faster than a busy disk."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        counters = read_counters(folder, [])
        if counters is not None and counters.counts["prepared"] >= number:
            return
        time.sleep(0.001)
    raise AssertionError(f"chunk {number} was not made")


def test_the_first_quarter_and_the_newest_stay(opened: Callable[[int], Recorder], tmp_path: Path) -> None:
    recorder, folder = opened(8), tmp_path / "capture"
    tick = recorder.intern("tick")
    first = recorder.begin(Kind.PHASE, recorder.intern("whole run"))
    inner, late = [], 0
    for number in range(30 * CHUNK_RECORDS):
        recorder.put(Kind.MARK, tick, number + 1, number + 1)
        if number % CHUNK_RECORDS == 5:
            inner.append(recorder.begin(Kind.MARK, recorder.intern(f"of chunk {number // CHUNK_RECORDS}")))
            recorder.count_step()
        if number % CHUNK_RECORDS == CHUNK_RECORDS * 3 // 4:
            wait_until_prepared(folder, number // CHUNK_RECORDS + 2)
        if number == 20 * CHUNK_RECORDS:
            late = recorder.intern("a late name")
    for handle in [*inner, first]:  # most of them were given up
        recorder.end(handle)
    recorder.put(Kind.MARK, late, 5, 5)
    assert (recorder.dropped, recorder.errors) == (0, 0)
    recorder.close()
    # 30 * (CHUNK_RECORDS + 1) + 2 records: the last is in chunk 30.
    assert chunks(folder) == [0, 1, 25, 26, 27, 28, 29, 30]
    capture = read_capture(folder)
    kept = 2 * CHUNK_RECORDS
    assert capture.gaps == [Gap(before=kept, steps=25, chunks=23, given_up=True)]
    assert capture.counters is not None
    assert {name: capture.counters.counts[name] for name in ("dropped", "given_up", "prepared", "steps")} == {
        "dropped": 0, "given_up": 23, "prepared": 31, "steps": 30,
    }  # fmt: skip
    assert (capture.problems, capture.damaged) == (["meta.json: missing"], 0)
    ticks = capture.records["start_ns"][capture.records["name"] == tick].tolist()
    assert ticks[: kept - 3] == list(range(1, kept - 2))
    assert ticks[kept - 3 :] == list(range(ticks[kept - 3], 30 * CHUNK_RECORDS + 1))
    assert (capture.records["state"] == State.DONE).all()
    assert {"whole run", "of chunk 0", "of chunk 12", "a late name"} <= set(read_names(folder).values())


def test_what_never_stops_stays_within_the_limit(opened: Callable[[int], Recorder], tmp_path: Path) -> None:
    recorder = opened(3)  # as few as it takes: the smallest that --limit may be
    tick = recorder.intern("tick")
    most = 0
    for number in range(12 * CHUNK_RECORDS):
        recorder.put(Kind.MARK, tick, number + 1, number + 1)
        if number % 2048 == 0:
            most = max(most, len(chunks(tmp_path / "capture")))
        if number % CHUNK_RECORDS == CHUNK_RECORDS * 3 // 4:
            wait_until_prepared(tmp_path / "capture", number // CHUNK_RECORDS + 2)
    recorder.close()
    assert most <= 3 + 1  # the next one is made before the oldest goes
    records = read_capture(tmp_path / "capture").records
    assert len(records) >= 3 * CHUNK_RECORDS // 2
    assert int(records["start_ns"][-1]) == 12 * CHUNK_RECORDS


# --- what is made of a gap ----------------------------------------------------------------------


def step(at: float) -> list[Record]:
    return [phase("forward", at, at + 4), phase("backward", at + 5, at + 8), phase("optimizer", at + 8, at + 9)]


def with_gap(before: list[Record], after: list[Record], steps: int) -> Capture:
    capture = capture_of(*before, *after)
    return replace(capture, gaps=[Gap(len(before), steps, 7, given_up=True)])


def rows_of(capture: Capture) -> pd.DataFrame:
    return trace_rows(capture, 0, 0)


def test_no_step_spans_a_gap() -> None:
    before = [*step(0), *step(10), phase("forward", 20, 24)]
    after = [phase("backward", 5005, 5008), phase("optimizer", 5008, 5009), *step(5010), *step(5020)]
    rows = rows_of(with_gap(before, after, 500))
    assert derived(rows, "step") == [
        ("step", 0, 9), ("step", 9, 19), ("step", 5009, 5019), ("step", 5019, 5029),
    ]  # fmt: skip
    assert of(rows[rows["kind"] == "step"], "step") == [(0,), (1,), (501,), (502,)]
    partial = rows[(rows["kind"] == "phase") & rows["start_ns"].between(20 * MS, 5009 * MS - 1)]
    assert of(partial, "name", "step") == [("forward", 2), ("backward", 500), ("optimizer", 500)]
    assert [name for name, start, end in derived(rows) if start < 5000 and end > 24] == []
    (mark,) = of(rows[rows["name"] == CAPTURE_GAP], "start_ns", "dur_ns", "value")
    assert mark == (20 * MS, 4985 * MS, 500)
    assert steps_taken(rows) == 500
    assert captured_part(completed_steps(rows), 500) == "captured were steps 0 to 1, 501 to 502"


def test_an_optimizer_behind_a_gap_is_not_that_of_the_backward_before_it() -> None:
    rows = rows_of(with_gap([*step(0), phase("backward", 15, 18)], [phase("optimizer", 5008, 5009), *step(5010)], 9))
    assert derived(rows, "step") == [("step", 0, 9), ("step", 5009, 5019)]
    assert of(rows[rows["kind"] == "step"], "step") == [(0,), (10,)]


def test_a_gap_before_the_first_step() -> None:
    setup = [phase("checkpoint", 1, 2), phase("checkpoint", 3, 4)]
    rows = rows_of(with_gap(setup, [*step(1000), *step(1010)], 40))
    assert of(rows[rows["kind"] == "step"], "step", "start_ns") == [(41, 1009 * MS)]


def test_where_nobody_counts_steps_those_behind_a_gap_are_none() -> None:
    alone = [phase("backward", 5, 8), phase("backward", 15, 18), phase("data", 20, 21)]
    rows = rows_of(with_gap(alone, [phase("backward", 5005, 5008), phase("backward", 5015, 5018)], 0))
    assert derived(rows, "step") == derived(derive(*alone), "step") == [("step", 5, 8), ("step", 8, 18)]


def test_what_was_under_way_before_the_gap_and_ended_has_ended() -> None:
    before = [*step(0), phase("data", 10, 4000)]
    rows = rows_of(with_gap(before, [*step(5010), *step(5020)], 500))
    assert rows.loc[rows["name"] == "data", "ended"].all()
    assert rows["ended"].all()


# --- a job whose ranks gave up different chunks ---------------------------------------------------


def cut(capture: Capture, first: int, last: int, record_of_step: Callable[[int], int]) -> Capture:
    """Without the records from within step `first` to within step `last`."""
    begin, end = record_of_step(first) + 3, record_of_step(last) + 3
    kept = np.concatenate([capture.records[:begin], capture.records[end:]])
    return replace(capture, records=kept, gaps=[Gap(begin, last, 2, given_up=True)])


def test_steps_are_judged_where_every_rank_has_them(tmp_path: Path) -> None:
    whole = Job(ranks=2, steps=120)
    captures = whole.captures()
    each = len(captures[0].records) // 120
    cuts = {0: (30, 60), 1: (40, 75)}
    rows = []
    for rank, (first, last) in cuts.items():
        part = cut(captures[rank], first, last, lambda step: step * each)
        table = trace_rows(part, rank, 0)
        steps = table.loc[table["kind"] == "step", "step"].tolist()
        assert steps == [*range(first), *range(last + 1, 120)]
        rows.append(table)
    full = whole.trace()
    trace = replace(full, source=type(full).of(full.run, pd.concat(rows, ignore_index=True)).source)
    analysis = analyze(trace)
    expected = analyze(full)
    assert analysis.steps.groupby("step").size().loc[lambda count: count == 2].index.tolist() == [
        *range(30), *range(76, 120),
    ]  # fmt: skip
    ordinary = analysis.steps[analysis.steps["ordinary"]]["step"]
    assert not ordinary.between(30, 75).any()
    assert analysis.step_ms is not None
    assert expected.step_ms is not None
    assert analysis.step_ms.mean == pytest.approx(expected.step_ms.mean, rel=0.02)
    both = analysis.collectives[~analysis.collectives["step"].between(30, 75)]
    assert (both["ranks"] == 2).all()
    assert not any("is not the same" in warning for warning in analysis.capture.warnings)
    assert [finding.code for finding in analysis.findings if finding.severity != "info"] == [
        finding.code for finding in expected.findings if finding.severity != "info"
    ]
    assert "captured were steps 0 to 39, 61 to 119" in analysis.notes


def test_the_files_of_a_capture_with_a_gap_are_merged_and_it_is_said(tmp_path: Path) -> None:
    (capture,) = Job(ranks=1, steps=8000).captures().values()
    each = len(capture.records) // 8000
    capture.records = capture.records[: 7 * CHUNK_RECORDS // 2]
    folder = write_capture(capture, tmp_path / "capture")
    numbers = chunks(folder)
    assert len(numbers) == 4
    counted = [
        (number * CHUNK_RECORDS + 3) // each for number in numbers
    ]  # three gauges follow when a step was counted
    for number in numbers:
        path = folder / ondisk.chunk_name(number)
        content = bytearray(path.read_bytes())
        ondisk.CHUNK_PLACE.pack_into(content, ondisk.CHUNK_HEADER.size, 1, 1 if number == 3 else 0, counted[number])
        path.write_bytes(content)
    (folder / ondisk.chunk_name(1)).unlink()
    trace = load(RunFolder(tmp_path))
    last, after = CHUNK_RECORDS // each, counted[2]
    assert [warning for warning in trace.run.warnings if "missing" in warning] == [
        f"rank 0: steps {last} to {after} are missing: at its size limit (--limit) the capture gave up the oldest of "
        "its middle, 1 MiB"
    ]
    steps = completed_steps(trace.rows)["step"].tolist()
    assert steps == [*range(last), *range(after + 1, 7 * CHUNK_RECORDS // 2 // each)]
    assert merge(RunFolder(tmp_path)).warnings == trace.run.warnings


LONG = """
import torch, torch.distributed as dist, dsprof
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(1000 + 500 * dist.get_rank()):
        dsprof.mark("tick")
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("native", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_job_beyond_its_limit(native: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LONG)
    done = profile(tmp_path, script, flags=("--native", native, "--limit", "4MiB", "--no-report"))
    assert done.status == 0, done.stderr
    analysis = done.analysis()
    for rank, of_rank in analysis.steps.groupby("rank"):
        numbers = of_rank["step"].tolist()
        assert numbers[0] == 0
        assert numbers[-1] == 79
        assert len(numbers) < 60
        assert numbers == sorted(set(numbers))
        (said,) = (text for text in analysis.capture.warnings if text.startswith(f"rank {rank}: steps "))
        assert "are missing: at its size limit" in said
        (missing,) = np.flatnonzero(np.diff(numbers) > 1)
        assert f"steps {numbers[missing] + 1} to {numbers[missing + 1] - 1} are" in said
    # One all-reduce a step, with the one number that the step has on both ranks.
    gradients = analysis.collectives[analysis.collectives["purpose"] == "gradient"]
    both = gradients[(gradients["ranks"] == 2) & (gradients["step"] > 0)]  # DDP agrees on its buckets after the first
    assert len(both) > 10
    assert np.ptp(both["seq"] - both["step"]) == 0
    assert "captured were steps 0 to " in done.stderr
