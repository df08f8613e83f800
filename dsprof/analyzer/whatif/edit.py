"""Editing the structure of steps of one template: edges, tasks and segments that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Int
from ..graph.step_graph import Costs, CrossStepEdges, Edges, Measured, StepGraph, Steps, Structure

GONE: Final = -1
Kind = TypeVar("Kind", bound=np.generic)


@dataclass(frozen=True)
class Recut:
    """Another structure for steps of one template.

    structure:  the new one
    operations: what number each segment and task has that there was, or GONE
    costs:      of the steps with the old structure, what the operations of the new one take
    """

    structure: Structure
    operations: Int
    costs: Callable[[Steps], Costs]


def taken(of: npt.NDArray[Kind], chosen: Int) -> npt.NDArray[Kind]:
    """`of[chosen]`, which takes no room where `of` takes none, as it says the same of all."""
    if not len(of) or of.strides[0]:
        return of[chosen]
    return np.broadcast_to(of[0], (len(chosen), *of.shape[1:]))


def with_tasks(structure: Structure, kept: Int, source: Int | None = None) -> tuple[Structure, Int]:
    """A structure with these of its tasks only, in this order, and `Recut.operations` of that. source: of its edges,
    where they are others than now."""
    segments, count = structure.segments, len(structure.tasks)
    number = np.full(segments + count + structure.outside, GONE)
    number[:segments] = np.arange(segments)
    number[segments + kept] = segments + np.arange(len(kept))
    number[segments + count :] = segments + len(kept) + np.arange(structure.outside)
    sources = number[structure.edges.source if source is None else source]
    targets = number[structure.edges.target]
    stays = (sources != GONE) & (targets != GONE)
    changed = replace(
        structure,
        tasks=tuple(structure.tasks[c] for c in kept.tolist()),
        edges=Edges(sources[stays], targets[stays]),
        ids=np.concatenate([structure.ids[:segments], structure.ids[segments + kept]]),
    )
    return changed, number[: segments + count]


def not_woken(structure: Structure, gone: Int) -> Int:
    """The segments that wait for nothing any more without these tasks: nobody is woken late from such a wait."""
    waits = structure.waits
    of_gone = np.isin(waits[:, 0], gone)
    return np.setdiff1d(waits[of_gone, 1], waits[~of_gone, 1])


class Restructure:
    """A change of the structure of each template, made once for each structure: graphs that differ in their costs only
    have the same structure afterwards, too, and are replayed together."""

    def __init__(self, change: Callable[[Steps], Recut | None]) -> None:
        """change: None leaves a template as it is. Of its steps it may read the structure and the sizes."""
        self._change = change
        self._recut: dict[Structure, Recut | None] = {}
        self._crossings: dict[tuple[int, ...], tuple[CrossStepEdges, CrossStepEdges]] = {}

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The graph with each template changed; edges across steps follow."""
        edited = []
        for steps in graph.templates:
            if steps.structure not in self._recut:
                self._recut[steps.structure] = self._change(steps)
            edited.append(self._recut[steps.structure])
        templates = tuple(
            steps if new is None else _steps(steps, new) for steps, new in zip(graph.templates, edited, strict=True)
        )
        old = graph.cross_step_edges
        if len(old):
            key = (id(old), *(id(steps.structure) for steps in graph.templates))
            if key not in self._crossings:
                self._crossings[key] = old, _moved(old, edited)
            old = self._crossings[key][1]
        return replace(graph, templates=templates, cross_step_edges=old)


def followed_by(steps: Steps, first: Recut, then: Callable[[Steps], Recut | None]) -> Recut:
    """Two changes of steps of one template, one after the other, as one."""
    second = then(_steps(steps, first))
    if second is None:
        return first
    operations = first.operations.copy()
    there = operations != GONE
    operations[there] = second.operations[operations[there]]
    return Recut(second.structure, operations, lambda steps: second.costs(_steps(steps, first)))


def _steps(steps: Steps, new: Recut) -> Steps:
    segments, tasks = new.structure.segments, len(new.structure.tasks)
    was, count = steps.structure, len(steps.numbers)
    began = np.full((segments, count), np.nan)
    ended, last = (np.full((tasks, count), np.nan) for _ in range(2))
    segment, task = new.operations[: was.segments], new.operations[was.segments :]
    stays, there = segment != GONE, task != GONE
    # What is still there was measured, unless it is a part of what it was.
    same = np.zeros(segments + tasks, bool)
    same[new.operations[new.operations != GONE]] = np.isin(
        new.structure.ids[new.operations[new.operations != GONE]], was.ids
    )
    began[segment[stays]] = np.where(same[segment[stays]][:, None], steps.began[stays], np.nan)
    for now, before in ((ended, steps.ended), (last, steps.last)):
        now[task[there] - segments] = np.where(same[task[there]][:, None], before[there], np.nan)
    return Steps(new.structure, steps.numbers, new.costs(steps), Measured(steps.outside, began, ended, last))


def _moved(old: CrossStepEdges, edited: list[Recut | None]) -> CrossStepEdges:
    source = old.source.copy()
    for index, new in enumerate(edited):
        if new is not None:
            mine = old.source_template == index
            source[mine] = new.operations[source[mine]]
    kept = source != GONE
    return CrossStepEdges(
        old.source_template[kept], source[kept], old.source_column[kept],
        old.target_template[kept], old.target[kept], old.target_column[kept],
    )  # fmt: skip
