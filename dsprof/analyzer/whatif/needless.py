"""What-ifs on communications that a step can do without: reductions in all its backwards but the last, parameters that
are gathered again, and buffers that are broadcast, with what is copied for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ..arrays import Float, Int
from ..graph.segment_work import copy_work
from ..graph.step_graph import PARTS, StepGraph, Steps
from .apply import Refused, Turn, WhatIf, measured
from .communications import without
from .edit import Restructure
from .merge import by_backward
from .select import Communications

COMPUTE: Final = PARTS.index("compute")


@dataclass(frozen=True)
class InLastBackward(WhatIf):
    """These communications happen in the last backward of a step only, of each process group; in those before it
    nothing is sent, and nobody waits."""

    of: Communications
    turn = Turn.FEWER_TASKS

    @property
    def name(self) -> str:
        return f"{self.of} in the last backward of a step only"

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(lambda steps: without(steps, _but_in(max, steps, self.of)))


@dataclass(frozen=True)
class GatheredOnce(WhatIf):
    """Of these gathers those before the first backward of a step happen, of each process group; what they gather is
    kept, so that later ones have nothing to gather, and nobody waits."""

    of: Communications
    turn = Turn.FEWER_TASKS

    @property
    def name(self) -> str:
        return f"{self.of} once a step"

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(lambda steps: without(steps, _but_in(min, steps, self.of)))


def _but_in(one: Callable[[int, int], int], steps: Steps, of: Communications) -> Int:
    """Of steps of one template, the tasks that are not of the first (`min`) or last (`max`) of what lies between two
    beginnings of a backward, and has some of their kind and process group."""
    found = by_backward(steps, of)
    kept: dict[tuple[str, str], int] = {}
    for begun, kind, lane in found:
        kept[kind, lane] = one(begun, kept.get((kind, lane), begun))
    gone = [c for (begun, kind, lane), tasks in found.items() if begun != kept[kind, lane] for c in tasks]
    return np.array(sorted(gone), np.int64)


@dataclass(frozen=True, eq=False)
class WithoutBuffers(WhatIf):
    """Buffers are not broadcast before forward, and not packed and unpacked for that.

    of:     which communications that is
    packed: ms that each rank packs before the first of a forward, and unpacks after the last, [T, S] over the judged
            steps. What a rank computes between two of them is packing, too.
    """

    of: Communications
    packed: Float
    turn = Turn.FEWER_TASKS

    @property
    def name(self) -> str:
        return f"without {self.of} and what is copied for them"

    def change(self, graph: StepGraph) -> StepGraph:
        origin = measured(graph)
        if self.packed.shape != (len(origin.ranks), int(origin.judged.sum())):
            raise Refused(self.name, "how long each rank packs is not known of these steps")
        templates = tuple(
            steps.with_costs(work=self._less(steps, self._of_steps(origin, index)))
            for index, steps in enumerate(graph.templates)
        )
        return self._edit(graph.with_templates(templates))

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(lambda steps: without(steps, self.of.of(steps.structure)))

    def _of_steps(self, graph: StepGraph, index: int) -> Float:
        """`packed` of each step of a template, [T, S]: of one that is not judged the mean."""
        columns = graph.columns_of(index)
        place = np.where(graph.judged[columns], np.cumsum(graph.judged)[columns] - 1, -1)
        mean = self.packed.mean(axis=1, keepdims=True)
        found: Float = np.concatenate([self.packed, mean], axis=1)[:, place]
        return found

    def _less(self, steps: Steps, packed: Float) -> Float:
        structure, work = steps.structure, copy_work(steps.work)
        mine = set(self.of.of(structure).tolist())
        issued = {(int(structure.thread[segment]), c): segment for segment, c in structure.issues.tolist() if c in mine}
        waited = structure.first_waits
        for thread in range(structure.threads):
            of_thread = [(begin, waited.get(key, begin)) for key, begin in issued.items() if key[0] == thread]
            for first, last in bursts(of_thread):
                work[first + 1 : last, :, COMPUTE] = 0.0
                # As much is unpacked as was packed. Where the last is not waited for, nothing is unpacked after it.
                for segment in (first, last) if last > first else (first,):
                    work[segment, :, COMPUTE] = np.maximum(work[segment, :, COMPUTE] - packed[thread], 0.0)
        return work


def bursts(broadcasts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(segment that ends with the first issue, segment that begins when the last wait is over) of each sequence of
    broadcasts of a thread, each of which is issued before the one before it has been waited for, or right afterwards.
    broadcasts: the same of each; of one that is not waited for twice the first of the two."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(broadcasts):
        if found and begin <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
