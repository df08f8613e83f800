"""Clocks that tests advance."""

from __future__ import annotations


class Clock:
    """Tells `now`, and is `tick` later at each look."""

    def __init__(self, now: int = 0, tick: int = 0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> int:
        self.now += self.tick
        return self.now
