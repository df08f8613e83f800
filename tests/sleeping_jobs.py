"""Run the jobs of `sleeping_device/jobs/`, with and without dsprof, and read what the device did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
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
        """What the rank's device did: name, stream, launch_ns, reached_ns, arrival_ns, begin_ns, end_ns
        (`sleeping_device.log`)."""
        return pd.DataFrame(self.told[rank]["log"])

    def did(self, name: str, rank: int = 0, last: int | None = None) -> pd.DataFrame:
        """Of the log, the operations of this name in the order of their launch; the last ones only. `ahead`: the device
        got to it after its launch, and the host had gone on when it was over: a host that a busy machine stops may put
        an event before or behind it too late."""
        log = self.log(rank).sort_values("launch_ns", kind="stable")
        went_on = (log["launch_ns"].shift(-1) < log["end_ns"]) | log["name"].str.endswith(
            "barrier"
        )  # for which it waits
        log = log.assign(ahead=(log["arrival_ns"] > log["launch_ns"]) & went_on)
        found = log[log["name"] == name]
        return found.iloc[0 if last is None else -last :].reset_index(drop=True)

    def phases(self, rank: int = 0) -> pd.DataFrame:
        """The phases of the job on its device's default stream: name, begin_ns, end_ns, and `ahead`, whether the host
        was ahead of the device at both ends. A phase begins when the host says so and the stream is through with what
        it had."""
        log = self.log(rank)
        stream = log[log["stream"] == 0]
        launched, ended = stream["launch_ns"].to_numpy(), stream["end_ns"].to_numpy()
        rows = []
        for name, begin, end in self.told[rank]["phases"]:
            before, within = (ended[launched < at].max(initial=0) for at in (begin, end))
            # The second, as `loss.backward()` makes a gradient before the backward begins.
            second = [*np.sort(launched[launched >= begin])[1:2], end][0]
            rows.append((name, max(before, begin), max(within, end), before > second and within > end))
        return pd.DataFrame(rows, columns=["name", "begin_ns", "end_ns", "ahead"])

    @cached_property
    def trace(self) -> Trace:
        return load(RunFolder(self.folder / "run"))

    def rows(self, rank: int = 0) -> pd.DataFrame:
        return self.trace.read(rank)

    def communications(self, name: str, rank: int = 0, least_step: int = 2) -> pd.DataFrame:
        """dsprof's rows of communications of this name in steps that it has seen whole, in the order of their issue."""
        rows = self.rows(rank)
        found = rows[(rows["kind"] == "comm") & (rows["name"] == name) & (rows["step"] >= least_step)]
        return found.sort_values("issue_ns", kind="stable").reset_index(drop=True)


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
        """`without`: collectors that are left out. No steps are traced by torch.profiler, which does not know this
        device, unless DSPROF_DEEP is given."""
        where.mkdir(parents=True, exist_ok=True)
        settings = {"SLEEPING_DEVICE_MEETS": str(where), "DSPROF_DEEP": "never", **env}
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
        assert statuses == [0] * ranks, f"{statuses}: {errors}"
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
