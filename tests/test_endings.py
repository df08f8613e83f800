"""However a rank ends, the job's status is its own, the capture is readable, and the verdict names the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import Finished, environment, profile

from dsprof.run import RunFolder

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
ending, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000 if ending == "forever" else 6):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step == 4:
        open(f"started{rank}", "w").close()
        if rank == 1:
            if ending == "exit-7":
                dist.destroy_process_group()
                sys.exit(7)
            if ending == "exception":
                raise ValueError("planted")
            if ending == "_exit-3":
                os._exit(3)
            if ending.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, ending))
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("ending", "status", "how"),
    [
        ("exit-0", 0, None),
        ("exit-7", 7, "exit status 7"),
        ("exception", 1, "exit status 1"),
        ("_exit-3", 3, "exit status 3"),
        ("SIGKILL", 137, "SIGKILL"),
        ("SIGTERM", 143, "SIGTERM"),
    ],
)
def test_a_rank_ends(ending: str, status: int, how: str | None, script: Path, tmp_path: Path) -> None:
    finished = profile(tmp_path, script, ending, flags=("--no-report",))
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
    assert finished.findings["run"]["ranks"] == {"expected": 2, "captured": 2}
    assert finished.findings["run"]["steps"] >= 5
    assert died[0]["where"]["steps"] == [4, 4]


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
