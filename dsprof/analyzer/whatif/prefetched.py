"""Gathers that are issued earlier: prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..graph.step_graph import Costs, StepGraph, Steps
from .apply import Turn, WhatIf
from .edit import Recut, with_tasks
from .fetching import forwards_and_backwards
from .issue_order import in_order_of_issue, issue_edges
from .merge import families
from .rebucket import Division
from .select import Communications


@dataclass(frozen=True)
class Prefetched(WhatIf):
    """Each of these gathers is issued where the one `ahead` of it was in the same forward or backward, by every rank of
    its group. What is gathered first there is gathered where it is now. part: only those that forward, or backward,
    needs."""

    of: Communications
    ahead: int
    part: Literal["forward", "backward"] | None = None
    turn = Turn.ORDER_OF_ISSUE

    @property
    def name(self) -> str:
        return f"{self.of} issued {self.ahead} ahead{f' in {self.part}' if self.part else ''}"

    def against(self, other: WhatIf) -> str | None:
        same = isinstance(other, Prefetched) and self.of.meets(other.of)
        same &= self.part is None or getattr(other, "part", None) in (None, self.part)
        return "both say when the same parameters are gathered" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Division:
        return Division(self.name, self._earlier)

    def _earlier(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        source = structure.edges.source.copy()
        at_of = issue_edges(structure)
        moved = False
        for family in self._families(steps):
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

    def _families(self, steps: Steps) -> list[list[int]]:
        """Raises NotRebucketed where a part is asked for, and what forward and backward gather is not told apart."""
        if self.part is None:
            return families(steps, self.of)
        place = 0 if self.part == "forward" else 1
        return [sorted(both[place]) for both in forwards_and_backwards(steps, self.of)]
