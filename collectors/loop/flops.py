"""The floating-point operations of a step (level full), counted by `native/flops.hpp` from the shapes that operators
are given: nothing is run differently. One step only, since being told of every operator costs a microsecond each: the
sixth of a run, the second of a part that is captured later, or the last of a part that is known to be shorter.

What was counted is a fact, as the records of any step may be given up for the size limit: `operations`, each of
[module, what for (`schema.FLOPS_FOR`), dtype, how many]; `uncounted`, operators whose operations are not known and how
often they were called; when that began and ended, from one optimizer's step to the next, on which thread, and how many
steps of optimizers there were in it; how many threads torch computes with there. Of several optimizers each of some
steps is a fact of its own. `dsprof.trace` makes rows of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsprof import regular_files
from dsprof.ondisk import unescape_name
from dsprof.schema import DTYPES, FLOPS_FACT, FLOPS_FOR

from ..capture.open_capture import OpenCapture
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..system.clock import now_ns
from . import optimizers

FIRST: Final = 5
"""Optimizers' steps before the one that is counted, captured or not: the first ones compile, and set up what the others
use."""
TURNS: Final = 8
"""Steps that are counted where there are several optimizers: what is a step of theirs is known when the run is over."""


class StepCounter:
    """Counts one step of a capture.

    write:      takes the fact
    capturing:  whether anything is recorded now
    names:      the text of each name's id
    last:       how many steps of optimizers are taken when the capture ends; None: not known
    optimizers: how many there are
    taken:      how many steps of optimizers there were in this process
    """

    def __init__(
        self,
        recorder: NativeRecorder,
        write: Callable[[Fact], None],
        capturing: Callable[[], bool],
        names: Callable[[], dict[int, str]],
        last: int | None = None,
        optimizers: Callable[[], int] = lambda: 1,
        taken: Callable[[], int] = lambda: 0,
    ) -> None:
        self._recorder, self._write, self._capturing, self._names = recorder, write, capturing, names
        self._last, self._optimizers, self._taken = last, optimizers, taken
        self._steps = 0
        """Of optimizers, since the capture opened."""
        self._captured = 0
        """Of them, one after the other, while capturing."""
        self._told = 0
        self._began: tuple[int, int] | None = None
        """When, and `taken` then."""
        self._done = False

    def after_step(self) -> None:
        """An optimizer's step ended."""
        self._steps += 1
        if self._done:
            return
        if not self._capturing():
            self.stop()
            self._done = self._told > 0  # what comes later is not the next turn of these optimizers
            self._captured = 0
            return
        self._captured += 1
        if self._began is not None:
            began, self._began = self._began, None
            self._told += 1
            self._done = self._told >= self._wanted()
            self._tell(*began)
        if not self._done:
            self._begin_if_due()

    def turned_on(self) -> None:
        """The capture begins anew, with the next step."""
        if not self._done:
            self._captured = 0
            self._begin_if_due()

    def stop(self) -> None:
        """What was counted so far is of no whole step."""
        if self._began is not None:
            self._began = None
            self._recorder.stop_counting()

    def _wanted(self) -> int:
        return TURNS if self._optimizers() > 1 else 1

    def _begin_if_due(self) -> None:
        left = None if self._last is None else self._last - self._steps
        usual = self._steps >= FIRST and self._captured > 0  # the first that is captured names modules
        if left != 0 and (usual or (left is not None and self._steps > 0 and 0 < left <= self._wanted())):
            self._began = now_ns(), self._taken()
            self._recorder.start_counting()

    def _tell(self, began_ns: int, taken: int) -> None:
        import torch

        ended_ns = now_ns()
        counted, missed = self._recorder.stop_counting()
        names = self._names() if counted else {}
        self._write(
            {
                "fact": FLOPS_FACT,
                "begin_ns": began_ns,
                "end_ns": ended_ns,
                "thread": threading.get_native_id(),
                "torch_threads": torch.get_num_threads(),
                "optimizer_steps": self._taken() - taken,
                "operations": [
                    [names.get(module, ""), FLOPS_FOR[part], DTYPES[dtype], operations]
                    for module, part, dtype, operations in counted
                ],
                "uncounted": dict(missed),
            }
        )


def install(capture: OpenCapture) -> list[Uninstall]:
    """Count a step at level full. The Python recorder cannot."""
    if not (capture.full and isinstance(capture.recorder, NativeRecorder)):
        return []
    counter = StepCounter(
        capture.recorder,
        capture.write_fact,
        capture.is_on,
        lambda: _read_names(capture.folder),
        capture.ends_after,
        optimizers.stepped,
        optimizers.taken,
    )
    capture.after_step.append(counter.after_step)
    capture.when_on.append(counter.turned_on)
    return [counter.stop]


def _read_names(folder: Path) -> dict[int, str]:
    """The names of a capture, which the helper alone keeps in memory. Raises OSError."""
    lines = regular_files.read_text(folder / "names.txt").split("\n")[:-1]
    pairs = (line.split("\t", 1) for line in lines)
    return {int(number): unescape_name(text) for number, text in pairs}
