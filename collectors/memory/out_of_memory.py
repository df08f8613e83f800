"""A rank that ran out of memory: where, and who held what it had. Told by a fact, `out_of_memory`.

On a device torch itself calls, whatever becomes of the error. On the host it is the exception that ended the process,
which the interpreter keeps until it is gone: then what the frames' variables hold is still there to be counted.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from .live_tensors import place_of

MOST_FRAMES: Final = 48
MOST_VARIABLES: Final = 12
MOST_OBJECTS: Final = 100_000
"""Elements of lists and dictionaries that are looked at for tensors."""
DEEPEST: Final = 3

REFUSED: Final = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
"""What torch's errors say of it, whose type is RuntimeError."""
ASKED: Final = (
    (re.compile(r"tried to allocate (\d+) bytes"), None),
    (re.compile(r"(?:Unable|Tried) to allocate ([\d.]+) (KiB|MiB|GiB|TiB|bytes)"), 2),
)
UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Frame = tuple[str, str, int]
"""Function, file, line."""


def of_process() -> BaseException | None:
    """The error of the host's memory that ends this process; None: it ends for another reason, or well."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    seen: set[int] = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        if _is_of_host(error):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_of_host(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # The device's own is an OutOfMemoryError, which was told when it came up.
    plain = isinstance(error, (RuntimeError, OSError)) and type(error).__name__ != "OutOfMemoryError"
    return plain and any(words in str(error) for words in REFUSED)


def asked_for(said: str) -> int | None:
    """Bytes that were asked for, by what the error says."""
    for pattern, unit in ASKED:
        found = pattern.search(said)
        if found:
            return int(float(found[1]) * (UNITS[found[unit]] if unit else 1))
    return None


def stack_of(error: BaseException) -> list[Frame]:
    """Where it came up, innermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [_frame(frame, line) for frame, line in frames][::-1][:MOST_FRAMES]


def stack_here(depth: int = 1) -> list[Frame]:
    """The calling thread's, innermost first; `depth` callers are left out."""
    return [_frame(frame, frame.f_lineno) for frame in _callers(sys._getframe(depth))][:MOST_FRAMES]


def _frame(frame: FrameType, line: int | None) -> Frame:
    return frame.f_code.co_qualname, frame.f_code.co_filename, line or 0


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def variables_of(trace: TracebackType | None, place: str, known: Iterable[int] = ()) -> list[dict[str, Any]]:
    """What the variables of these frames hold in tensors at `place` (`host`), by variable, most first: `name`,
    `function`, `file`, `line`, `tensors`, `bytes`. `known`: identities of storages that are counted elsewhere."""
    return _variables([frame for frame, _ in traceback.walk_tb(trace)], place, known)


def _variables(frames: list[FrameType], place: str, known: Iterable[int]) -> list[dict[str, Any]]:
    seen, left = set(known), [MOST_OBJECTS]
    found: list[dict[str, Any]] = []
    for frame in frames:  # the outermost first: what a caller holds is not the callee's
        for name, value in list(frame.f_locals.items()):
            sizes = list(_sizes(value, place, seen, left, DEEPEST))
            if sum(sizes):
                function, file, line = _frame(frame, frame.f_lineno)
                found.append(
                    {"name": name, "function": function, "file": file, "line": line, "tensors": len(sizes),
                     "bytes": sum(sizes)}
                )  # fmt: skip
    return sorted(found, key=lambda one: -one["bytes"])[:MOST_VARIABLES]


def _sizes(value: Any, place: str, seen: set[int], left: list[int], deep: int) -> Iterator[int]:
    """Bytes of each storage in it that was not seen yet."""
    import torch

    left[0] -= 1
    if left[0] < 0:
        return
    if isinstance(value, torch.Tensor):
        try:
            storage = value.untyped_storage()
            here, key, size = place_of(storage.device) == place, storage._cdata, storage.nbytes()
        except Exception:  # one without a plain storage
            return
        if here and key not in seen:
            seen.add(key)
            yield size
    elif deep and isinstance(value, (list, tuple, dict, set)):
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _sizes(one, place, seen, left, deep - 1)
