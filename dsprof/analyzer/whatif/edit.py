"""Editing the structure of steps of one template: edges, tasks and segments that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ..arrays import Int
from ..graph.step_graph import CrossStepEdges, StepGraph, Steps

GONE: Final = -1


@dataclass(frozen=True)
class Edited:
    """`steps` as they are now; `operations`: what number each segment and task has that there was, or GONE."""

    steps: Steps
    operations: Int


def edit(graph: StepGraph, change: Callable[[Steps], Edited | None]) -> StepGraph:
    """The graph with each template changed, where `change` does not return None; edges across steps follow."""
    edited = [change(steps) for steps in graph.templates]
    templates = tuple(new.steps if new is not None else old for old, new in zip(graph.templates, edited, strict=True))
    cross_step_edges = graph.cross_step_edges
    if len(cross_step_edges):
        source = cross_step_edges.source.copy()
        for index, new in enumerate(edited):
            if new is not None:
                mine = cross_step_edges.source_template == index
                source[mine] = new.operations[source[mine]]
        kept = source != GONE
        cross_step_edges = CrossStepEdges(
            cross_step_edges.source_template[kept], source[kept], cross_step_edges.source_column[kept],
            cross_step_edges.target_template[kept], cross_step_edges.target[kept], cross_step_edges.target_column[kept],
        )  # fmt: skip
    return replace(graph, templates=templates, cross_step_edges=cross_step_edges)
