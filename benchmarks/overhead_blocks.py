"""One rank of `overhead.py`'s arms that cost much: blocks of steps of each, in one process.

python overhead_blocks.py JOB FOLDER SEED ROUNDS BLOCK WARM RANK

Prints a line a round: for each arm a `Block`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

Step = Callable[[], None]
FIRST_STEPS: Final = 8
"""Before the first block: memory is taken, libraries choose their kernels."""


@dataclass(frozen=True)
class Arm:
    """captures: at level light, by the Python recorder; profiles: torch.profiler's arguments beside its activities."""

    captures: bool = False
    profiles: dict[str, bool] | None = None


ARMS: Final = {
    "off": Arm(),
    "off_again": Arm(),
    "python": Arm(captures=True),
    "torch_profiler": Arm(profiles={}),
    "torch_profiler_stacks": Arm(profiles={"with_stack": True}),
    "torch_profiler_memory": Arm(profiles={"profile_memory": True}),
}


@dataclass(frozen=True)
class Block:
    """What one rank measured: CPU time of the process and wall time of all steps of the block."""

    cpu_s: float
    wall_s: float


def run_block(arm: Arm, step: Step, block: int, warm: int, folder: Path) -> Block:
    gc.collect()  # what another arm left is not this one's to clear away
    if arm.captures:
        return _captured(step, block, warm, folder)
    for _ in range(warm):
        step()
    if arm.profiles is None:
        return Block(*_taken(step, block))
    from torch.profiler import ProfilerActivity, profile

    def window() -> None:
        with profile(activities=[ProfilerActivity.CPU], **(arm.profiles or {})):
            for _ in range(block):
                step()

    return Block(*_taken(window, 1))


def _captured(step: Step, block: int, warm: int, folder: Path) -> Block:
    from dsprof.collectors.capture import session

    os.environ.update(DSPROF_NATIVE="0", DSPROF_LEVEL="light", DSPROF_RUN=str(folder))
    capture = session.start()
    assert isinstance(capture, session.Session)
    for _ in range(warm):
        step()
    taken = _taken(step, block)
    assert (capture.recorder.dropped, capture.recorder.errors) == (0, 0), capture.recorder.failures()
    session.stop()
    return Block(*taken)


def _taken(call: Step, times: int) -> tuple[float, float]:
    """CPU time of the process, wall time."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    return time.process_time() - cpu, time.perf_counter() - wall


def main(job: str, folder: str, seed: str, rounds: str, block: str, warm: str, rank: str) -> None:
    import torch
    import torch.distributed as dist
    from overhead_jobs import JOBS

    torch.set_num_threads(1)
    ranks = JOBS[job].ranks
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=int(rank), world_size=ranks)
    step = JOBS[job].make(int(rank), JOBS[job].batch_size)
    for _ in range(FIRST_STEPS):
        step()
    for number in range(int(seed), int(seed) + int(rounds)):
        told: dict[str, Any] = {}
        for arm in random.Random(number).sample(list(ARMS), len(ARMS)):
            told[arm] = asdict(run_block(ARMS[arm], step, int(block), int(warm), Path(folder) / f"{arm}{number}"))
        print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end, after all is told


if __name__ == "__main__":
    main(*sys.argv[1:])
