"""What-if nothing were slower than is typical of its kind: the job without stragglers, whatever they are.

After 'Understanding Stragglers in Large Model Training Using What-if Analysis' (OSDI '25): every computation takes the
mean of its kind over ranks, steps and micro-batches, every communication the median of its transfers. How much longer
the steps take as they are is the slowdown; how much of that goes if only some ranks are made typical is their share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Float
from ..graph.segment_work import copy_work
from ..graph.step_graph import PARTS, StepGraph
from .apply import Turn, WhatIf
from .select import named, threads_of

GAPS = ("other", "wake_up_delay")
"""Parts that are no work of anything: between operations, and behind what was waited for."""


def without_gaps(graph: StepGraph) -> StepGraph:
    """Operations follow one another at once."""
    gaps = [PARTS.index(part) for part in GAPS]

    def at_once(work: Float) -> Float:
        changed = copy_work(work)
        changed[..., gaps] = 0.0
        return changed

    return graph.with_templates(tuple(steps.with_costs(work=at_once(steps.work)) for steps in graph.templates))


@dataclass(frozen=True)
class Typical(WhatIf):
    """Each segment takes the mean of those of its action, part by part, and each task the median of its kind.

    ranks: those whose segments are made typical, and no task; all, and all tasks, by default.
    """

    ranks: tuple[int, ...] | None = None
    turn = Turn.EQUAL_WORK

    @property
    def name(self) -> str:
        return f"typical work{named(self.ranks)}"

    def change(self, graph: StepGraph) -> StepGraph:
        means = _means(graph)
        medians = _medians(graph) if self.ranks is None else {}
        chosen = threads_of(graph, self.ranks)
        templates = []
        for steps in graph.templates:
            structure = steps.structure
            usual = np.stack([means[name] for name in structure.action.tolist()])
            # A part that a segment has none of it does not get; how often it has it is how the job runs.
            made, mine = copy_work(steps.work), chosen[structure.thread][:, None]
            for part in range(made.shape[-1]):
                np.copyto(made[..., part], usual[:, None, part], where=mine & (made[..., part] > 0))
            transfer = steps.transfer
            if medians and len(structure.tasks):
                transfer = np.repeat([[medians[task.kind]] for task in structure.tasks], len(steps.numbers), axis=1)
            templates.append(steps.with_costs(work=made, transfer=transfer))
        return graph.with_templates(tuple(templates))


def _means(graph: StepGraph) -> dict[str, Float]:
    """Action -> [PARTS] ms: the mean of each part over the segments that have any of it."""
    found = {}
    for name in {name for steps in graph.templates for name in steps.structure.action.tolist()}:
        every = np.concatenate(
            [steps.work[steps.structure.action == name].reshape(-1, len(PARTS)) for steps in graph.templates]
        )
        found[name] = every.sum(axis=0, dtype=np.float64) / np.maximum((every > 0).sum(axis=0), 1)
    return found


def _medians(graph: StepGraph) -> dict[str, float]:
    kinds: dict[str, list[Float]] = {}
    for steps in graph.templates:
        for task, transfer in zip(steps.structure.tasks, steps.transfer, strict=True):
            kinds.setdefault(task.kind, []).append(transfer)
    return {kind: float(np.median(np.concatenate(every))) for kind, every in kinds.items()}
