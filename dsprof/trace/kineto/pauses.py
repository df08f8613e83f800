"""When a rank's host put nothing on its device for longer than one that is busy launching does."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]

LAUNCHING_NS: Final = 1_000_000
"""A thread that is busy launching goes from one launch to the next in less: an operator takes it some 10 us, and a
module in Python a few hundred under a profiler. A longer pause is for something else."""


def launch_pauses(start: Int, end: Int) -> tuple[Int, Int]:
    """Begin and end of each pause between launches, given by when each call began and ended, in order of time."""
    order = np.argsort(start, kind="stable")
    if not len(order):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    reach = np.maximum.accumulate(end[order])[:-1]
    following = start[order][1:]
    long = following - reach > LAUNCHING_NS
    return reach[long], following[long]
