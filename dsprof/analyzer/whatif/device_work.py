"""What-if on devices: what they compute takes longer, or less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Float
from ..graph.segment_work import copy_work
from ..graph.step_graph import StepGraph, Steps
from .apply import Refused, Turn, WhatIf
from .work import OF_DEVICE, within


@dataclass(frozen=True, eq=False)
class DeviceWork(WhatIf):
    """What the device of each rank computes takes so many times as long. factors: [R], of each rank."""

    factors: Float
    turn = Turn.SCALED_WORK

    @property
    def name(self) -> str:
        return f"devices' work x {float(self.factors.mean()):g}"

    def change(self, graph: StepGraph) -> StepGraph:
        if len(graph.ranks) == graph.leads:
            raise Refused(self.name, "no rank has a device whose chain is known beside its host's")
        factors = np.ones(len(graph.ranks))
        factors[: graph.leads] = self.factors
        of_device = [place for part in OF_DEVICE for place in within(part)]

        def scaled(steps: Steps) -> Steps:
            work = copy_work(steps.work)
            work[..., of_device] *= factors[steps.structure.thread][:, None, None]
            return steps.with_costs(work=work)

        return graph.with_templates(tuple(scaled(steps) for steps in graph.templates))
