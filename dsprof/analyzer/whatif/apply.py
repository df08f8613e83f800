"""Applying what-ifs to a graph: the same graph comes of it in whatever order they are given.

A graph that was changed knows the measured one and what was applied to it. `apply` begins at the measured graph again
and makes all changes in an order of its own (`Turn`): work that goes away is a part of what was measured, and is gone
before gradients are cut into other buckets; a faster link moves the new buckets too. What no order gives a meaning to,
as two divisions of the same gradients, is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import ClassVar

from ..graph.step_graph import StepGraph


class Turn(IntEnum):
    """When a what-if is made, among others that are applied too."""

    LESS_WORK = 0
    EQUAL_WORK = 1
    SCALED_WORK = 2
    SCHEDULE = 3
    FEWER_TASKS = 4
    DIVISION = 5
    ORDER_OF_ISSUE = 6
    MORE_TASKS = 7
    LINK = 8


class Refused(Exception):
    """A what-if that these steps, or another what-if, do not allow. `name`: which; `why`: in words."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


class WhatIf(ABC):
    """A change to steps. It addresses operations by what they are (purpose, process group, part of the step, rank), and
    those that were measured by their ids."""

    turn: ClassVar[Turn]

    @property
    @abstractmethod
    def name(self) -> str:
        """What is changed, in words; two that are both applied have different ones."""

    @abstractmethod
    def change(self, graph: StepGraph) -> StepGraph:
        """The graph changed. Called by `apply` only. Raises Refused."""

    def against(self, other: WhatIf) -> str | None:
        """Why it does not go together with another one, whichever of the two is given first; None: it does."""
        return None


def measured(graph: StepGraph) -> StepGraph:
    """The graph that was measured, of one that what-ifs may have been applied to."""
    return graph if graph.origin is None else graph.origin


def apply(graph: StepGraph, whatifs: Sequence[WhatIf]) -> StepGraph:
    """The steps with these changes, and with those that were made before.

    Operations that a change leaves there keep their ids (`Structure.ids`), and what was measured of them. Raises
    Refused, which names the what-if that cannot be.
    """
    if not whatifs:
        return graph
    origin = measured(graph)
    every: tuple[WhatIf, ...] = graph.applied
    for whatif in whatifs:
        why = clash(whatif, every)
        if why is not None:
            raise Refused(whatif.name, why)
        every = (*every, whatif)
    every = tuple(sorted(every, key=lambda one: (one.turn, one.name)))
    changed = origin
    for whatif in every:
        changed = replace(whatif.change(changed), origin=origin)
    return replace(changed, applied=every)


def clash(whatif: WhatIf, others: Sequence[WhatIf]) -> str | None:
    """Why a what-if cannot be applied beside others; None: it can, as far as they say so themselves."""
    for other in others:
        if whatif.name == other.name:
            return "this is applied already"
        why = whatif.against(other) or other.against(whatif)
        if why is not None:
            return f"it does not go together with {other.name}: {why}"
    return None
