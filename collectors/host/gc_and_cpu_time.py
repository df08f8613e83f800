"""What the host does to a rank: when it began, pauses of the interpreter, CPU time, waiting for a core."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsprof import gauges
from dsprof.schema import CPU_SECONDS, STEPS_TAKEN, Kind

from ..capture.open_capture import OpenCapture
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..system import proc
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..recorder.record import Recorder

SHORTEST_NS: Final = 100_000
"""Young collections run hundreds of times a step and take microseconds: not worth a record."""

GAUGES: Final = (CPU_SECONDS, "training_thread_cpu_seconds", "worker_cpu_seconds", "core_wait_seconds")
"""Names of what is recorded after steps."""

READ_EVERY_S: Final = 0.05
"""Of workers' CPU time, which is read from a file for each of them and counts in steps of 0.01 s anyway."""

_pauses: deque[tuple[int, int, float]] = deque(maxlen=10_000)
"""Collections not yet recorded. A collection can start anywhere, inside the recorder and under its lock too: so the
callback only appends here, and `sample` writes them at the end of the step."""


PULSE_S: Final = 0.02
"""How often it is looked whether the process runs at all. A look takes up to 20 microseconds of a core."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record what `sample` does after steps, and pauses of the interpreter."""
    recorder = capture.recorder
    pulse = recorder.pulse if isinstance(recorder, NativeRecorder) else None
    sampled = sampler(recorder, None if pulse is None else pulse.stopped_s)
    capture.samples.append(sampled)
    capture.when_on.append(sampled)
    watched = [watch_collections(recorder)]
    if pulse is not None:
        pulse.start(PULSE_S)
        watched.append(pulse.stop)
    return watched


def watch_collections(recorder: Recorder) -> Uninstall:
    """Record collections of 0.1 ms and more; `value` is the generation."""
    began = 0

    def on_collection(event: str, info: dict[str, Any]) -> None:
        nonlocal began
        if event == "start":
            began = now_ns()
        elif began:
            end = now_ns()
            if end - began >= SHORTEST_NS:
                _pauses.append((began, end, float(info["generation"])))
            began = 0

    gc.callbacks.append(on_collection)

    def uninstall() -> None:
        if on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)
        _record_pauses(recorder)

    return uninstall


def _record_pauses(recorder: Recorder) -> None:
    name = recorder.intern("gc") if _pauses else 0
    while _pauses:
        began, end, generation = _pauses.popleft()
        recorder.put(Kind.PAUSE, name, began, end, generation, -1)


class _RunQueue:
    """How long a thread was ready to run and had no core, from Linux's schedstat."""

    def __init__(self) -> None:
        self.thread = 0
        self.file = -1

    def waited_s(self) -> float | None:
        """Of the calling thread since it began, s; None where the kernel does not tell."""
        thread = threading.get_native_id()
        if thread != self.thread:
            if self.file >= 0:
                os.close(self.file)
            self.thread, self.file = thread, proc.keep_open(f"{proc.PROC}/self/task/{thread}/schedstat")
        if self.file < 0:
            return None
        return int(os.pread(self.file, 96, 0).split()[1]) / 1e9


def worker_seconds() -> float | None:
    """CPU time of this process's children by `multiprocessing`, such as DataLoader workers, those that have ended
    included; s. None where there are none, or the system does not tell."""
    processes = getattr(sys.modules.get("multiprocessing.process"), "_children", None)
    if not processes:
        return None
    ended = os.times()
    total = ended.children_user + ended.children_system
    for process in list(processes):
        fields = proc.stat(process.pid)
        if fields:  # else it has ended meanwhile, and counts as such in the next step
            total += (int(fields[proc.USER_TICKS]) + int(fields[proc.SYSTEM_TICKS])) / proc.TICKS_A_SECOND
    return total


class WorkerTime:
    """`worker_seconds`, read now and then: a step may be short, and there may be dozens of workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = -math.inf

    def seconds(self) -> float | None:
        """None, too, where it has just been read."""
        now = self._clock()
        if now < self._due:
            return None
        self._due = now + READ_EVERY_S
        return worker_seconds()


_run_queue = _RunQueue()
_worker_time = WorkerTime()


def sampler(recorder: Recorder, stopped_s: Callable[[], float] | None = None) -> Callable[..., None]:
    """What the training thread calls at the end of a step, with the number of steps since the last time: it records the
    steps so far, the CPU time of the process, of the thread and of the process's workers, how long the thread waited
    for a core, and how long the whole process stood still (`stopped_s`, where that is known). All times in seconds,
    since the process or thread began, or the capture did.
    """
    put, gauge = recorder.put, int(Kind.GAUGE)
    of_process, of_thread, of_workers, of_queue = map(recorder.intern, GAUGES)
    of_stops = recorder.intern(gauges.STOPPED)
    of_steps, taken = recorder.intern(STEPS_TAKEN), 0

    def sample(steps: int = 0) -> None:
        nonlocal taken
        taken += steps
        if _pauses:
            _record_pauses(recorder)
        working, waited = _worker_time.seconds(), _run_queue.waited_s()
        now = now_ns()
        put(gauge, of_steps, now, now, float(taken), -1)
        put(gauge, of_process, now, now, time.process_time(), -1)
        put(gauge, of_thread, now, now, time.thread_time(), -1)
        if working is not None:
            put(gauge, of_workers, now, now, working, -1)
        if waited is not None:
            put(gauge, of_queue, now, now, waited, -1)
        if stopped_s is not None:
            put(gauge, of_stops, now, now, stopped_s(), -1)

    return sample
