"""Ranks under torchrun: whose status comes back, in which order they ended, and what signals do.

The ranks import no torch unless they must; each test still pays the agent's own import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import launcher
import pytest
import torch

from dsprof.launch.torchrun import DeathWatch
from dsprof.run import RankExit, RunFolder

RANK = """
import os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(*words):  # in one write: torchrun's ranks run unbuffered, and a print is two
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
WAIT = "if rank == 0: time.sleep(60)\n"


def run(folder: Path, script: str, *flags: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Two ranks of `script` under `dsprof run`."""
    (folder / "train.py").write_text(RANK + script)
    line = ["run", "--native", "off", "-o", "run", "--nproc_per_node", "2", *flags, "train.py", *words]
    return launcher.run(line, folder, forked=True)


def exits(folder: Path) -> list[RankExit]:
    (path,) = (folder / "run" / "exits").glob("*.json")
    found = [RankExit(**item) for item in json.loads(path.read_text())]
    assert RunFolder(folder / "run").read_info().exits == sorted(found, key=lambda item: (item.restart, item.rank))
    return found


def test_a_run_that_succeeds(tmp_path: Path) -> None:
    script = "say(rank, sys.argv[1:], os.environ['DSPROF'], os.environ['WORLD_SIZE'])"
    done = run(tmp_path, script, words=("-o", "foo", "--help", "--", "-x", "", "--", "a b"))
    assert done.returncode == 0
    words = "['-o', 'foo', '--help', '--', '-x', '', '--', 'a b'] 1 2"
    assert sorted(done.stdout.splitlines()) == [f"0 {words}", f"1 {words}"]
    assert [(item.rank, item.status, item.signal, item.stopped) for item in exits(tmp_path)] == [
        (0, 0, None, False),
        (1, 0, None, False),
    ]
    assert RunFolder(tmp_path / "run").read_info().world_size == 2
    assert "THE VERDICT" in done.stderr


@pytest.mark.parametrize(
    ("script", "status", "how"),
    [
        ("sys.exit(7)", 7, "exit status 7"),
        ("raise ValueError('boom')", 1, "exit status 1"),
        ("os._exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "SIGTERM"),
    ],
)
def test_the_first_failing_ranks_own_status(tmp_path: Path, script: str, status: int, how: str) -> None:
    done = run(tmp_path, WAIT + script)
    assert done.returncode == status
    assert f"[dsprof] the job ended with status {status}: rank 1 on " in done.stderr
    assert f"failed first ({how})" in done.stderr
    zero, one = exits(tmp_path)
    assert (one.rank, one.status, one.stopped) == (1, status, False)
    assert (zero.rank, zero.signal, zero.stopped) == (0, signal.SIGTERM, True)
    assert one.ended_ns is not None
    assert zero.ended_ns is not None
    assert one.ended_ns < zero.ended_ns
    assert "train.py FAILED" in done.stderr, "torchrun's own table"
    assert "ChildFailedError" not in done.stderr, "its traceback"
    assert "THE VERDICT" in done.stderr


def test_a_peer_that_fails_in_consequence_is_not_the_first(tmp_path: Path) -> None:
    script = """
from pathlib import Path
def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True
if rank == 1:
    Path("one.part").write_text(str(os.getpid()))
    os.rename("one.part", "one")
    while not os.path.exists("ready"):
        time.sleep(0.01)
    os._exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may look between the two ends, and stop this rank
Path("ready").touch()
while not os.path.exists("one") or not ended(int(Path("one").read_text())):
    time.sleep(0.01)
os._exit(4)
"""
    done = run(tmp_path, script, "--monitor-interval", "3")
    assert done.returncode == 3
    zero, one = exits(tmp_path)
    assert (zero.code, one.code) == (4, 3)
    assert zero.ended_ns is not None
    assert one.ended_ns is not None
    assert one.ended_ns < zero.ended_ns
    assert "rank 1 on" in done.stderr


def test_a_job_that_recovers_returns_0(tmp_path: Path) -> None:
    script = """
if restart == 0:
    if rank == 0:
        time.sleep(60)
    sys.exit(9)
"""
    done = run(tmp_path, script, "--max-restarts=1")
    assert done.returncode == 0
    assert [(item.restart, item.rank, item.status, item.stopped) for item in exits(tmp_path)] == [
        (0, 0, 143, True),
        (0, 1, 9, False),
        (1, 0, 0, False),
        (1, 1, 0, False),
    ]


def test_a_wrong_flag_of_torchrun_is_said_by_torchrun(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--rdzv-conf", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr or "rdzv" in done.stderr.lower()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has a GPU to start a rank for")
def test_no_gpu_to_start_a_rank_for_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = launcher.run(["run", "--native", "off", "-o", "run", "--nproc-per-node", "gpu", "train.py"], tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("[dsprof] error: --nproc-per-node gpu: ")
    assert "Traceback" not in done.stderr


def started(folder: Path, script: str) -> subprocess.Popen[str]:
    """Two ranks of `script`, both at its `say("up")`."""
    (folder / "train.py").write_text(RANK + script)
    line = ["run", "--native", "off", "-o", "run", "--nproc-per-node", "2", "train.py"]
    process = launcher.start(line, folder)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
    return process


def assert_no_rank_is_left(folder: Path) -> None:
    for item in exits(folder):
        with pytest.raises(ProcessLookupError):
            os.kill(item.pid, 0)


@pytest.mark.parametrize(
    ("send", "number", "status"),
    [(os.kill, signal.SIGINT, 130), (os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
)
def test_an_interrupted_job(tmp_path: Path, send: Callable[[int, int], None], number: int, status: int) -> None:
    process = started(tmp_path, "say('up'); time.sleep(60)")
    send(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"[dsprof] the job ended with status {status}\n" in err
    assert "THE VERDICT" in err
    assert "SignalException" not in err
    assert [(item.signal, item.stopped) for item in exits(tmp_path)] == [(number, True)] * 2
    assert_no_rank_is_left(tmp_path)


def test_the_second_ctrl_c_kills_ranks_that_ignore_the_first(tmp_path: Path) -> None:
    process = started(tmp_path, "signal.signal(2, signal.SIG_IGN); say('up'); time.sleep(60)")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.5)  # sooner, it counts as the same one
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "THE VERDICT" in err
    assert [(item.signal, item.stopped) for item in exits(tmp_path)] == [(signal.SIGKILL, True)] * 2
    assert_no_rank_is_left(tmp_path)


def test_a_killed_launcher_leaves_no_job_behind(tmp_path: Path) -> None:
    process = started(tmp_path, "say('up'); time.sleep(60)")
    process.kill()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("run/exits/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    (path,) = tmp_path.glob("run/exits/*.json")
    assert [item["signal"] for item in json.loads(path.read_text())] == [signal.SIGTERM] * 2


def test_the_order_of_deaths_is_the_kernels(tmp_path: Path) -> None:
    """Right even if the watching thread gets to run only after all of them."""
    watch = DeathWatch()
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(6)]
    for rank, process in enumerate(sleepers):
        watch.add(process, {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    order = [3, 0, 5, 1, 4, 2]
    for rank in order:
        sleepers[rank].kill()
        os.waitid(os.P_PID, sleepers[rank].pid, os.WEXITED | os.WNOWAIT)
    watch.start()
    first = watch.first_failure()
    assert first is not None
    assert first.rank == 3
    assert sorted(range(6), key=lambda rank: watch.children[rank].ended_ns or 0) == order
    assert {child.exit("host").status for child in watch.children} == {137}


def test_without_pidfd_statuses_are_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not in this sandbox")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    watch = DeathWatch()
    watch.start()
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    child = watch.add(process, {"RANK": "0", "LOCAL_RANK": "0"})
    process.wait()
    assert watch.first_failure() is child
    assert (child.exit("host").status, child.ended_ns) == (7, None)
