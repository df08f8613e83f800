"""What-ifs on collectives and messages: over another link, gone, or new."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Float, Int
from ..graph.link import Link, fit_link
from ..graph.segment_work import copy_work
from ..graph.shared_link import alone_on_link, link_shares_of
from ..graph.step_graph import WAKE_UP_DELAY, Costs, Edges, StepGraph, Steps, Structure, Task
from .apply import Refused, Turn, WhatIf, measured
from .edit import Recut, Restructure, not_woken, with_tasks
from .select import Communications

SHORTEST_MS: Final = 1e-9
"""What takes less takes no time."""


@dataclass(frozen=True)
class ScaleLink(WhatIf):
    """A link so many times as fast for these communications: `bandwidth` 2 moves a byte in half the time, `latency` 0.5
    begins to in half the time.

    A measured transfer is divided into the two by the line fitted to all of its process group's. Where their sizes are
    too alike for that, only both together can be changed. link: the line that divides them, where the caller knows one.
    Gradients that were under way at once shared the link, and share the other one (`alone_on_link`).
    steps: numbers of the steps in which the link is another one; None: in all.
    """

    latency: float = 1.0
    bandwidth: float = 1.0
    of: Communications = field(default_factory=Communications)
    link: Link | None = None
    steps: frozenset[int] | None = None
    turn = Turn.LINK

    @property
    def name(self) -> str:
        when = "" if self.steps is None else f" in steps {', '.join(map(str, sorted(self.steps)))}"
        return f"latency x {self.latency:g}, bandwidth x {self.bandwidth:g} for {self.of}{when}"

    def change(self, graph: StepGraph) -> StepGraph:
        links: dict[str, Link] = {}

        def link_of(group: str) -> Link:
            if group not in links:
                links[group] = link_of_group(measured(graph), group)
            return links[group]

        return graph.with_templates(tuple(self._scaled(steps, link_of) for steps in graph.templates))

    def _scaled(self, steps: Steps, link_of: Callable[[str], Link]) -> Steps:
        chosen = self.of.of(steps.structure)
        when = np.ones(len(steps.numbers), bool) if self.steps is None else np.isin(steps.numbers, [*self.steps])
        if not len(chosen) or not when.any():
            return steps
        alone, sharing = alone_on_link(steps, chosen)
        transfer, wire = steps.transfer.copy(), steps.wire.copy()
        latency, a_byte = np.where(when, self.latency, 1.0), np.where(when, 1 / self.bandwidth, 1.0)
        for c, whole, shares in zip(chosen.tolist(), alone, sharing.tolist(), strict=True):
            task = steps.structure.tasks[c]
            if task.linked:  # its parts are known
                transfer[c] *= latency
                wire[c] *= a_byte
                continue
            fixed = self._whatever_size(task, whole, steps.size[c], link_of)
            if shares:
                transfer[c], wire[c] = fixed * latency, (whole - fixed) * a_byte
            else:
                transfer[c, when] = (fixed * latency + (whole - fixed) * a_byte)[when]
        return replace(steps, structure=self._linked(steps.structure, chosen[sharing])).with_costs(
            transfer=transfer, wire=wire
        )

    def _whatever_size(self, task: Task, whole: Float, size: Float, link_of: Callable[[str], Link]) -> Float:
        """What of its time, `whole`, a task would take whatever its bytes; nothing, where both parts change alike."""
        if math.isclose(self.latency, 1 / self.bandwidth):
            return np.zeros(whole.shape)
        link = self.link or link_of(task.lane)
        if not link.fitted and self.link is None:
            raise Refused(
                self.name,
                f"what process group {task.lane} moves is all of one size, so its latency and its bandwidth "
                "cannot be told apart; change both alike",
            )
        return whole * link.latency_ms / np.maximum(link.transfer_ms(size), SHORTEST_MS)

    def _linked(self, structure: Structure, tasks: Int) -> Structure:
        """The structure whose tasks, these of them, have the link to themselves one after the other."""
        if not len(tasks):
            return structure
        key = structure, tuple(tasks.tolist())
        if key not in self._with_link:
            every = list(structure.tasks)
            for c in key[1]:
                every[c] = replace(every[c], linked=True)
            self._with_link[key] = replace(structure, tasks=tuple(every))
        return self._with_link[key]

    @cached_property
    def _with_link(self) -> dict[tuple[Structure, tuple[int, ...]], Structure]:
        return {}


def link_of_group(graph: StepGraph, group: str) -> Link:
    """The link of a process group (a task's lane), fitted to what its communications took in the measured steps."""
    found = []
    for steps in graph.templates:
        chosen = Communications(groups=(group,)).of(steps.structure)
        alone = steps.transfer[chosen] * link_shares_of(steps, chosen)
        found.append([of.ravel() for of in (steps.size[chosen], steps.transfer[chosen] * 1e6, alone * 1e6)])
    size, transfer, alone = (np.concatenate([np.empty(0), *of]) for of in zip(*found, strict=True))
    return fit_link(pd.DataFrame({"bytes": size, "transfer_ns": transfer, "alone_ns": alone}))


@dataclass(frozen=True)
class WithoutCommunications(WhatIf):
    """These communications never happen, and nobody waits for them. sizes: only those of so many bytes; empty: all."""

    of: Communications
    sizes: frozenset[int] = frozenset()
    turn = Turn.FEWER_TASKS

    @property
    def name(self) -> str:
        sizes = f" of {', '.join(map(str, sorted(self.sizes)))} bytes" if self.sizes else ""
        return f"without {self.of}{sizes}"

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(lambda steps: without(steps, self._gone(steps)))

    def _gone(self, steps: Steps) -> Int:
        chosen = self.of.of(steps.structure)
        if not self.sizes:
            return chosen
        return chosen[np.isin(np.round(steps.size[chosen].mean(axis=1)), sorted(self.sizes))]


def without(steps: Steps, gone: Int) -> Recut | None:
    """Steps of one template without these tasks, given by their numbers; None: there are none."""
    if not len(gone):
        return None
    structure = steps.structure
    kept = np.setdiff1d(np.arange(len(structure.tasks)), gone)
    changed, number = with_tasks(structure, kept)
    unwoken = not_woken(structure, gone)

    def costs(steps: Steps) -> Costs:
        work = copy_work(steps.work)
        work[unwoken, :, WAKE_UP_DELAY] = 0.0
        return Costs(work, steps.transfer[kept], steps.wire[kept], steps.size[kept])

    return Recut(changed, number, costs)


@dataclass(frozen=True, eq=False)
class MoreCommunication(WhatIf):
    """One more task, the last of its lane, in each step: issued and waited for by every thread at its own place.

    place:    (structure's) thread -> after which of its segments it is issued, and before which it is waited for, by
              their ids
    transfer: ms that it takes
    size:     bytes
    """

    what: str
    task: Task
    place: dict[int, tuple[int, int]]
    transfer: float
    size: float = 0.0
    turn = Turn.MORE_TASKS

    @property
    def name(self) -> str:
        return f"with {self.what}"

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(self._added)

    def _added(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        segments, tasks = structure.segments, len(structure.tasks)
        at = {int(number): i for i, number in enumerate(structure.ids[:segments].tolist())}
        ends = [(at.get(after), at.get(before)) for after, before in self.place.values()]
        if any(after is None or before is None for after, before in ends):
            return None
        new = segments + tasks
        moved = np.where(np.arange(new + structure.outside) >= new, 1, 0) + np.arange(new + structure.outside)
        issued, waited = (np.array(side, np.int64) for side in zip(*ends, strict=True))
        changed = replace(
            structure,
            tasks=(*structure.tasks, self.task),
            edges=Edges(
                np.concatenate([moved[structure.edges.source], issued, np.full(len(waited), new)]),
                np.concatenate([moved[structure.edges.target], np.full(len(issued), new), waited]),
            ),
            ids=np.append(structure.ids, structure.ids_used),
            ids_used=structure.ids_used + 1,
        )

        def costs(steps: Steps) -> Costs:
            def row(of: Float, value: float) -> Float:
                return np.concatenate([of, np.full((1, len(steps.numbers)), value)])

            now = steps.costs
            return Costs(now.work, row(now.transfer, self.transfer), row(now.wire, 0.0), row(now.size, self.size))

        return Recut(changed, np.arange(new), costs)
