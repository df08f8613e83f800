"""One round of `overhead.py`'s arms that cost little: each in processes of its own, which take their steps in turns.

python overhead_turns.py JOB FOLDER SEED TURNS

Prints one line: for each arm a `Round`'s part, the mean of its ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from overhead_jobs import JOBS

ARMS: Final = {"off": None, "off_again": None, "light": "light", "full": "full"}
"""Arm -> DSPROF_LEVEL; None: none is left when steps count."""
FIRST_TURNS: Final = 10
"""Not counted: libraries choose their kernels, Python specializes what it runs, and the heap grows."""
CAPTURED_TURNS: Final = 5
"""The first of them have collectors in every arm, so that all find memory and Python's tables alike. Types have numbers
in the order of their first use, and a method's place in Python's cache goes by its type's number: which hot methods
displace each other there is chance, but it makes 0.6 % of the instructions of FSDP2's step, and it would be the same in
all processes of an arm."""
BESIDE: Final = ("dsprof-host-load", "dsprof-nvml", "dsprof-watchdog", "dsprof-complete")
"""Names of the collectors' threads. (Those of the engine's lanes are the job's.)"""


@dataclass(frozen=True)
class Captured:
    """What one rank says when its steps are over.

    faults:        of pages, a step
    records:       a step
    beside_ms_a_second: CPU time of the collectors' own threads; in a step as much of it counts as it takes alone
    opening_ms, closing_ms: CPU time of what comes once a capture, in no step
    """

    faults: float
    records: float = 0.0
    beside_ms_a_second: float = 0.0
    opening_ms: float = 0.0
    closing_ms: float = 0.0


class Collectors:
    """The capture of one process, opened before the model is made as `dsprof run` does."""

    def __init__(self, level: str, folder: Path) -> None:
        began = time.process_time()
        from dsprof.collectors.capture import session

        os.environ.update(DSPROF_NATIVE="1", DSPROF_LEVEL=level, DSPROF_RUN=str(folder))
        self._session: Any = session.start()
        assert isinstance(self._session, session.Session)
        self.opening_s = time.process_time() - began

    @property
    def records(self) -> int:
        return 0 if self._session is None else int(self._session.recorder.records)

    def close(self) -> float:
        """Its CPU time, s; 0 of one that is closed."""
        if self._session is None:
            return 0.0
        from dsprof.collectors.capture import session

        recorder, self._session = self._session.recorder, None
        assert (recorder.dropped, recorder.errors) == (0, 0), recorder.failures()
        began = time.process_time()
        session.stop()
        return time.process_time() - began


def take_turns(job: str, arm: str, rank: int, folder: Path, link: Connection) -> None:
    """One rank of an arm. For each message on `link`, whether the step counts, it takes a step and answers with its CPU
    time, that of the collectors' threads aside, and wall time, s; to None it answers `Captured`, and ends."""
    ranks = JOBS[job].ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    collectors = Collectors(ARMS[arm] or "light", folder / arm)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{arm}.store", ranks), rank=rank, world_size=ranks)
    step = JOBS[job].make(rank, JOBS[job].batch_size)
    steps, before = 0, _so_far(collectors)
    for turn, counts in enumerate(iter(link.recv, None)):
        if turn == CAPTURED_TURNS and ARMS[arm] is None:
            collectors.close()
        if counts and not steps:
            before = _so_far(collectors)
        steps += counts
        beside = _beside_s()
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        link.send((cpu - (_beside_s() - beside), wall))
    faults, records, beside_s, elapsed_s = (now - then for now, then in zip(_so_far(collectors), before, strict=True))
    closing_s = collectors.close()
    link.send(
        Captured(
            faults / steps, records / steps, 1e3 * beside_s / elapsed_s, 1e3 * collectors.opening_s, 1e3 * closing_s
        )
    )
    os._exit(0)  # gloo's threads may abort an orderly end, after all is told


def _so_far(collectors: Collectors) -> tuple[int, int, float, float]:
    """Faults of pages, records, CPU time of the threads that the collectors have started and wall time, s."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return faults, collectors.records, _beside_s(), time.perf_counter()


def _beside_s() -> float:
    """CPU time of the threads that the collectors have started."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name in BESIDE]
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main(job: str, folder: str, seed: str, turns: str) -> None:
    torch.set_num_threads(1)
    forks = multiprocessing.get_context("fork")  # the arms' processes have one layout of memory, and import torch once
    links: dict[str, list[Connection]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for rank in range(JOBS[job].ranks):
            ours, theirs = forks.Pipe()
            forks.Process(target=take_turns, args=(job, arm, rank, Path(folder), theirs), daemon=True).start()
            theirs.close()
            links[arm].append(ours)
    order = random.Random(int(seed))
    cpu_us: dict[str, list[int]] = {arm: [] for arm in ARMS}
    wall_us: dict[str, list[int]] = {arm: [] for arm in ARMS}
    for turn in range(-FIRST_TURNS, int(turns)):
        for arm in order.sample(list(ARMS), len(ARMS)):
            _send(links[arm], turn >= 0)
            cpu, wall = zip(*_answers(links[arm]), strict=True)
            if turn >= 0:
                cpu_us[arm].append(_mean_us(cpu))
                wall_us[arm].append(_mean_us(wall))
    found: dict[str, Any] = {}
    for arm in ARMS:
        _send(links[arm], None)
        said = [asdict(one) for one in _answers(links[arm])]
        means = {name: round(sum(one[name] for one in said) / len(said), 3) for name in said[0]}
        # What the collectors' threads do goes by the time that passes, of which most is the other arms' here.
        threads_us = round(1e-3 * means["beside_ms_a_second"] * sum(wall_us["off"]) / len(wall_us["off"]))
        found[arm] = {"cpu_us": [us + threads_us for us in cpu_us[arm]], "wall_us": wall_us[arm], **means}
    print(json.dumps(found), flush=True)


def _send(links: list[Connection], message: bool | None) -> None:
    """To an arm's ranks."""
    for link in links:
        link.send(message)


def _answers(links: list[Connection]) -> list[Any]:
    """Of an arm's ranks."""
    return [link.recv() for link in links]


def _mean_us(seconds: Sequence[float]) -> int:
    return round(1e6 * sum(seconds) / len(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
