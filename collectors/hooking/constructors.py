"""Looking on as objects of a class are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import count_error
from .uninstall import Uninstall, replace_attribute
from .wrap import stands_for

WATCHED = "_dsprof"
"""Attribute of an `__init__` that is ours."""

Look = Callable[..., None]
"""Called with the object and the arguments that its class was called with."""


def before_init(cls: Any, look: Look, where: str, *, watches: bool = True) -> Uninstall:
    """Call `look` before each object of `cls` is made. where: names the hook where an error of `look` is counted.
    watches: it is what `is_watched` asks for."""
    construct = cls.__init__

    @stands_for(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            look(self, *args, **kwargs)
        except Exception as error:
            count_error(where, error)
        construct(self, *args, **kwargs)

    setattr(__init__, WATCHED, watches or getattr(construct, WATCHED, False))
    return replace_attribute(cls, "__init__", __init__)


def after_init(cls: Any, look: Look, where: str, *, watches: bool = True) -> Uninstall:
    """Call `look` after each object of `cls` is made. where: names the hook where an error of `look` is counted.
    watches: it is what `is_watched` asks for."""
    construct = cls.__init__

    @stands_for(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        try:
            look(self, *args, **kwargs)
        except Exception as error:
            count_error(where, error)

    setattr(__init__, WATCHED, watches or getattr(construct, WATCHED, False))
    return replace_attribute(cls, "__init__", __init__)


def is_watched(cls: Any) -> bool:
    """Whether somebody of dsprof looks on as objects of `cls` are made."""
    return getattr(cls.__init__, WATCHED, False) is True
