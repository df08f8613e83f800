"""What-if on what one chain of a rank waits for in another: the host does not wait for its device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..graph.step_graph import Edges, StepGraph


def without_flows(graph: StepGraph, kind: str) -> StepGraph:
    """The graph in which nobody waits for flows of this kind (`graph.chains`), in their own step or in another."""
    crossing = graph.cross_step_edges
    sources = [
        np.array([task.kind == kind for task in steps.structure.tasks], bool) for steps in graph.templates
    ]  # fmt: skip
    of_kind = np.zeros(len(crossing), bool)
    for index, steps in enumerate(graph.templates):
        mine = np.flatnonzero(crossing.source_template == index)
        task = crossing.source[mine] - steps.structure.segments
        of_kind[mine] = (task >= 0) & np.append(sources[index], False)[np.maximum(task, -1)]
    templates = []
    for index, steps in enumerate(graph.templates):
        structure = steps.structure
        first = structure.segments + len(structure.tasks)
        gone = np.zeros(first + structure.outside, bool)
        gone[structure.segments : first] = sources[index]
        gone[first + crossing.target[of_kind & (crossing.target_template == index)]] = True
        stays = ~gone[structure.edges.source]
        edges = Edges(structure.edges.source[stays], structure.edges.target[stays])
        templates.append(replace(steps, structure=replace(structure, edges=edges)))
    return graph.with_templates(tuple(templates))
