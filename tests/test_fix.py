"""Trying what findings advise: which changes there are, turns, and when one is kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsprof.analyzer.text import with_interval
from dsprof.cli import main
from dsprof.cli.trials import refuse_to_save
from dsprof.fix import Turns, decide, proposals, slug
from dsprof.knobs import flags
from dsprof.launch.again import RepeatedJob
from dsprof.launch.job import LaunchError
from dsprof.run import RunFolder, RunInfo

STALL = {
    "code": "data.stall", "gain": {"ms": 20.0, "low": 18.0, "high": 22.0, "percent": 36.0, "method": "replay"},
    "fixes": [{"kind": "code", "title": "more workers", "patch": [], "gain": None, "set": {"loader.num_workers": 2}}],
}  # fmt: skip
SLOW_RANK = {
    "code": "rank.straggler",
    "gain": None,
    "fixes": [{"kind": "code", "title": "look", "patch": [], "set": {}}],
}


def write_run(folder: Path, step_ms: float | None, *, status: int = 0, findings: Any = (), warnings: Any = ()) -> None:
    """A run folder as `dsprof run` leaves it, as far as a comparison reads it."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.write_info(RunInfo(id=folder.name, name="train", command=["dsprof", "run", "train.py"], status=status))
    found = {
        "findings": list(findings), "run": {"step_ms": step_ms and {"mean": step_ms}},
        "verdict": {"headline": "rank 1 ended by exit status 3"}, "capture": {"warnings": list(warnings)},
    }  # fmt: skip
    run.findings_json.write_text(json.dumps(found))


# --- what is offered


def test_fixes_that_a_flag_can_make_are_offered_worst_finding_first() -> None:
    (one,) = proposals({"findings": [SLOW_RANK, STALL]})
    assert (one.code, one.title) == ("data.stall", "more workers")
    assert flags(one.knobs.items()) == ["--set", "loader.num_workers=2"]
    assert one.gain == STALL["gain"]


# --- when it is kept


def test_a_change_that_saves_is_kept_and_one_that_costs_withdrawn() -> None:
    pairs = [(100.0, 80.0), (101.0, 80.5), (99.0, 80.2), (100.0, 80.1), (99.5, 80.0)]
    kept = decide(pairs, 6)
    assert (kept.outcome, round(kept.saved_ms, 2)) == ("kept", 19.74)
    assert kept.low < kept.saved_ms < kept.high
    assert decide([(80.0, 100.0), (80.5, 101.0), (80.2, 99.0)], 6).outcome == "withdrawn"
    assert decide([(100.0, 99.9), (100.0, 100.1), (100.0, 100.0)], 6).outcome == "withdrawn"
    assert decide([(100.0, 90.0), (120.0, 119.0), (90.0, 95.0)], 6).outcome == "undecided"
    assert decide([(100.0, 80.0), (101.0, 80.5)], 6).outcome == "undecided"


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05, 0.2])
def test_a_change_that_does_nothing_is_never_kept(noise: float) -> None:
    """600 comparisons of a job with itself, the steps of whose runs differ by so much of their mean."""
    draw = np.random.default_rng(1)
    kept = 0
    for _ in range(600):
        pairs = [(float(a), float(b)) for a, b in 100 * (1 + noise * draw.standard_normal((6, 2)))]
        looks = [decide(pairs[:count], 6).outcome for count in range(3, 7)]
        first = next((one for one in looks if one != "undecided"), "undecided")
        kept += first == "kept"
    assert kept <= 3  # 0.5 % of them, at most, at any look


def test_jobs_of_a_busy_machine_are_compared_by_their_ratio() -> None:
    """Each pair is slower by another factor."""
    kept = decide([(290.0, 145.0), (497.0, 240.0), (458.0, 235.0), (914.0, 450.0)], 6)
    assert (kept.outcome, round(kept.percent)) == ("kept", 50)
    nothing = decide([(100.0, 1e9), (1e9, 100.0)], 6)
    assert nothing.outcome == "undecided"
    assert nothing.low < 0 < nothing.high


def test_three_pairs_are_enough_of_what_was_predicted_or_is_much() -> None:
    """Jobs that happen to be fast or slow as a whole show a fifth by chance, but not what was predicted."""
    pairs = [(100.0, 80.0), (101.0, 80.5), (99.0, 80.2), (100.0, 80.1)]
    assert [decide(pairs[:count], 6).outcome for count in (3, 4)] == ["undecided", "undecided"]
    assert decide(pairs[:3], 6, (15.0, 25.0)).outcome == "kept"
    assert decide(pairs[:3], 6, (25.0, 35.0)).outcome == "undecided"
    assert decide([(100.0, 50.0), (101.0, 50.5), (99.0, 50.2)], 6).outcome == "kept"
    assert decide(pairs[:3], 3).outcome == "kept"


@pytest.mark.parametrize("by", [0.1, 0.2])
def test_jobs_that_are_fast_or_slow_by_chance_hardly_ever_keep_what_does_nothing(by: float) -> None:
    """1200 comparisons of a job with itself, half of whose runs are slower; if three pairs decided, 1 % were kept."""
    draw = np.random.default_rng(4)
    kept = 0
    for _ in range(1200):
        slow = draw.random((6, 2)) < 0.5
        pairs = [(float(a), float(b)) for a, b in 100 * (1 + by * slow) * (1 + 0.01 * draw.standard_normal((6, 2)))]
        looks = [decide(pairs[:count], 6).outcome for count in range(3, 7)]
        kept += next((one for one in looks if one != "undecided"), "undecided") == "kept"
    assert kept <= 4


def test_a_change_that_saves_a_tenth_is_found_in_most_comparisons() -> None:
    draw = np.random.default_rng(2)
    kept = 0
    for _ in range(200):
        pairs = [(float(a), float(0.9 * b)) for a, b in 100 * (1 + 0.01 * draw.standard_normal((6, 2)))]
        looks = [decide(pairs[:count], 6).outcome for count in range(3, 7)]
        kept += next((one for one in looks if one != "undecided"), "undecided") == "kept"
    assert kept >= 190


def test_savings_are_told_in_the_unit_that_fits_and_losses_as_such() -> None:
    assert with_interval(26156.3, 24100.0, 28212.0, 12.3) == "saves 26.2 s a step (12 %) [24.1, 28.2]"
    assert with_interval(-3.1, -5.0, -1.2, -2.04) == "costs 3.10 ms a step (2.0 %) [1.20, 5.00]"
    assert with_interval(-1.78e-15, -0.184, 0.184, -4.4e-15) == "costs 0 ms a step (<0.1 %) [-0.18, 0.18]"


# --- turns


class Jobs:
    """Runs that take what a script says, one after the other."""

    def __init__(self, original: float, changed: float | None, **of_changed: Any) -> None:
        self.original, self.changed, self.of_changed = original, changed, of_changed
        self.ran: list[str] = []

    def __call__(self, path: Path, knobs: Mapping[str, Any]) -> str:
        self.ran.append(path.name)
        shutil.rmtree(path, ignore_errors=True)  # as --force has it
        jitter = 0.1 * len(self.ran)
        if knobs:
            write_run(path, self.changed and self.changed + jitter, **self.of_changed)
        else:
            write_run(path, self.original + jitter)
        return ""


def turns(folder: Path, jobs: Jobs, most_pairs: int = 5) -> Turns:
    return Turns(folder, {"loader.num_workers": 2}, jobs, lambda _: None, most_pairs)


def test_jobs_take_turns_that_change_sides_and_stop_when_decided(tmp_path: Path) -> None:
    jobs = Jobs(100.0, 50.0)
    comparison = turns(tmp_path, jobs).compare()
    assert jobs.ran == ["original-1", "changed-1", "changed-2", "original-2", "original-3", "changed-3"]
    assert comparison.decision is not None
    assert comparison.decision.outcome == "kept"


def test_jobs_that_have_ended_are_not_run_again(tmp_path: Path) -> None:
    turns(tmp_path, Jobs(100.0, 50.0)).compare()
    jobs = Jobs(100.0, 50.0)
    turns(tmp_path, jobs).compare()
    assert jobs.ran == []


def test_a_job_that_failed_is_run_again(tmp_path: Path) -> None:
    assert turns(tmp_path, Jobs(100.0, 50.0, status=130)).compare().failed == "changed"
    jobs = Jobs(100.0, 50.0)
    comparison = turns(tmp_path, jobs).compare()
    assert jobs.ran[:2] == ["changed-1", "changed-2"]
    assert comparison.decision is not None
    assert comparison.decision.outcome == "kept"


def test_a_job_that_fails_with_the_change_says_why(tmp_path: Path) -> None:
    comparison = turns(tmp_path, Jobs(100.0, 50.0, status=3)).compare()
    assert (comparison.failed, comparison.outcome) == ("changed", "withdrawn")
    assert "the changed job failed: it ended with status 3: rank 1 ended" in comparison.why


def test_a_change_that_reaches_nothing_is_not_compared(tmp_path: Path) -> None:
    warning = "--set loader.num_workers=2 was not applied: nothing in the job takes it"
    assert (
        "nothing in the job takes it; nothing is compared"
        in turns(tmp_path, Jobs(100.0, 50.0, warnings=[warning])).compare().why
    )


def test_a_job_without_an_ordinary_step_says_what_to_do(tmp_path: Path) -> None:
    comparison = turns(tmp_path, Jobs(100.0, None)).compare()
    assert "the changed job tells nothing: none of its steps is ordinary: run more steps" in comparison.why
    assert (comparison.failed, comparison.outcome) == ("neither", "undecided")


def test_a_change_is_not_blamed_where_its_job_ended_well_and_was_not_analyzed(tmp_path: Path) -> None:
    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        shutil.rmtree(path, ignore_errors=True)
        write_run(path, 100.0)
        if knobs:
            RunFolder(path).findings_json.unlink()
        return ""

    comparison = Turns(tmp_path, {"loader.num_workers": 2}, run, lambda _: None, 5).compare()
    assert comparison.outcome == "undecided"
    assert "the changed job tells nothing: it ended with status 0 and could not be analyzed" in comparison.why


def test_the_job_as_it_was_is_run_once_more_where_it_fails(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        ran.append(path.name)
        shutil.rmtree(path, ignore_errors=True)
        write_run(path, 50.0 if knobs else 100.0, status=137 if ran == ["original-1"] else 0)
        return ""

    comparison = Turns(tmp_path, {"loader.num_workers": 2}, run, lambda _: None, 5).compare()
    assert ran[:3] == ["original-1", "original-1", "changed-1"]
    assert comparison.outcome == "kept"


def test_a_job_that_was_ended_since_it_took_too_long_says_so(tmp_path: Path) -> None:
    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        shutil.rmtree(path, ignore_errors=True)
        write_run(path, 100.0)
        return "it was not done after 9 s, and was ended" if knobs else ""

    comparison = Turns(tmp_path, {"loader.num_workers": 2}, run, lambda _: None, 5).compare()
    assert comparison.outcome == "withdrawn"
    assert "the changed job failed: it was not done after 9 s" in comparison.why


def test_a_comparison_ends_with_the_budget(tmp_path: Path) -> None:
    jobs = Jobs(100.0, 50.0)
    comparison = Turns(tmp_path, {"a": 1}, jobs, lambda _: None, 5, go_on=lambda: len(jobs.ran) < 4).compare()
    assert (comparison.outcome, comparison.why) == ("undecided", "the budget was spent after 2 of 5 pairs")
    assert comparison.decision is not None
    assert round(comparison.decision.saved_ms) == 50


def test_what_both_jobs_turn_is_beside_the_change(tmp_path: Path) -> None:
    turned: list[Mapping[str, Any]] = []

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        turned.append(knobs)
        write_run(path, 100.0)
        return ""

    Turns(tmp_path, {"a": 2}, run, lambda _: None, 3, base={"a": 1, "b": 3}).compare()
    assert turned[:2] == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


# --- the command


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "first"
    write_run(folder, 57.0, findings=[STALL])
    run = RunFolder(folder)
    command = [
        "dsprof",
        "run",
        "-o",
        "first",
        "--force",
        "--nproc-per-node",
        "2",
        "--set=gc.every=3",
        "train.py",
        "-o",
        "x",
    ]
    run.write_rerun({"command": command, "cwd": str(tmp_path), "python": "python"})
    return run


def test_it_lists_what_to_try_and_what_that_should_save(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "1. data.stall  more workers" in said
    assert "saves 20.0 ms a step (36 %) [18.0, 22.0]" in said
    assert "dsprof run --set loader.num_workers=2" in said
    assert f"prove  dsprof fix {run.path} -n 1 --verify\n" in said


def test_what_was_asked_for_is_what_is_proved(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(run.path), "--set", "loader.num_workers=4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1. what --set asks for\n")
    assert f"prove  dsprof fix {run.path} --set loader.num_workers=4 --verify\n" in said


def test_it_runs_both_and_tells_predicted_and_measured(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def start(again: RepeatedJob, path: Path, settings: Mapping[str, str], *_: Any) -> str:
        lines.append(again.line(path, settings))
        write_run(path, (40.0 if settings == {"loader.num_workers": "2"} else 60.0) + 0.1 * len(lines))
        return ""

    monkeypatch.setattr(RepeatedJob, "run", start)
    assert main(["fix", str(run.path), "--verify"]) == 0
    job = ["--nproc-per-node", "2", "--set", "gc.every=3", "train.py", "-o", "x"]
    assert [line[line.index("abort") + 1 :] for line in lines[:2]] == [job, ["--set", "loader.num_workers=2", *job]]
    said = capsys.readouterr().out
    assert "predicted  saves 20.0 ms a step (36 %) [18.0, 22.0]" in said
    assert "measured   saves 20" in said
    assert "kept: --set loader.num_workers=2" in said
    verified = run.read_info().verified["data.stall"]
    assert (verified["outcome"], verified["set"], len(verified["pairs"])) == ("kept", {"loader.num_workers": 2}, 3)


def test_what_the_run_had_turned_stays_unless_the_change_turns_it() -> None:
    words = ["-q", "-oout", "--set", "gc.every=3", "--set=env.A=b", "--nnodes", "2", "--", "x", "--set", "gc.every=1"]
    again = RepeatedJob.of_words(words, 7, python="python", cwd=".")
    rest = ["--set", "env.A=b", "--nnodes", "2", "--", "x", "--set", "gc.every=1"]
    start = ["python", "-m", "dsprof", "run", "-o", "place", "--force", "--no-report", "-q", "--on-hang", "abort"]
    assert again.line(Path("place"), {"gc.every": "0"}) == [*start, "--set", "gc.every=0", *rest]
    assert again.line(Path("place"), {}) == [*start, "--set", "gc.every=3", *rest]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Workers of pytest-xdist ignore SIGINT, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Command(RepeatedJob):
    """A command that is run as it is."""

    def line(self, path: Path, settings: Mapping[str, str]) -> list[str]:
        path.mkdir()
        return list(self.job)


def run_python(folder: Path, job: str, limit_s: float | None = None) -> str:
    again = Command(sys.executable, (), (sys.executable, "-c", job), str(folder))
    return again.run(folder / "changed-1", {}, lambda _: None, limit_s)


def test_an_interrupted_job_ends_by_itself_and_is_run_again(tmp_path: Path, interruptible: None) -> None:
    job = f"import os, signal, time\ntry: os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)\n"
    job += "except KeyboardInterrupt: time.sleep(0.5); print('ended')"
    with pytest.raises(KeyboardInterrupt):
        run_python(tmp_path, job)
    assert (tmp_path / "changed-1.txt").read_text() == "ended\n"
    assert not (tmp_path / "changed-1").exists()


def test_a_job_that_takes_too_long_is_ended_and_its_folder_stays(tmp_path: Path) -> None:
    assert run_python(tmp_path, "import time; time.sleep(60)", limit_s=0.3) == (
        "it was not done after 0 s, and was ended"
    )
    assert (tmp_path / "changed-1").exists()
    shutil.rmtree(tmp_path / "changed-1")
    assert run_python(tmp_path, "", limit_s=60) == ""


def test_a_trial_is_no_experiment_that_a_tracker_is_told_of(tmp_path: Path) -> None:
    job = "import os; print(os.environ['DSPROF_TRIAL'], os.environ['WANDB_MODE'], os.environ['WANDB_DIR'])"
    again = Command(sys.executable, (), (sys.executable, "-c", job), str(tmp_path))
    again.run(tmp_path / "changed-1", {}, lambda _: None, trial='{"steps": 9}')
    assert (tmp_path / "changed-1.txt").read_text() == f'{{"steps": 9}} offline {tmp_path / "changed-1.trackers"}\n'


def test_changes_of_the_same_letters_have_folders_of_their_own() -> None:
    slugs = {slug({"env.A": value}) for value in ("x/y", "x:y", "x_y", 90 * "x", 91 * "x")}
    assert len(slugs) == 5


def test_a_secret_that_is_tried_is_not_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(run.path), "--set", "env.HF_TOKEN=hunter2hunter2x"]) == 0
    said = capsys.readouterr().out
    assert "env.HF_TOKEN=[redacted]" in said
    assert "hunter2" not in said
    assert "hunter2" not in slug({"env.HF_TOKEN": "hunter2hunter2x"})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "loader.nm_workers=2"], "did you mean loader.num_workers?"),
        (["-n", "7"], "there are 1"),
    ],
)
def test_what_cannot_be_tried_says_what_to_write(
    run: RunFolder, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fix", str(run.path), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_run_that_dsprof_did_not_start_is_refused(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.rerun_json.unlink()
    assert main(["fix", str(run.path), "--verify"]) == 2
    assert "how to run this job again is not known" in capsys.readouterr().err


def test_a_job_of_several_hosts_is_not_run_again_from_one(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    info = run.read_info()
    info.nnodes = "2"
    run.write_info(info)
    assert main(["fix", str(run.path), "--verify"]) == 2
    assert "a job of several hosts is not run again" in capsys.readouterr().err


def test_a_job_that_writes_checkpoints_wants_to_be_asked(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    info = run.read_info()
    info.facts = [{"fact": "checkpoint", "function": "torch.save"}]
    run.write_info(info)
    assert main(["fix", str(run.path), "--verify"]) == 2
    assert "give --yes" in capsys.readouterr().err


def test_a_job_that_wrote_files_wants_to_be_asked_too(
    run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    info = run.read_info()
    info.cwd, info.started, info.ended = str(tmp_path), "2026-01-01T10:00:00+00:00", "2026-01-01T10:01:00+00:00"
    run.write_info(info)
    ended = datetime.fromisoformat(info.ended).timestamp()
    for number in range(5):
        written = tmp_path / "out" / f"{number}.csv"
        written.parent.mkdir(exist_ok=True)
        written.write_text("")
        os.utime(written, (ended - 1, ended - 1))
    assert main(["fix", str(run.path), "--verify"]) == 2
    said = capsys.readouterr().err
    assert "this job wrote files (" in said
    assert "and 2 more), and each job of the comparison would write them again" in said


def test_what_an_earlier_comparison_wrote_is_not_the_jobs(run: RunFolder) -> None:
    """It may have begun within the second in which the run ended, and prints to files of its own."""
    info = run.read_info()
    info.cwd, info.started, info.ended = str(run.path.parent), "2026-01-01T10:00:00+00:00", "2026-01-01T10:01:00+00:00"
    run.write_info(info)
    ended = datetime.fromisoformat(info.ended).timestamp()

    def written(folder: str, after_s: float) -> Path:
        path = run.path.parent / f"{run.path.name}-{folder}" / "original-1.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        os.utime(path, (ended + after_s, ended + after_s))
        return path

    written("tune/1-ddp.accumulate-3", 0.5)
    written("fix-gc.freeze-True", 0.5)
    refuse_to_save(run, yes=False)
    for folder, after_s in (("outputs", 0.5), ("tuned", -1), ("fix-me", -1)):
        path = written(folder, after_s)
        with pytest.raises(LaunchError, match="this job wrote files"):
            refuse_to_save(run, yes=False)
        path.unlink()
