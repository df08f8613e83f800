"""What a rank dumped of its allocators becomes the trace's side tables, and is judged as an imported snapshot is."""

from __future__ import annotations

from pathlib import Path

import allocations
import pytest
from allocations import Device, MiB
from synthetic import Job, write_capture

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.run import RunFolder
from dsprof.schema import OOM_SNAPSHOT_NAME, SNAPSHOT_NAME
from dsprof.trace import load, merge


def run_of(tmp_path: Path, ranks: int = 2) -> tuple[RunFolder, list[Path]]:
    """A run that was captured, and the captures."""
    folder = RunFolder(tmp_path / "run")
    captures = Job(ranks=ranks, steps=12).captures()
    return folder, [write_capture(capture, folder.capture) for capture in captures.values()]


def analysis_of(folder: RunFolder) -> Analysis:
    return analyze(load(folder))


def test_a_live_history_is_judged(tmp_path: Path) -> None:
    folder, captures = run_of(tmp_path)
    device = Device()
    allocations.pinned(device)
    device.write(captures[1] / SNAPSHOT_NAME)
    analysis = analysis_of(folder)
    (told,) = [fact for fact in analysis.run.facts if fact["fact"] == "allocator"]
    assert (told["rank"], told["file"]) == (1, SNAPSHOT_NAME)
    assert told["settings"] == device.snapshot()["allocator_settings"]
    assert [held.rank for held in analysis.memory] == [1]
    (finding,) = [one for one in analysis.findings if one.code == "memory.fragmentation"]
    assert finding.where.ranks == (1,)
    assert "most of it beside what train.py:20 keeps" in finding.title
    assert finding.fixes[0].patch[0]["value"] == "expandable_segments:True"
    again = load(folder)
    assert list(again.memory) == [1], "read from its Parquet files the second time"


def test_a_snapshot_of_an_oom_tells_more_than_one_of_the_end(tmp_path: Path) -> None:
    folder, captures = run_of(tmp_path, ranks=1)
    short, steady = Device(device_bytes=1900 * MiB), Device()
    with pytest.raises(allocations.OutOfMemory):
        allocations.pinned(short)
    allocations.steady(steady)
    short.write(captures[0] / OOM_SNAPSHOT_NAME)
    steady.write(captures[0] / SNAPSHOT_NAME)
    (finding,) = [one for one in analysis_of(folder).findings if one.code == "memory.oom-risk"]
    assert finding.title == "out of memory at train.py:30: 50.0 MiB more, with 780 MiB in use"


def test_one_that_comes_after_a_merge_is_read(tmp_path: Path) -> None:
    folder, captures = run_of(tmp_path, ranks=1)
    merge(folder)
    assert not load(folder).memory
    device = Device()
    allocations.steady(device)
    device.write(captures[0] / SNAPSHOT_NAME)
    assert list(load(folder).memory) == [0]


@pytest.mark.parametrize("content", [b"", b"\x80\x04cos\nsystem\n.", b"not a pickle"])
def test_a_damaged_one_costs_only_itself(tmp_path: Path, content: bytes) -> None:
    folder, captures = run_of(tmp_path)
    (captures[0] / SNAPSHOT_NAME).write_bytes(content)
    trace = load(folder)
    assert not trace.memory
    assert trace.ranks == (0, 1)
    (warning,) = [text for text in trace.run.warnings if "memory.pickle" in text]
    assert warning.startswith("rank 0: memory.pickle: not read (")
