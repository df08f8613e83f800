"""Where threads issue tasks, and in which order a lane takes those that are issued elsewhere than they were."""

from __future__ import annotations

import numpy as np

from ..arrays import Int
from ..graph.step_graph import Structure


def issue_edges(structure: Structure) -> dict[tuple[int, int], int]:
    """(thread, task) -> the edge by which that thread issues that task."""
    source, target, segments = structure.edges.source, structure.edges.target, structure.segments
    issue = (source < segments) & (target >= segments)
    return {
        (int(structure.thread[source[edge]]), int(target[edge]) - segments): edge
        for edge in np.flatnonzero(issue).tolist()
    }


def in_order_of_issue(structure: Structure, source: Int) -> Int:
    """The tasks, those of a lane in the order in which the first rank that issues one of them does; `source`: of the
    edges, as they are now."""
    segments, count = structure.segments, len(structure.tasks)
    issue = (source < segments) & (structure.edges.target >= segments)
    lead: dict[str, int] = {}
    at = np.full(count, -1)
    tasks = structure.edges.target[issue] - segments
    for segment, c in sorted(zip(source[issue].tolist(), tasks.tolist(), strict=True)):
        lane, thread = structure.tasks[c].lane, int(structure.thread[segment])
        if lead.setdefault(lane, thread) == thread and at[c] < 0:
            at[c] = segment
    order = np.arange(count)
    places: dict[str, list[int]] = {}
    for c, task in enumerate(structure.tasks):
        if at[c] >= 0:
            places.setdefault(task.lane, []).append(c)
    for mine in places.values():
        order[mine] = sorted(mine, key=lambda c: (at[c], c))
    return order
