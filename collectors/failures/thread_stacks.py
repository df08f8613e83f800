"""Where the Python threads of this process stand."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any, Final

MOST_THREADS: Final = 64
MOST_FRAMES: Final = 40

Frame = tuple[str, int, str]
"""File, line, function."""


def python_threads(training: int) -> list[dict[str, Any]]:
    """Each Python thread but the caller: name, the kernel's number of it, whether it is that of identity `training`,
    and its frames, the innermost first."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for identity, frame in list(sys._current_frames().items()):
        if identity == threading.get_ident():
            continue
        thread = known.get(identity)
        found.append(
            {
                "name": thread.name if thread else "",
                "task": thread.native_id if thread else None,
                "trains": identity == training,
                "frames": frames_of(frame),
            }
        )
    found.sort(key=lambda item: not item["trains"])
    return found[:MOST_THREADS]


def frames_of(frame: FrameType | None) -> list[Frame]:
    """The innermost first."""
    found: list[Frame] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found
