"""What capturing takes of the job, measured as the job runs.

Hooks are timed in one training step of 64: the native ones by two readings of the clock each (`native/hook_time.hpp`),
what Python does around them by a wrapper like theirs that stands for nothing, called right after that step. Samples
after steps are timed each (`step_end`), and the kernel knows what CPU time the side threads have used. All are gauges;
`dsprof.analyzer.budget.capture_overhead` makes a percentage of them. The Python recorder is not measured: its
capture's is estimated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import HOOK_SECONDS, SAMPLE_SECONDS, SIDE_THREAD_SECONDS, Kind

from ..system import proc
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..native import NativeRecorder
    from .step_end import StepEnd

EVERY: Final = 64
FIRST: Final = 4
"""The step that is timed first; those before it set things up."""
OURS: Final = b"dsprof-"
"""Begins the names of side threads."""
PROBES: Final = 8
"""Calls of the wrapper that stands for nothing; the first ones find it as cold as hooks are found."""


class HookTime:
    """Times the hooks of one step in EVERY.

    frame_ns:     what a hook in Python takes beside what it calls
    side_threads: CPU time that they have used, s
    """

    def __init__(
        self,
        recorder: NativeRecorder,
        step_end: StepEnd,
        frame_ns: Callable[[], float] | None = None,
        side_threads: Callable[[], float] | None = None,
    ) -> None:
        self._recorder, self._step_end = recorder, step_end
        self._frame_ns, self._side_threads = frame_ns or time_frame, side_threads or side_thread_seconds
        self._timing = False
        self.due = FIRST - 1
        """After this step something is to be done."""
        self._ids = [recorder.intern(name) for name in (HOOK_SECONDS, SAMPLE_SECONDS, SIDE_THREAD_SECONDS)]

    def after_step(self) -> None:
        """The step that was due is over: the next one is timed, or it was timed itself."""
        taken = self._step_end.taken
        if not self._timing:
            self._timing, self.due = True, taken + 1
            self._recorder.time_hooks(True)
            return
        self._timing, self.due = False, taken + EVERY - 1
        spent_ns, calls = self._recorder.time_hooks(False)
        spent_ns += round((calls + 1) * self._frame_ns())  # and this call
        self._put(spent_ns / 1e9)

    def close(self) -> None:
        """A last reading of what adds up."""
        if self._timing:
            self._recorder.time_hooks(False)
        self._put(None)

    def _put(self, in_hooks_s: float | None) -> None:
        hooks, samples, threads = self._ids
        now, kind = now_ns(), int(Kind.GAUGE)
        if in_hooks_s is not None:
            self._recorder.put(kind, hooks, now, now, in_hooks_s, -1)
        self._recorder.put(kind, samples, now, now, self._step_end.spent_ns / 1e9, -1)
        self._recorder.put(kind, threads, now, now, self._side_threads(), -1)


def _stands_for(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper like those that record."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _never():
            return original(*args, **kwargs)
        handle = _begin(0, 0)
        try:
            return original(*args, **kwargs)
        finally:
            _end(handle)

    return wrapper


def _nothing(*args: Any) -> None: ...


_never, _begin, _end = bool, max, abs
"""Calls of C functions, as those of the recorder are; their own time is next to nothing."""
_wrapper = _stands_for(_nothing)


def time_frame(clock: Callable[[], int] = now_ns) -> float:
    """What a wrapper adds to a call, ns."""
    began = clock()
    for _ in range(PROBES):
        _wrapper(None)
    between = clock()
    for _ in range(PROBES):
        _nothing(None)
    return max((between - began) - (clock() - between), 0) / PROBES


def side_thread_seconds(tasks: str = "/proc/self/task") -> float:
    """CPU time of the threads of this process that are ours, s."""
    total = 0
    for task in os.listdir(tasks):
        if proc.read(f"{tasks}/{task}/comm").startswith(OURS):
            total += int((proc.read(f"{tasks}/{task}/schedstat").split() or [b"0"])[0])
    return total / 1e9
