"""DSPROF=1 without a launcher: who builds the native helper, who waits for it, and what is said where there is none."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked_python
import pytest
import torch  # noqa: F401  (the helper is for the torch of this process)
from captures import build_helper
from jobs import ABORTED, environment

from dsprof.collectors.native import build
from dsprof.run import RunError, RunFolder, open_run
from dsprof.trace import load

TRAIN = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
RANKS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
NEXT_RUN = "recorded in Python, which is slower, as there is no native helper: it is being built for the next run"


class Machine:
    """One without a helper, whose compiler counts its runs and does `body` ($out: what it is to write)."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        compiler = folder / "cxx"
        compiler.write_text(
            f"""#!/bin/sh
if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi
echo run >> {folder}/runs
while [ "$1" != -o ]; do shift; done; out=$2
{body}
"""
        )
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        (folder / "tmp").mkdir()
        self.env = {"CXX": str(compiler), "DSPROF_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}

    @property
    def runs(self) -> int:
        path = self.folder / "runs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def found(self, name: str) -> list[Path]:
        return [*self.folder.glob(f"cache/native/*/{name}")]

    def begin(self) -> str:
        """What a rank here is told that would have it built."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.env.items():
                patch.setenv(name, value)
            return build.begin()

    def train(self, run: str, *, native: str = "") -> tuple[bool, list[str]]:
        """Train armed, without a launcher: whether with the helper, and the warnings."""
        (self.folder / "train.py").write_text(TRAIN)
        env = environment(DSPROF="1", DSPROF_RUN=str(self.folder / run), DSPROF_NATIVE=native, **self.env)
        done = forked_python.run([sys.executable, "train.py"], cwd=self.folder, env=env, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
        info = load(RunFolder(self.folder / run)).run
        assert [item.last_step for item in info.ranks] == [4]
        return info.ranks[0].native, info.warnings


@pytest.fixture
def helper() -> Path:
    """The real one."""
    return build_helper()


def test_the_first_run_does_not_wait_and_the_next_has_it(tmp_path: Path, helper: Path) -> None:
    go = tmp_path / "go"
    machine = Machine(tmp_path, f"until [ -e {go} ]; do sleep 0.05; done; cp {helper} $out")
    assert machine.train("one") == (False, [f"rank 0: {NEXT_RUN}"])
    machine.until(lambda: machine.runs)
    assert machine.begin() == "it is being built for the next run"  # by the process that builds already
    go.touch()
    machine.until(lambda: machine.found("dsprof_native.so"))
    assert machine.train("two") == (True, [])
    assert machine.runs == 1


def test_asked_for_by_name_it_is_waited_for(tmp_path: Path, helper: Path) -> None:
    machine = Machine(tmp_path, f"cp {helper} $out")
    assert machine.train("one", native="on") == (True, [])


def test_a_compiler_that_fails_is_told_and_not_asked_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "echo 'fatal error: planted' >&2; exit 1")
    native, (warning,) = machine.train("one", native="on")
    (log,) = machine.found("build.log")
    assert not native
    assert warning == (
        f"rank 0: recorded in Python, which is slower, as there is no native helper: building it failed, see {log}"
    )
    assert machine.begin() == f"building it failed, see {log}"
    assert machine.runs == 1


def test_no_compiler_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    machine.env["CXX"] = "/nowhere/c++"
    native, (warning,) = machine.train("one")
    assert not native
    assert warning.endswith("as there is no native helper: no C++ compiler found (set CXX, or install g++)")


def test_a_helper_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    path = tmp_path / "cache" / "native" / build.running_target().key / "dsprof_native.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nonsense")
    native, (warning,) = machine.train("one")
    assert not native
    assert warning.startswith(
        "rank 0: recorded in Python, which is slower, as there is no native helper: ImportError: "
    )


def test_nobody_waits_for_a_rank_that_is_not_armed(tmp_path: Path) -> None:
    """Of three ranks the first is not armed; the others are one run, and one of them has it built."""
    machine = Machine(tmp_path, "exit 1")
    (tmp_path / "ranks.py").write_text(RANKS)
    for attempt in range(3):
        out = tmp_path / f"out{attempt}"
        ranks = [
            forked_python.start(
                [sys.executable, "ranks.py", str(rank), str(tmp_path / f"store{attempt}")],
                cwd=tmp_path,
                env=environment(
                    **({"DSPROF": "1"} if rank else {}), DSPROF_DIR=str(out), OMP_NUM_THREADS="1", **machine.env
                ),
                stderr=subprocess.PIPE,
            )
            for rank in range(3)
        ]
        errors = [process.communicate(timeout=120)[1] for process in ranks]
        if not any(ABORTED in error for error in errors):
            break
    assert [process.returncode for process in ranks] == [0, 0, 0], errors
    (folder,) = out.iterdir()
    info = load(RunFolder(folder)).run
    assert [(item.rank, item.last_step) for item in info.ranks] == [(1, 4), (2, 4)]
    assert "no capture of rank 0 (2 of 3 captured)" in info.warnings
    assert any(warning.startswith("rank 1, 2: recorded in Python") for warning in info.warnings) or (
        len([warning for warning in info.warnings if ": recorded in Python" in warning]) == 2
    )  # where one began when the other's compiler had failed already
    machine.until(lambda: machine.found("failed.json"))
    assert machine.runs == 1


def test_a_wrong_setting_without_a_launcher_is_told_by_the_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    given = {"DSPROF": "1", "DSPROF_DIR": str(tmp_path / "runs"), "DSPROF_LIMIT": "banana"}
    done = forked_python.run([sys.executable, str(script)], env=environment(**given), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (run,) = (tmp_path / "runs").iterdir()
    with pytest.raises(RunError, match="no capture was begun: starting the capture: ValueError: 'banana' is no size"):
        open_run(run)
