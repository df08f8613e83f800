"""The critical path of a step: the operations, one after the other, that its length is made of.

A step is over when the last rank is through with it. What began that rank's last operation is the end of another one
(the one before on its chain, a launch, the last member to come to a collective, ...), what began that one is again the
end of one, and so on back to when the step before was over. Each of these operations begins when the one before it
ends, so together they are as long as the step; whatever is not on the path may take a little longer for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .path_operations import BEFORE, PROGRAM, CriticalPath, PathOperation
from .replay import Moments, moments
from .step_graph import StepGraph
from .trace_back import TIE_MS, TraceBack


def critical_path(
    graph: StepGraph, step: int, since: int | None = None, replayed: Moments | None = None
) -> CriticalPath:
    """The critical path of a step, or of all steps from `since` to it.

    Of a step that follows another one of the graph it begins when the last rank was through with that one; else when
    the first rank begins it.

    step, since: numbers of steps; replayed: `moments(graph)`, where it is there already
    Raises ValueError where a step is not in the graph, or where steps between the two are missing; and
    `evaluation_order.Cyclic`.
    """
    first, last = (_place(graph, number) for number in (step if since is None else since, step))
    if first > last or not graph.follows[first + 1 : last + 1].all():
        raise ValueError(f"steps {since} to {step} do not follow one another in the graph")
    return _path(graph, replayed or moments(graph), first, last)


def critical_path_within(
    graph: StepGraph, step: int, begin_ms: float, end_ms: float, rank: int, replayed: Moments | None = None
) -> CriticalPath:
    """The critical path of a part of a step, such as of what the training thread of a rank annotated: back from what
    that thread did when the part was over, or waited for, to when it began.

    begin_ms, end_ms: from the earliest rank's start of the step
    Raises ValueError where the step or the rank is not in the graph, or where nothing is between the moments; and
    `evaluation_order.Cyclic`.
    """
    place, of = _place(graph, step), replayed or moments(graph)
    if rank not in graph.ranks or begin_ms >= end_ms:
        raise ValueError(f"rank {rank} has nothing from {begin_ms:g} to {end_ms:g} ms of step {step}")
    thread = max(chain for chain, whose in enumerate(graph.ranks) if whose == rank)  # its host is the last
    begin, end = (moment + float(of.reference[place]) for moment in (begin_ms, end_ms))
    back = TraceBack(graph, of).operations(place, thread, end)
    return CriticalPath(tuple(_between(back, begin, end)), begin, end)


def _place(graph: StepGraph, number: int) -> int:
    found = np.flatnonzero(graph.numbers == number)
    if not len(found):
        raise ValueError(f"step {number} is not one of the steps of the graph")
    return int(found[0])


def _path(graph: StepGraph, of: Moments, first: int, last: int) -> CriticalPath:
    """Of the steps at these places."""
    ends = of.end[: graph.leads] + of.reference
    begin = float((of.start[: graph.leads, first] + of.reference[first]).min())
    if graph.follows[first]:
        begin = float(ends[:, first - 1].max())
    end = float(ends[:, last].max())
    back = TraceBack(graph, of).operations(last, int(ends[:, last].argmax()))
    return CriticalPath(tuple(_between(back, begin, end)), begin, end)


def _between(back: Iterator[PathOperation], begin: float, end: float) -> Iterator[PathOperation]:
    """Operations that come last first, in order, and of them what is between two moments."""
    found: list[PathOperation] = []
    for one in back:
        if one.end_ms <= begin + TIE_MS and one.ms > TIE_MS:
            break
        if one.start_ms < end:
            found.append(one.between(begin, end))
    found.reverse()
    missing = found[0].start_ms - begin
    if missing > TIE_MS:
        unknown = replace(found[0], kind=BEFORE, name="", operation=-1, parts={BEFORE: missing})
        found.insert(0, replace(unknown, start_ms=begin, ms=missing))
    return _that_take_time(found)


def _that_take_time(operations: list[PathOperation]) -> Iterator[PathOperation]:
    """What takes no time is left out; the edge that it was bound by, if that is from another chain, is that of what
    comes next."""
    edge = PROGRAM
    for one in operations:
        edge = one.edge if edge == PROGRAM else edge
        if abs(one.ms) > TIE_MS:
            yield replace(one, edge=edge)
            edge = PROGRAM
