"""A job while it runs: its newest steps are read beside it, and nothing is written."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from captures import build_helper, open_recorder
from factories import Job, build

from dsprof.cli import live, main
from dsprof.collectors.recorder.chunks import CHUNK_BYTES
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.reports import live as drawn
from dsprof.run import RunFolder
from dsprof.schema import Kind
from dsprof.trace import load
from dsprof.trace.recent import load_recent

MS = 1_000_000
RECORDS_A_STEP = 3
STEPS = 4 * CHUNK_RECORDS // RECORDS_A_STEP
NAME = "rank00000.0.host.4711"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Four chunks of a rank that has not ended: a step takes 10 ms."""
    build_helper()
    folder = RunFolder(tmp_path_factory.mktemp("live") / "run")
    folder.capture.mkdir(parents=True)
    folder.run_json.write_text(json.dumps({"id": "run", "name": "job", "command": [], "world_size": 1}))
    recorder = open_recorder("native", folder.capture / NAME, 1024 * CHUNK_BYTES)
    names = {name: recorder.intern(name) for name in ("forward", "backward", "optimizer")}
    for step in range(STEPS):
        at = (step + 1) * 10 * MS
        recorder.put(Kind.PHASE, names["forward"], at, at + 3 * MS)
        recorder.put(Kind.PHASE, names["backward"], at + 3 * MS, at + 8 * MS)
        recorder.put(Kind.PHASE, names["optimizer"], at + 8 * MS, at + 10 * MS)
        recorder.count_step()
    recorder.close()
    return folder


def listing(folder: RunFolder) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.path.rglob("*"))


def last_steps(rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    steps = rows[rows["kind"] == "step"].tail(100)
    return list(zip(steps["step"], steps["start_ns"], steps["dur_ns"], strict=True))


def test_the_newest_steps_are_those_of_the_whole_run(run: RunFolder, tmp_path: Path) -> None:
    before = listing(run)
    recent = load_recent(run, chunks=1)
    assert listing(run) == before
    assert recent.ranks == (0,)
    rows = recent.rows
    assert (rows["source"] == "measured").sum() <= 2 * CHUNK_RECORDS
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(run.path, copy.path)
    assert last_steps(rows) == last_steps(load(copy).rows)
    assert last_steps(rows)[-1][0] == STEPS - 1


def test_chunks_that_are_moved_while_it_runs(run: RunFolder, tmp_path: Path) -> None:
    copy, local = RunFolder(tmp_path / "run"), tmp_path / "memory" / "stand-in"
    shutil.copytree(run.path, copy.path)
    (local / "capture").mkdir(parents=True)
    shutil.copytree(copy.capture / NAME, local / "capture" / NAME)
    chunks = sorted((copy.capture / NAME).glob("chunk-*.bin"))
    for number, chunk in enumerate(chunks):
        (chunk if number > 1 else local / "capture" / NAME / chunk.name).unlink()
    recent = load_recent(copy, chunks=2, written_first=[local])
    assert last_steps(recent.rows) == last_steps(load_recent(run, chunks=2).rows)
    assert recent.run.warnings == []


def test_a_rank_that_cannot_be_read_costs_itself(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(run.path, copy.path)
    (copy.capture / "rank00001.0.host.4712").mkdir()
    assert load_recent(copy, chunks=1).ranks[0] == 0


# --- the command ----------------------------------------------------------------------------------


def test_it_looks_until_the_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.capture.mkdir(parents=True)
    info = {"id": "run", "name": "job", "command": []}
    folder.run_json.write_text(json.dumps(info))
    analysis = build(Job(slow={1: 20.0}))
    seen = iter([None, analysis, analysis])
    monkeypatch.setattr(drawn, "examine", lambda *_: next(seen))
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            folder.run_json.write_text(json.dumps({**info, "ended": "2026-11-26T00:00:00Z", "status": 0}))
        return False

    looks = list(live.looks(folder, 5.0, once=False, wait=wait))
    assert [(look.analysis is None, look.ended) for look in looks] == [(True, False), (False, False), (False, True)]
    assert len(waited) == 2
    assert all(seconds > 4 for seconds in waited)


def test_q_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.capture.mkdir(parents=True)
    folder.run_json.write_text(json.dumps({"id": "run", "name": "job", "command": []}))
    monkeypatch.setattr(drawn, "examine", lambda *_: None)
    assert len(list(live.looks(folder, 5.0, once=False, wait=lambda _: True))) == 1


def test_what_is_shown(run: RunFolder) -> None:
    analysis = build(Job(slow={1: 20.0}))
    said = drawn.text("run", analysis, io.StringIO(), ended=False, height=None)
    assert said.startswith("dsprof live  step 39, ")
    assert " steps/s (" in said.splitlines()[0]
    assert said.splitlines()[0].endswith("; q leaves; the job goes on")
    assert said.splitlines()[1].startswith("so far: inconclusive")
    assert "\npassed" not in said
    assert len(drawn.text("run", analysis, io.StringIO(), ended=False, height=8).splitlines()) == 8
    assert "waiting for the first steps to end" in drawn.text("run", None, io.StringIO(), ended=False, height=None)
    ended = drawn.text("run", replace(analysis, step_count=40), io.StringIO(), ended=True, height=None)
    assert "the job has ended: dsprof report" in ended.splitlines()[0]


class Terminal(io.StringIO):
    """Shows colours, and ASCII alone."""

    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_what_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    said = drawn.text("run", build(Job(slow={1: 20.0}), passed=("pause.gc",)), Terminal(), ended=False, height=None)
    assert "\x1b[" in said
    assert "so far: " in said
    assert "passed" not in said
    assert "capture" not in said
    said.encode("ascii")


def test_one_look_from_the_shell(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lowered = listing(run), []
    monkeypatch.setattr(os, "nice", lowered.append)  # for good, and this process has other tests to run
    assert main(["live", str(run.path), "--once"]) == 0
    assert lowered == [10]
    said = capsys.readouterr().out
    assert said.startswith(f"dsprof live  step {STEPS - 1:,}, 100 steps/s (10.0 ms) in the last 50 steps")
    assert main(["live", str(run.path), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ended"] is False
    assert found["findings"]["run"]["step_ms"]["mean"] == pytest.approx(10.0)
    assert listing(run) == before
    assert main(["live", str(run.path / "gone"), "--once"]) == 3
