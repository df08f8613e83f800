"""Communications that are waited for at another place: at once, or while others are under way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..graph.segment_work import copy_work
from ..graph.step_graph import WAKE_UP_DELAY, Costs, Edges, StepGraph, Steps
from .apply import Turn, WhatIf
from .edit import Recut, Restructure
from .issue_order import issue_edges
from .merge import families
from .select import Communications


@dataclass(frozen=True)
class WaitedFor(WhatIf):
    """Each of these is waited for where the one is issued that comes so many later in the same backward, 0: where it is
    issued itself; the last of a backward where the last of them was."""

    of: Communications
    later: int
    turn = Turn.ORDER_OF_ISSUE

    @property
    def name(self) -> str:
        return f"{self.of} waited for {self.later} later"

    def against(self, other: WhatIf) -> str | None:
        same = isinstance(other, WaitedFor) and self.of.meets(other.of)
        return "both say where the same communications are waited for" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(self._moved)

    def _moved(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        segments = structure.segments
        source, target = structure.edges.source, structure.edges.target.copy()
        at_of, waits = issue_edges(structure), structure.first_waits
        edges = {
            (int(structure.thread[target[edge]]), int(source[edge]) - segments): edge
            for edge in np.flatnonzero((source >= segments) & (source < segments + len(structure.tasks)))[::-1].tolist()
            if target[edge] == waits.get((int(structure.thread[target[edge]]), int(source[edge]) - segments))
        }
        for family in families(steps, self.of):
            for thread in range(structure.threads):
                mine = [c for c in family if (thread, c) in at_of and (thread, c) in edges]
                if not mine:
                    continue
                last = max(waits[thread, c] for c in mine)
                # The segment that begins once one is issued; of one that is waited for at once the next but one.
                begun = [int(source[at_of[thread, c]]) for c in mine]
                places = [
                    waits[thread, c] if waits[thread, c] == at + 2 else at + 1
                    for c, at in zip(mine, begun, strict=True)
                ]
                for place, c in enumerate(mine):
                    after = place + self.later
                    target[edges[thread, c]] = places[after] if after < len(mine) else last
        moved = target != structure.edges.target
        if not moved.any():
            return None
        was, now = structure.edges.target[moved], target[moved]
        waiting = target[(source >= segments) & (target < segments)]
        unwoken = np.setdiff1d(was, waiting)
        changed = replace(structure, edges=Edges(source, target))

        def costs(steps: Steps) -> Costs:
            work, late = copy_work(steps.work), steps.work[..., WAKE_UP_DELAY]
            work[unwoken, :, WAKE_UP_DELAY] = 0.0
            for before, after in zip(was.tolist(), now.tolist(), strict=True):
                work[after, :, WAKE_UP_DELAY] = np.maximum(work[after, :, WAKE_UP_DELAY], late[before])
            return Costs(work, steps.transfer, steps.wire, steps.size)

        return Recut(changed, np.arange(segments + len(structure.tasks)), costs)
