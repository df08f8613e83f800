"""What-ifs on collectives and messages: over another link, gone, or new."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Float, Int
from ..graph.link import Link, fit_link
from ..graph.segment_work import copy_work
from ..graph.shared_link import link_shares_of, sharing_gradients
from ..graph.step_graph import WAKE_UP_DELAY, Costs, Edges, StepGraph, Steps, Task
from .apply import Refused, Turn, WhatIf, measured
from .edit import Recut, Restructure, not_woken, with_tasks
from .last_end import late_waits
from .select import Communications

SHORTEST_MS: Final = 1e-9
"""What takes less takes no time."""
BY_BYTES: Final = 0.1
"""A transfer whose latency is no more than this part of what its bytes take is bound by them."""


@dataclass(frozen=True)
class ScaleLink(WhatIf):
    """A link so many times as fast for these communications: `bandwidth` 2 moves a byte in half the time, `latency` 0.5
    begins to in half the time.

    A measured transfer is divided into the two by the line fitted to all of its process group's. Where their sizes are
    too alike for that, only both together can be changed. link: the line that divides them, where the caller knows one.
    A rank to which they come last has them as much earlier or later (`last_end`).
    Where gradients that are waited for together shared the link, they share the other one, too (`sharing_gradients`).
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

        pairs = zip_longest(graph.templates, measured(graph).templates[: len(graph.templates)])
        return graph.with_templates(tuple(self._scaled(steps, origin, link_of) for steps, origin in pairs))

    def _scaled(self, steps: Steps, origin: Steps | None, link_of: Callable[[str], Link]) -> Steps:
        """origin: the same steps as they were measured."""
        was = origin if origin is not None and origin.structure is steps.structure else None
        chosen = self.of.of(steps.structure)
        when = np.ones(len(steps.numbers), bool) if self.steps is None else np.isin(steps.numbers, [*self.steps])
        if not len(chosen) or not when.any():
            return steps
        transfer, wire = steps.transfer.copy(), steps.wire.copy()
        a_byte, alike = 1 / self.bandwidth, math.isclose(self.latency, 1 / self.bandwidth)
        divided = [c for c in chosen.tolist() if not (alike or steps.structure.tasks[c].linked)]
        links = {c: self._link(steps.structure.tasks[c], link_of) for c in divided}
        times: dict[int, Float] = {}  # by what the time of each transfer is multiplied
        shares = self._shares(was, links) if was is not None and self.steps is None else {}
        for c in chosen.tolist():
            if c not in links:  # both parts change alike, or each is known
                times[c] = np.where(when, self.latency, 1.0)
                transfer[c, when] *= self.latency
                wire[c, when] *= a_byte
                continue
            of_bytes = steps.size[c] * links[c].ms_per_byte
            whole = np.maximum(links[c].latency_ms + of_bytes, SHORTEST_MS)
            fixed = transfer[c] * links[c].latency_ms / whole
            rest = (transfer[c] - fixed) * a_byte
            changed = (links[c].latency_ms * self.latency + of_bytes * a_byte) / whole
            times[c] = np.where(when & (whole > SHORTEST_MS), changed, 1.0)
            if c in shares:
                transfer[c], wire[c] = fixed * self.latency, rest * shares[c]
            else:
                transfer[c, when] = (fixed * self.latency + rest)[when]
        structure = steps.structure.with_shared_link(tuple(shares)) if shares else steps.structure
        work = None
        waits = late_waits(steps, [*times])
        if waits.ms.any():
            # Any work but the measured one was copied for this graph (`apply` begins at the measured one).
            work = copy_work(steps.work) if origin is None or steps.work is origin.work else steps.work
            waits.scale(times, work)
        return replace(steps, structure=structure).with_costs(work=work, transfer=transfer, wire=wire)

    @staticmethod
    def _shares(was: Steps, links: Mapping[int, Link]) -> dict[int, Float]:
        """Task -> which share of the link it had, of those that shared it and that bytes bind: what is latency was not
        shared, and when in a transfer it lies is not known."""
        by_bytes = [
            c for c, link in links.items() if link.latency_ms <= BY_BYTES * link.ms_per_byte * was.size[c].mean()
        ]
        sharing, shares = sharing_gradients(was, np.array(by_bytes, np.int64))
        return dict(zip(sharing.tolist(), shares, strict=True))

    def _link(self, task: Task, link_of: Callable[[str], Link]) -> Link:
        link = self.link or link_of(task.lane)
        if not link.fitted and self.link is None:
            raise Refused(
                self.name,
                f"what process group {task.lane} moves (all of one size, or always at once) does not tell its latency "
                "from its bandwidth; change both alike",
            )
        return link


def link_of_group(graph: StepGraph, group: str) -> Link:
    """The link of a process group (a task's lane), fitted to what its communications took in the measured steps."""
    found = []
    for steps in graph.templates:
        chosen = Communications(groups=(group,)).of(steps.structure)
        transfer = 1e6 * steps.transfer[chosen]
        columns = {
            "bytes": steps.size[chosen], "transfer_ns": transfer,
            "alone_ns": transfer * link_shares_of(steps, chosen), "end_ns": 1e6 * steps.ended[chosen],
            "step": np.broadcast_to(steps.numbers, transfer.shape),
        }  # fmt: skip
        found.append(pd.DataFrame({name: of.ravel() for name, of in columns.items()}))
    return fit_link(pd.concat(found, ignore_index=True))


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
