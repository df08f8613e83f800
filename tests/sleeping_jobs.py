"""Run the jobs of `sleeping_device/jobs/`, with and without dsprof, and read what the device did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from captures import build_helper
from jobs import environment
from sleeping_device.build import CannotBuild, build

from dsprof.run import RunFolder
from dsprof.trace import load
from dsprof.trace.load import Trace

HERE = Path(__file__).parent
JOBS = HERE / "sleeping_device" / "jobs"


@dataclass(frozen=True)
class Ran:
    """A job that has run: what each rank told, and its trace if dsprof watched."""

    folder: Path
    told: list[dict[str, Any]]

    def log(self, rank: int = 0) -> pd.DataFrame:
        """What the rank's device did: name, stream, launch_ns, arrival_ns, begin_ns, end_ns."""
        return pd.DataFrame(self.told[rank]["log"])

    def trace(self) -> Trace:
        return load(RunFolder(self.folder / "run"))

    def rows(self, rank: int = 0) -> pd.DataFrame:
        return self.trace().read(rank)


class SleepingRanks:
    """Runs jobs whose ranks are forked from one process with the device and torch."""

    def __init__(self, libraries: Path) -> None:
        paths = [str(HERE), *filter(None, sys.path)]
        env = environment(
            SLEEPING_DEVICE=str(libraries), PYTHONPATH=":".join(paths), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sleeping_device.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(
        self,
        where: Path,
        script: str,
        *arguments: str,
        ranks: int = 1,
        armed: bool = True,
        without: str = "",
        **env: str,
    ) -> Ran:
        """`without`: collectors that are left out."""
        where.mkdir(parents=True, exist_ok=True)
        settings = {"SLEEPING_DEVICE_MEETS": str(where), **env}
        if armed:
            settings |= {"DSPROF": "1", "DSPROF_RUN": str(where / "run"), "DSPROF_WITHOUT": without}
        path = script if os.path.isabs(script) else str(JOBS / script)
        job = {"script": path, "arguments": arguments, "ranks": ranks, "env": settings, "folder": str(where)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        errors = "\n".join((where / f"err.{rank}").read_text() for rank in range(ranks))
        assert statuses == [0] * ranks, errors
        return Ran(where, [json.loads((where / f"told.{rank}").read_text()) for rank in range(ranks)])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def start(cache: Path) -> SleepingRanks:
    """Skips the test where there can be no such device."""
    try:
        libraries = build(cache)
    except CannotBuild as error:
        pytest.skip(str(error))
    build_helper()
    return SleepingRanks(libraries)
