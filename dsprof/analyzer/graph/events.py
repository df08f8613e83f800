"""The events of each rank's program, and the own work between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.engine.schedule import COMPUTE
from dsprof.run import RunInfo

from ..align.match import Matches, when_asked
from ..align.participants import NOT_TOLD
from ..arrays import Float, Int, places
from ..budget.lane_tasks import LaneTasks
from ..budget.step_budget import BEHIND, RankTime
from ..columns import RankRows, as_rows
from .segment_work import no_work
from .step_graph import PARTS

ISSUE, WAIT, WAIT_GRADIENTS, BACKWARD, ACTION_BEGINS, ACTION_ENDS = range(6)
"""What a event of a thread is. To wait for gradients is to wait for all that were issued so far; an action is one of a
pipeline's schedule."""
TURN: Final = np.array([2, 0, 0, 4, 4, 1])
"""Which of the events of one moment comes first: what a rank waited for is over, and its action, before it issues the
next; then it begins something new."""
WAIT_FOR_OWN: Final = 3
"""The turn of a wait for what is issued at that very moment."""

ACTIONS: Final = ("", *COMPUTE)
"""What a segment can be of."""
NOWHERE: Final = (-1, -1)
"""Stage and micro-batch of a segment that is of no action, or of one that does not say."""
_STAGES: Final = 1 << 28


Narrow = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ProgramEvents:
    """The events of programs, by step, chain and time.

    step:   index of the step, -1: in none of the graph's; rank: index of the chain; what: ISSUE, ...
    target: row of `tasks.Tasks`, -1: none. These four are narrow: of many ranks there are millions of events
    when:   ns
    action: of a event at either end of one, which: `action_code`; narrow where there is none
    """

    step: Narrow
    rank: Narrow
    what: npt.NDArray[np.int8]
    target: Narrow
    when: Int
    action: Int

    def take(self, chosen: Int | slice) -> ProgramEvents:
        return ProgramEvents(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


Program = tuple[npt.NDArray[Any], ...]
"""One rank's events in any order: what, target, when, ended, action, own. The target is a row of the matched table, or
of the rank's own `LaneTasks` where `own` is 1; `ended` is when the rank saw what it issued end, ns (-1: unknown); the
others are as in `ProgramEvents`. A rank keeps them in types as narrow as they fit in (`_narrow`)."""
WHAT, TARGET, WHEN, ENDED, ACTION, OWN = range(6)
NEVER: Final = np.iinfo(np.int64).max
"""A moment that is not known."""


@dataclass(frozen=True)
class Segments:
    """The stretches between events, of steps that are alike together: of each group of them, in which every step has W
    segments, by rank and time, began: [W, S] ns, when each began, and work: [W, S, PARTS] ms, its own work."""

    began: tuple[Int, ...]
    work: tuple[Float, ...]


def find_events(
    moments: Sequence[Int], programs: Iterable[tuple[int, Program]], begin: Int, end: Int, first_own: Int, shared: int
) -> tuple[ProgramEvents, Int]:
    """The events of these chains; and of each row of the matched table, [shared], the earliest moment at which a chain
    that issued it saw it end, ns (NEVER: unknown).

    moments: of each chain, when its events are
    programs: of each chain, with its number
    begin, end: [T, N] of the graph's steps, ns
    first_own: [T] the row of `tasks.Tasks` that the first of the own tasks of each one's rank is
    """
    chains, number = begin.shape
    counts = np.zeros((number + 1, chains), np.int64)
    for i, of_chain in enumerate(moments):
        counts[:, i] = np.bincount(_steps_of(of_chain, begin[i], end[i]) + 1, minlength=number + 1)
    total = int(counts.sum())
    first = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)  # of each chain's in each step, in this order
    step, rank, target = (np.empty(total, np.int32) for _ in range(3))
    what = np.empty(total, np.int8)
    action: Int = np.zeros(total, np.int8)
    when, first_end = np.empty(total, np.int64), np.full(shared, NEVER)
    for i, columns in programs:
        mine = _steps_of(columns[WHEN], begin[i], end[i])
        turn = _turn(columns[WHAT], columns[TARGET], columns[OWN], columns[WHEN])
        order = np.lexsort((turn, columns[WHEN], mine))
        place = places(first[:, i], counts[:, i])
        step[place], rank[place] = mine[order], i
        target[place] = (columns[TARGET] + np.where(columns[OWN] == 1, first_own[i], 0))[order]
        if columns[ACTION].itemsize > action.itemsize:
            action = action.astype(columns[ACTION].dtype)
        for column, into in ((WHAT, what), (WHEN, when), (ACTION, action)):
            into[place] = columns[column][order]
        seen = (columns[WHAT] == ISSUE) & (columns[OWN] == 0) & (columns[ENDED] >= 0)
        np.minimum.at(first_end, columns[TARGET][seen], columns[ENDED][seen])
    return ProgramEvents(step, rank, what, target, when, action), first_end


def _steps_of(when: Int, begin: Int, end: Int) -> Int:
    """The index of the step that each moment is in, -1: in none. begin, end: [N] of the steps, ns."""
    at = np.searchsorted(begin, when, "right") - 1
    found: Int = np.where((at >= 0) & (when < end[np.maximum(at, 0)]), at, -1)
    return found


def find_program(
    time: RankTime, rows: pd.DataFrame | RankRows, matches: Matches, run: RunInfo | None = None
) -> Program:
    """One rank's events: of its `rows` the communications, phases and actions, of its `time` the waits and tasks."""
    rows = as_rows(rows)
    main = rows.are("lane", "main")
    backward_at = rows.whole("start_ns")[rows.are("kind", "phase") & rows.are("name", "backward") & main]
    acts = rows.are("kind", "pipe") & main & rows.known("dur_ns") & rows.are("name", *COMPUTE)
    parts = [
        _issues(rows, matches, run),
        _own_issues(time.lane_tasks),
        _instants(BACKWARD, backward_at),
        *_actions(rows, np.flatnonzero(acts)),
        _waits(time.waits, np.sort(backward_at)),
    ]
    return _narrow(*(np.concatenate([part[k] for part in parts]) for k in range(OWN + 1)))


def _narrow(what: Int, target: Int, when: Int, ended: Int, action: Int, own: Int) -> Program:
    acts = action.any()
    return (
        what.astype(np.int8), target.astype(np.int32), when, ended, action if acts else action.astype(np.int8),
        own.astype(np.int8),
    )  # fmt: skip


def _instants(what: int, when: Int, action: Int | None = None) -> Program:
    nothing, zero = np.full(len(when), -1), np.zeros(len(when), np.int64)
    return np.full(len(when), what), nothing, when, when, zero if action is None else action, zero


def _issues(rows: RankRows, matches: Matches, run: RunInfo | None) -> Program:
    asked = when_asked(rows)
    comm = np.flatnonzero(rows.are("kind", "comm") & (asked != NOT_TOLD) & rows.known("seq"))
    target = matches.find_at(rows, comm, run) if matches.unique else np.full(len(comm), -1)
    comm, target = comm[target >= 0], target[target >= 0]
    ended = np.where(rows.known("dur_ns")[comm], rows.whole("start_ns")[comm] + rows.whole("dur_ns")[comm], -1)
    zero = np.zeros(len(comm), np.int64)
    return np.full(len(comm), ISSUE), target, asked[comm], ended, zero, zero


def _own_issues(tasks: LaneTasks) -> Program:
    count = len(tasks)
    zero = np.zeros(count, np.int64)
    return np.full(count, ISSUE), np.arange(count), tasks.issue, tasks.end, zero, zero + 1


def action_code(op: Int, stage: Int, microbatch: Int) -> Int:
    """One number for each action. op: index into ACTIONS; stage, microbatch: -1 where it does not say."""
    code: Int = op + len(ACTIONS) * (stage + 1 + _STAGES * (microbatch + 1))
    return code


def without_microbatch(code: Int) -> Int:
    """What an action is, whichever micro-batch it is of."""
    found: Int = code.astype(np.int64) % (len(ACTIONS) * _STAGES)
    return found


def _decoded(code: int) -> tuple[str, tuple[int, int]]:
    """Name of an action, and its stage and micro-batch."""
    place, op = divmod(code, len(ACTIONS))
    microbatch, stage = divmod(place, _STAGES)
    return ACTIONS[op], (stage - 1, microbatch - 1)


def _actions(rows: RankRows, acted: Int) -> tuple[Program, Program]:
    """Where the actions of a pipeline's schedule begin and end."""
    stage, microbatch = (rows.whole(name, -1)[acted] for name in ("stage", "microbatch"))
    name = np.array([ACTIONS.index(word) for word in rows.words("name", acted).tolist()], np.int64)
    action = action_code(name, stage, microbatch)
    start = rows.whole("start_ns")[acted]
    end = start + rows.whole("dur_ns")[acted]
    return _instants(ACTION_BEGINS, start, action), _instants(ACTION_ENDS, end, action)


def _waits(waits: pd.DataFrame, backward_at: Int) -> Program:
    when, target, task = (waits[name].to_numpy(np.int64) for name in ("end_ns", "collective", "lane_task"))
    derived = waits["derived"].to_numpy(bool)
    chosen = (target >= 0) | derived | (task >= 0)
    when, target, task, derived = when[chosen], target[chosen], task[chosen], derived[chosen]
    # DDP waits for its buckets one after the other, for as many as are still under way: that is one wait for all.
    number = np.searchsorted(backward_at, when)
    last = np.ones(len(when), bool)
    last[:-1] = ~(derived[:-1] & derived[1:] & (number[:-1] == number[1:]))
    own = (task >= 0) & ~derived
    target = np.where(own, task, np.where(derived, -1, target))[last]
    what, when = np.where(derived, WAIT_GRADIENTS, WAIT)[last], when[last]
    return what, target, when, when, np.zeros_like(when), own[last].astype(np.int64)


def _turn(what: Int, target: Int, own: Int, when: Int) -> Int:
    """Which of a chain's events of one moment comes first."""
    turn = TURN[what]
    issued, waited = np.flatnonzero(what == ISSUE), np.flatnonzero(what == WAIT)
    key = 2 * target.astype(np.int64) + own
    order = issued[np.argsort(key[issued], kind="stable")]
    at = np.searchsorted(key[order], key[waited])
    known = at < len(order)
    known[known] = key[order[at[known]]] == key[waited[known]]
    issue = order[at[known]]
    turn[waited[known][when[issue] == when[waited[known]]]] = WAIT_FOR_OWN
    return turn


class Time(Protocol):
    """Where the time of a chain goes."""

    def work_between(self, when: Int) -> Float:
        """Own work between consecutive moments, [len(when) - 1, PARTS] in ms."""


def find_segments(
    times: Iterable[tuple[int, Time]], events: ProgramEvents, begin: Int, end: Int, alike: Sequence[Sequence[int]]
) -> Segments:
    """What lies between the events, from the beginning of each step to its end. times: of each chain, with its number;
    alike: indices of steps that have as many events of each chain, in groups; each step is in one."""
    chains, steps = begin.shape
    key = events.step.astype(np.int64)
    key *= chains
    key += events.rank
    low = np.searchsorted(key, np.arange(steps * chains)).reshape(steps, chains)
    counts = np.searchsorted(key, np.arange(steps * chains), "right").reshape(steps, chains) - low
    del key
    # A segment of a chain begins with the step, and one with each of its events.
    segments = (np.cumsum(counts + 1, axis=1) - counts - 1).astype(np.int64)
    began = tuple(_beginnings(group, events, begin, low, counts) for group in alike)
    # What each chain's are goes where it belongs at once: of many chains there is room for one such table.
    first, apart, ends = np.empty(steps, np.int64), np.empty(steps, np.int64), [0]
    for group, beginnings in zip(alike, began, strict=True):
        first[group], apart[group] = ends[-1] + np.arange(len(group)), len(group)
        ends.append(ends[-1] + beginnings.size)
    work = no_work(ends[-1], 1, len(PARTS))[:, 0]
    for i, time in times:
        count = counts[:, i]
        edges = np.cumsum(count + 2)
        when = np.empty(int(edges[-1]), np.int64)
        begins, finishes = edges - count - 2, edges - 1
        when[begins], when[finishes] = begin[i], end[i]
        is_event = np.ones(len(when), bool)
        is_event[begins] = is_event[finishes] = False
        when[is_event] = events.when[places(low[:, i], count)]
        inside = np.ones(len(when) - 1, bool)
        inside[finishes[:-1]] = False  # from the end of a step to the next one's start is no segment
        spent = time.work_between(when)[inside]
        mine = places(segments[:, i], count + 1)
        mine *= np.repeat(apart, count + 1)
        mine += np.repeat(first, count + 1)
        for part in np.flatnonzero(spent.any(axis=0)).tolist():
            work[mine, part] = spent[:, part]
    parts = [(slice(low, high), len(group)) for (low, high), group in zip(pairwise(ends), alike, strict=True)]
    return Segments(began, tuple(work[part].reshape(-1, count, len(PARTS)) for part, count in parts))


def _beginnings(group: Sequence[int], events: ProgramEvents, begin: Int, low: Int, counts: Int) -> Int:
    """When the segments of steps that are alike begin, [W, S] ns. low, counts: [N, T] where the events of each chain in
    each step begin, and how many they are."""
    chains = begin.shape[0]
    found = np.empty((int(counts[group[0]].sum()) + chains, len(group)), np.int64)
    for column, step in enumerate(group):
        firsts = np.cumsum(counts[step] + 1) - counts[step] - 1
        is_event = np.ones(len(found), bool)
        is_event[firsts] = False
        found[firsts, column] = begin[:, step]
        found[is_event, column] = events.when[low[step, 0] : low[step, 0] + len(found) - chains]
    return found


def work_between(time: RankTime, when: Int) -> Float:
    """A training thread's own work between consecutive moments, [len(when) - 1, PARTS] in ms. Waits for something
    unknown keep their length: they count as `other`. Those for the rank's own tasks are no work, whatever was labelled
    there."""
    spent = {part: np.diff(value) / 1e6 for part, value in time.before(when).items()}
    explained = sum(spent.values(), np.zeros(len(when) - 1))
    unknown = np.diff(time.unbound.before(when)) / 1e6
    spent["other"] = np.diff(when) / 1e6 - explained + spent["outside_training"] + unknown
    if len(time.lane_tasks):
        waited = time.for_lane_tasks
        behind = {part: np.diff(value) / 1e6 for part, value in time.before(when, waited).items()}
        spent["other"] -= np.diff(waited.before(when)) / 1e6 - sum(behind.values(), np.zeros(len(when) - 1))
        for part in BEHIND:
            spent[part] -= behind[part]
    spent["sharding"] = np.diff((time.sharding - time.for_lane_tasks).before(when)) / 1e6
    spent["compute"] -= spent["sharding"]
    spent["wake_up_delay"] = np.zeros(len(when) - 1)
    return np.stack([spent[part] for part in PARTS], axis=-1)


def actions_of(events: ProgramEvents, segments: int) -> tuple[npt.NDArray[np.object_], Int]:
    """The action that each segment of one step is of, one that has begun and not ended: its name, and its stage and
    micro-batch, [W, 2]. Where none has, what is returned takes no room."""
    if not (events.what == ACTION_BEGINS).any():
        return np.broadcast_to(np.array("", object), segments), np.broadcast_to(np.array(NOWHERE), (segments, 2))
    found = np.full(segments, "", object)
    place_of = np.full((segments, 2), NOWHERE)
    none = "", NOWHERE
    under_way: dict[int, tuple[str, tuple[int, int]]] = {}
    after = np.arange(len(events.rank)) + events.rank + 1
    for segment, rank, what, action in zip(
        after.tolist(), events.rank.tolist(), events.what.tolist(), events.action.tolist(), strict=True
    ):
        if what == ACTION_BEGINS:
            under_way[rank] = _decoded(action)
        elif what == ACTION_ENDS:
            under_way[rank] = none
        found[segment], place_of[segment] = under_way.get(rank, none)
    return found, place_of
