"""The what-if of a pipeline that runs another plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsprof.engine.schedule import Plan, ScheduleError, check

from ...arrays import Bool
from ...graph.step_graph import StepGraph, Steps, Structure
from ..apply import Refused, Turn, WhatIf, measured
from ..edit import Recut, Restructure
from .assemble import assemble
from .messages import awaited
from .program import NotLowered, measured_plan
from .recipe import Stages


@dataclass(frozen=True, eq=False)
class Lower(WhatIf):
    """Every pipeline of the job runs `plan` on the ranks that it has. None: the plan that ran.

    stages: of which measured ones the plan's are made, and what they take
    says:   what is changed, in words
    """

    plan: Plan | None = None
    stages: Stages = field(default_factory=Stages)
    says: str = ""
    turn = Turn.SCHEDULE

    @property
    def name(self) -> str:
        return self.says or ("the plan that ran" if self.plan is None else f"schedule {self.plan.schedule}")

    def against(self, other: WhatIf) -> str | None:
        return "both say in which order the pipeline's actions run" if other.turn is Turn.SCHEDULE else None

    def change(self, graph: StepGraph) -> StepGraph:
        origin = measured(graph)
        judged = set(origin.judged_steps.tolist())
        waited = {steps.structure: awaited(steps) for steps in origin.templates}

        def lowered(steps: Steps) -> Recut | None:
            try:
                return self._recut(steps.structure, waited.get(steps.structure))
            except NotLowered as why:
                if judged.isdisjoint(steps.numbers.tolist()):
                    return None  # it is only there because a delay reaches through it
                raise Refused(self.name, str(why)) from None

        return Restructure(lowered)(graph)

    def _recut(self, structure: Structure, waited: Bool | None) -> Recut:
        was = measured_plan(structure)
        plan = was.plan if self.plan is None else self.plan
        if plan.ranks != was.plan.ranks:
            raise NotLowered(f"the plan is of {plan.ranks} ranks, and the pipeline that ran of {was.plan.ranks}")
        try:
            check(plan, mixed=True)
        except ScheduleError as error:
            raise NotLowered(str(error)) from None
        return assemble(structure, was, plan, self.stages, waited)
