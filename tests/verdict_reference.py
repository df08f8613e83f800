"""The losses of a job without dsprof and without sleeping: what they have to be with it.

Importing torch takes longer than such a job, so one process imports it and forks the ranks of every job. Run as a
script it is that process: a job is a line of JSON on stdin, and its status a line on stdout.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from jobs import environment
from verdict_truth import JOBS, Job

LIMIT_S: Final = 120


class Reference:
    """Runs jobs plainly; `close` ends the process and its ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment(VERDICT_JOBS_HURRY="1"), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def losses(self, job: Job, folder: Path) -> list[list[float]]:
        """Of each rank; raises RuntimeError if the job fails."""
        folder.mkdir(parents=True, exist_ok=True)
        line = {"script": job.script, "steps": job.steps, "args": job.args, "ranks": job.ranks, "folder": str(folder)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        if not ready or self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"{job} failed or hung without dsprof: {(folder / 'output').read_text()}")
        return [json.loads(file.read_text())["losses"] for file in sorted(folder.glob("rank*.json"))]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _serve() -> None:
    import torch.distributed.fsdp
    import torch.distributed.pipelining  # noqa: F401

    sys.path.insert(0, str(JOBS))
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = [_fork(asked, rank, port) for rank in range(asked["ranks"] or 1)]
        failed = [os.waitpid(pid, 0)[1] for pid in ranks]
        print("failed" if any(failed) else "done", flush=True)


def _fork(asked: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(Path(asked["folder"]) / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if asked["ranks"] is not None:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked["ranks"], "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
        script = str(JOBS / asked["script"])
        sys.argv = [script, "--steps", str(asked["steps"]), *asked["args"], "--results", asked["folder"]]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
