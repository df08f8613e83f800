"""What-ifs on own work: some of it gone, more of it, all of it scaled, or as much on one rank as on another."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..arrays import Bool, Float, Int
from ..budget.parts import OWN_WORK
from ..graph.chain_work import chain_groups, chain_work, hosts
from ..graph.segment_work import copy_work
from ..graph.stalled import stalls_of
from ..graph.step_graph import PARTS, SHARDING_PART, WAKE_UP_DELAY, StepGraph, Steps
from .apply import Turn, WhatIf, measured
from .select import named, threads_of

OFFLOAD: Final = "offload"
"""The part of the budget that a wait for a lane of the rank's own is."""


@dataclass(frozen=True)
class Spans:
    """Stretches of ranks' time from whose work a share goes, N of them; those of one rank do not overlap.

    rank, step: [N] which of the graph's threads, and of its judged steps
    start_ms:   [N] from the earliest rank's start of the step; `ms`: [N] how long
    share:      [N] of the work in it that goes, up to 1; below 0 there is more to do
    """

    rank: Int
    step: Int
    start_ms: Float
    ms: Float
    share: Float

    def share_between(self, thread: int, step: Int, begin: Float, end: Float) -> Float:
        """What goes of the work between two moments of steps of one thread, mean over that time. step: [S]; the
        moments: [.., S] ms from the earliest rank's start."""
        mine = np.flatnonzero(self.rank == thread)
        if not len(mine) or not begin.size:
            return np.zeros(begin.shape)
        mine = mine[np.lexsort((self.start_ms[mine], self.step[mine]))]
        start, length = self.start_ms[mine], self.ms[mine]
        latest, earliest = max((start + length).max(), end.max()), min(start.min(), begin.min())
        line = latest - earliest + 1.0  # one step behind the other on one line of time
        first = self.step[mine] * line + start
        edges = np.stack([first, first + length], axis=1).ravel()
        total = np.cumsum(self.share[mine] * length)
        upto = np.stack([total - self.share[mine] * length, total], axis=1).ravel()
        gone = np.interp(step * line + end, edges, upto) - np.interp(step * line + begin, edges, upto)
        found: Float = gone / np.maximum(end - begin, 1e-9)
        return found


@dataclass(frozen=True)
class Change:
    """Own work that would go away if one fault were mended.

    removed: part of WORK -> ms, [R, S] over the judged steps in order, or of the graph's chains, [T, S]; negative
              where a rank would get more to do.
              What FSDP does for its units is compute; what a thread stood still for in lanes of its own is its work.
    where_beyond_peers: it goes from where the rank takes longer than those that do the same work, between the same
              collectives; else from all of the step in proportion.
    spans:    it goes from these stretches of time, from each as much as it says; not from all of the step alike.
    launches: on a device, its host has as much less to launch: the same share of what it does in that part.
    waits:    [C, S] ms of each template of the measured graph, by which communications take less: what they waited for
              ranks that were not captured, whose work changes, too (`uncaptured`).
    """

    removed: Mapping[str, Float]
    where_beyond_peers: bool = False
    spans: Spans | None = None
    launches: bool = False
    waits: tuple[Float, ...] = ()


@dataclass(frozen=True)
class ScaleWork(WhatIf):
    """Each part of the own work of these ranks (all, by default) takes so many times as long; as offload also what
    their own lanes take."""

    factors: Mapping[str, float]
    ranks: tuple[int, ...] | None = None
    turn = Turn.SCALED_WORK

    @property
    def name(self) -> str:
        factors = ", ".join(f"{part} x {factor:g}" for part, factor in sorted(self.factors.items()))
        return f"{factors}{named(self.ranks)}"

    def change(self, graph: StepGraph) -> StepGraph:
        factor = np.ones(len(PARTS))
        for part, of_part in self.factors.items():
            factor[PARTS.index(part)] = of_part
        chosen = threads_of(graph, self.ranks)

        def scaled(steps: Steps) -> Steps:
            mine, work = chosen[steps.structure.thread], copy_work(steps.work)
            for part in np.flatnonzero(factor != 1).tolist():
                work[mine, :, part] *= factor[part]
            copies = np.array([task.owner >= 0 and chosen[task.owner] for task in steps.structure.tasks], bool)
            return steps.with_costs(
                work=work,
                transfer=np.where(copies[:, None], steps.transfer * factor[PARTS.index(OFFLOAD)], steps.transfer),
            )

        return graph.with_templates(tuple(scaled(steps) for steps in graph.templates))


@dataclass(frozen=True, eq=False)
class EvenRanks(WhatIf):
    """In each step, these parts of the work take every rank of a peer group what they take its members in the mean."""

    peer_groups: Sequence[Bool]
    parts: tuple[str, ...] = OWN_WORK
    turn = Turn.EQUAL_WORK

    @property
    def name(self) -> str:
        return f"equal {', '.join(self.parts)} on all ranks"

    def change(self, graph: StepGraph) -> StepGraph:
        columns = [k for part in self.parts for k in within(part)]

        def evened(steps: Steps) -> Steps:
            structure, work = steps.structure, copy_work(steps.work)
            spent = np.zeros((structure.threads, len(steps.numbers)))
            np.add.at(spent, structure.thread, work[..., columns].sum(axis=-1, dtype=np.float64))
            wanted = spent.copy()
            for group in chain_groups(graph, self.peer_groups):
                wanted[group] = spent[group].mean(axis=0)
            factor = np.divide(wanted, spent, out=np.ones_like(spent), where=spent > 0)
            work[..., columns] *= factor[structure.thread][..., None]
            return steps.with_costs(work=work)

        return graph.with_templates(tuple(evened(steps) for steps in graph.templates))


class LessWork(WhatIf):
    """The work of a `Change` taken away, in the segments in which it was measured to lie, and from the tasks that a
    thread stood still for in lanes of its own; in judged steps only."""

    turn = Turn.LESS_WORK

    def __init__(self, what: str, removed: Change, peer_groups: Sequence[Bool]) -> None:
        """what: whose work it is, in words: its name. peer_groups: [R] each, ranks that are to do the same work."""
        self._what, self.removed, self.peer_groups = what, removed, peer_groups
        self._gone: tuple[weakref.ref[StepGraph], list[_Gone]] | None = None

    @property
    def name(self) -> str:
        return f"without {self._what}"

    def change(self, graph: StepGraph) -> StepGraph:
        origin = measured(graph)
        every = zip(graph.templates, self._of(origin), strict=True)
        return graph.with_templates(tuple(gone.less(steps) for steps, gone in every))

    def _of(self, origin: StepGraph) -> list[_Gone]:
        """Of each template, what goes."""
        if self._gone is None or self._gone[0]() is not origin:
            waits = self.removed.waits or tuple(np.zeros(steps.transfer.shape) for steps in origin.templates)
            found = [_Gone({}, of_template.copy()) for of_template in waits]
            removed, groups = _on_chains(origin, self.removed), self.peer_groups
            if groups and len(groups[0]) < len(origin.ranks):
                groups = chain_groups(origin, groups)
            for index, (steps, stood) in enumerate(zip(origin.templates, stalls_of(origin), strict=True)):
                shares = _shares(origin, index, removed, groups, stood.before)
                for part, share in (*shares.work.items(), (WAKE_UP_DELAY, shares.stood)):
                    some = np.flatnonzero(share.any(axis=1))
                    if len(some):
                        gone = np.empty((len(some), share.shape[1]), steps.work.dtype)
                        np.multiply(steps.work[some, :, part], share[some], out=gone, casting="same_kind")
                        found[index].work[part] = some, gone
                for wait in stood.waits:
                    gone = wait.spent * shares.stood[wait.segment, wait.columns]
                    np.add.at(found[wait.template].transfer, (wait.tasks[:, None], wait.task_columns), gone)
            self._gone = weakref.ref(origin), found  # of many ranks a graph is too large to be kept for this
            return found
        return self._gone[1]


@dataclass(frozen=True)
class _Gone:
    """What goes of steps of one template. It is kept as long as the what-if, of many ranks, so of their work only that
    of which something goes.

    work:     place in PARTS -> K segments that have less of it, and how much less, [K, S] ms
    transfer: [C, S] ms
    """

    work: dict[int, tuple[Int, Float]]
    transfer: Float

    def less(self, steps: Steps) -> Steps:
        """The steps without it."""
        return steps.without(self.work, np.maximum(steps.transfer - self.transfer, 0.0))


OF_DEVICE: Final = ("compute", "optimizer")
"""Parts of a rank's work that its device does where there is one; all else its training thread does."""


def _on_chains(graph: StepGraph, change: Change) -> Change:
    """The same change with arrays of chains, [T, S], where it has arrays of ranks, [R, S]."""
    if len(graph.ranks) == graph.leads:
        return change
    of_host, removed = hosts(graph), {}
    for part, of_part in change.removed.items():
        if len(of_part) == len(graph.ranks):
            removed[part] = of_part
            continue
        removed[part] = np.zeros((len(graph.ranks), of_part.shape[1]))
        removed[part][np.arange(graph.leads) if part in OF_DEVICE else of_host] = of_part
        if change.launches and part in OF_DEVICE:
            work = chain_work(graph, part)
            beside = of_host >= graph.leads
            share = of_part / np.maximum(work[: graph.leads], 1e-9)
            removed[part][of_host[beside]] = (np.minimum(share, 1.0) * work[of_host])[beside]
    return replace(change, removed=removed)


@dataclass(frozen=True)
class _Shares:
    """What goes of steps of one template: work: place in PARTS -> [W, S] of each segment's work of it, 0 to 1 (below 0:
    it grows), and stood: [W, S] of how long it was stood still for before it."""

    work: dict[int, Float]
    stood: Float


def _shares(graph: StepGraph, index: int, change: Change, peer_groups: Sequence[Bool], stood: Float) -> _Shares:
    """stood: [W, S] ms that each segment was stood still for before it."""
    steps = graph.templates[index]
    structure = steps.structure
    parts = [k for part in change.removed for k in within(part)]
    nothing: Float = np.broadcast_to(0.0, stood.shape)  # which takes no room
    found = _Shares(dict.fromkeys(parts, nothing), nothing)
    columns = graph.columns_of(index)
    chosen = np.flatnonzero(graph.judged[columns])
    judged = (np.cumsum(graph.judged) - 1)[columns[chosen]]
    if not len(chosen):
        return found
    if change.spans is not None:
        gone = np.zeros(stood.shape)
        for thread in np.unique(change.spans.rank).tolist():
            mine = structure.of_thread(thread)
            work, begin = steps.work[mine][:, chosen], steps.began[mine][:, chosen]
            end = begin + work.sum(axis=-1, dtype=np.float64) - work[..., WAKE_UP_DELAY]
            gone[mine, chosen] = change.spans.share_between(thread, judged, begin, end)
        return replace(found, work=dict.fromkeys(parts, gone))
    if change.where_beyond_peers:
        removed = sum((of_part[:, judged] for of_part in change.removed.values()), np.zeros(()))
        waited = stood[:, chosen] if OFFLOAD in change.removed else np.zeros((structure.segments, len(chosen)))
        some = np.asarray(removed).any(axis=1)
        taken = _TakenByThreads(steps, chosen, parts, waited)
        of_work, of_stood = np.zeros(stood.shape), np.zeros(stood.shape)
        for r in np.flatnonzero(some).tolist():
            group = next(number for number, peer_group in enumerate(peer_groups) if peer_group[r])
            usual = taken.usual(group, structure.programs[r], np.flatnonzero(peer_groups[group] & ~some))
            mine = structure.of_thread(r)
            of_work[mine, chosen], of_stood[mine, chosen] = _beyond_peers(taken.by(r), usual, removed[r])
        return _Shares(dict.fromkeys(parts, of_work), of_stood)
    for part, of_part in change.removed.items():
        own = sum((steps.work[:, chosen, k] for k in within(part)), stood[:, chosen] if part == OFFLOAD else 0.0)
        total = np.zeros((structure.threads, len(chosen)))
        np.add.at(total, structure.thread, own)
        del own  # of many ranks one table of segments is large
        share = np.zeros((structure.threads, stood.shape[1]))
        share[:, chosen] = np.minimum(of_part[:, judged] / np.maximum(total, 1e-9), 1.0)
        gone = share[structure.thread]
        found = _Shares({**found.work, **dict.fromkeys(within(part), gone)}, gone if part == OFFLOAD else found.stood)
    return found


def within(part: str) -> list[int]:
    """Places in PARTS of what a part of the budget consists of."""
    return [PARTS.index(part), SHARDING_PART] if part == "compute" else [PARTS.index(part)]


class _TakenByThreads:
    """What threads take of `parts`: work of each segment, then how long it was stood still for, [2 * segments, S].

    stood: [W, S] ms"""

    def __init__(self, steps: Steps, columns: npt.NDArray[np.int64], parts: list[int], stood: Float) -> None:
        self._steps, self._columns, self._parts, self._stood = steps, columns, parts, stood
        self._usual: dict[tuple[int, bytes], Float | None] = {}

    def by(self, thread: int) -> Float:
        mine = self._steps.structure.of_thread(thread)
        work = self._steps.work[mine][:, self._columns][..., self._parts].sum(axis=-1, dtype=np.float64)
        return np.concatenate([work, self._stood[mine]])

    def usual(self, group: int, program: bytes, peers: npt.NDArray[np.int64]) -> Float | None:
        """The median, [2 * segments], of the means of those peers that have this program; None: none has. group: whose
        `peers` these are: what several ask for alike is worked out once."""
        if (group, program) not in self._usual:
            programs = self._steps.structure.programs
            each = [self.by(p).mean(axis=1) for p in peers.tolist() if programs[p] == program]
            self._usual[group, program] = np.median(each, axis=0) if each else None
        return self._usual[group, program]


def _beyond_peers(taken: Float, usual: Float | None, removed: Float) -> tuple[Float, Float]:
    """Which share goes of what a thread takes (`_TakenByThreads.by`), of its work and of how long it stood still,
    [segments, S], for `removed` ms of each step, [S], to go from where it takes longer than its peers usually do
    between the same points; where they do other things (None), from all of it in proportion."""
    share = taken / np.maximum(taken.sum(axis=0), 1e-9)
    if usual is not None:
        more = np.clip(taken.mean(axis=1) - usual, 0, None)
        if more.any():
            share = np.broadcast_to((more / more.sum())[:, None], taken.shape)
    gone = np.clip(share * removed / np.maximum(taken, 1e-9), None, 1.0)
    of_work, of_stood = np.split(gone, 2)
    return of_work, of_stood
