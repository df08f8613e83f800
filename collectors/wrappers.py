"""Functions in the place of others that record their calls, or tell what is communicated in them.

They are called dozens of times a step: in C++ where there is the native helper (`native/python_wrappers.hpp`), else in
Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import dynamo
from .native import NativeRecorder
from .wrap import stands_for

if TYPE_CHECKING:
    from .record import Recorder


def recorded(recorder: Recorder, original: Any, kind: int, name: int) -> Any:
    """A function in the place of `original`: its calls are recorded under that name."""
    if isinstance(recorder, NativeRecorder):
        return stands_for(original)(recorder.recorded(original, kind, name))
    compiling, begin, end = dynamo.check(), recorder.begin, recorder.end

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        handle = begin(kind, name)
        try:
            return original(*args, **kwargs)
        finally:
            end(handle)

    dynamo.skip_frame(called)
    return called


def for_purpose(recorder: Recorder, purpose: str, original: Any) -> Any:
    """A function in the place of `original`: what this thread communicates in it has that purpose, wherever it is
    called from."""
    number = recorder.intern(purpose)
    if isinstance(recorder, NativeRecorder):
        return stands_for(original)(recorder.for_purpose(original, number))
    compiling, context = dynamo.check(), recorder.context

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        before = context(-1, -1, 0, number)
        try:
            return original(*args, **kwargs)
        finally:
            context(*before)

    dynamo.skip_frame(called)
    return called
