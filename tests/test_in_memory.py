"""Captures that are written to memory first, or to a local disk, of real jobs to which something happens: nothing is
lost, the job goes on, and nothing is left there.

A folder of the test's stands for /dev/shm: what is chosen by itself is the subject of test_scratch.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import forked_python
import pytest
from armed import both, train
from jobs import environment

from dsprof.collectors.capture import scratch
from dsprof.launch import left_behind
from dsprof.run import RunFolder
from dsprof.schema import COPYING_FILE, Kind
from dsprof.trace import load
from dsprof.trace.capture import Capture, read_capture

JOB = """
import os, shutil, sys, time
from pathlib import Path
import torch, dsprof
run, disk = Path(os.environ["DSPROF_RUN"]), Path(os.environ["DSPROF_SCRATCH"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def write(records):
    for number in range(records):
        dsprof.mark("tick", number)
        if number % 256 == 0:
            time.sleep(0.001)
for _ in range(3):
    step()
write(20_000)
{}
write(20_000)
for _ in range(3):
    step()
print("trained", flush=True)
"""
REMOVE_RUN = "run.rename(run.with_name('gone'))"
REMOVE_LOCAL = """
while disk.exists():  # its copier may be writing there
    shutil.rmtree(disk, ignore_errors=True)
"""
FILL = """
(disk / "filler").touch()
with open(disk / "filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
"""
FIRST_CHUNK = 16_000
"""Of the 16,384 records of a chunk, some are of the steps."""
WAIT = """
Path("waits").touch()
while not Path("go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def ticks(capture: Capture) -> int:
    return int((capture.records["kind"] == Kind.MARK).sum())


def problem_of_the_copy(run: Path, word: str) -> str:
    """The problem of the only capture that has this word, when the copier has told of it: a rank whose local folder is
    gone does not wait for that."""
    deadline = time.monotonic() + 60
    while True:
        told = [problem for problem in only_capture(run).problems if word in problem]
        if told or time.monotonic() > deadline:
            (problem,) = told
            return problem
        time.sleep(0.05)


def all_or_counted(capture: Capture, records: int) -> bool:
    """Whether all that was written is there, but for what a busy machine had no next chunk for in time, which is
    counted. The first chunk is there before the job begins."""
    return ticks(capture) + capture.dropped == records and ticks(capture) > FIRST_CHUNK


def only_capture(run: Path) -> Capture:
    (folder,) = (run / "capture").iterdir()
    return read_capture(folder)


@both
def test_a_run_folder_that_vanishes_is_made_again(tmp_path: Path, disk: Path, native: str) -> None:
    run = tmp_path / "run"
    done = train(
        tmp_path, JOB.replace("{}", REMOVE_RUN), native=native, DSPROF_SCRATCH=str(disk), DSPROF_EXIT_WAIT="60"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    capture = only_capture(run)
    # What was in the run folder when it vanished is gone with it; what was not is there.
    assert ticks(capture) + capture.dropped >= 20_000
    is_emptied(disk)


@both
def test_a_local_folder_that_vanishes_costs_the_capture_not_the_job(tmp_path: Path, disk: Path, native: str) -> None:
    done = train(tmp_path, JOB.replace("{}", REMOVE_LOCAL), native=native, DSPROF_SCRATCH=str(disk))
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    told = problem_of_the_copy(tmp_path / "run", "removed")
    assert "was removed before all of it was copied: the newest part of its capture is lost" in told
    assert not disk.exists()


@pytest.fixture
def small_memory(disk: Path) -> Iterator[Path]:
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@both
def test_memory_that_fills_up_costs_records_not_the_job(tmp_path: Path, small_memory: Path, native: str) -> None:
    more = {"DSPROF_SCRATCH": str(small_memory), "DSPROF_LIMIT": "32MiB", "DSPROF_EXIT_WAIT": "60"}
    done = train(tmp_path, JOB.replace("{}", FILL), native=native, **more)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    capture = only_capture(tmp_path / "run")
    assert 0 < capture.dropped < 40_000
    assert ticks(capture) + capture.dropped >= 40_000
    is_emptied(small_memory)
    assert (
        f"rank 0: {capture.dropped} records could not be written to {small_memory} in memory (disk full, or slower "
        "than the job): make room, lower --limit, or name another folder by --scratch DIR"
    ) in load(RunFolder(tmp_path / "run")).run.warnings


def test_two_jobs_of_a_user_at_once(tmp_path: Path, disk: Path) -> None:
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(JOB.replace("{}", WAIT))
        env = environment(
            DSPROF="1", DSPROF_RUN=str(tmp_path / name / "run"), DSPROF_NATIVE="off", DSPROF_SCRATCH=str(disk),
            DSPROF_EXIT_WAIT="60",
        )  # fmt: skip
        jobs.append(forked_python.start([sys.executable, "train.py"], cwd=tmp_path / name, env=env))
    for name in ("a", "b"):
        appears(tmp_path / name / "waits")
    assert len([*disk.glob("*/*/capture/rank*")]) == 2
    for name in ("a", "b"):
        (tmp_path / name / "go").touch()
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    assert all(all_or_counted(only_capture(tmp_path / name / "run"), 40_000) for name in ("a", "b"))
    is_emptied(disk)


def is_emptied(disk: Path) -> None:
    """A rank waits until its own folder there is gone; what that stood in goes right after it."""
    until = time.monotonic() + 60
    while [*disk.glob("*/*")]:
        assert time.monotonic() < until
        time.sleep(0.02)


def appears(path: Path) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("killed", ["launcher", pytest.param("launcher and rank", marks=pytest.mark.slow), "all"])
def test_no_kill_loses_anything(tmp_path: Path, disk: Path, killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of a command that goes on without it, its rank too, and the copier as well."""
    (tmp_path / "train.py").write_text(JOB.replace("{}", WAIT))
    run = tmp_path / "run"
    flags = ["-o", str(run), "--scratch", str(disk), "--native", "off", "--exit-wait", "60"]
    launcher = forked_python.start(
        [sys.executable, "-m", "dsprof", "run", *flags, "--", sys.executable, "train.py"],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    appears(tmp_path / "waits")
    (local,) = disk.glob("*/*/capture/rank*")
    state = scratch.state_of(local / COPYING_FILE)
    assert state is not None
    rank = int(local.name.rpartition(".")[2])
    victims = {"launcher": [], "launcher and rank": [rank], "all": [rank, state.copier]}[killed]
    for process in (launcher.pid, *victims):
        os.kill(process, signal.SIGKILL)
    launcher.wait()
    (tmp_path / "go").touch()
    if killed == "all":
        monkeypatch.setattr(scratch, "SHARED_MEMORY", disk)
        monkeypatch.setattr(scratch, "parents", lambda given: [])
        until = time.monotonic() + 300
        while not left_behind.find():  # a killed process holds it until its last thread has ended
            assert time.monotonic() < until
            time.sleep(0.02)
        assert [*left_behind.tidy(tmp_path / "next")] == [
            f"{local}, left by processes that were killed, is moved to {run}"
        ]
    until = time.monotonic() + 300
    while [*disk.glob("*/*")]:
        assert time.monotonic() < until
        time.sleep(0.02)
    capture = only_capture(run)
    assert capture.problems == []
    assert all_or_counted(capture, 40_000 if killed == "launcher" else 20_000)


def test_a_containers_small_memory_is_not_used(tmp_path: Path) -> None:
    """64 MiB, as Docker gives it: asked for by name, it is refused in words."""
    alone = ["unshare", "--mount"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run([*alone, "sh", "-c", small], capture_output=True).returncode:
        pytest.skip("a mount namespace is not permitted here")
    (tmp_path / "train.py").write_text(JOB.replace("{}", ""))
    env = environment(DSPROF="1", DSPROF_RUN=str(tmp_path / "run"), DSPROF_NATIVE="off", DSPROF_SCRATCH="/dev/shm")
    job = [*alone, "sh", "-c", f'{small} && "{sys.executable}" train.py && find /dev/shm -type f']
    done = subprocess.run(job, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    capture = only_capture(tmp_path / "run")
    assert all_or_counted(capture, 40_000)
    (note,) = [fact["text"] for fact in capture.facts if fact["fact"] == "note"]
    assert note.startswith(
        "captured into the run folder directly: /dev/shm has 64 MiB of memory for captures (tmpfs); "
    )
