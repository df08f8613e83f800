"""Which operations a what-if is about, by what they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..arrays import Bool, Int
from ..graph.step_graph import StepGraph, Structure, Task


@dataclass(frozen=True)
class Communications:
    """Collectives and messages that ranks share: those of these purposes, process groups and kinds (`all_gather
    parameter`). What is None chooses nothing out.

        Communications(purposes=("gradient",), groups=("0",))
    """

    purposes: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def has(self, task: Task) -> bool:
        """Whether a task is one of them. A rank's own copies never are."""
        return task.owner < 0 and all(
            wanted is None or value in wanted
            for wanted, value in ((self.purposes, task.purpose), (self.groups, task.lane), (self.kinds, task.kind))
        )

    def of(self, structure: Structure) -> Int:
        """The numbers of those tasks of `structure`, ascending."""
        return np.array([c for c, task in enumerate(structure.tasks) if self.has(task)], np.int64)

    def meets(self, other: Communications) -> bool:
        """Whether some communication may be one of both."""
        return all(
            mine is None or its is None or bool(set(mine) & set(its))
            for mine, its in ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        )

    def __str__(self) -> str:
        words = [", ".join(self.kinds or self.purposes or ("all communications",))]
        return " ".join([*words, *(["of group", ", ".join(self.groups)] if self.groups is not None else [])])


def threads_of(graph: StepGraph, ranks: Collection[int] | None) -> Bool:
    """[T] whether each thread of the graph is one of these ranks; None: all are."""
    if ranks is None:
        return np.ones(len(graph.ranks), bool)
    chosen: Bool = np.isin(graph.ranks, list(ranks))
    return chosen


def named(ranks: Sequence[int] | None) -> str:
    """` on rank 0, 3`, or nothing."""
    return "" if ranks is None else f" on rank {', '.join(map(str, ranks))}"
