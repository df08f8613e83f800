"""The floating-point operations of a step (level full), counted by `native/flops.hpp` from the shapes that operators
are given: nothing is run differently. One step only, since being told of every operator costs a microsecond each.

Rows are gauges named `schema.FLOPS` + dtype, with the module, and in `purpose` what they are for; operators whose
operations are not known are gauges named `schema.UNCOUNTED` + operator, whose value is the number of calls. They span
what was counted: from one optimizer's step to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from dsprof.schema import DTYPES, FLOPS, FLOPS_FOR, UNCOUNTED, Kind

from . import facts, optimizers
from .collector import OpenCapture
from .native import NativeRecorder
from .uninstall import Uninstall

FIRST: Final = 5
"""Optimizers' steps before the one that is counted: the first ones compile, and set up what the others use."""
TURNS: Final = 8
"""That are counted where there are several optimizers: what is a step of theirs is known when the run is over."""

NOTHING: Final = ((0, FLOPS_FOR.index("other"), 0, 0.0),)
"""What is written of a span in which nothing was counted: that there was one."""


class StepCounter:
    """Counts one step of a capture. `capturing`: whether anything is recorded now. `optimizers`: how many there are."""

    def __init__(
        self, recorder: NativeRecorder, capturing: Callable[[], bool], optimizers: Callable[[], int] = lambda: 1
    ) -> None:
        self._recorder, self._capturing, self._optimizers = recorder, capturing, optimizers
        self._steps = 0
        """Of optimizers, one after the other, while capturing."""
        self._began_ns: int | None = None
        self._dtypes: set[str] = set()
        self._done = False

    def after_step(self) -> None:
        """An optimizer's step ended."""
        if self._done:
            return
        if not self._capturing():
            self.stop()
            self._steps = 0
            return
        self._steps += 1
        if self._began_ns is not None:
            self._write(self._began_ns)
            self._began_ns = None
            self._done = self._steps - FIRST >= (TURNS if self._optimizers() > 1 else 1)
            if self._done:
                facts.state({"fact": "flops", "dtypes": sorted(self._dtypes)})
        if self._steps >= FIRST and not self._done:
            self._began_ns = time.perf_counter_ns()
            self._recorder.start_counting()

    def stop(self) -> None:
        """What was counted so far is of no whole step."""
        if self._began_ns is not None:
            self._began_ns = None
            self._recorder.stop_counting()

    def _write(self, began_ns: int) -> None:
        ended_ns = time.perf_counter_ns()
        counted, missed = self._recorder.stop_counting()
        for module, part, dtype, operations in counted or NOTHING:
            name = self._recorder.intern(FLOPS + DTYPES[dtype])
            self._put(name, began_ns, ended_ns, operations, module, self._recorder.intern(FLOPS_FOR[part]))
            self._dtypes |= {DTYPES[dtype]} - {""}
        for operator, calls in missed:
            self._put(self._recorder.intern(UNCOUNTED + operator), began_ns, ended_ns, float(calls), 0, 0)

    def _put(self, name: int, start_ns: int, end_ns: int, value: float, module: int, purpose: int) -> None:
        self._recorder.span(Kind.GAUGE, name, start_ns, end_ns, 0, value, -1, 0, 0, -1, -1, module, purpose)


def install(capture: OpenCapture) -> list[Uninstall]:
    """Count a step at level full. The Python recorder cannot."""
    if not (capture.full and isinstance(capture.recorder, NativeRecorder)):
        return []
    counter = StepCounter(capture.recorder, capture.is_on, optimizers.stepped)
    capture.after_step.append(counter.after_step)
    return [counter.stop]
