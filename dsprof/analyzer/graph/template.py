"""The structure that steps of one template share: a step's segments, its tasks, and the edges between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..align.match import SENDER_GOES_ON
from ..arrays import Bool, Int
from .events import BACKWARD, ISSUE, WAIT, WAIT_GRADIENTS, ProgramEvents, actions_of
from .step_graph import Edges, Structure, Task
from .tasks import EVERYONE, HANDED, Tasks

END, ISSUED = "end", "issue"
"""What a step is supplied with by others."""


@dataclass
class StepTemplate:
    """A structure, and which rows of `tasks.Tasks` its local targets are in each of its steps.

    tasks:   (local target, view) of each task
    outside: (END, local target, view) or (ISSUED, local target, rank) of what other steps supply
    steps:   indices of the steps; `targets`: of each, the rows
    """

    structure: Structure
    tasks: list[tuple[int, int]]
    outside: list[tuple[str, int, int]]
    steps: list[int] = field(default_factory=list)
    targets: list[Int] = field(default_factory=list)


def find_template(
    events: ProgramEvents,
    table: Tasks,
    here: Bool,
    awaited: set[tuple[int, int]],
    issued_elsewhere: Sequence[tuple[int, int]],
    leads: Int,
) -> StepTemplate:
    """The structure of the step with these events, whose targets are rows of `table`, the step's own tasks.

    here:   [rows] whether a task belongs to this step
    awaited: (row, view) of what other steps wait for
    issued_elsewhere: (row, chain) of what that chain issued in another step
    leads:  [T] of each chain, the one that leads its rank: who waits for a communication depends on arrivals of ranks
    """
    threads = len(leads)
    gradients = _waited_gradients(events, table.gradient)
    views = {*awaited, *((i, EVERYONE) for i in np.flatnonzero(here & table.shared).tolist())}
    views |= {(index, table.view(index, int(leads[rank]))) for _, rank, index in gradients if here[index]}
    found = _EdgeFinder(table, here, sorted(views), len(events.rank) + threads, leads)
    # The events of a thread lie between its segments: one ends at each, and the next begins.
    ends = np.arange(len(events.rank)) + events.rank
    for event in np.flatnonzero(events.what == ISSUE).tolist():
        found.issue(int(events.target[event]), int(events.rank[event]), int(ends[event]))
    for index, rank in issued_elsewhere:
        found.issue(index, rank, None)
    for event in np.flatnonzero(events.what == WAIT).tolist():
        found.wait(int(events.target[event]), int(events.rank[event]), int(ends[event]) + 1)
    for event, rank, index in gradients:
        found.wait(index, rank, int(ends[event]) + 1)
    backward = np.zeros(found.segments, bool)
    backward[ends[events.what == BACKWARD] + 1] = True
    action, place = actions_of(events, found.segments)
    structure = Structure(
        thread=np.sort(np.concatenate([events.rank, np.arange(threads)])),
        backward=backward,
        action=action,
        place=place,
        tasks=tuple(_task(table, index, view) for index, view in found.tasks),
        outside=len(found.outside),
        edges=Edges(np.array(found.source, np.int64), np.array(found.target, np.int64)),
        threads=threads,
    )
    return StepTemplate(structure, found.tasks, list(found.outside))


class _EdgeFinder:
    """The edges of a step, as they are found. Operations are numbered as in `step_graph.Edges`."""

    def __init__(self, table: Tasks, here: Bool, tasks: list[tuple[int, int]], segments: int, leads: Int) -> None:
        self.tasks, self.segments = tasks, segments
        self.outside: dict[tuple[str, int, int], int] = {}
        self.source: list[int] = []
        self.target: list[int] = []
        self._table, self._here, self._leads, self._ranks = table, here, leads, int(leads.max(initial=-1)) + 1
        self._number = {task: segments + i for i, task in enumerate(tasks)}

    def issue(self, index: int, rank: int, segment: int | None) -> None:
        """`rank` has issued a task at the end of `segment`; None: in another step. One that belongs to another
        step is an edge there."""
        if segment is not None and not self._here[index]:
            return
        for view in self._table.views_of(index, int(self._leads[rank]), self._ranks):
            if (index, view) in self._number:
                source = segment if segment is not None else self._supplied(ISSUED, index, rank)
                self._add(source, self._number[index, view])

    def wait(self, index: int, rank: int, segment: int) -> None:
        """`segment` begins when the task has ended, as `rank` sees it."""
        view = self._table.view(index, int(self._leads[rank]))
        self._add(self._number[index, view] if self._here[index] else self._supplied(END, index, view), segment)

    def _supplied(self, what: str, index: int, by: int) -> int:
        """The operation of another step that supplies this."""
        first = self.segments + len(self.tasks)
        return first + self.outside.setdefault((what, index, by), len(self.outside))

    def _add(self, source: int, target: int) -> None:
        self.source.append(source)
        self.target.append(target)


def _task(table: Tasks, index: int, view: int) -> Task:
    workers = int(table.workers[index])
    takes_worker = view == EVERYONE and bool(table.shared[index]) and workers > 0
    handed = view != EVERYONE and table.needs[index] in SENDER_GOES_ON
    return Task(
        lane=str(table.lane[index]),
        kind=HANDED if handed else str(table.kind[index]),
        gradient=bool(table.gradient[index]),
        workers=workers if takes_worker else None,
        owner=int(table.owner[index]),
    )


def _waited_gradients(events: ProgramEvents, gradient: Bool) -> list[tuple[int, int, int]]:
    """(event, rank, target) of each wait for all gradients and what it waits for."""
    if not (events.what == WAIT_GRADIENTS).any():
        return []
    found = []
    under_way: dict[int, dict[int, None]] = defaultdict(dict)
    for event, (rank, what, target) in enumerate(
        zip(events.rank.tolist(), events.what.tolist(), events.target.tolist(), strict=True)
    ):
        if what == ISSUE and gradient[target]:
            under_way[rank][target] = None
        elif what == WAIT:
            under_way[rank].pop(target, None)
        elif what == WAIT_GRADIENTS:
            found += [(event, rank, index) for index in under_way.pop(rank, {})]
    return found
