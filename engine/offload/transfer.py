"""A read or write under way, and its spans."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Final, Literal

from ..hooks import Hooks, Purpose

Direction = Literal["read", "write"]


FIRST_NUMBER: Final = 1 << 40
"""Of a copy. A profiler of a device numbers what runs there from 1."""


_numbers: Final = itertools.count(FIRST_NUMBER)


@dataclass(frozen=True, slots=True)
class About:
    """What is told of a transfer: see `hooks.Span`."""

    purpose: Purpose
    module: str | None = None
    value: float | None = None


class Transfer:
    """A transfer under way. `number`: of its spans, their `corr`."""

    def __init__(self, hooks: Hooks, direction: Direction, about: About) -> None:
        self.number = next(_numbers)
        self._told = False
        self._hooks = hooks
        self._direction = direction
        self._about = about
        self._over = threading.Event()
        self.error: BaseException | None = None

    def finish(self) -> None:
        self._over.set()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def check(self) -> None:
        """Raises OffloadError if it failed, of one that is done."""
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Return when it is over, which the caller cannot go on without. Raises OffloadError if it failed."""
        # That its end was needed here is told even if nobody had to stand still for it: another time they may have to.
        if not self.done or (not self._told and self._hooks.listening):
            self._told = True
            about = self._about
            with self._hooks.span(
                "wait", self._direction, module=about.module, purpose=about.purpose, corr=self.number
            ):
                self._over.wait()
        self.check()
