"""What a hook gives back: the function that takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Uninstall = Callable[[], None]


def in_reverse(uninstalls: Iterable[Uninstall]) -> Uninstall:
    """One for several, the last first. A second call does nothing."""
    left = list(uninstalls)

    def uninstall() -> None:
        while left:
            left.pop()()

    return uninstall


def replace_attribute(place: Any, name: str, new: Any) -> Uninstall:
    """Put `new` in the place of what `place` has under `name`; it is put back unless somebody has replaced it since."""
    old = getattr(place, name)
    setattr(place, name, new)

    def uninstall() -> None:
        if getattr(place, name) is new:
            setattr(place, name, old)

    return uninstall
