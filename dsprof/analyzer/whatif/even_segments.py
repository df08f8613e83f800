"""What-if on work that ranks divide unequally: between the same two events of their programs all take the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph.step_graph import StepGraph, Steps
from .apply import Refused, Turn, WhatIf
from .work import within


@dataclass(frozen=True, eq=False)
class EvenSegments(WhatIf):
    """Each piece of compute, between two events of the program, takes every rank of a team what it takes its members in
    the mean of the step: as where a sequence is dealt so that each of its turns is equal for all.

    teams: ranks that do the same work, whose programs are equal
    """

    teams: Sequence[tuple[int, ...]]
    turn = Turn.EQUAL_WORK

    @property
    def name(self) -> str:
        return f"equal compute between the same events on ranks {'; '.join(str(list(team)) for team in self.teams)}"

    def change(self, graph: StepGraph) -> StepGraph:
        columns = within("compute")
        teams = [np.flatnonzero(np.isin(graph.ranks[: graph.leads], team)).tolist() for team in self.teams]

        def evened(steps: Steps) -> Steps:
            structure, work = steps.structure, steps.work.copy()
            for team in teams:
                if len({structure.programs[thread] for thread in team}) > 1:
                    raise Refused(self.name, "these ranks do not issue and wait for the same things in the same order")
                mine = [structure.of_thread(thread) for thread in team]
                if not mine:
                    continue
                mean = np.mean([steps.work[of][..., columns] for of in mine], axis=0)
                for of in mine:
                    work[of.start : of.stop, :, columns] = mean
            return steps.with_costs(work=work)

        return graph.with_templates(tuple(evened(steps) for steps in graph.templates))
