"""Run a real job under `dsprof run`, as a user would, and read what it left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.run import RunFolder
from dsprof.trace import load

ABORTED = "terminate called without an active exception"
"""Of torch: a gloo job says this on its way out now and then, with any profiler or none. It is run again."""

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    folder: RunFolder
    status: int
    stdout: str
    stderr: str

    @property
    def findings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.findings_json.read_text())
        return found

    @property
    def above_info(self) -> list[str]:
        return [finding["code"] for finding in self.findings["findings"] if finding["severity"] != "info"]

    def analysis(self) -> Analysis:
        return analyze(load(self.folder))


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would arm or steer dsprof or torchrun."""
    drop = ("DSPROF", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PET_", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **more}


def profile(tmp_path: Path, script: Path, *args: str, ranks: int | None = 2, flags: tuple[str, ...] = ()) -> Finished:
    """`dsprof run --nproc-per-node RANKS script args` in `tmp_path`; without ranks, `dsprof run script args`."""
    folder = tmp_path / "run"
    launcher = [] if ranks is None else ["--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "dsprof", "run", "-o", str(folder), *launcher, *flags]
    for _ in range(3):
        done = subprocess.run(
            [*command, str(script), *args], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
        )
        if ABORTED not in done.stderr:
            break
        shutil.rmtree(folder)
    return Finished(RunFolder(folder), done.returncode, done.stdout, done.stderr)
