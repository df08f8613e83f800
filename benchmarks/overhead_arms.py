"""One rank of `overhead.py`: takes blocks of steps with and without collectors, and prints a line a round.

python overhead_arms.py JOB ARMS FOLDER SEED ROUNDS BLOCK WARM RANK
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

Step = Callable[[], None]
FIRST_STEPS: Final = 8
"""Before the first block: memory is taken, libraries choose their kernels."""
BESIDE: Final = ("dsprof-host-load", "dsprof-nvml", "dsprof-watchdog", "dsprof-reaper")
"""Names of the collectors' threads. (Those of the engine's lanes are the job's.)"""


@dataclass(frozen=True)
class Arm:
    """captures: DSPROF_NATIVE and DSPROF_LEVEL; profiles: what torch.profiler is given beside its activities."""

    captures: tuple[str, str] | None = None
    profiles: dict[str, bool] | None = None


ARMS: Final = {
    "off": Arm(),
    "off_again": Arm(),
    "light": Arm(captures=("1", "light")),
    "full": Arm(captures=("1", "full")),
    "python": Arm(captures=("0", "light")),
    "torch_profiler": Arm(profiles={}),
    "torch_profiler_stacks": Arm(profiles={"with_stack": True}),
    "torch_profiler_memory": Arm(profiles={"profile_memory": True}),
}


@dataclass(frozen=True)
class Block:
    """What one rank measured.

    cpu_s, wall_s: of all steps of the block
    faults:        of pages in them
    records:       written in them
    beside_s:      of cpu_s, that of the collectors' own threads
    opening_s, closing_s: CPU time of what comes once a capture
    """

    cpu_s: float
    wall_s: float
    faults: int
    records: int = 0
    beside_s: float = 0.0
    opening_s: float = 0.0
    closing_s: float = 0.0


def run_block(arm: Arm, step: Step, block: int, warm: int, folder: Path) -> Block:
    gc.collect()  # what another arm left is not this one's to clear away
    if arm.captures:
        return _captured(arm.captures, step, block, warm, folder)
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


def _captured(captures: tuple[str, str], step: Step, block: int, warm: int, folder: Path) -> Block:
    from dsprof.collectors import session

    os.environ["DSPROF_NATIVE"], os.environ["DSPROF_LEVEL"] = captures
    os.environ["DSPROF_RUN"] = str(folder)
    began = time.process_time()
    capture = session.start()
    opening_s = time.process_time() - began
    assert capture is not None
    assert isinstance(capture, session.Session)
    for _ in range(warm):
        step()
    records, beside_s = capture.recorder.records, _beside_s()
    taken = _taken(step, block)
    records, beside_s = capture.recorder.records - records, _beside_s() - beside_s
    assert (capture.recorder.dropped, capture.recorder.errors) == (0, 0), capture.recorder.failures()
    began = time.process_time()
    session.stop()
    return Block(*taken, records, beside_s, opening_s, time.process_time() - began)


def _taken(call: Step, times: int) -> tuple[float, float, int]:
    """CPU time of the process, wall time, faults of pages."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu, wall, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def _beside_s() -> float:
    """CPU time so far of the threads that the collectors have started, s."""
    total = 0
    for thread in threading.enumerate():
        if thread.name in BESIDE:
            total += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return total / 1e9


def main(job: str, arms: str, folder: str, seed: str, rounds: str, block: str, warm: str, rank: str) -> None:
    import torch
    import torch.distributed as dist
    from overhead_jobs import JOBS

    from dsprof.collectors import native

    if native.load_or_build(wait=True, explain=print) is None:
        sys.exit("the native helper could not be built")
    torch.set_num_threads(1)
    ranks = JOBS[job].ranks
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=int(rank), world_size=ranks)
    step = JOBS[job].make(int(rank), JOBS[job].batch_size)
    for _ in range(FIRST_STEPS):
        step()
    for number in range(int(seed), int(seed) + int(rounds)):
        told: dict[str, Any] = {}
        for arm in random.Random(number).sample(arms.split(","), arms.count(",") + 1):
            told[arm] = asdict(run_block(ARMS[arm], step, int(block), int(warm), Path(folder) / f"{arm}{number}"))
        print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end, after all is told


if __name__ == "__main__":
    main(*sys.argv[1:])
