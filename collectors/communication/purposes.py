"""What a call communicates for, where the function that is called tells, wherever it is called from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..hooking import dynamo
from ..hooking.wrap import stands_for

if TYPE_CHECKING:
    from ..recorder.record import Recorder


def for_purpose(recorder: Recorder, purpose: str, original: Any) -> Any:
    """A function in the place of `original`: what this thread communicates in it has that purpose."""
    set_context, own = recorder.set_context, recorder.make_context(-1, -1, 0, recorder.intern(purpose))

    def enter(*_: Any) -> int:
        set_context(own)
        return 0

    return in_context(recorder, original, enter)


def in_context(
    recorder: Recorder, original: Any, enter: Callable[[tuple[Any, ...], dict[str, Any]], int]
) -> Callable[..., Any]:
    """A function in the place of `original`: before each call `enter` gets its arguments, sets what this thread calls
    c10d for, and gives the handle of a record, 0: none. After the call, however it ends, the record is ended, and what
    the thread calls c10d for is what it was; also where a signal's handler raises just after it was set."""
    compiling, context, set_context, end = dynamo.check(), recorder.context, recorder.set_context, recorder.end

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        before, handle = context(), 0
        try:
            handle = enter(args, kwargs)
            return original(*args, **kwargs)
        finally:
            set_context(before)
            end(handle)

    dynamo.skip_frame(called)
    dynamo.skip(enter)
    return called
