"""What-ifs on what one chain of a rank waits for in another, and on all that is no such wait."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..graph.chains import FLOWS
from ..graph.step_graph import Edges, StepGraph
from .apply import Turn, WhatIf


@dataclass(frozen=True)
class TransfersAtOnce(WhatIf):
    """What ranks communicate takes no time once the last of them has come; flows between chains stay as they are."""

    turn = Turn.LINK

    @property
    def name(self) -> str:
        return "transfers take no time"

    def change(self, graph: StepGraph) -> StepGraph:
        return graph.with_templates(tuple(
            steps.with_costs(
                transfer=np.where([[task.kind not in FLOWS] for task in steps.structure.tasks], 0.0, steps.transfer)
            )
            for steps in graph.templates
        ))  # fmt: skip


@dataclass(frozen=True)
class WithoutFlows(WhatIf):
    """Nobody waits for flows of this kind (`graph.chains`), in their own step or in another. Where there are none,
    nothing changes."""

    kind: str
    turn = Turn.FEWER_TASKS

    @property
    def name(self) -> str:
        return f"without waits for flows of kind {self.kind}"

    def change(self, graph: StepGraph) -> StepGraph:
        crossing = graph.cross_step_edges
        sources = [np.array([task.kind == self.kind for task in of.structure.tasks], bool) for of in graph.templates]
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
