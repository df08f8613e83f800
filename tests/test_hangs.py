"""Real jobs that hang, or whose ranks disagree: the culprit and the collective are named. Slow ones are left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from captures import build_helper
from jobs import Finished, environment, profile

from dsprof import schema
from dsprof.engine import hooks
from dsprof.launch.supervise import HUNG
from dsprof.run import RunFolder

JOB = Path(__file__).parent / "hang_job.py"
TIMEOUT_S = 4
SECONDS = 3 * TIMEOUT_S
CALLED = re.compile(r"\[dsprof\] (hang|desync): ")
BEGINS = re.compile(r"begins at ([\d.]+)")


def run(
    tmp_path: Path,
    case: str,
    *,
    ranks: int = 2,
    timeout: str = str(TIMEOUT_S),
    seconds: int = SECONDS,
    more: tuple[str, ...] = (),
    fresh: bool = True,
) -> Finished:
    """`fresh`: in interpreters of their own, which takes as much again as most of these jobs."""
    flags = ("--no-report", "--hang-timeout", timeout, "--on-hang", "abort", *more)
    return profile(tmp_path, JOB, case, str(seconds), ranks=ranks, flags=flags, fresh=fresh)


def first(finished: Finished) -> dict[str, Any]:
    assert finished.findings["verdict"]["status"] == "failed", finished.stderr
    found: dict[str, Any] = finished.findings["findings"][0]
    return found


def line_of(text: str) -> int:
    """Of the job, the only one that holds it."""
    (number,) = [i for i, line in enumerate(JOB.read_text().splitlines(), 1) if text in line]
    return number


def heard(finished: Finished, pattern: re.Pattern[str]) -> list[tuple[float, re.Match[str]]]:
    """Lines of stderr that hold it, and when they came by this process's clock, in s since the epoch."""
    return [(at, found) for at, line in finished.heard if (found := pattern.search(line))]


def in_time(finished: Finished, *, at_s: float | None = None) -> None:
    """It was told within 5 s of the time-out, and not before, since the job itself says that it began to hang. `at_s`:
    when it was told; None: when the launcher said so on stderr."""
    began_s = max(float(said[1]) for _, said in heard(finished, BEGINS))
    if at_s is None:
        told = heard(finished, CALLED)
        assert told, finished.stderr
        at_s = told[0][0]
    assert TIMEOUT_S <= at_s - began_s <= TIMEOUT_S + 5, finished.stderr


# --- hangs ---------------------------------------------------------------------------------------


def test_a_rank_asleep_in_python(tmp_path: Path) -> None:
    finished = run(tmp_path, "ddp/python", fresh=False)  # those below are
    assert finished.status == HUNG, finished.stderr
    assert CALLED.search(finished.stderr)
    found = first(finished)
    assert found["code"] == "run.hang"
    assert (found["where"]["ranks"], found["where"]["op"], found["where"]["group"]) == ([1], "all_reduce", "0")
    assert f"rank 1 is at hang_job.py:{line_of('lambda: time.sleep(FOREVER)')}" in found["title"]
    assert "dsprof ended the job then (--on-hang abort)" in found["title"]
    assert "the job ended with status 124: dsprof ended it, since it hung" in finished.stderr
    assert "killed by" not in finished.stderr
    assert found["where"]["steps"] == [3, 3]
    text = json.dumps(found["evidence"])
    assert 'its main thread", "value": "sleeps for a set time (in the kernel: ' in text
    assert "rank 0 waits in" in text
    assert "rank 1 stands in" in text
    (fix,) = found["fixes"]
    assert fix["patch"][0]["file"] == str(JOB)
    in_time(finished)


SLEEPERS = [
    pytest.param("ddp/c", "hang_job.py", id="in C"),
    pytest.param("ddp/c-with-the-lock", "holds the interpreter's lock", id="in C, with the interpreter's lock"),
    pytest.param("ddp/lock", "hang_job.py", id="in a lock"),
    pytest.param("ddp/stopped", "is stopped", id="stopped"),
    pytest.param("fsdp/python", "hang_job.py", id="FSDP2"),
    pytest.param("fsdp/lock", "hang_job.py", id="FSDP2, in a lock"),
    pytest.param("engine/python", "hang_job.py", id="the engine"),
    pytest.param("engine/c", "hang_job.py", id="the engine, in C"),
    pytest.param("loader", "in data", id="in a loader"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), SLEEPERS)
def test_a_rank_asleep(case: str, words: str, tmp_path: Path) -> None:
    finished = run(tmp_path, case, ranks=3)
    assert finished.status == HUNG, finished.stderr
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.hang", [1]), found
    assert words in found["title"]
    assert found["where"]["op"] in ("all_reduce", "all_gather", "reduce_scatter", "reduce")
    if case == "loader":
        said = {item["metric"]: item["value"] for item in found["evidence"]}
        assert said["rank 1: a child (pt_data_worker)"].startswith("sleeps for a set time (in the kernel: ")
    in_time(finished)


@pytest.mark.slow
@pytest.mark.parametrize("asleep", ["python", "c"])
def test_a_stage_asleep(asleep: str, tmp_path: Path) -> None:
    finished = run(tmp_path, f"pipeline/{asleep}", ranks=3)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.hang", [1]), found
    assert found["where"]["op"] in ("send", "recv")
    in_time(finished)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp/left", "ddp/gone"])
def test_a_rank_that_left(case: str, tmp_path: Path) -> None:
    """The others are told by gloo at once: no time-out has passed."""
    finished = run(tmp_path, case)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.hang", [1], "all_reduce")
    assert "rank 1 had ended" in found["title"]
    assert finished.status == 1


@pytest.mark.slow
def test_torchs_own_timeout_comes_first(tmp_path: Path) -> None:
    finished = run(tmp_path, "torch-timeout", timeout="600", seconds=8)
    assert finished.status not in (0, HUNG)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.hang", [1], "barrier")


@pytest.mark.slow
def test_both_receive_first(tmp_path: Path) -> None:
    finished = run(tmp_path, "both-receive", ranks=3)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.hang", [0, 1], "recv")
    assert "wait for each other" in found["title"]
    in_time(finished)


# --- desyncs -------------------------------------------------------------------------------------


def test_another_order(tmp_path: Path) -> None:
    finished = run(tmp_path, "order", ranks=3, fresh=False)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.desync", [1]), found
    assert "broadcast of 16 bytes of float32 on rank 1" in found["title"]
    assert "all_reduce of 16 bytes of float32 on ranks 0, 2" in found["title"]
    in_time(finished)


@pytest.mark.slow
def test_another_order_of_two_groups(tmp_path: Path) -> None:
    finished = run(tmp_path, "groups")
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.desync", [0, 1], "barrier")
    at = f"hang_job.py:{line_of('dist.barrier(group=group)')}"
    assert found["title"].count(at) == 2, "both call sites"
    in_time(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "odd"),
    [
        ("size", "all_reduce of 4004 bytes of float32 on rank 1"),
        ("skipped", "rank 1"),
    ],
)
def test_another_size(case: str, odd: str, tmp_path: Path) -> None:
    finished = run(tmp_path, case, ranks=3)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.desync", [1]), found
    assert odd in found["title"]
    issued = {item["metric"]: item["value"] for item in found["evidence"]}
    if case == "size":
        assert issued["rank 1 issued"].endswith(f" at hang_job.py:{line_of('1000 + (rank == CULPRIT)')}")
    if case == "skipped":  # of another size gloo tells the ranks at once
        in_time(finished)


@pytest.mark.slow
def test_another_dtype_that_nobody_noticed(tmp_path: Path) -> None:
    finished = run(tmp_path, "dtype", ranks=3)
    assert finished.status == 0, finished.stderr
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.desync", [1], "all_reduce")
    assert "4000 bytes of int32 on rank 1" in found["title"]
    issued = {item["metric"]: item["value"] for item in found["evidence"]}
    at = f"hang_job.py:{line_of('torch.int32 if rank')}"
    assert issued["ranks 0, 2 issued"] == f"all_reduce of 4000 bytes of float32 at {at}"
    assert issued["rank 1 issued"] == f"all_reduce of 4000 bytes of int32 at {at}"
    assert found["fixes"][0]["patch"][0]["line"] == line_of("torch.int32 if rank")


@pytest.mark.slow
def test_a_line_is_named_where_no_other_issues_the_same(tmp_path: Path) -> None:
    """Ranks 0 and 2 issue theirs at two lines."""
    found = first(run(tmp_path, "dtype-again", ranks=3))
    issued = {item["metric"]: item["value"] for item in found["evidence"]}
    assert issued["ranks 0, 2 issued"] == "all_reduce of 4000 bytes of float32"
    line = line_of("torch.int32 if rank")
    assert issued["rank 1 issued"] == f"all_reduce of 4000 bytes of int32 at hang_job.py:{line}"
    assert found["fixes"][0]["patch"][0]["line"] == line


@pytest.mark.slow
def test_what_the_engine_proves_itself(tmp_path: Path) -> None:
    """Within seconds, and with the names of the parameters."""
    assert schema.DEADLOCK == hooks.DEADLOCK
    finished = run(tmp_path, "branches", timeout="600")
    assert finished.status not in (0, HUNG)
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.desync", [0, 1])
    assert "the ranks ran different modules" in found["title"]
    assert "rank 1 waits for the parameter right.weight" in found["title"]


# --- what is not called so -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "ddp/busy",
        pytest.param("download", marks=pytest.mark.slow),
        pytest.param("checkpoint", marks=pytest.mark.slow),
        pytest.param("slow", marks=pytest.mark.slow),
        pytest.param("compile", marks=pytest.mark.slow),
        pytest.param("evaluation", marks=pytest.mark.slow),
    ],
)
def test_a_slow_job_lives(case: str, tmp_path: Path) -> None:
    # Forked, the busy one stood still until its time-out in two of two runs of all tests, and in none by itself.
    finished = run(tmp_path, case, fresh=case == "ddp/busy")
    assert finished.status == 0, finished.stderr
    assert not CALLED.search(finished.stderr), finished.stderr
    assert not {"run.hang", "run.desync"} & {finding["code"] for finding in finished.findings["findings"]}
    if case in ("ddp/busy", "download", "checkpoint"):
        assert "which is not called a hang: rank 1 has not reached" in finished.stderr


# --- what resolves itself, and what only looks so ------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_comes_after_all(tmp_path: Path) -> None:
    flags = ("--no-report", "--hang-timeout", str(TIMEOUT_S))
    finished = profile(tmp_path, JOB, "ddp/late", str(SECONDS), flags=flags, fresh=True)
    assert finished.status == 0, finished.stderr
    in_time(finished)
    assert "the job goes on, after" in finished.stderr
    at = f"hang_job.py:{line_of('lambda: time.sleep(SECONDS)')}"
    said = re.search(r"at step 3 the job stood still ([0-9.]+) s: it waited for rank 1 \((\S+)\) in all_reduce",
                     finished.findings["verdict"]["headline"])  # fmt: skip
    assert said is not None, finished.findings["verdict"]
    assert said[2] == at
    assert float(said[1]) >= SECONDS - 1
    assert finished.findings["verdict"]["status"] != "failed"


@pytest.mark.slow
def test_a_job_that_torchs_time_out_ends_does_not_go_on(tmp_path: Path) -> None:
    flags = ("--no-report", "--hang-timeout", str(TIMEOUT_S))
    finished = profile(tmp_path, JOB, "torch-timeout", str(4 * TIMEOUT_S), flags=flags, fresh=True)
    assert finished.status not in (0, HUNG)
    in_time(finished)
    assert "goes on" not in finished.stderr
    found = first(finished)
    assert (found["code"], found["where"]["ranks"], found["where"]["op"]) == ("run.hang", [1], "barrier")


# --- without abort, and without the launcher -----------------------------------------------------


@pytest.mark.slow
def test_a_hung_job_that_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsprof", "run", "-o", "run", "--nproc-per-node", "2", "--no-report",
               "--hang-timeout", str(TIMEOUT_S), str(JOB), "ddp/python"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:  # it says so while the job goes on to wait
        lines.append((time.time(), line))
        if CALLED.search(line):
            process.send_signal(signal.SIGINT)
            break
    said = "".join(line for _, line in lines) + process.communicate(timeout=120)[1]
    finished = Finished(RunFolder(tmp_path / "run"), process.returncode, "", said, tuple(lines))
    found = first(finished)
    assert (found["code"], found["where"]["ranks"]) == ("run.hang", [1]), said
    assert process.returncode == 130
    in_time(finished)


@pytest.mark.slow
def test_ranks_that_something_else_started(tmp_path: Path) -> None:
    """Nobody watches them but themselves; the verdict is drawn afterwards."""
    build_helper()
    at = f"hang_job.py:{line_of('lambda: time.sleep(FOREVER)')}"
    procs = []
    for rank in range(2):
        env = environment(
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
            DSPROF="1", DSPROF_RUN=str(tmp_path / "run"), DSPROF_HANG_TIMEOUT=str(TIMEOUT_S),
        )  # fmt: skip
        code = f"""
import sys, torch.distributed as dist
init = dist.init_process_group
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group = lambda backend: init(backend, store=store, rank={rank}, world_size=2)
sys.argv = ["hang_job.py", "ddp/python"]
exec(compile(open({str(JOB)!r}).read(), {str(JOB)!r}, "exec"))
"""
        with (tmp_path / f"{rank}.log").open("w") as log:
            procs.append(subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stderr=log))
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            files = list((tmp_path / "run" / "capture").glob("*/facts.jsonl"))
            said = [line for path in files for line in path.read_text().splitlines() if '"fact": "standstill"' in line]
            stands, waits = (any(words in line for line in said) for words in (at, "all_reduce"))
            if stands and waits:
                told_s = time.time()
                break
            time.sleep(0.2)
        else:
            raise AssertionError("the ranks said nothing")
    finally:
        for process in procs:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    done = subprocess.run(
        [sys.executable, "-m", "dsprof", "analyze", str(tmp_path / "run"), "--json"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)["findings"][0]
    assert (found["code"], found["where"]["ranks"]) == ("run.hang", [1]), done.stdout
    logs = [(0.0, line) for rank in range(2) for line in (tmp_path / f"{rank}.log").read_text().splitlines()]
    in_time(Finished(RunFolder(tmp_path / "run"), 0, "", "", tuple(logs)), at_s=told_s)
