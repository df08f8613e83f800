"""The processes of `instructions.py`: one job with collectors and without, natively or under callgrind.

python instructions_job.py JOB ARMS FOLDER WARM STEPS MARKS STEP_NS SAMPLE_NS

Each arm's ranks are forked from this process, one arm after the other, so that all have one layout of memory and import
torch once. Prints a line a rank. MARKS: the library made of instructions_marks.c, under callgrind, or `-`; then STEP_NS
and SAMPLE_NS are what a step, and a sample after one, take natively: the samplers' clock goes by them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import multiprocessing
import os
import resource
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from overhead_jobs import COUNTED

INSTRUMENTED: Final = 4
"""Steps under callgrind before those that count; the ones before them go faster."""


class Marks:
    """What callgrind is asked; nothing where it does not run this process."""

    def __init__(self, library: str) -> None:
        self._library: Any = None if library == "-" else ctypes.CDLL(library)

    @property
    def slow(self) -> bool:
        return self._library is not None

    def start(self) -> None:
        if self._library:
            self._library.start_counting()

    def forget(self) -> None:
        if self._library:
            self._library.forget()

    def tell(self, what: str) -> None:
        if self._library:
            self._library.tell(what.encode())
            self._library.stop_counting()


class Clock:
    """A job's steps as they pass natively: what samples and what waits goes by them, however long they take here."""

    def __init__(self, step_ns: int, sample_ns: int) -> None:
        self.step_ns, self.sample_ns = step_ns, sample_ns
        self.steps = self.asked = 0
        self._waiting: dict[threading.Event, tuple[float, Any]] = {}
        self._next = math.inf

    def of_samples(self) -> int:
        """Asked before and after each sample."""
        self.asked += 1
        return self.steps * self.step_ns + self.asked // 2 * self.sample_ns

    def seconds(self) -> float:
        return self.steps * self.step_ns / 1e9

    def step(self) -> None:
        """A step has been taken: whoever waited as long as it goes on."""
        self.steps += 1
        if self.steps >= self._next:
            for event, (until, _) in list(self._waiting.items()):  # a copy: the threads that wait add themselves
                if self.steps >= until:
                    self.wake(event)

    def wait(self, event: threading.Event, seconds: float) -> None:
        gate = threading.Lock()
        gate.acquire()
        self._waiting[event] = self.steps + seconds * 1e9 / self.step_ns, gate
        self._find_next()
        if event.is_set():
            self.wake(event)
        gate.acquire()

    def wake(self, event: threading.Event) -> None:
        _, gate = self._waiting.pop(event, (0, None))
        self._find_next()
        if gate is not None:
            gate.release()

    def _find_next(self) -> None:
        self._next = min((until for until, _ in list(self._waiting.values())), default=math.inf)


def capture(folder: Path, clock: Clock | None) -> Any:
    """As `dsprof run` opens it; its samplers and side threads by `clock`, if there is one."""
    from dsprof.collectors.capture import session, side_thread
    from dsprof.collectors.failures import watchdog
    from dsprof.collectors.host import stack_samples

    if clock is not None:
        stacks: Any = stack_samples.Samples
        stacks.sample = lambda _: None

        class Event(threading.Event):
            """Side threads look as often a step as they do natively."""

            def wait(self, timeout: float | None = None) -> bool:
                if timeout is None or self.is_set():
                    return super().wait(timeout)
                clock.wait(self, timeout)
                return self.is_set()

            def set(self) -> None:
                super().set()
                clock.wake(self)

        paced: Any = types.SimpleNamespace(**{**vars(threading), "Event": Event})
        side_thread.threading = watchdog.threading = paced
    os.environ.update(DSPROF_NATIVE="1", DSPROF_LEVEL="light", DSPROF_RUN=str(folder))
    opened: Any = session.start()
    assert isinstance(opened, session.Session)
    if clock is not None:
        step_end: Any = opened._step_end
        step_end._clock, step_end._began_ns, step_end._ended_ns = clock.of_samples, 0, 0
        switch: Any = opened._switch
        switch._clock, switch._opened, switch._looked = clock.seconds, 0.0, 0.0
    return opened


def slow_down(opened: Any, factor: float) -> None:
    """Have the helper's own threads wake as often a step as they do natively: one takes `factor` times as long here."""
    from dsprof.collectors.failures import watchdog
    from dsprof.collectors.host import gc_and_cpu_time

    recorder = opened._capture.recorder
    recorder.pulse.stop()
    recorder.pulse.start(factor * gc_and_cpu_time.PULSE_S)
    if dist.is_initialized() and dist.get_world_size() > 1:  # else there is no watch
        recorder.lock_watch.stop()
        recorder.lock_watch.start(os.devnull, math.inf, factor * watchdog.LOCKS_EVERY_S)


def next_look(opened: Any) -> int:
    """The step after which the capture looks again at what tensors are for. Each time it is twice as many steps until
    the next, so that none is to be among those that count."""
    samplers = [getattr(sample, "__self__", None) for sample in opened._capture.samples]
    return max((getattr(sampler, "_next_look", 0) for sampler in samplers), default=0)


def take(job: str, arm: str, rank: int, folder: Path, warm: int, steps: int, marks: Marks, clock: Clock) -> None:
    """One rank of an arm."""
    ranks = COUNTED[job].ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    opened = capture(folder / arm, clock if marks.slow else None)
    if job != "launch-bound":
        store = dist.FileStore(f"{folder}/{arm}.store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    step = COUNTED[job].make(rank, COUNTED[job].batch_size)
    counted: Callable[[], None] = step

    def turn() -> None:
        counted()
        clock.step()

    instrumented, shortest_s = max(warm - INSTRUMENTED, warm // 2), math.inf
    for number in range(warm):
        if number == warm // 2 and arm == "off":  # what its first steps leave, all have (overhead_turns.CAPTURED_TURNS)
            from dsprof.collectors.capture import session

            session.stop()
        if number == instrumented:
            marks.start()
        began = time.perf_counter()
        turn()
        if number >= instrumented:
            shortest_s = min(shortest_s, time.perf_counter() - began)
    if arm == "light" and marks.slow:
        slow_down(opened, shortest_s / (clock.step_ns / 1e9))
    while (
        arm == "light" and marks.slow and opened._step_end.taken < next_look(opened) <= opened._step_end.taken + steps
    ):
        turn()
    before = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), opened._step_end.spent_ns
    gc.collect()
    gc.freeze()  # whether a whole collection falls into the steps that count is chance
    marks.forget()
    for _ in range(steps):
        turn()
    marks.tell(f"{arm} {rank}")
    after = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), opened._step_end.spent_ns
    costs = sorted(opened._step_end._costs)
    said = {
        "arm": arm, "rank": rank, "pid": os.getpid(),
        "wall_ns": round((after[1] - before[1]) * 1e9 / steps),
        "user_us": round((after[0].ru_utime - before[0].ru_utime) * 1e6 / steps, 2),
        "system_us": round((after[0].ru_stime - before[0].ru_stime) * 1e6 / steps, 2),
        "faults": round((after[0].ru_minflt - before[0].ru_minflt) / steps, 3),
        "sample_ns": costs[0] if costs else 0,  # the others lost their core meanwhile, or their caches
        "every": opened._step_end.due - opened._step_end.taken + opened._step_end.since,
    }  # fmt: skip
    os.write(sys.stdout.fileno(), f"{json.dumps(said)}\n".encode())  # at once: the ranks share one pipe
    os._exit(0)  # gloo's threads may abort an orderly end, after all is told


def main(job: str, arms: str, folder: str, warm: str, steps: str, library: str, step_ns: str, sample_ns: str) -> None:
    torch.set_num_threads(1)
    forks = multiprocessing.get_context("fork")
    marks, clock = Marks(library), Clock(int(step_ns), int(sample_ns))
    for arm in arms.split(","):
        started = [
            forks.Process(target=take, args=(job, arm, rank, Path(folder), int(warm), int(steps), marks, clock))
            for rank in range(COUNTED[job].ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
            if process.exitcode:
                sys.exit(f"a rank of {job}, {arm}, ended with {process.exitcode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
