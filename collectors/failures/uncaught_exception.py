"""The exception that ends this rank, as a fact, so that `run.rank-died` can say what it was and where it was raised.

`sys.excepthook` is chained: the job's own is called first, whatever becomes of ours. A hook that the script sets later,
and that does not call ours, takes nothing away: as the capture closes, the interpreter is asked for the last exception
that it has told. SystemExit and KeyboardInterrupt are no failures; what a thread raises ends only the thread.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Final

from dsprof.live.frames import user_site
from dsprof.redact import redact_text
from dsprof.schema import UNCAUGHT

from ..capture.open_capture import OpenCapture
from ..hooking.errors import count_error
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall

LONGEST: Final = 300
"""Characters that are kept of a message."""
MOST_FRAMES: Final = 200
"""That are looked at, the innermost ones."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Tell of an exception that nothing catches."""
    before = sys.excepthook
    process = os.getpid()

    def tell(error: object) -> None:
        try:
            if process == os.getpid() and is_failure(error) and not hasattr(sys, "ps1"):
                capture.write_fact(describe(error))
        except Exception as failed:
            count_error("an uncaught exception", failed)

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            tell(error)

    def uninstall() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = before
        tell(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    sys.excepthook = excepthook
    return [uninstall]


def is_failure(error: object) -> bool:
    """Whether a process that ends with this exception has failed."""
    return isinstance(error, BaseException) and not isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit))


def describe(error: object) -> Fact:
    """Type, message and place of an exception. The place is the innermost frame of the user's own code, or where there
    is none the innermost frame; None where there is no frame at all."""
    assert isinstance(error, BaseException)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    frames = frames[:MOST_FRAMES]
    site = user_site(frames) or (f"{frames[0][0]}:{frames[0][1]}" if frames else None)
    return {"fact": UNCAUGHT, "type": type(error).__qualname__, "message": _message(error), "site": site}


def _message(error: BaseException) -> str:
    """The first line of what it says, without secrets; of a process that torch spawned, what that one raised last."""
    try:
        lines = [line for line in str(error).splitlines() if line.strip()]
    except Exception:  # an exception of the job's, with a __str__ that fails
        return ""
    spawned = type(error).__name__ == "ProcessRaisedException"  # its message is the other's whole traceback
    said = redact_text(lines[-1 if spawned else 0].strip()) if lines else ""
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
