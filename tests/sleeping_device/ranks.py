"""Runs jobs on the sleeping device, each rank forked from one process that has imported torch: importing it takes
longer than a job. `python -m sleeping_device.ranks` reads a job a line, as JSON, and answers with its ranks'
statuses."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any

import sleeping_device  # noqa: F401  # before torch

LATER = (
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "torch._meta_registrations",
)
"""What torch imports when a job first uses it, which takes each rank a second."""


def main() -> None:
    for module in LATER:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _run(job, rank)  # does not return
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


def _run(job: dict[str, Any], rank: int) -> None:
    """Become a rank of the job; ends as an interpreter does."""
    for name, number in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", job["ranks"])):
        os.environ[name] = str(number)
    os.environ.update(job["env"])
    os.chdir(job["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, os.path.dirname(job["script"]))
    if "DSPROF_RUN" in job["env"]:
        from dsprof.collectors.arming.process import arm

        arm()
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
