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


def losses(job: Job, folder: Path) -> list[list[float]]:
    """Of each rank. Raises RuntimeError if the job fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(JOBS / job.script), "--steps", str(job.steps), *job.args, "--results", str(folder)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = []
    with open(folder / "output", "w") as output:
        for rank in range(job.ranks or 1):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
            known = {} if job.ranks is None else {name: str(value) for name, value in place.items()}
            env = environment(VERDICT_JOBS_HURRY="1", MASTER_ADDR="127.0.0.1", **known)
            ranks.append(forked_python.start(command, env=env, stdout=output, stderr=output))
    try:
        failed = any(rank.wait(LIMIT_S) for rank in ranks)
    except subprocess.TimeoutExpired:
        failed = True
    for rank in ranks:
        rank.kill()
    if failed:
        raise RuntimeError(f"{job} failed or hung without dsprof: {(folder / 'output').read_text()}")
    return [json.loads(file.read_text())["losses"] for file in sorted(folder.glob("rank*.json"))]
