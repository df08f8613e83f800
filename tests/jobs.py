"""Run a real job under `dsprof run`, as a user would, and read what it left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import forked_python

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.run import RunFolder
from dsprof.trace import load

ABORTED = "terminate called without an active exception"
"""Of torch: a gloo job says this on its way out now and then, with any profiler or none. It is run again."""

NO_CORE = "compute.no-core"
STARVED = 0.03
"""Share of a job's time for which its ranks wait for a core. On a machine that is not busy it is far less, and nothing
may be said of it; dsprof speaks from 0.05 of the steps after warm-up on."""

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    folder: RunFolder
    status: int
    stdout: str
    stderr: str
    heard: tuple[tuple[float, str], ...] = ()
    """Each line of stderr, and when it came, in s since the epoch."""

    @property
    def findings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.findings_json.read_text())
        return found

    @property
    def above_info(self) -> list[str]:
        return [finding["code"] for finding in self.told if finding["severity"] != "info"]

    @property
    def told(self) -> list[dict[str, Any]]:
        """The findings; without that ranks wait for cores, where the kernel itself counts that they do: it is true
        then, and of the machine that the tests run on."""
        found: list[dict[str, Any]] = self.findings["findings"]
        starved = any(finding["code"] == NO_CORE for finding in found) and self.starved
        return [finding for finding in found if not (starved and finding["code"] == NO_CORE)]

    @cached_property
    def starved(self) -> bool:
        """Whether half of the ranks or more waited for a core for much of the time, by the kernel's own count."""
        rows = load(self.folder).rows
        read = rows[(rows["kind"] == "gauge") & (rows["name"] == "core_wait_seconds")].sort_values("start_ns")
        each = [
            (of["value"].iloc[-1] - of["value"].iloc[0]) * 1e9 / (of["start_ns"].iloc[-1] - of["start_ns"].iloc[0])
            for _, of in read.groupby("rank") if len(of) > 1
        ]  # fmt: skip
        return bool(each) and sorted(each)[len(each) // 2] > STARVED

    def analysis(self) -> Analysis:
        return analyze(load(self.folder))


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would arm or steer dsprof or torchrun. Captures go into the run folder at once,
    where a test looks for them; where else they go by themselves is the subject of test_scratch.py."""
    drop = ("DSPROF", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PET_", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "DSPROF_SCRATCH": "off", **more}


def profile(
    tmp_path: Path,
    script: Path,
    *args: str,
    ranks: int | None = 2,
    flags: tuple[str, ...] = (),
    fresh: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """`dsprof run --nproc-per-node RANKS script args` in `tmp_path`; without ranks, `dsprof run script args`.

    fresh: in interpreters that import torch themselves, for what depends on how processes are started and end
    variables: of the environment, beside this process's
    """
    folder = tmp_path / "run"
    launcher = [] if ranks is None else ["--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "dsprof", "run", "-o", str(folder), *launcher, *flags]
    for _ in range(3):
        try:
            finished = _heard(RunFolder(folder), [*command, str(script), *args], tmp_path, fresh, variables)
        except subprocess.TimeoutExpired:  # what is ours to blame hangs in interpreters of its own, too
            if fresh:
                raise
            fresh = True
        else:
            if ABORTED not in finished.stderr:
                break
        time.sleep(0.5)  # a rank that was killed may still be writing
        shutil.rmtree(folder)
    return finished


def _heard(
    folder: RunFolder, command: list[str], cwd: Path, fresh: bool, variables: Mapping[str, str] | None
) -> Finished:
    """Run it, and note when it says what on stderr."""
    heard: list[tuple[float, str]] = []
    read, write = os.pipe()

    def listen() -> None:
        with open(read, errors="replace") as lines:
            heard.extend((time.time(), line) for line in lines)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        done = forked_python.run(
            command,
            cwd=cwd,
            env=environment(**(variables or {})),
            stdout=subprocess.PIPE,
            stderr=write,
            fresh=fresh,
            timeout=170 if fresh else 110,
        )
    except subprocess.TimeoutExpired:
        forked_python.ask_for_stacks()
        time.sleep(1)
        forked_python.end_all()
        # The job is run again, so that nobody would hear of it.
        warnings.warn(f"stood still: {''.join(line for _, line in heard)[-50_000:]}", stacklevel=2)
        raise
    finally:
        os.close(write)
    listener.join()
    return Finished(folder, done.returncode, done.stdout, "".join(line for _, line in heard), tuple(heard))
