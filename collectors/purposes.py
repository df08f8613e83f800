"""What a call communicates for, where the function that is called tells, wherever it is called from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import dynamo
from .wrap import stands_for

if TYPE_CHECKING:
    from .record import Recorder


def for_purpose(recorder: Recorder, purpose: str, original: Any) -> Any:
    """A function in the place of `original`: what this thread communicates in it has that purpose."""
    number, compiling = recorder.intern(purpose), dynamo.check()
    context, current = recorder.context, recorder.current_context

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        before = current()
        try:
            context(-1, -1, 0, number)
            return original(*args, **kwargs)
        finally:
            context(*before)

    dynamo.skip_frame(called)
    return called
