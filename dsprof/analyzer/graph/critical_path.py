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
    found: list[PathOperation] = []
    for one in TraceBack(graph, of).operations(last, int(ends[:, last].argmax())):
        if one.end_ms <= begin + TIE_MS and one.ms > TIE_MS:
            break
        found.append(one)
    kept = [found[-1].after(begin), *reversed(found[:-1])]
    missing = kept[0].start_ms - begin
    if missing > TIE_MS:
        unknown = replace(
            kept[0], kind=BEFORE, name="", start_ms=begin, ms=missing, operation=-1, parts={BEFORE: missing}
        )
        kept = [unknown, *kept]
    return CriticalPath(tuple(_that_take_time(kept)), begin, end)


def _that_take_time(operations: list[PathOperation]) -> Iterator[PathOperation]:
    """What takes no time is left out; the edge that it was bound by, if that is from another chain, is that of what
    comes next."""
    edge = PROGRAM
    for one in operations:
        edge = one.edge if edge == PROGRAM else edge
        if abs(one.ms) > TIE_MS:
            yield replace(one, edge=edge)
            edge = PROGRAM
