"""What-if on hosts of devices: what they compute to launch takes less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..graph.chain_work import hosts
from ..graph.segment_work import copy_work
from ..graph.step_graph import PARTS, StepGraph, Steps
from .apply import Refused, Turn, WhatIf

LAUNCHING: Final = tuple(PARTS.index(part) for part in ("compute", "optimizer", "other", "sharding"))
"""Of what a host does, what is there to launch: not loading, nor collecting garbage."""


@dataclass(frozen=True)
class FasterHosts(WhatIf):
    """What the host of each device does, but to load and to collect garbage, takes `factor` times as long."""

    factor: float
    turn = Turn.SCALED_WORK

    @property
    def name(self) -> str:
        return f"launching x {self.factor:g}"

    def change(self, graph: StepGraph) -> StepGraph:
        of_host = np.zeros(len(graph.ranks), bool)
        of_host[[chain for chain in hosts(graph).tolist() if chain >= graph.leads]] = True
        if not of_host.any():
            raise Refused(self.name, "no rank has a device whose chain is known beside its host's")

        def faster(steps: Steps) -> Steps:
            work = copy_work(steps.work)
            mine = np.flatnonzero(of_host[steps.structure.thread])
            work[np.ix_(mine, np.arange(work.shape[1]), np.array(LAUNCHING))] *= self.factor
            return steps.with_costs(work=work)

        return graph.with_templates(tuple(faster(steps) for steps in graph.templates))
