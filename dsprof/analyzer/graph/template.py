"""The structure that like-shaped steps share: a step's segments, its tasks, and the edges between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .events import BACKWARD, ISSUE, WAIT, WAIT_GRADIENTS, Points, actions_of
from .step_graph import Edges, Structure, Task
from .tasks import EVERYONE, Tasks

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

END, ISSUED = "end", "issue"
"""What a step is supplied with by others."""


@dataclass
class Alike:
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


def find_shape(
    points: Points,
    table: Tasks,
    here: Bool,
    wanted: set[tuple[int, int]],
    astray: Sequence[tuple[int, int]],
    threads: int,
) -> Alike:
    """The structure of the step with these points, whose targets are rows of `table`, the step's own tasks.

    here:   [rows] whether a task belongs to this step
    wanted: (row, view) of what other steps wait for
    astray: (row, rank) of what that rank issued in another step
    """
    gradients = _waited_gradients(points, table.gradient)
    views = {*wanted, *((i, EVERYONE) for i in np.flatnonzero(here).tolist() if table.needs[i] == "all")}
    views |= {(index, table.view(index, rank)) for _, rank, index in gradients if here[index]}
    wiring = _Wiring(table, here, sorted(views), len(points.rank) + threads, threads)
    # The points of a thread lie between its segments: one ends at each, and the next begins.
    ends = np.arange(len(points.rank)) + points.rank
    for point in np.flatnonzero(points.what == ISSUE).tolist():
        wiring.issue(int(points.target[point]), int(points.rank[point]), int(ends[point]))
    for index, rank in astray:
        wiring.issue(index, rank, None)
    for point in np.flatnonzero(points.what == WAIT).tolist():
        wiring.wait(int(points.target[point]), int(points.rank[point]), int(ends[point]) + 1)
    for point, rank, index in gradients:
        wiring.wait(index, rank, int(ends[point]) + 1)
    backward = np.zeros(wiring.segments, bool)
    backward[ends[points.what == BACKWARD] + 1] = True
    structure = Structure(
        thread=np.sort(np.concatenate([points.rank, np.arange(threads)])),
        backward=backward,
        action=actions_of(points, wiring.segments),
        tasks=tuple(_task(table, index, view) for index, view in wiring.tasks),
        outside=len(wiring.outside),
        edges=Edges(np.array(wiring.source, np.int64), np.array(wiring.target, np.int64)),
        threads=threads,
    )
    return Alike(structure, wiring.tasks, list(wiring.outside))


class _Wiring:
    """The edges of a step, as they are found. Operations are numbered as in `step_graph.Edges`."""

    def __init__(self, table: Tasks, here: Bool, tasks: list[tuple[int, int]], segments: int, threads: int) -> None:
        self.tasks, self.segments = tasks, segments
        self.outside: dict[tuple[str, int, int], int] = {}
        self.source: list[int] = []
        self.target: list[int] = []
        self._table, self._here, self._threads = table, here, threads
        self._number = {task: segments + i for i, task in enumerate(tasks)}

    def issue(self, index: int, rank: int, segment: int | None) -> None:
        """`rank` has issued a task at the end of `segment`; None: in another step. One that belongs to another
        step is an edge there."""
        if segment is not None and not self._here[index]:
            return
        for view in self._table.views_of(index, rank, self._threads):
            if (index, view) in self._number:
                source = segment if segment is not None else self._supplied(ISSUED, index, rank)
                self._add(source, self._number[index, view])

    def wait(self, index: int, rank: int, segment: int) -> None:
        """`segment` begins when the task has ended, as `rank` sees it."""
        view = self._table.view(index, rank)
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
    takes_worker = view == EVERYONE and table.needs[index] == "all" and workers > 0
    return Task(
        lane=str(table.lane[index]),
        kind=str(table.kind[index]),
        gradient=bool(table.gradient[index]),
        workers=workers if takes_worker else None,
        owner=int(table.owner[index]),
    )


def _waited_gradients(points: Points, gradient: Bool) -> list[tuple[int, int, int]]:
    """(point, rank, target) of each wait for all gradients and what it waits for."""
    if not (points.what == WAIT_GRADIENTS).any():
        return []
    found = []
    under_way: dict[int, dict[int, None]] = defaultdict(dict)
    for point, (rank, what, target) in enumerate(
        zip(points.rank.tolist(), points.what.tolist(), points.target.tolist(), strict=True)
    ):
        if what == ISSUE and gradient[target]:
            under_way[rank][target] = None
        elif what == WAIT:
            under_way[rank].pop(target, None)
        elif what == WAIT_GRADIENTS:
            found += [(point, rank, index) for index in under_way.pop(rank, {})]
    return found
