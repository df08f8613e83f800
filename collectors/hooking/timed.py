"""The wrapper around what is timed: something begins before each call of a function, and ends after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import dynamo
from .errors import count_error
from .wrap import stands_for

Begun = TypeVar("Begun")


def timed(
    original: Callable[..., Any], begin: Callable[[], Begun], end: Callable[[Begun], object], where: str
) -> Callable[..., Any]:
    """A function in the place of `original`, with `begin()` before each call and `end` of what that gave after it,
    however the call ends. Dynamo, where it traces through it, finds `original` alone.

    where: names the hook where an error of `begin` is counted; then `original` is called by itself. `end` must not
    raise.
    """
    compiling = dynamo.check()

    @stands_for(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        try:
            begun = begin()
        except Exception as error:
            count_error(where, error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            end(begun)

    _keep_dynamo_away(call, begin, end)
    return call


def timed_by_arguments(
    original: Callable[..., Any],
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Begun],
    end: Callable[[Begun], object],
    where: str,
) -> Callable[..., Any]:
    """`timed`, where `begin` is given the arguments of the call: those by position, and those by name."""
    compiling = dynamo.check()

    @stands_for(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        try:
            begun = begin(args, kwargs)
        except Exception as error:
            count_error(where, error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            end(begun)

    _keep_dynamo_away(call, begin, end)
    return call


def _keep_dynamo_away(call: Callable[..., Any], *inside: Callable[..., Any]) -> None:
    """Called between the parts of a compiled step, they are no part of it; but what `call` stands for may be."""
    dynamo.skip_frame(call)
    dynamo.skip(*(one for one in inside if hasattr(one, "__code__")))
