"""Gathers that are issued earlier: prefetched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Int
from ..graph.step_graph import Costs, Edges, StepGraph, Steps, Structure
from .apply import Turn, WhatIf
from .edit import Recut, Restructure
from .merge import families
from .select import Communications


@dataclass(frozen=True)
class Prefetched(WhatIf):
    """Each of these gathers is issued where the one `ahead` of it was in the same forward or backward, by every rank of
    its group. What is gathered first there is gathered where it is now."""

    of: Communications
    ahead: int
    turn = Turn.ORDER_OF_ISSUE

    @property
    def name(self) -> str:
        return f"{self.of} issued {self.ahead} ahead"

    def against(self, other: WhatIf) -> str | None:
        same = isinstance(other, Prefetched) and self.of.meets(other.of)
        return "both say when the same parameters are gathered" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(self._earlier)

    def _earlier(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        source, target = structure.edges.source.copy(), structure.edges.target
        segments = structure.segments
        issue = (source < segments) & (target >= segments)
        at_of: dict[tuple[int, int], int] = {}  # (thread, task) -> its edge
        for edge in np.flatnonzero(issue).tolist():
            at_of[int(structure.thread[source[edge]]), int(target[edge]) - segments] = edge
        moved = False
        for family in families(steps, self.of):
            for thread in range(structure.threads):
                edges = [at_of[thread, c] for c in family if (thread, c) in at_of]
                was = [int(source[edge]) for edge in edges]
                for edge, earlier in zip(edges[self.ahead :], was, strict=False):
                    source[edge], moved = earlier, True
        if not moved:
            return None
        taken = _in_order_of_issue(structure, source)
        number = np.arange(segments + len(taken) + structure.outside)
        number[segments + taken] = segments + np.arange(len(taken))
        changed = replace(
            structure,
            tasks=tuple(structure.tasks[c] for c in taken.tolist()),
            edges=Edges(number[source], number[target]),
            ids=np.concatenate([structure.ids[:segments], structure.ids[segments + taken]]),
        )

        def costs(steps: Steps) -> Costs:
            return Costs(steps.work, steps.transfer[taken], steps.wire[taken], steps.size[taken])

        return Recut(changed, number[: segments + len(taken)], costs)


def _in_order_of_issue(structure: Structure, source: Int) -> Int:
    """The tasks, those of a lane in the order in which the first rank that issues one of them does; `source`: of the
    edges, as they are now."""
    segments, count = structure.segments, len(structure.tasks)
    issue = (source < segments) & (structure.edges.target >= segments)
    lead: dict[str, int] = {}
    at = np.full(count, -1)
    tasks = structure.edges.target[issue] - segments
    for segment, c in sorted(zip(source[issue].tolist(), tasks.tolist(), strict=True)):
        lane, thread = structure.tasks[c].lane, int(structure.thread[segment])
        if lead.setdefault(lane, thread) == thread and at[c] < 0:
            at[c] = segment
    order = np.arange(count)
    places: dict[str, list[int]] = {}
    for c, task in enumerate(structure.tasks):
        if at[c] >= 0:
            places.setdefault(task.lane, []).append(c)
    for mine in places.values():
        order[mine] = sorted(mine, key=lambda c: (at[c], c))
    return order
