"""What-if on collectives: neighbours merged into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..arrays import Float, Int
from ..graph.link import Link
from ..graph.segment_work import copy_work
from ..graph.step_graph import SHARDING_PART, WAKE_UP_DELAY, Costs, Edges, StepGraph, Steps, Structure
from .apply import Turn, WhatIf
from .edit import Recut, not_woken, with_tasks
from .issue_order import in_order_of_issue, issue_edges
from .last_end import end_with_the_last
from .rebucket import Division, NotRebucketed
from .select import Communications


@dataclass(frozen=True)
class Merge(WhatIf):
    """Neighbours among these communications merged into one, which moves over `link`.

    Neighbours are of one kind and process group, in one forward or backward. What is gathered is needed by the first of
    those merged, so it is issued and waited for there; what is reduced is there with the last. All of these
    communications are modelled, merged or not, so that with `together` 1 the model's own error can be told and cancels
    from a difference.

    together:   how many become one; `most_bytes`: or as many as hold so many bytes
    reached:    as few as hold `most_bytes` become one, and not as many as hold no more
    host_ms:    the issuing thread's cost of each collective that is saved
    blocking:   each is waited for before anything else is done: else it is not known what would wait for the merged one
    unit_work:  by what the work of FSDP for its units, or of an engine for its buckets, is multiplied
    in_advance: what is gathered is issued when what was gathered so many before it is taken over, and what is reduced
                waited for when the next is reduced, as FSDP does on a device: then merged ones are issued as many
                merged ones before, too, which is earlier, and waited for at the next merged one, which is later
    """

    of: Communications
    link: Link
    together: int | None = None
    most_bytes: float | None = None
    reached: bool = False
    host_ms: float = 0.0
    blocking: bool = False
    unit_work: float = 1.0
    in_advance: bool = False
    turn = Turn.DIVISION

    @property
    def name(self) -> str:
        pieces = f"{self.together} at a time" if self.together is not None else f"up to {self.most_bytes:g} bytes"
        return f"{self.of}, {pieces}"

    @property
    def divides(self) -> bool:
        """Whether it merges any, and does not only model their transfers."""
        return self.together != 1 and self.most_bytes != 0

    def against(self, other: WhatIf) -> str | None:
        same = isinstance(other, Merge) and self.of.meets(other.of)
        return "both say how the same communications are divided" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._division(graph)

    @cached_property
    def _division(self) -> Division:
        return Division(self.name, self._merged)

    def _merged(self, steps: Steps) -> Recut:
        if self.blocking:
            need_blocking(steps, self.of)
        packs = self.packs(steps)
        source = None
        if self.in_advance:
            every = families(steps, self.of)
            edges = _waited_for_at_the_next(steps.structure, every, packs)
            steps = replace(steps, structure=replace(steps.structure, edges=edges))
            source = _in_advance(steps, every, packs)
        return merged(steps, packs, self.link, self.host_ms, self.unit_work, source)

    def packs(self, steps: Steps) -> list[list[int]]:
        """Of steps of one template, the tasks that become one, in order of issue."""
        if self.most_bytes is not None:
            return packed(steps, self.of, self.most_bytes, self.reached)
        together = self.together or 1
        return [
            family[begin : begin + together]
            for family in families(steps, self.of)
            for begin in range(0, len(family), together)
        ]


def families(steps: Steps, of: Communications) -> list[list[int]]:
    """Tasks of one kind and process group between two beginnings of a backward, in the order in which the first of the
    group's ranks issues them."""
    return list(by_backward(steps, of).values())


def by_backward(steps: Steps, of: Communications) -> dict[tuple[int, str, str], list[int]]:
    """`families`, by how many backwards had begun on the issuing thread and those before it, their kind and process
    group."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for family, c in _issued(steps, of):
        found.setdefault(family, []).append(c)
    return found


def packed(steps: Steps, of: Communications, most: float, reached: bool = False) -> list[list[int]]:
    """Each of `families` in pieces of neighbours, of as many as hold up to `most` bytes; or where these are to be
    reached, of as few as hold so many."""
    last: dict[tuple[int, str, str], float] = {}
    found: list[list[int]] = []
    place: dict[tuple[int, str, str], int] = {}
    for family, c in _issued(steps, of):
        size = float(np.mean(steps.size[c]))
        if family in place and (last[family] < most if reached else last[family] + size <= most):
            found[place[family]].append(c)
            last[family] += size
        else:
            place[family], last[family] = len(found), size
            found.append([c])
    return found


def _issued(steps: Steps, of: Communications) -> Iterator[tuple[tuple[int, str, str], int]]:
    """(family, task) of each of these communications, as the first rank of its process group issues them."""
    structure = steps.structure
    issues = structure.issues[np.argsort(structure.issues[:, 0], kind="stable")]
    thread = structure.thread[issues[:, 0]]
    begun = np.cumsum(structure.backward)
    first: dict[str, int] = {}  # lane -> the thread that stands for the others
    for (segment, c), by in zip(issues.tolist(), thread.tolist(), strict=True):
        task = structure.tasks[c]
        # A segment is before the point at which it ends.
        if of.has(task) and first.setdefault(task.lane, by) == by:
            yield (int(begun[segment]), task.kind, task.lane), c


def _in_advance(steps: Steps, of: list[list[int]], packs: list[list[int]]) -> Int:
    """The sources of the structure's edges, with the gathers that others are merged into issued where they are if as
    many merged ones are under way as there were single ones. of: `families`"""
    structure, source = steps.structure, steps.structure.edges.source
    moved, at_of, waits = source.copy(), issue_edges(structure), structure.first_waits
    size = {pack[0]: len(pack) for pack in packs}
    for family in of:
        if structure.tasks[family[0]].gradient:
            continue
        for thread in range(structure.threads):
            waited = np.sort([waits[thread, c] for c in family if (thread, c) in waits])
            for place, c in enumerate(family):
                if size.get(c, 1) < 2 or (thread, c) not in waits or (thread, c) not in at_of:
                    continue
                issued = int(source[at_of[thread, c]])
                under_way = int(np.sum((waited > issued + 1) & (waited <= waits[thread, c])))
                earlier = family[max(place - under_way * (size[c] - 1), 0)]
                if (thread, earlier) in at_of:
                    moved[at_of[thread, c]] = source[at_of[thread, earlier]]
    return moved


def _waited_for_at_the_next(structure: Structure, of: list[list[int]], packs: list[list[int]]) -> Edges:
    """The structure's edges, with a reduction that was waited for where the next one is issued waited for where the
    next merged one is. of: `families`"""
    source, target = structure.edges.source.copy(), structure.edges.target.copy()
    at_of, segments = issue_edges(structure), structure.segments
    pack_of = {c: number for number, pack in enumerate(packs) for c in pack}
    waits_of: dict[int, list[int]] = {}
    for edge in np.flatnonzero((source >= segments) & (target < segments)).tolist():
        waits_of.setdefault(int(source[edge]) - segments, []).append(edge)
    for family in of:
        if not structure.tasks[family[0]].gradient:
            continue
        for c, following in pairwise(family):
            mine = packs[pack_of[c]]
            after = family.index(mine[-1]) + 1
            if len(mine) == 1 and (after == len(family) or len(packs[pack_of[family[after]]]) == 1):
                continue
            for edge in waits_of.get(c, []):
                thread = int(structure.thread[target[edge]])
                if (thread, c) not in at_of or (thread, following) not in at_of:
                    continue
                issued, next_issued = (int(source[at_of[thread, one]]) for one in (c, following))
                if not issued < target[edge] <= next_issued:
                    continue
                kept = packs[pack_of[family[after]]][-1] if after < len(family) else None
                if kept is not None and (thread, kept) in at_of:
                    source[edge] = segments + mine[-1]
                    target[edge] = source[at_of[thread, kept]] + 1
    return Edges(source, target)


def merged(
    steps: Steps,
    packs: list[list[int]],
    link: Link,
    host_ms: float = 0.0,
    unit_work: float = 1.0,
    issued: Int | None = None,
) -> Recut:
    """What `Merge` makes of steps of one template. issued: sources of its edges, where they are others than now.

    Raises NotRebucketed where ranks of a process group do not issue the same collectives.
    """
    structure = steps.structure
    tasks = list(structure.tasks)
    total_of: dict[int, float] = {}
    dropped_list: list[int] = []
    for pack in packs:
        kept = pack[-1] if tasks[pack[0]].gradient else pack[0]
        total_of[kept] = sum(float(np.mean(steps.size[c])) for c in pack)
        tasks[kept] = replace(tasks[kept], linked=True)
        dropped_list += [c for c in pack if c != kept]
    dropped: Int = np.array(sorted(dropped_list), np.int64)
    issues = structure.issues
    every = [c for pack in packs for c in pack]
    _need_the_same(steps, every)
    order = np.arange(len(tasks)) if issued is None else in_order_of_issue(structure, issued)
    kept_tasks = order[~np.isin(order, dropped)]
    changed, number = with_tasks(replace(structure, tasks=tuple(tasks)), kept_tasks, issued)
    spared = issues[np.isin(issues[:, 1], dropped), 0]
    unwoken = not_woken(structure, dropped)

    def costs(steps: Steps) -> Costs:
        now = steps.costs
        work, transfer, wire, size = copy_work(now.work), now.transfer.copy(), now.wire.copy(), now.size.copy()
        work[..., SHARDING_PART] *= unit_work
        for kept, total in total_of.items():
            transfer[kept], wire[kept], size[kept] = link.latency_ms, total * link.ms_per_byte, total
        end_with_the_last(steps, every, work)
        for segment in spared.tolist():
            taken: Float = work[segment].sum(axis=-1)
            work[segment] *= np.clip(1 - host_ms / np.maximum(taken, 1e-9), 0.0, None)[:, None]
        work[unwoken, :, WAKE_UP_DELAY] = 0.0
        return Costs(work, transfer[kept_tasks], wire[kept_tasks], size[kept_tasks])

    return Recut(changed, number, costs)


def _need_the_same(steps: Steps, chosen: list[int]) -> None:
    """Raises NotRebucketed unless every rank that issues one of these tasks of a lane issues all of them."""
    structure = steps.structure
    of_lane: dict[str, set[int]] = {}
    for c in chosen:
        of_lane.setdefault(structure.tasks[c].lane, set()).add(c)
    by_thread: dict[tuple[int, str], set[int]] = {}
    for segment, c in structure.issues.tolist():
        lane = structure.tasks[c].lane
        if c in of_lane.get(lane, ()):
            by_thread.setdefault((int(structure.thread[segment]), lane), set()).add(c)
    elsewhere = structure.edges.source >= structure.segments + len(structure.tasks)
    from_outside = np.isin(structure.edges.target[elsewhere] - structure.segments, chosen).any()
    if from_outside or any(issued != of_lane[lane] for (_, lane), issued in by_thread.items()):
        raise NotRebucketed("not every rank issues the same collectives")


def need_blocking(steps: Steps, of: Communications) -> None:
    """Raises NotRebucketed unless every thread waits for each of these before it does anything else."""
    structure = steps.structure
    for segment, c in structure.issues.tolist():
        # The segment in which it is issued, then one up to the point of waiting.
        if of.has(structure.tasks[c]) and structure.first_waits.get((int(structure.thread[segment]), c)) != segment + 2:
            raise NotRebucketed("backward goes on while a bucket is under way, and what it would wait for is not known")
