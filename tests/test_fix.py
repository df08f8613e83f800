"""Trying what findings advise: which changes there are, turns, and when one is kept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsprof.cli import fix as verb
from dsprof.cli import main
from dsprof.fix import CannotEdit, TrialFailed, Turns, decide, proposals
from dsprof.fix.edit_call import set_argument
from dsprof.fix.edit_json import set_value
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
    assert (one.code, one.title, one.flags) == ("data.stall", "more workers", ["--set", "loader.num_workers=2"])
    assert one.gain == STALL["gain"]


# --- when it is kept


def test_a_change_that_saves_is_kept_and_one_that_costs_withdrawn() -> None:
    kept = decide([(100.0, 80.0), (101.0, 80.5), (99.0, 80.2)], 6)
    assert (kept.outcome, round(kept.saved_ms, 2)) == ("kept", 19.77)
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


def test_a_change_that_saves_a_tenth_is_found_in_most_comparisons() -> None:
    draw = np.random.default_rng(2)
    kept = 0
    for _ in range(200):
        pairs = [(float(a), float(0.9 * b)) for a, b in 100 * (1 + 0.01 * draw.standard_normal((6, 2)))]
        looks = [decide(pairs[:count], 6).outcome for count in range(3, 7)]
        kept += next((one for one in looks if one != "undecided"), "undecided") == "kept"
    assert kept >= 190


# --- turns


class Jobs:
    """Runs that take what a script says, one after the other."""

    def __init__(self, original: float, changed: float | None, **of_changed: Any) -> None:
        self.original, self.changed, self.of_changed = original, changed, of_changed
        self.ran: list[str] = []

    def __call__(self, path: Path, knobs: Mapping[str, Any]) -> None:
        self.ran.append(path.name)
        jitter = 0.1 * len(self.ran)
        if knobs:
            write_run(path, self.changed and self.changed + jitter, **self.of_changed)
        else:
            write_run(path, self.original + jitter)


def turns(folder: Path, jobs: Jobs, most_pairs: int = 5) -> Turns:
    return Turns(folder, {"loader.num_workers": 2}, jobs, lambda _: None, most_pairs)


def test_jobs_take_turns_that_change_sides_and_stop_when_decided(tmp_path: Path) -> None:
    jobs = Jobs(100.0, 80.0)
    comparison = turns(tmp_path, jobs).compare()
    assert jobs.ran == ["original-1", "changed-1", "changed-2", "original-2", "original-3", "changed-3"]
    assert comparison.decision is not None
    assert comparison.decision.outcome == "kept"


def test_jobs_that_have_ended_are_not_run_again(tmp_path: Path) -> None:
    turns(tmp_path, Jobs(100.0, 80.0)).compare()
    jobs = Jobs(100.0, 80.0)
    turns(tmp_path, jobs).compare()
    assert jobs.ran == []


def test_a_job_that_fails_with_the_change_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="the changed job failed: it ended with status 3: rank 1 ended") as raised:
        turns(tmp_path, Jobs(100.0, 80.0, status=3)).compare()
    assert raised.value.side == "changed"


def test_a_change_that_reaches_nothing_is_not_compared(tmp_path: Path) -> None:
    warning = "--set loader.num_workers=2 was not applied: nothing in the job takes it"
    with pytest.raises(TrialFailed, match="nothing in the job takes it; nothing is compared"):
        turns(tmp_path, Jobs(100.0, 80.0, warnings=[warning])).compare()


def test_a_job_without_an_ordinary_step_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="run more steps"):
        turns(tmp_path, Jobs(100.0, None)).compare()


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
    assert "saves 20 ms a step (36 %) [18, 22]" in said
    assert "dsprof run --set loader.num_workers=2" in said


def test_it_runs_both_and_tells_predicted_and_measured(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def start(line: list[str], **_: Any) -> None:
        lines.append(line)
        write_run(Path(line[line.index("-o") + 1]), (60.0 if "--set" not in line else 40.0) + 0.1 * len(lines))

    monkeypatch.setattr(subprocess, "run", start)
    assert main(["fix", str(run.path), "--verify"]) == 0
    assert [line[line.index("-q") + 1 :] for line in lines[:2]] == [
        ["--nproc-per-node", "2", "train.py", "-o", "x"],
        ["--set", "loader.num_workers=2", "--nproc-per-node", "2", "train.py", "-o", "x"],
    ]
    said = capsys.readouterr().out
    assert "predicted  saves 20 ms a step (36 %) [18, 22]" in said
    assert "measured   saves 20" in said
    assert "kept: --set loader.num_workers=2" in said
    verified = run.read_info().verified["data.stall"]
    assert (verified["outcome"], verified["set"], len(verified["pairs"])) == ("kept", {"loader.num_workers": 2}, 3)


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


def test_a_job_that_writes_checkpoints_wants_to_be_asked(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "_saves", lambda _: True)
    assert main(["fix", str(run.path), "--verify"]) == 2
    assert "give --yes" in capsys.readouterr().err


# --- the user's files


TEXT = """{
  // as the cluster wants it
  "train_batch_size": 16,
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 20000, # small
    "offload": {"device": "none"}
  },
  "bf16": {}
}
"""


@pytest.mark.parametrize(
    ("keys", "value", "old", "new"),
    [
        ("zero_optimization.reduce_bucket_size", 5000, "20000", "5000"),
        ("train_batch_size", 32, "16,", "32,"),
        ("zero_optimization.offload", {"device": "cpu"}, '{"device": "none"}', '{"device": "cpu"}'),
        ("zero_optimization.overlap_comm", True, '"none"}', '"none"},\n    "overlap_comm": true'),
        ("bf16.enabled", True, '"bf16": {}', '"bf16": {"enabled": true}'),
        ("fp16.enabled", False, '"bf16": {}', '"bf16": {},\n  "fp16": {"enabled": false}'),
    ],
)
def test_a_json_text_keeps_all_but_the_value(keys: str, value: object, old: str, new: str) -> None:
    assert set_value(TEXT, keys.split("."), value) == TEXT.replace(old, new)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": }', '{"a": 1} 2', "", '{"a" 1}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(CannotEdit):
        set_value(text, ["a"], 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = DataLoader(data)\n", "x = DataLoader(data, num_workers=2)\n"),
        ("x = DataLoader()\n", "x = DataLoader(num_workers=2)\n"),
        ("x = DataLoader(data, num_workers=0, shuffle=1)\n", "x = DataLoader(data, num_workers=2, shuffle=1)\n"),
        ("ö = é(DataLoader(\n    data,  # ü\n))", "ö = é(DataLoader(\n    data, num_workers=2,  # ü\n))"),
        ("for x in Loads(f(data)):\n    pass\n", None),
        ("x = make(data)\n", "x = make(data, num_workers=2)\n"),
        ("x = DataLoader(a), DataLoader(b)\n", None),
        ("x = (\n", None),
    ],
)  # fmt: skip
def test_a_call_keeps_all_but_the_argument(text: str, wanted: str | None) -> None:
    if wanted is None:
        with pytest.raises(CannotEdit):
            set_argument(text, 1, "loader", "num_workers", 2)
    else:
        assert set_argument(text, 1, "loader", "num_workers", 2) == wanted


def test_files_are_written_beside_the_originals_and_never_over_what_is_there(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, configuration = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text("import x\nloader = DataLoader(data)\n")
    configuration.write_text('{"zero_optimization": {"stage": 2}}')
    info = run.read_info()
    info.cwd = str(tmp_path)
    info.facts = [
        {"fact": "dataloader", "site": f"{script}:2", "framework": None},
        {"fact": "config", "path": str(configuration), "content": {"zero_optimization": {"stage": 2}}},
    ]
    run.write_info(info)

    assert main(["fix", str(run.path)]) == 0
    assert "+loader = DataLoader(data, num_workers=2)" in capsys.readouterr().out
    both = ["--set", "loader.num_workers=4", "--set", "zero_optimization.stage=1", "--set", "env.A=b"]
    assert main(["fix", str(run.path), *both, "--write"]) == 0
    assert (tmp_path / "train.fixed.py").read_text() == "import x\nloader = DataLoader(data, num_workers=4)\n"
    assert (tmp_path / "ds.fixed.json").read_text() == '{"zero_optimization": {"stage": 1}}'
    assert "by hand: export A=b" in capsys.readouterr().out

    assert main(["fix", str(run.path), *both, "--write"]) == 2
    assert "is there already" in capsys.readouterr().err
    configuration.write_text('{"zero_optimization": {"stage": 3}}')
    assert main(["fix", str(run.path), *both, "--in-place"]) == 2
    assert "it has been edited since the run" in capsys.readouterr().err
    assert script.read_text() == "import x\nloader = DataLoader(data)\n"
    assert main(["fix", str(run.path), "--in-place"]) == 0
    assert script.read_text() == "import x\nloader = DataLoader(data, num_workers=2)\n"
