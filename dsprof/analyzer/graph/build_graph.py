"""From the ranks' chains to the step graph: steps of one template, their tasks and edges.

The chains that lead come first, one of each rank in order; those beside them (the host of a rank whose device leads)
follow.

A task belongs to the step in which the last of its ranks issued it; who issued it in another step, or waits for it
there, is joined to it by an edge across steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Float, Int
from ..freed_memory import give_back
from .chains import RankChains, of_host, without_own_lanes
from .chains_of_ranks import ChangedChains, EachChain
from .durations import no_later_than_seen, transfers, wake_up_delays
from .events import ISSUE, WAIT, ProgramEvents, Time, find_events, find_segments, without_microbatch
from .step_graph import WAKE_UP_DELAY, Costs, CrossStepEdges, Measured, StepGraph, Steps
from .tasks import Tasks, find_tasks
from .template import END, ISSUED, StepTemplate, find_template

LEAST_ALIKE: Final = 0.5
"""Of the judged steps, those of one template, with the ranks' own copies among the tasks."""
AT_ONCE: Final = 250_000
"""Segments whose costs are worked out at once, of some of the steps: arrays of as many numbers are made for it."""
MOST_BRIDGED: Final = 8
"""So many steps that are not judged, between two that are, are in the graph too: a delay reaches through them."""


def build_graph(
    ranks: Mapping[int, RankChains], collectives: pd.DataFrame, steps: pd.DataFrame, run: RunInfo | None = None
) -> StepGraph | None:
    """The steps that are judged, and the few between them, of the ranks that have steps. None where no step is judged.

    Where ranks issue their own copies in another order each step, as when they read ahead into whichever buffer is
    free, no two steps are alike, and nothing is known of what a copy would delay in another: then copies are no tasks.

    ranks:    gone through in order, several times
    steps:    rank, step, start_ns, dur_ns, ordinary
    """
    builder = _builder(ranks, collectives, steps, run)
    if builder is None:
        return None
    own_copies, graph = builder.own_copies, builder.build()
    del builder
    if not own_copies or _alike(graph) >= LEAST_ALIKE:
        return graph
    without_copies = ChangedChains(ranks, lambda _, chains: without_own_lanes(chains))
    again = _builder(without_copies, collectives, steps, run)
    return again.build() if again is not None else None


def _alike(graph: StepGraph) -> float:
    """Share of the judged steps that have the template that most of them have."""
    return float(np.bincount(graph.template[graph.judged]).max()) / max(int(graph.judged.sum()), 1)


def _builder(
    of_ranks: Mapping[int, RankChains], collectives: pd.DataFrame, steps: pd.DataFrame, run: RunInfo | None
) -> _Builder | None:
    """All that a graph takes of the chains but their work; None where no step is judged."""
    ranks = tuple(sorted(set(of_ranks) & set(steps["rank"].tolist())))
    numbers, judged = _chosen(steps, len(ranks))
    if not len(numbers):
        return None
    known = [of_ranks[rank].outline() for rank in ranks]
    timed = (chain.numbers for of_rank in known for chain in of_rank.chains if len(chain.numbers))
    if not all(np.isin(numbers, of_chain).all() for of_chain in timed):  # what devices did was not seen in every step
        of_ranks = ChangedChains(of_ranks, lambda _, chains: of_host(chains))
        known = [of_ranks[rank].outline() for rank in ranks]
    beside = [(i, chain) for i, of_rank in enumerate(known) for chain in of_rank.chains[1:]]
    rank, step = (steps[name].to_numpy(np.int64) for name in ("rank", "step"))
    inside = np.flatnonzero(np.isin(step, numbers) & np.isin(rank, ranks))
    at_step = np.searchsorted(ranks, rank[inside]), np.searchsorted(numbers, step[inside])
    begin: Int = np.zeros((len(ranks), len(numbers)), np.int64)
    begin[at_step] = steps["start_ns"].to_numpy(np.int64)[inside]
    end: Int = begin.copy()
    end[at_step] += steps["dur_ns"].to_numpy(np.int64)[inside]
    for i, of_rank in enumerate(known):
        if len((chain := of_rank.chains[0]).numbers):
            at = np.searchsorted(chain.numbers, numbers)
            begin[i], end[i] = chain.begin[at], chain.end[at]
    for _, chain in beside:
        at = np.searchsorted(chain.numbers, numbers)
        begin, end = np.vstack([begin, chain.begin[at]]), np.vstack([end, chain.end[at]])
    every = [*(of_rank.chains[0] for of_rank in known), *(chain for _, chain in beside)]
    leads = np.array([*range(len(ranks)), *(i for i, _ in beside)], np.int64)
    follows = np.append(False, np.diff(numbers) == 1)
    first_own = len(collectives) + np.cumsum([0, *(of_rank.own_tasks for of_rank in known)])[:-1]
    programs = EachChain(of_ranks, ranks, lambda chain: chain.program)
    moments = [chain.events for chain in every]
    events, first_end = find_events(moments, programs, begin, end, first_own[leads], len(collectives))
    give_back()  # what is freed here and below is as large as what is made next
    tasks = find_tasks(collectives, known, events, first_end, ranks, leads, run)
    times = EachChain(of_ranks, ranks, lambda chain: chain.time)
    names = tuple(chain.name for chain in every)
    return _Builder(ranks, names, leads, numbers, judged, follows, begin, end, events, times, tasks)


def _chosen(steps: pd.DataFrame, ranks: int) -> tuple[Int, npt.NDArray[np.bool_]]:
    """Numbers of the steps of the graph, and which of them are judged."""
    step = steps["step"].to_numpy(np.int64)
    judged = np.unique(step[steps["ordinary"].to_numpy(bool)])
    every, counts = np.unique(step, return_counts=True)
    complete = every[counts == ranks]
    judged = judged[np.isin(judged, complete)]
    if not len(judged):
        return judged, np.zeros(0, bool)
    after = np.searchsorted(judged, complete)
    between = (after > 0) & (after < len(judged))
    near = np.zeros(len(complete), bool)
    near[between] = (judged[after[between]] - judged[after[between] - 1]) <= MOST_BRIDGED + 1
    numbers: Int = complete[near | np.isin(complete, judged)]
    return numbers, np.isin(numbers, judged)


class _Builder:
    def __init__(
        self,
        ranks: tuple[int, ...],
        chain_names: tuple[str, ...],
        leads: Int,
        numbers: Int,
        judged: npt.NDArray[np.bool_],
        follows: npt.NDArray[np.bool_],
        begin: Int,
        end: Int,
        events: ProgramEvents,
        times: Iterable[tuple[int, Time]],
        tasks: Tasks,
    ) -> None:
        self.ranks, self.numbers, self.judged, self.follows = ranks, numbers, judged, follows
        self.leads, self.chain_names = leads, chain_names
        self.begin, self.end, self.times = begin, end, times
        self.reference = begin.min(axis=0)
        self.stretch = np.cumsum(~follows)
        self.tasks = tasks
        self.own_copies = bool((tasks.owner >= 0).any())
        issues = events.what == ISSUE
        home = np.where(events.target >= 0, self.tasks.home[events.target], -1) if len(self.tasks.home) else events.step
        # Issued in another step than the one the task belongs to: those events, and where they are among all.
        self.elsewhere_at = np.flatnonzero(issues & (home >= 0) & (home != events.step))
        self.elsewhere = events.take(self.elsewhere_at)
        self.issued_elsewhere: dict[int, list[int]] = defaultdict(list)
        for i, step in enumerate(home[self.elsewhere_at].tolist()):
            self.issued_elsewhere[step].append(i)
        # What is waited for from elsewhere, by the step it belongs to.
        self.awaited: dict[int, set[tuple[int, int]]] = defaultdict(set)
        waits = np.flatnonzero((events.what == WAIT) & (home >= 0))
        target = events.target[waits].astype(np.int64)
        awaited = target * (len(ranks) + 1) + tasks.views(target, leads[events.rank[waits]])
        for row, view in zip(*(of.tolist() for of in np.divmod(np.unique(awaited), len(ranks) + 1)), strict=True):
            self.awaited[int(tasks.home[row])].add((row, view))
        del issues, home, waits, target, awaited
        # Tasks that keep a worker of their lane beyond their own step: step -> lane -> until when, ns.
        self.overhanging: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        after = np.append(self.reference, np.iinfo(np.int64).max)[tasks.home + 1]
        keeps = (tasks.home >= 0) & (tasks.end > after) & (tasks.workers > 0) & tasks.shared
        for index in np.flatnonzero(keeps).tolist():
            later, until = int(tasks.home[index]) + 1, int(tasks.end[index])
            while later < len(numbers) and follows[later] and until > self.reference[later]:
                self.overhanging[later][str(tasks.lane[index])].append(until)
                later += 1
        self.events = events
        self.first_event = np.searchsorted(events.step, np.arange(len(numbers) + 1))
        self.templates: list[StepTemplate] = []
        self.place: dict[int, tuple[int, int]] = {}

    def build(self) -> StepGraph:
        by_key: dict[object, int] = {}
        for step in range(len(self.numbers)):
            targets, key = self._describe(step)
            index = by_key.setdefault(key, len(self.templates))
            if index == len(self.templates):
                self.templates.append(self._template(step, targets))
            template = self.templates[index]
            self.place[step] = (index, len(template.steps))
            template.steps.append(step)
            template.targets.append(targets)
        alike = [template.steps for template in self.templates]
        segments = find_segments(self.times, self.events, self.begin, self.end, alike)
        of_template = zip(self.templates, segments.began, segments.work, strict=True)
        self.events = self.elsewhere  # of many ranks there is not room for all that is known at once
        del by_key, segments
        give_back()
        gap = np.zeros(self.begin.shape)
        gap[:, 1:] = np.where(self.follows[1:], (self.begin[:, 1:] - self.end[:, :-1]) / 1e6, 0.0)
        return StepGraph(
            ranks=tuple(self.ranks[lead] for lead in self.leads.tolist()),
            leads=len(self.ranks),
            templates=tuple(self._steps(*one) for one in of_template),
            numbers=self.numbers,
            judged=self.judged,
            template=np.array([self.place[step][0] for step in range(len(self.numbers))], np.int64),
            column=np.array([self.place[step][1] for step in range(len(self.numbers))], np.int64),
            start=(self.begin - self.reference) / 1e6,
            duration=(self.end - self.begin) / 1e6,
            follows=self.follows,
            gap=gap,
            cross_step_edges=self._crossings(),
            chain_names=self.chain_names,
        )

    def _mine(self, step: int) -> ProgramEvents:
        return self.events.take(slice(int(self.first_event[step]), int(self.first_event[step + 1])))

    def _describe(self, step: int) -> tuple[Int, object]:
        """The step's targets in the order in which they are met, and what it has in common with steps alike."""
        mine = self._mine(step)
        here = mine.target[mine.target >= 0]
        beyond = [int(self.elsewhere.target[i]) for i in self.issued_elsewhere.get(step, ())]
        asked = sorted(target for target, _ in self.awaited.get(step, ()))
        met, first = np.unique(np.concatenate([here, beyond, asked]).astype(np.int64), return_index=True)
        targets: Int = met[np.argsort(first)]
        number = np.empty(int(met[-1]) + 1 if len(met) else 0, np.int64)
        number[targets] = np.arange(len(targets))
        local = np.where(mine.target >= 0, number[mine.target] if len(number) else -1, -1)
        tasks = self.tasks
        awaited = frozenset((int(number[target]), view) for target, view in self.awaited.get(step, ()))
        target, rank = self.elsewhere.target, self.elsewhere.rank
        elsewhere = self.issued_elsewhere.get(step, ())
        issued_elsewhere = tuple(sorted((int(number[target[i]]), int(rank[i])) for i in elsewhere))
        key = (
            mine.rank.tobytes(), mine.what.tobytes(), local.tobytes(), tuple(tasks.lane[targets]),
            tuple(tasks.kind[targets]), tuple(tasks.needs[targets]), tasks.root[targets].tobytes(),
            (tasks.home[targets] == step).tobytes(), awaited, issued_elsewhere,
            without_microbatch(mine.action).tobytes(),
        )  # fmt: skip
        return targets, key

    def _template(self, step: int, targets: Int) -> StepTemplate:
        mine, events = self._mine(step), self.elsewhere
        number = {target: i for i, target in enumerate(targets.tolist())}
        return find_template(
            replace(mine, target=np.array([number.get(target, -1) for target in mine.target.tolist()], np.int64)),
            self.tasks.take(targets),
            here=self.tasks.home[targets] == step,
            awaited={(number[target], view) for target, view in self.awaited.get(step, ())},
            issued_elsewhere=[
                (number[int(events.target[i])], int(events.rank[i])) for i in self.issued_elsewhere.get(step, ())
            ],
            leads=self.leads,
        )

    # --- values

    def _steps(self, template: StepTemplate, began_ns: Int, work: Float) -> Steps:
        """work: [W, S, PARTS], which the steps take over; began_ns: [W, S]."""
        steps, structure = np.array(template.steps), template.structure
        reference = self.reference[steps]
        began = np.empty(began_ns.shape)
        picks = np.array([[targets[i] for targets in template.targets] for i, _ in template.tasks], np.int64)
        picks = picks.reshape(len(template.tasks), len(steps))
        ended, last = (
            (end[picks] - reference) / 1e6 if picks.size else np.zeros(picks.shape)
            for end in (self.tasks.end, self.tasks.last)
        )
        outside = self._outside(template, steps)
        busy, transfer = self._busy(steps), np.empty(picks.shape)
        at_once = max(AT_ONCE // max(structure.segments, 1), 1)
        for first in range(0, len(steps), at_once):  # no step tells anything of another one
            some = slice(first, first + at_once)
            seen, supplied = (began_ns[:, some] - reference[some]) / 1e6, outside[:, some]
            began[:, some] = seen
            over = seen + work[:, some].sum(axis=-1)
            over_at = no_later_than_seen(structure, seen, ended[:, some])
            kept = {lane: until[:, some] for lane, until in busy.items()}
            transfer[:, some], ended[:, some] = transfers(structure, over, supplied, over_at, kept)
            work[:, some, WAKE_UP_DELAY] = wake_up_delays(structure, seen, over, supplied, ended[:, some])
        return Steps(
            structure=structure,
            numbers=self.numbers[steps],
            costs=Costs(
                given=work,
                transfer=transfer,
                wire=np.zeros(transfer.shape),
                size=self.tasks.size[picks] if picks.size else np.zeros(picks.shape),
            ),
            measured=Measured(outside=outside, began=began, ended=ended, last=np.maximum(last, ended)),
        )

    def _busy(self, steps: Int) -> dict[str, Float]:
        """Lane -> [2, S] until when tasks of the steps before keep its workers, ascending, ms from each reference."""
        found: dict[str, Float] = {}
        for column, step in enumerate(steps.tolist()):
            for lane, ends in self.overhanging.get(step, {}).items():
                last = sorted([-np.inf, -np.inf, *((end - self.reference[step]) / 1e6 for end in ends)])[-2:]
                found.setdefault(lane, np.full((2, len(steps)), -np.inf))[:, column] = last
        return found

    def _outside(self, template: StepTemplate, steps: Int) -> Float:
        """When what other steps supply had ended, [O, S] ms from each step's reference."""
        found = np.empty((len(template.outside), len(steps)))
        issued = {
            (int(self.elsewhere.target[i]), int(self.elsewhere.rank[i])): int(self.elsewhere.when[i])
            for step in template.steps
            for i in self.issued_elsewhere.get(step, ())
        }
        for row, (what, index, by) in enumerate(template.outside):
            for column, (step, targets) in enumerate(zip(template.steps, template.targets, strict=True)):
                target = int(targets[index])
                when = int(self.tasks.end[target]) if what == END else issued[target, by]
                found[row, column] = (when - self.reference[step]) / 1e6
        return found

    def _crossings(self) -> CrossStepEdges:
        found: list[tuple[int, int, int, int, int, int]] = []
        at_issue = {}
        events = self.elsewhere
        for indices in self.issued_elsewhere.values():
            for i in indices:
                if events.step[i] >= 0:
                    in_step = int(self.elsewhere_at[i] - self.first_event[events.step[i]])
                    at_issue[int(events.target[i]), int(events.rank[i])] = (
                        int(events.step[i]), in_step + int(events.rank[i]),
                    )  # fmt: skip
        numbers = [{task: i for i, task in enumerate(template.tasks)} for template in self.templates]
        for index, template in enumerate(self.templates):
            for row, (what, local, by) in enumerate(template.outside):
                for column, (step, targets) in enumerate(zip(template.steps, template.targets, strict=True)):
                    target = int(targets[local])
                    if what == ISSUED:
                        source_step, operation = at_issue.get((target, by), (-1, -1))
                    else:
                        source_step, operation = int(self.tasks.home[target]), -1
                    if source_step < 0 or self.stretch[source_step] != self.stretch[step]:
                        continue  # it stands as it was measured
                    from_template, from_column = self.place[source_step]
                    if what == END:
                        source = self.templates[from_template]
                        there = np.flatnonzero(source.targets[from_column] == target)
                        number = numbers[from_template].get((int(there[0]), by)) if len(there) else None
                        if number is None:
                            continue
                        operation = source.structure.segments + number
                    found.append((from_template, operation, from_column, index, row, column))
        return CrossStepEdges(*np.array(found, np.int64).reshape(-1, 6).T)
