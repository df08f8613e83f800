"""What was issued to lanes of one rank alone, such as reads from disk: tasks of the step graph that are that rank's.

A lane is a queue where each of its operations was issued at a known time and they ran one after the other in that
order. Of another nothing is known but how long it was waited for: such a wait stays a rank's own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from .intervals import Int

Words = npt.NDArray[np.object_]

NOT_QUEUED: Final = -1
QUEUED: Final = ("name", "purpose", "bytes", "issue_ns")
"""Columns of the trace that are needed beside a lane, a start and an end."""


@dataclass(frozen=True)
class Queue:
    """K operations, a lane's in the order in which they were issued.

    lane:  [K] its name; `kind`: [K] name and purpose: `read optimizer`; `part`: [K] of the budget, what it is
    issue, end: [K] ns
    size:  [K] bytes, 0: unknown
    """

    lane: Words
    kind: Words
    part: Words
    issue: Int
    end: Int
    size: Int

    def __len__(self) -> int:
        return len(self.lane)

    @staticmethod
    def empty() -> Queue:
        words, numbers = np.empty(0, object), np.empty(0, np.int64)
        return Queue(words, words, words, numbers, numbers, numbers)


def find_queue(work: pd.DataFrame, lane: Words, part: Words, start: Int, end: Int) -> tuple[Queue, Int]:
    """The operations among `work` (QUEUED) whose lane is a queue, and of each row its place in it, NOT_QUEUED.

    part: of the budget; empty: no operation of a lane's own, such as a communication.
    """
    place = np.full(len(work), NOT_QUEUED)
    issue = work["issue_ns"].to_numpy(np.int64, na_value=0)
    order = np.lexsort((start, issue, lane.astype(str)))
    follows = np.append(False, lane[order][1:] == lane[order][:-1])
    apart = np.append(True, start[order][1:] >= end[order][:-1])
    odd = (issue <= 0) | (part == "")
    odd[order] |= follows & ~apart
    order = order[~np.isin(lane[order], lane[odd])]
    if not len(order):
        return Queue.empty(), place
    place[order] = np.arange(len(order))
    purpose = work["purpose"].astype(object).fillna("").astype(str)
    kind = (work["name"].astype(str) + " " + purpose).str.rstrip().to_numpy(object)
    size = work["bytes"].to_numpy(np.int64, na_value=0)
    return Queue(lane[order], kind[order], part[order], issue[order], end[order], size[order]), place
