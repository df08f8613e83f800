"""Gathers that are issued earlier: prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..graph.step_graph import Costs, StepGraph, Steps
from .apply import Turn, WhatIf
from .edit import Recut, Restructure, with_tasks
from .issue_order import in_order_of_issue, issue_edges
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
        source = structure.edges.source.copy()
        at_of = issue_edges(structure)
        moved = False
        for family in families(steps, self.of):
            for thread in range(structure.threads):
                edges = [at_of[thread, c] for c in family if (thread, c) in at_of]
                was = [int(source[edge]) for edge in edges]
                for edge, earlier in zip(edges[self.ahead :], was, strict=False):
                    source[edge], moved = earlier, True
        if not moved:
            return None
        taken = in_order_of_issue(structure, source)
        changed, number = with_tasks(structure, taken, source)

        def costs(steps: Steps) -> Costs:
            return Costs(steps.work, steps.transfer[taken], steps.wire[taken], steps.size[taken])

        return Recut(changed, number, costs)
