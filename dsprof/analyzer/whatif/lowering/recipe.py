"""Of which measured actions each action of another plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from dsprof.engine.schedule import Action, Plan

from ...graph.step_graph import Structure
from .program import ActionBlock, Pipeline

WEIGHT_SHARE: Final = 0.5
"""Of a backward, what only makes the weights' gradients, where that was not measured: of a product with a weight, one
of the two products of its backward."""

Carried = Literal["all", "gradients", "others"]
"""Which of the tasks that are issued in a block a copy of it issues too: those that reduce gradients, or the rest."""


@dataclass(frozen=True)
class ActionPiece:
    """A copy of a measured block, or of its own segments alone, without what comes before and after them. Its
    computation takes `factor` times as long. `loads`: whether it waits for input where the measured one did."""

    block: ActionBlock
    factor: float = 1.0
    whole: bool = True
    carried: Carried = "all"
    loads: bool = True


@dataclass(frozen=True)
class Stages:
    """Stages other than those that ran.

    factors: (stage, `F` or `B`) -> what its computation takes, times what that of the measured stage takes that its
             rank held first (`source`); a `W` takes as many times as long as a `B`
    weight_share: of a backward that was measured as one, what W is
    """

    factors: Mapping[tuple[int, str], float] = field(default_factory=dict)
    weight_share: float = WEIGHT_SHARE

    def factor(self, action: Action) -> float:
        return self.factors.get((action.stage, "F" if action.op == "F" else "B"), 1.0)


def source_stage(measured: Plan, plan: Plan, stage: int) -> int:
    """The measured stage that a stage of `plan` is made of: itself where ranks hold as many; else one of the same rank,
    the last for the last."""
    if (plan.virtual_stages, plan.v_shaped) == (measured.virtual_stages, measured.v_shaped):
        return stage
    held = [one for one in range(measured.stages) if measured.owner(one) == plan.owner(stage)]
    return held[-1] if stage == plan.stages - 1 else held[0]


def source_microbatch(measured: int, microbatches: int, number: int) -> int:
    """The measured micro-batch that one of `microbatches` is like: the first and the last are like the first and the
    last, which load and reduce; those between like those between, in turns."""
    if measured == microbatches:
        return number
    if number == microbatches - 1:
        return measured - 1
    if number == 0 or measured < 3:
        return 0
    return 1 + (number - 1) % (measured - 2)


class Recipe:
    """What the actions of one rank's new program are made of."""

    def __init__(self, structure: Structure, pipeline: Pipeline, rank: int, plan: Plan, stages: Stages) -> None:
        self._pipeline, self._plan, self._stages = pipeline, plan, stages
        self._last = plan.actions[rank][-1]
        self._final = _reduces_once(structure, pipeline, rank)

    def pieces(self, action: Action) -> tuple[ActionPiece, ...]:
        """The pieces of an action, in order."""
        was, plan, blocks = self._pipeline.plan, self._plan, self._pipeline.blocks
        stage = source_stage(was, plan, action.stage)
        micro = source_microbatch(was.microbatches, plan.microbatches, action.microbatch)
        if action.op == "F" and was.microbatches == 2 and action.microbatch > 0:
            micro = 1  # the input of the first one may have been loaded before the schedule began
        # Inputs are for the first stage and targets for the last: one between them, made of these, waits for none.
        loads = stage not in (0, was.stages - 1) or action.stage in (0, plan.stages - 1)
        factor = self._stages.factor(action)
        # Gradients that a rank reduces once a step, it reduces with its last action.
        reduces: Carried = "all" if self._final is None or action == self._last else "others"

        def copied(op: str, times: float = 1.0, *, whole: bool = True, carried: Carried = reduces) -> ActionPiece:
            block = blocks[Action(op, stage, micro)]
            if action == self._last and self._final is not None and op == self._final.action.op:
                block = self._final
            return ActionPiece(block, factor * times, whole, carried, loads)

        if action.op == "F":
            return (copied("F", carried="all"),)
        in_two = (stage, micro) in was.split
        if in_two == (action[1:] in plan.split):
            return (copied(action.op),)
        if in_two:
            return (copied("B"), copied("W", whole=False))
        share = self._stages.weight_share
        if action.op == "B":
            return (copied("B", 1 - share, carried="others"),)
        return (copied("B", share, whole=False, carried="gradients" if reduces == "all" else "others"),)


def _reduces_once(structure: Structure, pipeline: Pipeline, rank: int) -> ActionBlock | None:
    """The rank's last block, where gradients are reduced in no other one before it; None: they are reduced in several,
    or in none."""
    program = pipeline.programs[rank]
    last = program.blocks[-1]
    issued = [s for s, task in structure.issues.tolist() if structure.tasks[task].gradient]
    inside = [s for s in issued if program.blocks[0].first <= s < last.stop]
    return last if inside and min(inside) >= last.first else None
