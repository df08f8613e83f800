"""However a rank ends, the job's status is its own, the capture is readable, and the verdict names the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from jobs import Finished, environment, profile

from dsprof.run import RunFolder

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
ending, rank, distributed = sys.argv[1], int(os.environ.get("RANK", 0)), "RANK" in os.environ
if distributed:
    dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
if distributed:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000 if ending == "forever" else 6):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step == 4:
        open(f"started{rank}", "w").close()
        if rank == int(distributed):
            if ending == "exit-7":
                if distributed:
                    dist.destroy_process_group()
                sys.exit(7)
            if ending == "exception":
                raise ValueError("planted")
            if ending == "_exit-3":
                os._exit(3)
            if ending.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, ending))
if distributed:
    dist.destroy_process_group()
"""

SPAWNS = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, world_size, store, ending):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        if step == 4 and rank == 1 and ending == "SIGKILL":
            os.kill(os.getpid(), 9)
    dist.destroy_process_group()

if __name__ == "__main__":
    assert "RANK" not in os.environ
    mp.spawn(work, (2, os.path.abspath("store"), sys.argv[1]), nprocs=2)
    print("all have ended")
"""

NANO = """
import os, torch, torch.distributed as dist
distributed = int(os.environ.get("RANK", -1)) != -1
if distributed:
    dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("ending", "status", "how", "fresh"),
    [
        pytest.param("exit-0", 0, None, True, marks=pytest.mark.slow),  # as one process below, and most other jobs
        pytest.param("exit-7", 7, "exit status 7", True, marks=pytest.mark.slow),
        ("exception", 1, "exit status 1", False),
        pytest.param("exception", 1, "exit status 1", True, marks=pytest.mark.slow),
        pytest.param("_exit-3", 3, "exit status 3", True, marks=pytest.mark.slow),
        ("SIGKILL", 137, "SIGKILL", False),  # ends no program
        pytest.param("SIGTERM", 143, "SIGTERM", True, marks=pytest.mark.slow),
    ],
)
def test_a_rank_ends(ending: str, status: int, how: str | None, fresh: bool, script: Path, tmp_path: Path) -> None:
    """In `make test` in processes that are forked with torch in them: interpreters of their own take five times as
    long, and how they end is seen in what follows."""
    finished = profile(tmp_path, script, ending, flags=("--no-report",), fresh=fresh)
    assert finished.status == status, finished.stderr
    assert "[dsprof] verdict" in finished.stderr
    died = [finding for finding in finished.findings["findings"] if finding["code"] == "run.rank-died"]
    if how is None:
        assert died == []
        assert finished.findings["run"]["steps"] == 6
        return
    assert finished.findings["findings"][0] == died[0]
    assert died[0]["where"]["ranks"] == [1]
    assert how in died[0]["title"]
    assert died[0]["title"].endswith(": train.py:22: ValueError: planted") == (ending == "exception")
    assert finished.findings["run"]["ranks"] == {"expected": 2, "captured": 2}
    assert finished.findings["run"]["steps"] >= 5
    assert died[0]["where"]["steps"] == [4, 4]


@pytest.mark.parametrize(
    ("ending", "status", "how"),
    [
        ("exit-0", 0, None),
        ("exit-7", 7, "exit status 7"),
        pytest.param("SIGKILL", 137, "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_one_process_ends(ending: str, status: int, how: str | None, script: Path, tmp_path: Path) -> None:
    finished = profile(tmp_path, script, ending, ranks=None, flags=("--no-report",), fresh=ending == "exit-7")
    assert finished.status == status, finished.stderr
    assert "[dsprof] verdict" in finished.stderr
    assert finished.findings["run"]["ranks"] == {"expected": 1, "captured": 1}
    run = finished.folder.read_info()
    (rank,) = run.ranks
    assert (rank.closed_ns is None) == (ending == "SIGKILL")
    assert rank.started_ns is not None
    began_ns = rank.started_ns + 10_000_000  # the kernel tells it to 10 ms
    moments = [run.started_ns, began_ns, rank.opened_ns, rank.closed_ns or run.ended_ns, run.ended_ns]
    assert moments == sorted(moments), "each on the clock of the one host"
    died = [finding for finding in finished.findings["findings"] if finding["code"] == "run.rank-died"]
    if how is None:
        assert died == []
        return
    assert died[0]["where"] == {"ranks": [0], "steps": [4, 4]}
    assert how in died[0]["title"]


@pytest.mark.parametrize(("ending", "status"), [pytest.param("exit-0", 0, marks=pytest.mark.slow), ("SIGKILL", 1)])
def test_a_script_that_spawns_its_ranks(ending: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    finished = profile(tmp_path, tmp_path / "train.py", ending, ranks=None, flags=("--no-report",))
    assert finished.status == status, finished.stderr
    assert ("all have ended" in finished.stdout) == (status == 0)
    assert "[dsprof] verdict" in finished.stderr
    run = finished.folder.read_info()
    assert (run.world_size, [item.rank for item in run.ranks]) == (2, [0, 1])
    assert len({item.pid for item in run.ranks}) == 2
    assert run.exits == []  # the process that ended with this status is neither
    assert "rank 0 ended" not in finished.stderr
    assert "rank 0 on" not in finished.stderr


def test_a_script_that_is_one_process_where_rank_is_not_set(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANO)
    finished = profile(tmp_path, Path("train.py"), "x", ranks=None, flags=("--no-report",))
    assert (finished.status, finished.stdout) == (0, "trained\n")
    assert finished.findings["run"]["ranks"] == {"expected": 1, "captured": 1}
    assert finished.findings["run"]["steps"] == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="has what NCCL wants")
def test_a_script_that_would_rather_be_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANO)
    finished = profile(tmp_path, Path("train.py"), "x", ranks=1, flags=("--no-report",))
    assert finished.status == 1
    (hint,) = finished.folder.read_info().hints
    assert hint.startswith("the script may want to be one process, started without ranks (")
    assert hint.endswith(f"; type: dsprof run -o {finished.folder.path} --force --no-report train.py x")
    assert f"[dsprof] {hint}\n" in finished.stderr


@pytest.mark.parametrize("wants", ['int(os.environ["RANK"])', 'torch.distributed.init_process_group("gloo")'])
def test_a_script_that_wants_ranks(wants: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import os, torch, torch.distributed\n{wants}\n")
    finished = profile(tmp_path, Path("train.py"), "x", ranks=None, flags=("--no-report",))
    assert finished.status == 1
    (hint,) = finished.folder.read_info().hints
    assert hint.startswith("the script wants to be started with ranks (")
    line = f"dsprof run -o {finished.folder.path} --force --no-report --nproc-per-node 2 train.py x"
    assert hint.endswith(f"; type: {line}")
    assert f"[dsprof] {hint}\n" in finished.stderr


def test_ctrl_c(script: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "dsprof", "run", "-o", str(folder.path), "--nproc-per-node", "2", "--no-report"]
    job = subprocess.Popen(
        [*command, str(script), "forever"], cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"started{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGINT)
        _, stderr = job.communicate(timeout=120)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    finished = Finished(folder, job.returncode, "", stderr)
    assert finished.status == 130, stderr
    assert "[dsprof] verdict" in stderr
    assert "run.rank-died" not in finished.above_info
    assert finished.findings["run"]["ranks"]["captured"] == 2
