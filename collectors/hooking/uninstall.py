"""What a hook gives back: the function that takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Uninstall = Callable[[], None]


def in_reverse(uninstalls: Iterable[Uninstall]) -> Uninstall:
    """One for several, the last first. A second call does nothing. Where one of an iterator's hooks cannot be had,
    those before it are taken away again, and the error is raised."""
    left: list[Uninstall] = []

    def uninstall() -> None:
        while left:
            left.pop()()

    try:
        left.extend(uninstalls)
    except BaseException:
        uninstall()
        raise
    return uninstall


def replace_attribute(place: Any, name: str, new: Any) -> Uninstall:
    """Put `new` in the place of what a class, module or object has under `name`. It is put back unless somebody has
    replaced `new` since, or wrapped it."""
    inherited = object()
    stored = vars(place).get(name, inherited)  # of a class: what binds it, which `getattr` does not give
    if stored is inherited:
        getattr(place, name)  # raises AttributeError
    setattr(place, name, new)

    def uninstall() -> None:
        if vars(place).get(name) is not new:
            return
        if stored is inherited:
            delattr(place, name)
        else:
            setattr(place, name, stored)

    return uninstall
