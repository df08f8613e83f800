"""What of a run is captured: all of it, some steps, some seconds, or what somebody switches on while it runs.

It changes at the end of an optimizer's step only. While it is off nothing is written, but collectives go on to be
numbered, so that they still match those of ranks that switch at another step. Marks say where it changed; their value
is how many optimizer steps this process has taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsprof import control
from dsprof.ranges import parse_steps
from dsprof.schema import CAPTURE_OFF, CAPTURE_ON, CONTROL_FILE, Kind

from ..hooking.errors import count_error
from ..hooking.signals import by_handler

if TYPE_CHECKING:
    from ..recorder.record import Recorder

LOOK_EVERY_S: Final = 0.5
"""How often the control file is looked for."""


@dataclass(frozen=True)
class Window:
    """Which part of a run: of the steps from `first` on (counted from 0) and before `last`, what lies between `delay_s`
    and `delay_s + duration_s` after the capture opened. None: no limit."""

    first: int = 0
    last: int | None = None
    delay_s: float = 0.0
    duration_s: float | None = None

    @staticmethod
    def of_settings(setting: Callable[[str], str]) -> Window:
        """By DSPROF_STEPS, DSPROF_DELAY and DSPROF_DURATION. Raises ValueError."""
        first, last = parse_steps(setting("DSPROF_STEPS"))
        duration = setting("DSPROF_DURATION")
        return Window(first, last, float(setting("DSPROF_DELAY") or 0), float(duration) if duration else None)

    def holds(self, steps: int, seconds: float) -> bool:
        """Whether a step that begins now, after so many steps and seconds, is captured."""
        if steps < self.first or (self.last is not None and steps >= self.last):
            return False
        return self.delay_s <= seconds and (self.duration_s is None or seconds < self.delay_s + self.duration_s)


class Switch:
    """Turns the recorder on and off as the window and the control file of the run folder say."""

    def __init__(
        self, recorder: Recorder, window: Window, run: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder, self._window, self._clock = recorder, window, clock
        self._control = run / CONTROL_FILE
        self._opened = self._looked = clock()
        self._seen: tuple[int, int] | None = None
        self._told: bool | None = None
        """What the control file said last; it outdoes the window."""
        self.when_told: list[Callable[[control.Control], None]] = []
        """Called with what the control file says, where that is new."""
        self._steps = 0
        self.on = True
        if not window.holds(0, 0.0):
            self._turn(False)

    @property
    def ends_after(self) -> int | None:
        """The window's last step; None where it has none."""
        return self._window.last

    @property
    def next_change(self) -> int | None:
        """After which step the window begins or ends next; None where that does not go by steps, or is over."""
        window = self._window
        if window.delay_s or window.duration_s is not None:
            return self._steps + 1  # by the clock, which is looked at after each step
        return next((step for step in (window.first, window.last) if step is not None and step > self._steps), None)

    def after_step(self, steps: int = 1) -> bool:
        """The training thread has taken so many steps since the last time; whether that turned the capture on."""
        self._steps += steps
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look()
        wanted = self._told
        if wanted is None:
            wanted = self._window.holds(self._steps, now - self._opened)
        if wanted == self.on:
            return False
        self._turn(wanted)
        return wanted

    def close(self) -> None:
        """The capture closes: where it is off, how many steps there were is written all the same."""
        if not self.on:
            self._recorder.mute(False)
            self._turn(False)

    def _look(self) -> None:
        try:
            found = os.lstat(self._control)
        except OSError as error:
            if by_handler(error):
                raise
            return
        identity = (found.st_ino, found.st_mtime_ns)
        if identity == self._seen:
            return
        self._seen = identity
        try:
            told = control.read(self._control)
        except (OSError, ValueError) as error:
            count_error(CONTROL_FILE, error)
            return
        if told.capture is not None:
            self._told = told.capture
        for hear in self.when_told:
            try:
                hear(told)
            except Exception as error:
                count_error(CONTROL_FILE, error)

    def _turn(self, on: bool) -> None:
        self.on = on
        if on:
            self._recorder.mute(False)
        self._recorder.mark(Kind.MARK, self._recorder.intern(CAPTURE_ON if on else CAPTURE_OFF), float(self._steps))
        if not on:
            self._recorder.mute(True)
