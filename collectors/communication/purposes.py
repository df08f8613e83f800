"""What a call communicates for, where the function that is called tells, wherever it is called from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..hooking import dynamo
from ..hooking.wrap import stands_for

if TYPE_CHECKING:
    from ..recorder.record import Recorder


def for_purpose(recorder: Recorder, purpose: str, original: Any) -> Any:
    """A function in the place of `original`: what this thread communicates in it has that purpose."""
    compiling, context, set_context = dynamo.check(), recorder.context, recorder.set_context
    own = recorder.make_context(-1, -1, 0, recorder.intern(purpose))

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        before = context()
        try:
            set_context(own)
            return original(*args, **kwargs)
        finally:
            set_context(before)

    dynamo.skip_frame(called)
    return called
