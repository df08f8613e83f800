"""Wrappers that stand for the function they wrap, also for whoever counts frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar, cast

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

FILE: Final = "<{file} of dsprof, which warnings pass over like importlib._bootstrap>"
"""`warnings.warn` with a `stacklevel` does not count frames of a file whose name holds both "importlib" and
"_bootstrap". So what torch warns about in a wrapped function still names the line of the user's that called it."""


def stands_for(original: Callable[..., Any]) -> Callable[[Wrapper], Wrapper]:
    """Decorator of a function written in Python that calls `original`: `functools.wraps`, and warnings pass it over."""

    def decorate(wrapper: Wrapper) -> Wrapper:
        function = cast(FunctionType, wrapper)
        code = function.__code__
        function.__code__ = code.replace(co_filename=FILE.format(file=Path(code.co_filename).name))
        functools.update_wrapper(wrapper, original)
        return wrapper

    return decorate
