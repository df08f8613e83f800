"""The work of segments, [W, S, PARTS], held part by part: of the parts of a step most segments have one or two, and
some parts no segment has. Memory that nobody has written to takes no room, so of many ranks a table takes as many parts
as there are, and not as many as there could be. Of MANY numbers each is a float32, which tells a second to 0.1 us; sums
over segments or steps are worked out as float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ..arrays import Float, Int

AT_ONCE: Final = 4096
"""Segments of which work is taken away at once."""
Taken: TypeAlias = Mapping[int, tuple[Int, Float]]
"""Place of a part -> K segments that have less of it, and how much less, [K, S] ms."""
MANY: Final = 1 << 19
"""Numbers of one part."""


def no_work(segments: int, steps: int, parts: int) -> Float:
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


def part_without(work: Float, part: int, taken: Sequence[Taken]) -> Float:
    """[W, S] of one part of work, of which this is taken, one after the other, and never more than there is. Where some
    is taken, what there is less than nothing of is nothing, too. It is not written to: it may be part of the work."""
    found: Float = work[..., part]
    if not taken:
        return found
    mine = bool(found.min(initial=0.0) < 0)
    if mine:
        found = np.maximum(found, 0.0)
    for some, gone in (of[part] for of in taken if part in of):
        found, mine = found if mine else found.copy(), True
        for first in range(0, len(some), AT_ONCE):
            here = slice(first, first + AT_ONCE)
            found[some[here]] = np.maximum(found[some[here]] - gone[here], 0.0)
    return found


def work_without(work: Float, taken: Sequence[Taken]) -> Float:
    """[W, S, PARTS] of work, of which this is taken (`part_without`). Where something is, it may be written to."""
    if not taken:
        return work
    found = _zeros(work.shape, work.dtype)
    for part in range(work.shape[-1]):
        left = part_without(work, part, taken)
        if left.any():
            found[..., part] = left
    return found
