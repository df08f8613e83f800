"""What a collector is given when a capture opens. `catalogue` lists the collectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..hooking.uninstall import Uninstall

if TYPE_CHECKING:
    from dsprof.control import Control

    from ..hooking.statements import Fact
    from ..recorder.record import Recorder

FULL: Final = "full"
"""The level at which every module is timed."""


Sample = Callable[[int], "bool | None"]
"""Samples something after a step, so many steps after the last time; whether it wants to after the next step, too."""


@dataclass(frozen=True)
class OpenCapture:
    """The capture of one rank, as a collector sees it.

    folder:       where its files are
    level:        `light` or FULL
    is_on:        whether anything is recorded now (`window`)
    step_ended:   to be called by what sees a training step end, on the thread that took it
    write_fact:   appends to facts.jsonl, once for each fact
    before_end:   called before samples are taken, and once more before the hooks go: what was set up since
    after_step:   called after each step that ended. Only what must see every step belongs here: it is paid for by each.
    samples:      called with the number of steps since the last time, after every Nth step: as often as a budget allows
                  (`step_end`), after the first steps, and once more before the hooks go. What returns True is called
                  again after the next step.
    when_on:      called where the capture begins anew in the middle of a run
    when_told:    called with what the control file of the run says, where that is new, on the training thread
    run:          the run folder
    ends_after:   so many steps of optimizers, counted from the opening of the capture, it is asked to end; None: it is
                  not known beforehand
    """

    recorder: Recorder
    folder: Path
    level: str
    is_on: Callable[[], bool]
    step_ended: Callable[[], None]
    write_fact: Callable[[Fact], None]
    before_end: list[Callable[[], None]] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    when_on: list[Callable[[], None]] = field(default_factory=list)
    when_told: list[Callable[[Control], None]] = field(default_factory=list)
    ends_after: int | None = None
    run: Path = Path()

    @property
    def full(self) -> bool:
        return self.level == FULL


Install = Callable[[OpenCapture], list[Uninstall]]
"""Installs a collector; gives back what takes it away again. Each has one, by the name of `install`."""
