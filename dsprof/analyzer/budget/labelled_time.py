"""Time in which every moment has one label, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..arrays import Int
from .intervals import Intervals

UNLABELLED: Final = -1


@dataclass(frozen=True)
class LabelledTime:
    """when:  [K] ns, in order: where what lies behind has another label than what lies before
    label: [K] what each moment from then on has, UNLABELLED: none, as before the first and from the last on
    labels: how many there are: they are 0 to `labels` - 1
    """

    when: Int
    label: npt.NDArray[np.int8]
    labels: int

    @staticmethod
    def of(parts: Sequence[Intervals]) -> LabelledTime:
        """Label `i` where `parts[i]` is and none before it; of parts that overlap the first one counts."""
        edges = [part.start for part in parts] + [part.end for part in parts]
        when = np.sort(np.concatenate(edges))
        when = when[np.append(True, when[1:] != when[:-1])[: len(when)]]
        label = np.full(len(when), UNLABELLED, np.int8)
        for place in reversed(range(len(parts))):
            if len(parts[place].start):
                label[parts[place].holds(when)] = place
        changes = np.append(label[:1] != UNLABELLED, label[1:] != label[:-1])[: len(label)]
        return LabelledTime(when[changes], label[changes], len(parts))

    def spans(self, label: int) -> Intervals:
        """When it is that."""
        at = np.flatnonzero(self.label == label)  # the last moment has none, so another one follows
        return Intervals(self.when[at], self.when[at + 1])

    def before(self, when: Int) -> Int:
        """[labels, len(when)]: how long each label lies before each moment, ns."""
        found = np.zeros((self.labels, len(when)), np.int64)
        if not len(self.when):
            return found
        at = np.searchsorted(self.when, when, "right") - 1
        inside, length = at >= 0, np.diff(self.when)
        since = when - self.when[at]
        label = self.label[at]
        for place in range(self.labels):
            mine = self.label[:-1] == place
            if mine.any():
                total = np.append(0, np.cumsum(np.where(mine, length, 0)))
                found[place] = np.where(inside, total[at] + np.where(label == place, since, 0), 0)
        return found

    def of_label(self, label: int, when: Int) -> Int:
        """How long that label lies before each moment, ns."""
        return self.spans(label).before(when)

    def before_within(self, when: Int, within: Intervals) -> Int:
        """`before`, of which only what lies in `within` counts."""
        if not len(within.start):
            return np.zeros((self.labels, len(when)), np.int64)
        begins, ends = self.before(within.start), self.before(within.end)
        whole = np.concatenate([np.zeros((self.labels, 1), np.int64), np.cumsum(ends - begins, axis=1)], axis=1)
        at = np.searchsorted(within.start, when, "right") - 1
        begun = self.before(np.minimum(when, within.end[at])) - begins[:, at]
        found: Int = np.where(at >= 0, whole[:, at] + begun, 0)
        return found
