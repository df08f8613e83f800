"""A script that wants to be started in another way leaves a word for the launcher, and ends as it would have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked_python
import pytest
from armed import train
from jobs import environment

from dsprof.collectors.arming import launch_hints

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
JOIN = "import sys, torch.distributed as dist\n"
LOSE_A_KEY = "import torch\nranks = {}\nranks['RANK']"
GO_ON = (
    JOIN
    + """
import torch
try:
    dist.init_process_group("gloo")
except ValueError:
    pass
torch.ones(1, requires_grad=True).sum().backward()
sys.exit(1)
"""
)
CATCH = (
    JOIN
    + """
try:
    dist.init_process_group("gloo")
except ValueError as error:
    sys.exit("caught")
"""
)
SPAWN = """
import torch, torch.multiprocessing as mp
def rank(number):
    pass
if __name__ == "__main__":
    mp.spawn(rank, nprocs=1)
"""


def left(tmp_path: Path) -> list[tuple[str, str]]:
    """Kind and reason of each hint."""
    found = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("hint.*.json")]
    return [(hint["kind"], hint["reason"]) for hint in found]


@pytest.mark.parametrize(
    ("code", "variable"),
    [
        (JOIN + "dist.init_process_group('gloo')", "RANK"),
        ("import os, torch\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))", "LOCAL_RANK"),
        ("import os, torch\nworld = int(os.environ.get('WORLD_SIZE'))", "WORLD_SIZE"),
        (CATCH, "RANK"),
    ],
)
def test_who_dies_for_want_of_a_rank_says_so(code: str, variable: str, tmp_path: Path) -> None:
    done = train(tmp_path, code, native="0")
    alone = forked_python.run(
        [sys.executable, str(tmp_path / "train.py")], env=environment(), capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]
    assert left(tmp_path) == [("wants-ranks", f"it needs {variable}, which is not set")]


@pytest.mark.parametrize("code", [LOSE_A_KEY, GO_ON, "import torch\nraise ValueError('RANK')", "import torch"])
def test_who_dies_of_something_else_does_not(code: str, tmp_path: Path) -> None:
    train(tmp_path, code, native="0")
    assert left(tmp_path) == []


def test_a_rank_that_wants_nccl_without_a_gpu(tmp_path: Path) -> None:
    done = train(tmp_path, JOIN + "dist.init_process_group('nccl')", native="0", **TORCHRUN)
    assert done.returncode == 1
    assert left(tmp_path) == [("wants-no-ranks", "given ranks, it wants NCCL, and there is no GPU")]


def test_a_rank_that_starts_ranks_itself(tmp_path: Path) -> None:
    done = train(tmp_path, SPAWN, native="0", **TORCHRUN)
    assert (done.returncode, done.stderr) == (0, "")
    assert left(tmp_path) == [("wants-no-ranks", "it starts its own processes with torch.multiprocessing")]
    (tmp_path / "alone").mkdir()
    done = train(tmp_path / "alone", SPAWN, native="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert left(tmp_path / "alone") == []


def test_without_a_launcher_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPROF_RUN", raising=False)
    monkeypatch.setattr(launch_hints.identity, "_remembered", {})
    registered: list[object] = []
    monkeypatch.setattr(launch_hints.atexit, "register", registered.append)
    launch_hints.watch()
    assert registered == []
