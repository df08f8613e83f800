"""Facts on their way into the capture. Until one opens they are kept: a DataLoader may well be built before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Fact = dict[str, Any]

MOST_KEPT: Final = 1000

_kept: list[Fact] = []
_sink: Callable[[Fact], None] | None = None


def state(fact: Fact) -> None:
    """Write `fact` to the open capture, or keep it for the one to come."""
    if _sink is not None:
        _sink(fact)
    elif len(_kept) < MOST_KEPT and fact not in _kept:
        _kept.append(fact)


def send_to(sink: Callable[[Fact], None] | None) -> None:
    """Send facts to `sink`, those kept so far first; None keeps them again."""
    global _sink
    _sink = sink
    if sink is not None:
        for fact in _kept:
            sink(fact)
        _kept.clear()


def forget() -> None:
    """Keep none of the facts that were stated while no capture was open: they are of what came before the next one."""
    _kept.clear()
