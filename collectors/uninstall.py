"""What a hook gives back: the function that takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Uninstall = Callable[[], None]


def in_reverse(uninstalls: Iterable[Uninstall]) -> Uninstall:
    """One for several, the last first. A second call does nothing."""
    left = list(uninstalls)

    def uninstall() -> None:
        while left:
            left.pop()()

    return uninstall
