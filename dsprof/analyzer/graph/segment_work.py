"""The work of segments, [W, S, PARTS], held part by part: of the parts of a step most segments have one or two, and
some parts no segment has. Memory that nobody has written to takes no room, so of many ranks a table takes as many parts
as there are, and not as many as there could be. Of MANY numbers each is a float32, which tells a second to 0.1 us; sums
over segments or steps are worked out as float64.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..arrays import Float, Int
from .step_graph import PARTS

MANY: Final = 1 << 19
"""Numbers of one part."""


def no_work(segments: int, steps: int, parts: int = len(PARTS)) -> Float:
    """[segments, steps, parts] zeros."""
    return _zeros((segments, steps, parts), np.dtype(np.float32 if segments * steps > MANY else np.float64))


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Float:
    segments, steps, parts = shape
    return np.moveaxis(np.zeros((parts, segments, steps), dtype), 0, -1)


def take_work(work: Float, segments: Int) -> Float:
    """The work of these segments, which may be written to. `work[segments]` would write all parts."""
    found = _zeros((len(segments), *work.shape[1:]), work.dtype)
    for part in range(work.shape[-1]):
        if work[..., part].any():
            found[..., part] = work[..., part][segments]
    return found


def copy_work(work: Float) -> Float:
    """Work that may be written to. `work.copy()` would write to the parts that nobody has, too."""
    found = _zeros(work.shape, work.dtype)
    for part in range(work.shape[-1]):
        if work[..., part].any():
            found[..., part] = work[..., part]
    return found
