"""What dsprof advises to type where a job died because its script wants to be started in another way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import launcher
import pytest

from dsprof import hints
from dsprof.hints import launch_hints
from dsprof.launch import Job
from dsprof.run import Hint, RunFolder
from dsprof.schema import host_name

SCRIPT = ("train.py", "--name", "a b")
RANKS = ("--nproc-per-node=1",)
LEAVES = """
import json, os, sys, time
def leave(kind, reason):
    with open(os.path.join(os.environ["DSPROF_RUN"], f"hint.{os.getpid()}.json"), "w") as file:
        json.dump({"kind": kind, "reason": reason}, file)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "capture").mkdir()
    return RunFolder(tmp_path)


def leave(folder: RunFolder, kind: str, reason: str, pid: int = 7) -> None:
    (folder.path / f"hint.{pid}.json").write_text(json.dumps({"kind": kind, "reason": reason}))


@pytest.mark.parametrize(
    ("kind", "job", "says"),
    [
        ("wants-ranks", Job(SCRIPT), "dsprof run --ranks 0 --nproc-per-node 2 train.py --name 'a b'"),
        ("wants-ranks", Job(("-m", "pkg.train")), "dsprof run --ranks 0 --nproc-per-node 2 -m pkg.train"),
        ("wants-ranks", Job(SCRIPT, torchrun_flags=RANKS), None),
        ("wants-ranks", Job(("python", *SCRIPT), is_command=True), "sets RANK, into the command after --"),
        ("wants-no-ranks", Job(SCRIPT, torchrun_flags=RANKS), "dsprof run --ranks 0 train.py --name 'a b'"),
        ("wants-no-ranks", Job(SCRIPT), None),
        ("wants-no-ranks", Job(("torchrun", *SCRIPT), is_command=True), "leave the launcher out of the command"),
        (
            "wants-no-ranks",
            Job(("./run.sh",), is_program=True, torchrun_flags=RANKS),
            "dsprof run --ranks 0 -- ./run.sh",
        ),
        (
            "wants-no-ranks",
            Job(SCRIPT, torchrun_flags=RANKS, on_our_engine=True),
            "dsprof run --ranks 0 -- python train.py --name 'a b'",
        ),
        ("wants-tea", Job(SCRIPT), None),
    ],
)
def test_the_line_to_type(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, kind: str, job: Job, says: str | None
) -> None:
    monkeypatch.setattr(hints, "visible_gpus", lambda environ: 0)
    leave(folder, kind, "because\nof this")
    found = launch_hints(folder, job, ("--ranks", "0"))
    if says is None:
        assert found == []
        return
    (hint,) = found
    assert hint.startswith(("the script wants to be ", "the script may want to be "))
    assert "(because of this)" in hint
    assert says in hint


def test_a_rank_for_each_visible_gpu(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "visible_gpus", lambda environ: 4)
    leave(folder, "wants-ranks", "RANK is not set")
    assert launch_hints(folder, Job(("train.py",)), ()) == [
        "the script wants to be started with ranks (RANK is not set); type: dsprof run --nproc-per-node 4 train.py"
    ]


def test_many_ranks_are_one_hint_and_the_first_reason_counts(folder: RunFolder) -> None:
    for number, pid in enumerate((9, 10, 8)):
        leave(folder, "wants-no-ranks", f"reason {number}", pid)
        os.utime(folder.path / f"hint.{pid}.json", ns=(number, number))
    (hint,) = launch_hints(folder, Job(SCRIPT, torchrun_flags=RANKS), ())
    assert "(reason 0)" in hint


def test_a_rank_that_was_captured_may_spawn_what_it_likes(folder: RunFolder) -> None:
    (folder.capture / f"rank00001.0.{host_name()}.7").mkdir()
    leave(folder, "wants-no-ranks", "it calls mp.spawn", 7)
    assert launch_hints(folder, Job(SCRIPT, torchrun_flags=RANKS), ()) == []


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "wants-ranks"}', "\x00", "3"])
def test_what_cannot_be_read_is_left_out(folder: RunFolder, content: str) -> None:
    (folder.path / "hint.7.json").write_text(content)
    (folder.path / "hint.mine.json").write_text('{"kind": "wants-ranks", "reason": ""}')
    leave(folder, "wants-ranks", "RANK", 8)
    assert folder.read_hints() == [Hint(8, "wants-ranks", "RANK")]


def test_a_long_reason_is_shortened(folder: RunFolder) -> None:
    assert hints.one_line("a \x1b[31m b\u2028c " + "x" * 300) == "a [31m b c " + "x" * 186 + "..."


# --- a job, the analysis stubbed


def test_a_script_that_wants_ranks_is_told_before_the_verdict(tmp_path: Path) -> None:
    code = "leave('wants-ranks', 'RANK is not set'); os.environ['RANK']"
    (tmp_path / "train.py").write_text(LEAVES + code)
    done = launcher.run(["run", "--native", "off", "-o", "out", "train.py", "$x"], tmp_path)
    assert done.returncode == 1
    hint = (
        "the script wants to be started with ranks (RANK is not set); "
        "type: dsprof run -o out --force --native off --nproc-per-node 2 train.py '$x'"
    )
    assert done.stderr.index("KeyError: 'RANK'") < done.stderr.index(f"[dsprof] {hint}\n")
    assert done.stderr.index(hint) < done.stderr.index("THE VERDICT")
    assert RunFolder(tmp_path / "out").read_info().hints == [hint]


def test_a_job_that_ended_well_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES + "leave('wants-ranks', 'RANK is not set')")
    done = launcher.run(["run", "--native", "off", "-o", "out", "train.py"], tmp_path)
    assert "type:" not in done.stderr
    assert RunFolder(tmp_path / "out").read_info().hints == []


def test_a_job_that_hung_under_torchrun_is_told_when_it_is_interrupted(tmp_path: Path) -> None:
    code = "leave('wants-no-ranks', 'it calls mp.spawn in every rank'); print('up', flush=True); time.sleep(60)"
    (tmp_path / "train.py").write_text(LEAVES + code)
    line = ["run", "--native", "off", "-o", "out", "--nproc-per-node", "1", "train.py"]
    process = launcher.start(line, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "[dsprof] the script may want to be one process, started without ranks (it calls mp.spawn in every rank); "
        "type: dsprof run -o out --force --native off train.py\n"
    ) in err


def test_the_advised_line_can_be_typed(tmp_path: Path) -> None:
    code = "if 'RANK' not in os.environ: leave('wants-ranks', 'no RANK'); sys.exit(3)\nprint(os.environ['RANK'])"
    (tmp_path / "train.py").write_text(LEAVES + code)
    assert launcher.run(["run", "-q", "--native", "off", "-o", "out", "train.py"], tmp_path).returncode == 3
    (hint,) = RunFolder(tmp_path / "out").read_info().hints
    words = hint.partition("type: dsprof ")[2].split()
    done = launcher.run(words, tmp_path)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1"])
