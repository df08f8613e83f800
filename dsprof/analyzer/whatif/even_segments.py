"""What-if on work that ranks divide unequally: between the same two events of their programs all take the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Float
from ..graph.segment_work import copy_work
from ..graph.step_graph import StepGraph, Steps
from .apply import Refused, Turn, WhatIf
from .work import within


@dataclass(frozen=True, eq=False)
class EvenSegments(WhatIf):
    """Each piece of compute, between two events of the program, takes every rank of a team what it takes its members in
    the mean of the step: as where a sequence is dealt so that each of its turns is equal for all.

    teams: ranks that do the same work, whose programs are equal
    share: of each template, [W] how much of what a segment differs by from the mean goes, the same for all of a team;
           None: all of it
    """

    teams: Sequence[tuple[int, ...]]
    share: tuple[Float, ...] | None = None
    turn = Turn.EQUAL_WORK

    @property
    def name(self) -> str:
        return f"equal compute between the same events on ranks {'; '.join(str(list(team)) for team in self.teams)}"

    def change(self, graph: StepGraph) -> StepGraph:
        columns = within("compute")
        place = {rank: thread for thread, rank in enumerate(graph.ranks[: graph.leads])}
        teams = [[place[rank] for rank in team if rank in place] for team in self.teams]

        def evened(steps: Steps, share: Float | None) -> Steps:
            structure, work = steps.structure, copy_work(steps.work)
            for team in teams:
                if share is not None and not any(share[structure.of_thread(thread)].any() for thread in team):
                    continue
                if len({structure.programs[thread] for thread in team}) > 1:
                    raise Refused(self.name, "these ranks do not issue and wait for the same things in the same order")
                mine = [structure.of_thread(thread) for thread in team]
                if not mine:
                    continue
                mean = np.mean([steps.work[of][..., columns] for of in mine], axis=0, dtype=np.float64)
                for of in mine:
                    goes = 1.0 if share is None else share[of][:, None, None]
                    work[of.start : of.stop, :, columns] += goes * (mean - steps.work[of][..., columns])
            return steps.with_costs(work=work)

        shares = self.share or (None,) * len(graph.templates)
        return graph.with_templates(tuple(evened(*one) for one in zip(graph.templates, shares, strict=True)))
