"""The user's own regions and marks. Without a capture they cost a comparison and do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .capture import session
from .system.clock import now_ns

Function = TypeVar("Function", bound=Callable[..., Any])


class span:
    """A named region of the training script: `with dsprof.span("augment"): ...`, or a decorator.

    It becomes a `mark` row with a duration. Spans may nest. One span object is entered once at a time.
    """

    __slots__ = ("_handle", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._handle = 0

    def __enter__(self) -> span:
        capture = session.current()
        if capture is not None:
            self._handle = capture.begin_span(self.name)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle:
            capture = session.current()
            if capture is not None:
                capture.recorder.end(self._handle)
            self._handle = 0

    def __call__(self, function: Function) -> Function:
        name = self.name

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def mark(name: str, value: float | None = None) -> None:
    """Something happened now, with a number if it has one: a `mark` row without a duration."""
    capture = session.current()
    if capture is not None:
        now = now_ns()
        capture.put_mark(name, now, value)
