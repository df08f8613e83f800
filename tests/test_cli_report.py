"""The verbs report, analyze and tensorboard, and `finish`, which the launcher calls."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import factories
import pytest

from dsprof import cli, reports
from dsprof.analyzer.align.steps import StepTime
from dsprof.analyzer.analysis import Analysis
from dsprof.cli.runs import find_run, find_runs
from dsprof.run import RunError, RunFolder


def make_run(parent: Path, name: str = "job-20261120T101500Z-a1b2c3") -> RunFolder:
    folder = RunFolder(parent / name)
    folder.path.mkdir(parents=True)
    analysis = factories.straggler()
    analysis.run.id = name
    folder.write_info(analysis.run)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder in the parent folder `runs`, whose analysis is that of the straggler."""
    monkeypatch.setattr(
        reports, "examine", lambda folder, jobs=None, observer=None, executor=None: factories.straggler()
    )
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs")


def refuse(folder: RunFolder, jobs: int | None = None, observer: object = None, executor: object = None) -> Analysis:
    raise RunError(f"{folder.path}: no capture in it")


# --- finish -----------------------------------------------------------------------------------------


def test_finish_writes_every_output(run: RunFolder) -> None:
    analysis = reports.finish(run)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "findings.json", "report.html", "run.json", "tensorboard",
    ]  # fmt: skip
    assert json.loads(run.findings_json.read_bytes()) == factories.straggler().to_dict()
    assert analysis.capture.warnings == ()


def test_finish_without_report(run: RunFolder) -> None:
    reports.finish(run, report=False)
    assert sorted(path.name for path in run.path.iterdir()) == ["findings.json", "run.json"]


def test_an_output_that_fails_costs_only_itself(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(analysis: Analysis, folder: RunFolder) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(reports, "write_html", fails)
    run.tensorboard.write_text("in the way")
    analysis = reports.finish(run)
    assert analysis.capture.warnings[0] == "report.html: not written (ValueError: a bug)"
    assert analysis.capture.warnings[1].startswith("tensorboard: not written (")
    assert run.findings_json.exists()


def test_findings_json_has_no_nan(run: RunFolder) -> None:
    analysis = replace(factories.straggler(), step_ms=StepTime(float("nan"), float("inf"), 1.0, 2.0))
    assert json.loads(reports.findings_json(analysis))["run"]["step_ms"] == {
        "mean": None, "median": None, "p10": 1.0, "p90": 2.0,
    }  # fmt: skip


def test_findings_json_has_the_keys_that_are_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "findings-json.md").read_text()
    documented = json.loads(page.partition("```json\n")[2].partition("```")[0])
    written = factories.straggler().to_dict()
    for keys in ([], ["run"], ["run", "step_ms"], ["budget"], ["verdict"], ["time"], ["capture"]):
        shown, made = documented, written
        for key in keys:
            shown, made = shown[key], made[key]
        assert list(shown) == list(made), keys
    assert list(documented["findings"][0]) == list(written["findings"][0])
    assert list(documented["findings"][0]["gain"]) == list(written["findings"][0]["gain"])


# --- which run --------------------------------------------------------------------------------------


def test_a_parent_folder_means_its_newest_run(tmp_path: Path) -> None:
    make_run(tmp_path, "b-20261120T101500Z-aaaaaa")
    newest = make_run(tmp_path, "a-20261120T101501Z-aaaaaa")
    unstamped = make_run(tmp_path, "mine")
    os.utime(unstamped.run_json, (0, 0))
    (tmp_path / "other").mkdir()
    assert find_run(tmp_path) == newest
    assert [folder.path.name for folder in find_runs(tmp_path)] == [
        newest.path.name,
        "b-20261120T101500Z-aaaaaa",
        "mine",
    ]
    assert find_run(unstamped.path) == unstamped


# --- analyze ----------------------------------------------------------------------------------------


def test_analyze_prints_the_verdict_on_stdout(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "runs"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("[dsprof] verdict: bottleneck ")
    assert "1. high  rank.straggler" in said.out
    assert said.err == ""
    assert run.findings_json.exists()


def test_analyze_json_and_quiet(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "--json", str(run.path)]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "rank.straggler"
    assert cli.main(["analyze", "-q", str(run.path)]) == 0
    assert capsys.readouterr().out == (
        "rank 1 arrives late in every step: its forward takes longer; "
        "fixing it saves 37.9 ms of each 212 ms step (18 %)\n"
    )


@pytest.mark.parametrize("verb", ["analyze", "report", "tensorboard"])
def test_no_such_run(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, str(tmp_path / "gone")]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"[dsprof] error: {tmp_path / 'gone'}: no such run folder")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["analyze", "report", "tensorboard"])
def test_a_run_that_cannot_be_read(
    verb: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "examine", refuse)
    assert cli.main([verb, str(run.path)]) == 3
    assert capsys.readouterr().err == f"[dsprof] error: {run.path}: no capture in it\n"


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["analyze"]) == 3
    assert capsys.readouterr().err == (
        "[dsprof] error: dsprof-out/: no such folder, so no run to take; "
        "name a run folder, or make one with `dsprof run`\n"
    )


# --- report -----------------------------------------------------------------------------------------


def test_report_prints_the_path(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # its own file it replaces
        assert cli.main(["report", "runs"]) == 0
        assert capsys.readouterr().out == f"runs/{run.path.name}/report.html\n"
    assert run.report_html.read_text().startswith("<!doctype html>")


def test_a_step_or_rank_that_is_not_there_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = factories.straggler().steps["step"]
    asked = {
        ("--step", "4000"): f"--step 4000: this run has no such step; captured are {numbers.min()} to {numbers.max()}",
        ("--ranks", "9"): "--ranks: rank 9 was not captured; captured are 0 to 1",
        ("--ranks", "0-99999999999"): "--ranks: rank 2 was not captured; captured are 0 to 1",
        ("--ranks", "x"): "--ranks: 'x' is not a list of ranks; write ranks and ranges, such as 0,2-3",
    }
    for words, answer in asked.items():
        assert cli.main(["report", str(run.path), *words]) == 2
        assert answer in capsys.readouterr().err
    assert not run.report_html.exists()


def test_report_elsewhere(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.html"
    assert cli.main(["report", "runs", "-o", "out.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == "out.html"
    assert not run.report_html.exists()

    target.write_text("mine")
    assert cli.main(["report", "runs", "-o", "out.html"]) == 2
    assert (
        capsys.readouterr().err == "[dsprof] error: out.html: exists; choose another name, or --force to overwrite it\n"
    )
    assert target.read_text() == "mine"
    assert cli.main(["report", "runs", "-o", "out.html", "--force"]) == 0
    assert target.read_text() != "mine"

    assert cli.main(["report", "runs", "-o", "."]) == 2
    assert capsys.readouterr().err == "[dsprof] error: .: is a folder; name a file in it\n"
    assert cli.main(["report", "runs", "-o", "no/such/folder/out.html"]) == 2
    assert "no/such/folder/out.html: cannot be written (No such file or directory)" in capsys.readouterr().err


# --- tensorboard ------------------------------------------------------------------------------------


def test_tensorboard_writes_what_is_missing_or_stale(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tensorboard", str(run.path), "--no-serve"]) == 0
    assert capsys.readouterr().out == f"{run.tensorboard}\n"
    events = sorted(run.tensorboard.glob("*/*tfevents*"))
    assert len(events) == 5

    def written() -> list[int]:
        return [path.stat().st_mtime_ns for path in events]

    later = min(written())
    os.utime(run.run_json, ns=(later - 1000, later - 1000))
    before = written()
    assert cli.main(["tensorboard", str(run.path), "--no-serve"]) == 0
    assert written() == before
    os.utime(run.run_json, ns=(later + 10**9, later + 10**9))
    assert cli.main(["tensorboard", str(run.path), "--no-serve"]) == 0
    assert written() != before


def test_tensorboard_takes_all_runs_of_a_parent(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = make_run(run.path.parent, "bad-20261120T101500Z-a1b2c3")

    def examine(folder: RunFolder) -> Analysis:
        return refuse(folder) if folder.path.name == bad.path.name else factories.straggler()

    monkeypatch.setattr(reports, "examine", examine)
    assert cli.main(["tensorboard", "runs", "--no-serve"]) == 0
    said = capsys.readouterr()
    assert said.out == "runs\n"
    assert said.err == f"[dsprof] warning: runs/{bad.path.name}: no capture in it\n"
    assert run.tensorboard.is_dir()
