"""Change after change: what is proposed, predicted, corrected, kept, and when it is over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsprof.cli import main
from dsprof.cli.tune import table
from dsprof.fix import Journal, Proposal, Tuning, joint_proposals, proposals
from dsprof.fix.corrections import Scored, corrected, factor
from dsprof.launch.again import RepeatedJob
from dsprof.run import RunFolder, RunInfo


def write_run(folder: Path, step_ms: float, findings: Any = (), *, status: int = 0) -> None:
    """A run folder, as far as tuning reads it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.write_info(RunInfo(id=folder.name, name="train", command=["dsprof", "run", "train.py"], status=status))
    found = {
        "findings": list(findings), "run": {"step_ms": {"mean": step_ms}, "whole_step_ms": step_ms},
        "verdict": {"headline": "rank 0 ended by SIGKILL"}, "capture": {"warnings": []},
    }  # fmt: skip
    run.findings_json.write_text(json.dumps(found))


def finding(code: str, knobs: Mapping[str, Any], ms: float, step_ms: float, **more: Any) -> dict[str, Any]:
    gain = {"ms": ms, "low": 0.8 * ms, "high": 1.2 * ms, "percent": 100 * ms / step_ms, "method": "replay"}
    return {"code": code, "gain": gain, "fixes": [{"title": code, "set": dict(knobs), "gain": None}], **more}


class Job:
    """A made-up job: its step takes `step_ms`, and less for each knob that is turned.

    saves:    what a knob's value really saves, ms; says: what findings predict instead
    breaks:   knobs whose job fails; takes_s: of each job, by the clock
    """

    def __init__(
        self, step_ms: float, saves: Mapping[str, float], says: Mapping[str, float] | None = None, **more: Any
    ) -> None:
        self.step_ms, self.saves, self.says = step_ms, saves, {**saves, **(says or {})}
        self.breaks: tuple[str, ...] = more.get("breaks", ())
        self.takes_s: float = more.get("takes_s", 1.0)
        self.now_s = 0.0
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def run(self, path: Path, knobs: Mapping[str, Any]) -> str:
        turned = [f"{key}={value}" for key, value in knobs.items()]
        self.ran.append(" ".join(turned))
        self.now_s += self.takes_s
        left = self.step_ms - sum(self.saves.get(one, 0.0) for one in turned) + 0.01 * (len(self.ran) % 3)
        found = [
            finding(f"code.{name.partition('.')[0]}", {name.partition("=")[0]: read(name)}, ms, left)
            for name, ms in self.says.items()
            if name not in turned
        ]
        write_run(path, left, found, status=9 if any(one in self.breaks for one in turned) else 0)
        return ""


def read(name: str) -> Any:
    return json.loads(name.partition("=")[2])


@pytest.fixture
def tuning(tmp_path: Path) -> Callable[..., Tuning]:
    def make(job: Job, budget_s: float = 1e6, most: int = 20, run: Any = None) -> Tuning:
        first = tmp_path / "first"
        if not first.exists():
            job.run(first, {})
            job.ran.clear()
        return Tuning(first, tmp_path / "tune", offered, run or job.run, lambda _: None, budget_s, most, 6, job.clock)

    return make


def offered(path: Path) -> list[Proposal]:
    found = json.loads((path / "findings.json").read_text())
    return [*proposals(found), *joint_proposals(found)]


def tune(tuned: Tuning) -> Journal:
    tuned.place.mkdir(exist_ok=True)
    return tuned.tune(Journal.read(tuned.place / "tune.json"))


# --- the loop


def test_what_pays_is_kept_one_after_the_other_largest_first(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0, "c.z=3": 1.0})
    journal = tune(tuning(job))
    assert [(one.knobs, one.base, one.outcome) for one in journal.attempts] == [
        ({"b.y": 2}, {}, "kept"),
        ({"a.x": 1}, {"b.y": 2}, "kept"),
    ]
    assert journal.kept == {"b.y": 2, "a.x": 1}
    assert journal.ended == "nothing is left that should save 2 % of the step"
    assert journal.together is not None
    assert (journal.together["outcome"], round(journal.together["ms"])) == ("kept", 40)
    assert "a.x=1 b.y=2" not in job.ran  # what was kept before comes first


def test_a_change_that_does_not_pay_is_withdrawn_and_the_next_is_tried(tuning: Callable[..., Tuning]) -> None:
    journal = tune(tuning(Job(100.0, {"a.x=1": -5.0, "b.y=2": 8.0}, {"a.x=1": 20.0})))
    assert [(one.knobs, one.outcome) for one in journal.attempts] == [({"a.x": 1}, "withdrawn"), ({"b.y": 2}, "kept")]
    assert (journal.kept, journal.together) == ({"b.y": 2}, None)


def test_predictions_are_written_before_the_job_runs_and_corrected_by_what_was_measured(
    tuning: Callable[..., Tuning], tmp_path: Path
) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 10.0}, {"a.x=1": 20.0, "b.y=2": 18.0})
    written: list[int] = []

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        attempts = json.loads((tmp_path / "tune" / "tune.json").read_text())["attempts"]
        assert attempts[-1]["corrected"]["ms"] > 0
        written.append(len(attempts))
        return job.run(path, knobs)

    journal = tune(tuning(job, run=run))
    assert written[0] == 1
    first, second = journal.attempts
    assert first.corrected is not None
    assert second.corrected is not None
    assert (first.corrected["ms"], round(second.corrected["ms"], 2)) == (20.0, 15.75)  # 18 * (3 + 0.5) / 4
    assert (first.held, second.held) == (False, False)


def test_trials_that_die_do_not_stop_it_and_the_rest_is_found(tuning: Callable[..., Tuning]) -> None:
    bad = {f"bad.k{i}=1": 40.0 - i for i in range(12)}
    journal = tune(tuning(Job(100.0, {**bad, "a.x=1": 10.0}, breaks=tuple(bad))))
    assert [one.outcome for one in journal.attempts] == 12 * ["withdrawn"] + ["kept"]
    assert "it ended with status 9: rank 0 ended by SIGKILL" in (journal.attempts[0].measured or {})["why"]
    assert journal.kept == {"a.x": 1}


def test_a_trial_that_hangs_is_withdrawn_and_the_rest_is_found(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"bad.x=1": 40.0, "a.x=1": 10.0})

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        if "bad.x" in knobs:
            return "it was not done after 620 s, and was ended"
        return job.run(path, knobs)

    journal = tune(tuning(job, run=run))
    assert [(one.code, one.outcome) for one in journal.attempts] == [("code.bad", "withdrawn"), ("code.a", "kept")]
    assert "it was not done after 620 s" in (journal.attempts[0].measured or {})["why"]
    assert journal.kept == {"a.x": 1}


def test_where_the_job_itself_fails_again_and_again_it_stops(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {f"a.k{i}=1": 10.0 for i in range(9)})

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        job.run(path, knobs)
        return "" if knobs else "it was not done after 9 s, and was ended"

    journal = tune(tuning(job, run=run))
    assert [one.outcome for one in journal.attempts] == 3 * ["undecided"]
    assert "the job without a new change failed 3 times" in journal.ended
    assert journal.kept == {}


def test_it_goes_on_where_it_was_interrupted(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0})
    whole = tune(tuning(job)).to_dict()
    jobs = len(job.ran)
    shutil.rmtree(tuning(job).place)

    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0})
    stop_at = [3, 8, 11]

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        if stop_at and len(job.ran) == stop_at[0]:
            stop_at.pop(0)
            raise KeyboardInterrupt
        return job.run(path, knobs)

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(tuning(job, run=run))
    assert tune(tuning(job, run=run)).kept == whole["kept"]
    assert len(job.ran) == jobs
    again = tune(tuning(job, run=run))
    assert (again.kept, len(job.ran)) == (whole["kept"], jobs)


def test_the_budget_ends_it_and_a_larger_one_goes_on(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0}, takes_s=10.0)
    journal = tune(tuning(job, budget_s=80.0))
    assert [one.outcome for one in journal.attempts] == ["kept", "undecided"]
    assert (journal.ended, journal.kept) == ("the budget of 80 s is spent", {"b.y": 2})
    assert len(job.ran) == 8
    journal = tune(tuning(job, budget_s=1e6))
    assert [one.outcome for one in journal.attempts] == ["kept", "kept"]
    assert (len(job.ran), journal.kept) == (18, {"b.y": 2, "a.x": 1})


def test_so_many_changes_are_tried_and_more_if_more_are_asked_for(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0, "c.z=3": 5.0})
    journal = tune(tuning(job, most=1))
    assert ([one.knobs for one in journal.attempts], journal.ended) == ([{"b.y": 2}], "1 change was tried")
    journal = tune(tuning(job, most=2))
    assert (list(journal.kept), round((journal.together or {})["ms"])) == (["b.y", "a.x"], 40)
    journal = tune(tuning(job))
    assert (list(journal.kept), round((journal.together or {})["ms"])) == (["b.y", "a.x", "c.z"], 45)


def test_where_all_together_cost_nothing_is_kept(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 10.0, "b.y=2": 30.0})

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        job.run(path, knobs)
        if path.parent.name == "all-2" and knobs:
            write_run(path, 120.0)
        return ""

    journal = tune(tuning(job, run=run))
    assert [one.outcome for one in journal.attempts] == ["kept", "kept"]
    assert (journal.together or {})["outcome"] == "withdrawn"
    assert journal.kept == {}


def test_faults_that_hide_each_other_are_fixed_together() -> None:
    both = {"ms": 30.0, "low": 25.0, "high": 35.0, "percent": 30.0, "method": "replay"}
    one = finding("a.one", {"a.x": 1}, 0.5, 100.0, together={"code": "b.other", "gain": both})
    (joint,) = joint_proposals({"findings": [finding("b.other", {"b.y": 2}, 1.0, 100.0), one]})
    assert (joint.code, dict(joint.knobs), joint.gain) == ("b.other and a.one", {"b.y": 2, "a.x": 1}, both)
    assert list(joint_proposals({"findings": [one]})) == []


def test_a_change_that_did_nothing_beside_a_fault_is_tried_again_without_it(tuning: Callable[..., Tuning]) -> None:
    job = Job(100.0, {"a.x=1": 0.0, "b.y=2": 20.0}, {"a.x=1": 25.0})
    journal = tune(tuning(job))
    assert [(one.knobs, one.base) for one in journal.attempts] == [
        ({"a.x": 1}, {}), ({"b.y": 2}, {}), ({"a.x": 1}, {"b.y": 2}),
    ]  # fmt: skip
    assert [one.outcome for one in journal.attempts] == ["withdrawn", "kept", "withdrawn"]


# --- corrections


def test_trials_of_the_same_finding_count_more_than_those_of_others() -> None:
    assert factor("a", []) == 1.0
    half = Scored("a", 20.0, 10.0)
    assert factor("a", [half]) == 0.75
    assert factor("b", [half]) == 0.875
    assert factor("a", [half, Scored("b", 1.0, 3.0)]) == 0.75
    assert factor("a", [Scored("a", 10.0, -5.0)]) == 0.5
    assert factor("a", [Scored("a", 1.0, 100.0)]) == 2.0


def test_a_corrected_prediction_keeps_the_low_end_that_was_predicted() -> None:
    gain = {"ms": 20.0, "low": 15.0, "high": 25.0, "percent": 10.0, "method": "replay"}
    assert corrected(gain, 0.5) == {"ms": 10.0, "low": 7.5, "high": 12.5, "percent": 5.0}
    assert corrected(gain, 2.0) == {"ms": 40.0, "low": 15.0, "high": 50.0, "percent": 20.0}


# --- the command


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "first"
    knobs = {"loader.num_workers": 2}
    write_run(folder, 100.0, [finding("data.stall", knobs, 30.0, 100.0)])
    (tmp_path / "train.py").write_text("loader = DataLoader(data)\n")
    run = RunFolder(folder)
    info = run.read_info()
    info.cwd, info.facts = str(tmp_path), [{"fact": "dataloader", "site": f"{tmp_path}/train.py:1", "framework": None}]
    run.write_info(info)
    run.write_rerun({"command": ["dsprof", "run", "train.py"], "cwd": str(tmp_path), "python": "python"})
    return run


def take(again: RepeatedJob, path: Path, settings: Mapping[str, str], *_: Any) -> str:
    write_run(path, 70.0 if settings else 100.0)
    return ""


def test_it_ends_with_a_table_the_patch_and_how_to_apply_it(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RepeatedJob, "run", take)
    assert main(["tune", str(run.path)]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].split()[:3] == ["change", "predicted", "corrected"]
    assert lines[1].startswith("loader.num_workers=2  30.0 ms (30 %)  30.0 ms (30 %)  saves 30.0 ms a step (30 %)")
    assert lines[1].split()[-2:] == ["kept", "yes"]
    assert "+loader = DataLoader(data, num_workers=2)" in said
    assert f"apply  dsprof fix {run.path} --set loader.num_workers=2 --in-place" in said
    assert (tmp_path / "first-tune" / "tune.patch").read_text().endswith("+loader = DataLoader(data, num_workers=2)\n")
    assert (tmp_path / "train.py").read_text() == "loader = DataLoader(data)\n"


def test_the_result_as_json_and_nothing_kept_has_a_status_of_its_own(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(again: RepeatedJob, path: Path, settings: Mapping[str, str], *_: Any) -> str:
        write_run(path, 100.0)
        return ""

    monkeypatch.setattr(RepeatedJob, "run", same)
    assert main(["tune", str(run.path), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["kept"], found["attempts"][0]["measured"]["outcome"]) == ({}, "withdrawn")


def test_a_secret_that_is_tried_is_in_the_journal_alone(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried with its value, which only the owner of the folder can read."""
    secret = {"env.HF_TOKEN": "hunter2hunter2x", "loader.num_workers": 2}
    write_run(run.path, 100.0, [finding("data.stall", secret, 30.0, 100.0)])
    run.write_rerun({"command": ["dsprof", "run", "train.py"], "cwd": str(run.path.parent), "python": "python"})
    monkeypatch.setattr(RepeatedJob, "run", take)
    assert main(["tune", str(run.path), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["kept"] == {"env.HF_TOKEN": "[redacted]", "loader.num_workers": 2}
    assert found["attempts"][0]["knobs"] == found["kept"]
    assert "hunter2" not in said.out + said.err
    assert main(["tune", str(run.path)]) == 0
    assert main(["fix", str(run.path), "--json"]) == 0
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err
    journal = run.path.with_name("first-tune") / "tune.json"
    assert "hunter2hunter2x" in journal.read_text()
    assert journal.stat().st_mode & 0o077 == 0


def test_a_job_is_run_first_where_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[list[str]] = []

    def first(again: RepeatedJob, path: Path, settings: Mapping[str, str], *_: Any) -> str:
        lines.append(again.line(path, settings))
        write_run(path, 100.0)
        RunFolder(path).write_rerun(
            {"command": ["dsprof", "run", *lines[0][4:]], "cwd": str(tmp_path), "python": "python"}
        )
        return ""

    monkeypatch.setattr(RepeatedJob, "run", first)
    assert main(["tune", "--", "--nproc-per-node", "2", "train.py", "--lr", "1"]) == 4
    assert lines[0][-5:] == ["--nproc-per-node", "2", "train.py", "--lr", "1"]
    assert "nothing was tried" in capsys.readouterr().out


def test_a_damaged_journal_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    place = run.path.with_name("first-tune")
    place.mkdir()
    (place / "tune.json").write_text('{"attempts": [{"a": 1}]}')
    assert main(["tune", str(run.path)]) == 3
    assert "move it away to begin anew" in capsys.readouterr().err


def test_an_attempt_that_is_under_way_has_a_line() -> None:
    assert table(Journal(Path("tune.json"))) == ["nothing was tried"]
