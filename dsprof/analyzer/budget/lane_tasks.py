"""Copies that were issued to lanes of one rank's own, such as reads from disk: tasks of the step graph that no other
rank takes part in.

That takes a lane all of whose operations were issued at known times and ran one after the other in that order. Of
another nothing is known but how long it was waited for: such a wait stays a rank's own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Int
from ..columns import Words

NO_TASK: Final = -1
COPY: Final = "copy"
LANE_TASK_COLUMNS: Final = ("kind", "name", "purpose", "bytes", "issue_ns")
"""Columns of the trace that are needed beside a lane, a start and an end."""


@dataclass(frozen=True)
class LaneTasks:
    """K copies, those of a lane in the order in which they were issued.

    lane:  [K] its name; `kind`: [K] name and purpose: `read optimizer`
    issue, end: [K] ns
    size:  [K] bytes, 0: unknown
    """

    lane: Words
    kind: Words
    issue: Int
    end: Int
    size: Int

    def __len__(self) -> int:
        return len(self.lane)

    @staticmethod
    def none() -> LaneTasks:
        words, numbers = np.empty(0, object), np.empty(0, np.int64)
        return LaneTasks(words, words, numbers, numbers, numbers)


def kinds_of(operations: pd.DataFrame) -> Words:
    """Name and purpose of each, as `Task.kind` has them; of one that has no purpose, its name."""
    purpose = operations["purpose"].astype(object).fillna("").astype(str)
    name = operations["name"].astype(object).astype(str)
    found: Words = (name + " " + purpose).str.rstrip().to_numpy(object)
    return found


def find_lane_tasks(work: pd.DataFrame, lane: Words, start: Int, end: Int) -> tuple[LaneTasks, Int]:
    """Those among `work` (LANE_TASK_COLUMNS), what lanes of one rank did; and of each row its place there, NO_TASK."""
    place = np.full(len(work), NO_TASK)
    issue = work["issue_ns"].to_numpy(np.int64, na_value=0)
    order = np.lexsort((start, issue, lane.astype(str)))
    follows = np.append(False, lane[order][1:] == lane[order][:-1])
    after = np.append(True, start[order][1:] >= end[order][:-1])
    unlike = (work["kind"] != COPY).to_numpy(bool) | (issue <= 0) | (issue > start)
    unlike[order] |= follows & ~after
    order = order[~np.isin(lane[order], lane[unlike])]
    if not len(order):
        return LaneTasks.none(), place
    place[order] = np.arange(len(order))
    kind = kinds_of(work)
    size = work["bytes"].to_numpy(np.int64, na_value=0)
    return LaneTasks(lane[order], kind[order], issue[order], end[order], size[order]), place
