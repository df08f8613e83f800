"""Clocks that tests advance."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Tells `now`, and is `tick` later at each look."""

    def __init__(self, now: int = 0, tick: int = 0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> int:
        self.now += self.tick
        return self.now


class SleepingClock:
    """Only sleeping moves it. `at`: what happens when it has reached a moment, s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()

    def clock(self) -> float:
        return self.now
