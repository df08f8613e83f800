"""Where in the script something was called, as the id of a `file:line`: of the innermost frame that is neither torch's,
nor ours, nor of the standard library. In a trainer's own loop that is the trainer's line, not the script's call of it.
The twin in C++ is `native/sites.hpp`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final

from ..hooking.caller import HOME, STANDARD_LIBRARY

if TYPE_CHECKING:
    from .record import Recorder

LIBRARY: Final = STANDARD_LIBRARY + os.sep
INSTALLED: Final = "-packages/"
MOST: Final = 1 << 14


def passed_over() -> list[str]:
    """Beginnings of the names of files whose lines are not what anybody asks for, those that torch.compile writes among
    them; torch is loaded."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
    return [str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep, f"{HOME}{os.sep}", "<", compiled]


class SourceLocations:
    """The places of one capture. A place that was asked for before costs less than a microsecond."""

    def __init__(self, recorder: Recorder) -> None:
        self._intern = recorder.intern
        self._inside = tuple(passed_over())
        self._outside: dict[int, tuple[CodeType, bool]] = {}
        """By the code's address, and so with the code: to compare two takes longer. Kept, no other comes there."""
        self._ids: dict[tuple[int, int], int] = {}

    def here(self) -> int:
        """The id of where the caller is; 0 where none of its frames is outside."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            known = self._outside.get(id(code))
            if known[1] if known is not None else self._is_outside(code):
                place = id(code), frame.f_lasti
                found = self._ids.get(place)
                if found is None:
                    found = self._ids[place] = self._intern(f"{code.co_filename}:{frame.f_lineno}")
                return found
            frame = frame.f_back
        return 0

    def _is_outside(self, code: CodeType) -> bool:
        if len(self._outside) >= MOST:
            self._outside.clear()
            self._ids.clear()
        file = code.co_filename
        outside = not file.startswith(self._inside) and (INSTALLED in file or not file.startswith(LIBRARY))
        self._outside[id(code)] = code, outside
        return outside
