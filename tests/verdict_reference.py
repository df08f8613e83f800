"""The losses of a job without dsprof and without sleeping: what they have to be with it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import forked_python
from jobs import environment
from verdict_truth import JOBS, Job

LIMIT_S: Final = 120
AT_ONCE: Final = 3


class Reference:
    """A job that runs without dsprof, from now on."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--steps", str(job.steps), *job.args, "--results", str(folder)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        self._ranks = []
        with open(folder / "output", "w") as output:
            for rank in range(job.ranks or 1):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
                known = {} if job.ranks is None else {name: str(value) for name, value in place.items()}
                env = environment(VERDICT_JOBS_HURRY="1", MASTER_ADDR="127.0.0.1", **known)
                command = [sys.executable, str(JOBS / job.script), *words]
                self._ranks.append(forked_python.start(command, env=env, stdout=output, stderr=output))

    def losses(self) -> list[list[float]]:
        """Of each rank, when it has ended. Raises RuntimeError if the job fails."""
        try:
            failed = any(rank.wait(LIMIT_S) for rank in self._ranks)
        except subprocess.TimeoutExpired:
            failed = True
        self.kill()
        if failed:
            output = (self._folder / "output").read_text()
            raise RuntimeError(f"{self._job} failed or hung without dsprof: {output}")
        return [json.loads(file.read_text())["losses"] for file in sorted(self._folder.glob("rank*.json"))]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


def losses(job: Job, folder: Path) -> list[list[float]]:
    """Of each rank."""
    return Reference(job, folder).losses()


def losses_of(jobs: dict[str, Job], folder: Path) -> dict[str, list[list[float]] | RuntimeError]:
    """Of each rank of each job, or why there are none. Several run at a time: half of what one takes is waiting."""
    found: dict[str, list[list[float]] | RuntimeError] = {}
    running: dict[str, Reference] = {}
    waiting = list(jobs.items())
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, job = waiting.pop(0)
                running[name] = Reference(job, folder / name.replace(" ", "-"))
            name = next(iter(running))
            try:
                found[name] = running[name].losses()
            except RuntimeError as error:
                found[name] = error
            del running[name]
    finally:
        for reference in running.values():
            reference.kill()
    return found
