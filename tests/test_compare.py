"""`dsprof compare`: which of two jobs is slower, how certain that is, and where the difference lies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import Job, build

from dsprof import reports
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding, Gain, Where
from dsprof.cli import main
from dsprof.compare import MeasuredRun, NothingToCompare, compare
from dsprof.compare.decide import StepChange, decide, in_turns
from dsprof.launch.commit import checked_out
from dsprof.reports import comparison as drawn

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run(number: int, step_ms: float, noise: float = 0.0, seed: int = 0, **changes: Any) -> MeasuredRun:
    """A made-up run of 50 steps that began in minute `number`."""
    steps = step_ms * (1 + noise * np.random.default_rng(seed).standard_normal(50))
    parts = {"compute": 0.75 * step_ms, "data": 0.25 * step_ms}
    made = MeasuredRun(f"run-{number}", f"2026-11-26T00:{number:02}:00Z", tuple(steps.tolist()), parts, waited=0.0)
    return replace(made, **changes)


def turns(pairs: int, ratio: float, spread: float, seed: int) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """Runs that took turns, on a machine that drifts by half in the meantime."""
    random = np.random.default_rng(seed)
    drift = 100 * np.linspace(1, 1.5, pairs)
    off = 1 + spread * random.standard_normal((2, pairs))
    return (
        [run(2 * i, drift[i] * off[0, i]) for i in range(pairs)],
        [run(2 * i + 1, drift[i] * ratio * off[1, i]) for i in range(pairs)],
    )


def decided(before: list[MeasuredRun], after: list[MeasuredRun], within: float) -> StepChange:
    return decide(before, after, within, in_turns(before, after))


# --- the decision ---------------------------------------------------------------------------------


def test_runs_in_turns_are_pairs_though_the_machine_drifts() -> None:
    before, after = turns(10, 1.03, 0.008, seed=1)
    assert in_turns(before, after) == [(i, i) for i in range(10)]
    found = decided(before, after, 0.01)
    assert found.outcome == "worse"
    assert found.low < 0.03 < found.high
    assert decided(after, before, 0.01).outcome == "better"


def test_a_job_held_against_itself_is_seldom_another() -> None:
    """300 comparisons of ten pairs, at most three alarms; and +3 % is found in 95 of 100."""
    alarms = sum(decided(*turns(10, 1.0, 0.01, seed), 0.0).outcome in ("worse", "better") for seed in range(300))
    assert alarms <= 3
    found = sum(decided(*turns(10, 1.03, 0.01, seed), 0.0).outcome == "worse" for seed in range(100))
    assert found >= 95


def test_runs_of_one_side_after_the_other_are_no_pairs() -> None:
    before, after = [run(i, 100.0 + i % 2) for i in range(5)], [run(i + 5, 104.0 + i % 2) for i in range(5)]
    assert in_turns(before, after) is None
    found = decided(before, after, 0.01)
    assert found.outcome == "not certain"  # the machine may have changed in between
    assert "not made in turns" in found.rests_on
    mixed = decided([before[0], before[2], after[4]], [before[1], before[3], after[0]], 0.01)
    assert "turns" not in mixed.rests_on or mixed.rests_on.startswith("3 pairs")


@pytest.mark.parametrize(("ratio", "waited", "outcome"), [
    (1.05, 0.0, "not certain"),  # two runs of one job may well be so far apart
    (1.5, 0.0, "worse"),
    (0.5, 0.0, "better"),
    (1.5, 0.5, "not certain"),  # on a machine that others use
    (1.2, math.nan, "not certain"),
])  # fmt: skip
def test_single_runs_differ_by_more_than_their_steps_tell(ratio: float, waited: float, outcome: str) -> None:
    before, after = run(0, 100.0, 0.001, waited=waited), run(1, 100.0 * ratio, 0.001, waited=waited)
    found = decided([before], [after], 0.02)
    assert found.outcome == outcome
    assert found.low < found.change < found.high
    assert (found.runs_more > 0) == (outcome == "not certain")


def test_noise_of_the_steps_counts_too() -> None:
    quiet, noisy = (decided([run(0, 100.0, n, 1)], [run(1, 130.0, n, 2)], 0.02) for n in (0.001, 1.0))
    assert quiet.outcome == "worse"
    assert noisy.outcome == "not certain"


def test_equal_within_the_limit() -> None:
    before, after = turns(10, 1.0, 0.002, seed=3)
    assert decided(before, after, 0.02).outcome == "same"


# --- the comparison -------------------------------------------------------------------------------


def test_a_regression_is_slower_by_more_than_is_allowed() -> None:
    before, after = turns(10, 1.05, 0.005, seed=4)
    found = compare(before, after, limit=0.03)
    assert found.regression
    assert found.status == 1
    allowed = compare(before, after, limit=0.03, accepted={"new tokenizer": 0.04})
    assert not allowed.regression
    assert allowed.status == 0
    assert allowed.accepted == "new tokenizer"
    assert compare(before, after).status == 0  # nobody asked


def test_not_certain_has_a_status_of_its_own() -> None:
    found = compare([run(0, 100.0)], [run(1, 104.0)], limit=0.03)
    assert found.status == 4
    assert "5 runs of each, in turns, may tell" in found.headline


def test_the_parts_sum_to_the_step_and_the_worst_is_named() -> None:
    before, after = turns(5, 1.0, 0.001, seed=5)
    after = [
        replace(one, steps_ms=tuple(ms * 1.2 for ms in one.steps_ms),
                parts_ms={**one.parts_ms, "data": one.parts_ms["data"] + 0.2 * one.mean_ms})
        for one in after
    ]  # fmt: skip
    found = compare(before, after)
    assert sum(part.ms for part in found.parts) == pytest.approx(found.step.ms, rel=0.01)
    assert found.headline == "the step is 20 % slower, mostly by data"
    data = next(part for part in found.parts if part.name == "data")
    assert data.low is not None
    assert data.high is not None
    assert data.low < data.ms < data.high


def test_findings_that_came_and_went_and_what_else_differs() -> None:
    stall = {"data.stall": {"severity": "high", "title": "the loop waits", "ms": 3.0}}
    late = {"rank.straggler": {"severity": "low", "title": "rank 1 is late", "ms": 1.0}}
    before = run(0, 100.0, findings=stall, hosts=("a",), ranks=2, versions={"torch": "2.12"}, knobs={"gc.every": 5})
    after = run(1, 100.0, findings=late, hosts=("b",), ranks=4, versions={"torch": "2.13"})
    found = compare([before], [after])
    assert found.gone == {"data.stall": "the loop waits"}
    assert found.appeared == {"rank.straggler": "rank 1 is late"}
    assert found.warnings == (
        "the hosts differ: a against b",
        "the numbers of ranks differ: 2 against 4",
        "the versions differ: torch 2.12 against torch 2.13",
        "what --set turned differ: gc.every=5 against none",
    )


# --- what is kept of a run ------------------------------------------------------------------------


def measured(job: Job, *findings: Finding, name: str = "run") -> MeasuredRun:
    return MeasuredRun.of(build(job, findings), name)


def test_a_run_is_measured_as_its_analysis_says() -> None:
    finding = Finding("data.stall", "slow", "medium", Where(), (), Gain(3.0, 2.0, 2.0, 4.0, "replay"), ())
    analysis = build(Job(slow={1: 20.0}), (finding, replace(finding, code="pause.gc", severity="info")))
    found = MeasuredRun.of(analysis, "run")
    assert analysis.step_ms is not None
    assert found.mean_ms == pytest.approx(analysis.step_ms.mean)
    assert sum(found.parts_ms.values()) == pytest.approx(found.mean_ms, rel=1e-3)
    assert found.ranks_ms[1] - found.ranks_ms[0] == pytest.approx(20.0, abs=1.0)
    assert found.findings == {"data.stall": {"severity": "medium", "title": "slow", "ms": 3.0}}
    assert found.command == ("examples/train_gpt.py", "--steps", "40")


def test_a_baseline_file_says_the_same() -> None:
    found = measured(Job(slow={1: 20.0}))
    again = MeasuredRun.from_dict(json.loads(json.dumps(found.to_dict())), "file")
    assert math.isnan(again.waited)
    assert replace(again, waited=0.0) == replace(found, waited=0.0)


@pytest.mark.parametrize("spoilt", [
    {"schema": 2}, {"steps_ms": [1.0]}, {"steps_ms": [1.0, 2.0, -3.0, 4.0, 5.0]}, {"steps_ms": ["a"] * 9},
    {"parts_ms": []}, {"findings": 3}, {"ranks": "many"},
])  # fmt: skip
def test_a_file_that_is_no_baseline_is_refused(spoilt: dict[str, Any]) -> None:
    data = {**json.loads(json.dumps(measured(Job()).to_dict())), **spoilt}
    with pytest.raises(NothingToCompare, match="file"):
        MeasuredRun.from_dict(data, "file")


def test_a_run_without_steps_has_nothing_to_compare() -> None:
    with pytest.raises(NothingToCompare, match="run: 3 ordinary training steps were captured, and 5 are needed"):
        measured(Job(steps=3))


# --- the command ----------------------------------------------------------------------------------


@cache
def analysis_of(number: int) -> Analysis:
    """Of a run that began in minute `number`; every second loads longer."""
    analysis = build(Job(data=4.0 + 20.0 * (number % 2) + 0.01 * (number // 2)))
    return replace(analysis, run=replace(analysis.run, started=f"2026-11-26T00:0{number}:00Z", commit=COMMIT))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs base/0 to base/3 and slow/0 to slow/3, which took turns and of which the latter load longer."""
    by_path = {}
    for number in range(8):
        side = ("base", "slow")[number % 2]
        folder = tmp_path / side / str(number // 2)
        (folder / "capture").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"id": "x", "name": "x", "command": []}))
        by_path[folder] = analysis_of(number)
    monkeypatch.setattr(reports, "examine", lambda folder: by_path[folder.path.resolve()])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_of_runs(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "base", "slow"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("worse: the step is 11 % slower, mostly by data\n")
    assert "from 4 pairs of runs that took turns" in said
    assert f"commits {COMMIT[:12]} -> {COMMIT[:12]}" in said
    assert main(["compare", "slow", "base"]) == 0


def test_a_regression_fails_where_it_is_asked_for(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "base", "slow", "--fail-on-regression", "3%", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["regression"] is True
    assert found["outcome"] == "worse"
    assert main(["compare", "base", "slow", "--fail-on-regression", "3%", "--accept", "more data=20%"]) == 0
    assert "with what was accepted: more data" in capsys.readouterr().out


def test_a_baseline_is_saved_and_compared_with(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "slow", "base", "--save", "baseline.json"]) == 0
    assert main(["compare", "slow", "base", "--save", "baseline.json"]) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert main(["compare", "baseline.json", "slow", "--fail-on-regression", "3"]) == 1


def test_a_pattern_and_single_runs(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "base/[012]", "slow/[012]"]) == 0
    assert "from 3 pairs" in capsys.readouterr().out
    assert main(["compare", "base/0", "base/1"]) == 4
    assert capsys.readouterr().out.startswith("not certain: the step is ")


@pytest.mark.parametrize(("words", "status", "says"), [
    (["base", "base"], 2, "is given twice"),
    (["base", "slow", "--within", "a lot"], 2, "--within a lot: a percentage"),
    (["base", "slow", "--fail-on-regression", "-3%"], 2, "a percentage from 0 to 1000"),
    (["base", "slow", "--accept", "5%"], 2, "a name and a percentage are wanted"),
    (["base", "slow", "--json", "--markdown"], 2, "choose one"),
    (["base", "gone"], 3, "gone: no such run folder"),
    (["base", "gone/*"], 3, "no folder has such a name"),
    (["base", "base/0/run.json"], 3, "this is no baseline"),
])  # fmt: skip
def test_mistakes(folders: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str) -> None:
    assert main(["compare", *words]) == status
    assert says in capsys.readouterr().err


def test_names_from_the_job_do_nothing_in_a_pull_request(folders: Path) -> None:
    evil = "<img src=x onerror=alert(1)> | [x](http://e) @everyone \x1b[2J `rm`"
    found = {"data.stall": {"severity": "high", "title": evil, "ms": 1.0}}
    after = run(1, 150.0, findings=found, modules_ms={evil: 50.0}, hosts=(evil,))
    said = drawn.markdown(compare([run(0, 100.0)], [after]))
    assert "<img" not in said
    assert "\x1b" not in said
    assert "@everyone" not in said
    assert "\\[x\\](http://e)" in said
    assert "\x1b" not in drawn.text(compare([run(0, 100.0)], [after]))


# --- the commit -----------------------------------------------------------------------------------


def test_the_commit_that_is_checked_out(tmp_path: Path) -> None:
    git, deep = tmp_path / ".git", tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    git.mkdir()
    assert checked_out(deep) == ""
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert checked_out(deep) == COMMIT
    newer = COMMIT[::-1]
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text(newer)
    assert checked_out(deep) == newer
    (git / "HEAD").write_text(COMMIT)
    assert checked_out(deep) == COMMIT
    for hostile in ("ref: ../../../etc/passwd", "ref: refs/../../x", "ref: refs/heads/gone", "\x00" * 100):
        (git / "HEAD").write_text(hostile)
        assert checked_out(deep) == ""


def test_the_commit_of_a_worktree(tmp_path: Path) -> None:
    common, worktree = tmp_path / "main" / ".git", tmp_path / "other"
    own = common / "worktrees" / "other"
    own.mkdir(parents=True)
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {own}\n")
    (own / "HEAD").write_text("ref: refs/heads/other\n")
    (own / "commondir").write_text("../..\n")
    (common / "refs" / "heads").mkdir(parents=True)
    (common / "refs" / "heads" / "other").write_text(f"{COMMIT}\n")
    assert checked_out(worktree) == COMMIT
