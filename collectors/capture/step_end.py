"""When samples are taken after a training step: as often as a budget allows.

What samples something (memory, CPU time, events of a device) takes some tens of microseconds. After a step of 150 ms
that is nothing, after one of 2 ms it would be 3 %. So samples are taken after every Nth step, where N is such that they
take at most SHARE of the time that the steps take: N is 1 where steps are long. All are taken together, since what
costs most is to leave the training's data and code in the caches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Final

from ..system.clock import now_ns

SHARE: Final = 0.002
"""Of the mean step, that samples may take."""
FIRST: Final = 3
"""After so many steps samples are taken in any case: what a job sets up shows itself then, and nothing is known yet of
what they cost. The first one imports, and is not counted."""
COSTS: Final = 5
"""So many samples tell what one costs, by their median: a thread that lost its core meanwhile counts for nothing.
Of two the lower one counts, for the same reason: the next sample would be far away, and with it what could put it
right."""


class StepEnd:
    """Counts the steps of one process, and knows after which of them samples are due.

    taken:    steps so far
    due:      the step after which the next sample is due
    spent_ns: what samples have taken so far, all in all
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self._clock = clock
        self.taken = 0
        self.due = 1
        self.spent_ns = 0
        self._costs: deque[int] = deque(maxlen=COSTS)
        self._began_ns = self._ended_ns = clock()
        self._sampled = 0
        """The step after which the last sample was taken."""

    @property
    def since(self) -> int:
        """Steps since the last sample."""
        return self.taken - self._sampled

    def begin(self) -> None:
        """A sample is taken now."""
        self._began_ns = self._clock()

    def end(self, soon: bool = False) -> None:
        """It has been taken. `soon`: somebody wants one after the next step, whatever it costs."""
        now = self._clock()
        cost, between = now - self._began_ns, self._began_ns - self._ended_ns
        steps = max(self.since, 1)
        self.spent_ns += cost
        self._ended_ns, self._sampled = now, self.taken
        if self.taken > 1:
            self._costs.append(cost)
        if soon or self.taken < FIRST or not self._costs:
            self.due = self.taken + 1
            return
        allowed_ns = SHARE * max(between / steps, 1.0)
        self.due = self.taken + max(math.ceil(median_low(self._costs) / allowed_ns), 1)

    def no_later_than(self, step: int) -> None:
        """A sample is due after this step, or one before it."""
        self.due = max(min(self.due, step), self.taken + 1)
