"""Whose an exception is that came up inside a hook: one of ours is caught, what a signal's handler of the job raised is
the job's and must reach it (a timeout by SIGALRM, a preemption by SIGTERM).

Python runs a handler between two instructions of the main thread, ours included, and gives it the frame that it has
interrupted. So the traceback tells: a frame in it that was called with a signal's number and with the frame that called
it, or one further up that very traceback, is a handler's. That costs nothing until there is an exception.

What it cannot tell: a handler that is no Python function (its exception is taken for ours and counted), one that has
overwritten its own parameters before it raised, and what is raised in a callback whose exceptions Python itself drops
(of the garbage collector, of weak references): there it is lost with or without a profiler's callback.
"""

from __future__ import annotations

import itertools
import signal
import sys
from types import FrameType
from typing import Any, Final

_NUMBERS: Final = frozenset(int(number) for number in signal.valid_signals())


def by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised this, which somebody up the stack has caught."""
    above: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # To read a frame's variables keeps them in the frame (before Python 3.13). Of the one that caught the error the
        # error is among them, and has the frame: both would stay until garbage is collected, and so would the tensors
        # of whoever called it. What raised is over.
        if not _is_running(frame) and _is_handler(frame, above):
            return True
        above.append(frame)
        trace = trace.tb_next
    return False


def _is_running(frame: FrameType) -> bool:
    """Whether it is in this thread's stack."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def _is_handler(frame: FrameType, above: list[FrameType]) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + bool(code.co_flags & 0x04)]  # CO_VARARGS: `*args` too
    given: list[Any] = []
    for name in names:
        value = frame.f_locals.get(name)
        given += value if isinstance(value, tuple) and name == names[-1] else (value,)
    return any(
        isinstance(number, int) and number in _NUMBERS and any(at is one for one in (frame.f_back, *above) if one)
        for number, at in itertools.pairwise(given)
    )
