"""The what-if of a pipeline whose messages go beside the computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ..arrays import Bool
from ..graph.segment_work import copy_work
from ..graph.step_graph import WAKE_UP_DELAY, Costs, Edges, StepGraph, Steps, Structure, Task
from ..graph.tasks import HANDED
from .apply import Turn, WhatIf, measured
from .edit import Recut, Restructure
from .lowering.messages import awaited
from .lowering.program import is_message


def pair_of(task: Task) -> tuple[int, int] | None:
    """The ranks between which a pipeline's message goes, the one that sends first; None: it is none."""
    if not is_message(task) and task.kind != HANDED:
        return None
    pair = next((word for word in reversed(task.lane.split()) if ">" in word), "")
    source, _, target = pair.partition(">")
    return (int(source), int(target)) if source.isdecimal() and target.isdecimal() else None


@dataclass(frozen=True, eq=False)
class OverlappedMessages(WhatIf):
    """What stages send each other goes beside their computation: nobody waits until what it sent has been taken, and
    who receives has asked for it before it is sent. The messages of one rank to another go one after the other.

    Of messages that nobody waited for it was not seen what they take: as much as the others of the pair.
    """

    turn = Turn.ORDER_OF_ISSUE
    _edits: dict[tuple[int, ...], Restructure] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return "messages between stages beside the computation"

    def against(self, other: WhatIf) -> str | None:
        return "both say when messages are sent and received" if other.turn is Turn.SCHEDULE else None

    def change(self, graph: StepGraph) -> StepGraph:
        waited = {id(steps.structure): awaited(steps) for steps in measured(graph).templates}
        if graph.ranks not in self._edits:
            self._edits[graph.ranks] = Restructure(lambda steps: _overlapped(steps, graph.ranks, waited))
        return self._edits[graph.ranks](graph)


def _overlapped(steps: Steps, ranks: tuple[int, ...], waited: Mapping[int, Bool]) -> Recut | None:
    structure = steps.structure
    pairs = [pair_of(task) for task in structure.tasks]
    if not any(pairs):
        return None
    dropped = _dropped(structure, pairs, np.array(ranks))
    edges = structure.edges
    tasks = tuple(
        replace(task, workers=1) if pair is not None and is_message(task) else task
        for task, pair in zip(structure.tasks, pairs, strict=True)
    )
    changed = replace(structure, tasks=tasks, edges=Edges(edges.source[~dropped], edges.target[~dropped]))
    unwoken = np.setdiff1d(structure.waits[:, 1], changed.waits[:, 1])
    of_lane: dict[str, list[int]] = {}
    for number, task in enumerate(structure.tasks):
        if is_message(task):
            of_lane.setdefault(task.lane, []).append(number)
    seen = waited.get(id(structure))

    def costs(steps: Steps) -> Costs:
        now = steps.costs
        work, transfer = copy_work(now.work), now.transfer.copy()
        work[unwoken, :, WAKE_UP_DELAY] = 0.0
        for mine in of_lane.values():
            if seen is not None and seen[mine].any():
                transfer[mine] = np.where(seen[mine], transfer[mine], transfer[mine][seen[mine]].mean())
        return Costs(work, transfer, now.wire, now.size)

    return Recut(changed, np.arange(structure.segments + len(structure.tasks)), costs)


NOT_A_RANK: Final = -1


def _dropped(structure: Structure, pairs: list[tuple[int, int] | None], ranks: np.ndarray) -> Bool:
    """Which edges go: what makes a sender wait for its message, and a message for its receiver."""
    segments, count = structure.segments, len(structure.tasks)
    ends = np.array([pair or (NOT_A_RANK, NOT_A_RANK) for pair in pairs], np.int64).reshape(-1, 2)
    source, target = structure.edges.source, structure.edges.target
    rank_of = ranks[structure.thread]
    from_task = (source >= segments) & (source < segments + count) & (target < segments)
    to_task = (source < segments) & (target >= segments)
    found = np.zeros(len(source), bool)
    found[from_task] = ends[source[from_task] - segments, 0] == rank_of[target[from_task]]
    found[to_task] = ends[target[to_task] - segments, 1] == rank_of[source[to_task]]
    return found
