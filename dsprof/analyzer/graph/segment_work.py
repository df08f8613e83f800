"""The work of segments, [W, S, PARTS], held part by part: of the parts of a step most segments have one or two, and
some parts no segment has. Memory that nobody has written to takes no room, so of many ranks a table takes as many parts
as there are, and not as many as there could be.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float, Int
from .step_graph import PARTS


def no_work(segments: int, steps: int, parts: int = len(PARTS)) -> Float:
    """[segments, steps, parts] zeros."""
    return np.moveaxis(np.zeros((parts, segments, steps)), 0, -1)


def take_work(work: Float, segments: Int) -> Float:
    """The work of these segments, which may be written to. `work[segments]` would write all parts."""
    found = no_work(len(segments), *work.shape[1:])
    for part in range(work.shape[-1]):
        if work[..., part].any():
            found[..., part] = work[..., part][segments]
    return found


def copy_work(work: Float) -> Float:
    """Work that may be written to. `work.copy()` would write to the parts that nobody has, too."""
    found = no_work(*work.shape)
    for part in range(work.shape[-1]):
        if work[..., part].any():
            found[..., part] = work[..., part]
    return found
