"""Collectives, messages and the tasks of the ranks' own lanes as arrays: which step each belongs to, what runs it, whom
its end depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from ..align.backends import backend_of
from ..align.broadcast_tree import holds_up, members_of
from ..align.match import BOTH_SIDES, SEND_RECV, SENDER_GOES_ON
from ..arrays import Float, Int
from ..budget.lane_tasks import LaneTasks, kinds_of
from .chains import Flows, RankOutline
from .events import ISSUE, NEVER, ProgramEvents

EVERYONE, OWN = 0, 1
"""Whose arrival the end of a task depends on, as a rank sees it: on that of all; OWN + i: on that of rank i itself and,
where a root sends, on the root's; along a tree, on those of whom rank i waits for. Of a message whose sender goes on
once it has handed it over, OWN + i is that moment, for which the receiver must have come, too, unless the message is
eager."""
HANDED: Final = "hand_over pipeline"
"""Kind of the task that is: the pipeline's message until its sender goes on."""


@dataclass(frozen=True)
class Tasks:
    """The matched table as arrays, a row a task: see `match.COLLECTIVE_COLUMNS`; and after it, each rank's own tasks.

    home: index of the step it belongs to; -1: none of the graph's
    end:  ns, when the first rank saw it end; `last`: when the last one did, of what all ranks wait for all in
    owner: index of the rank whose own it is, -1: ranks share it
    holds_up: of a broadcast along a tree, index of a rank -> of those that its arrival holds up; else None
    """

    lane: npt.NDArray[np.object_]
    kind: npt.NDArray[np.object_]
    gradient: npt.NDArray[np.bool_]
    workers: Int
    needs: npt.NDArray[np.object_]
    root: Int
    size: Float
    end: Int
    last: Int
    home: Int
    owner: Int
    holds_up: npt.NDArray[np.object_]

    def take(self, chosen: Int) -> Tasks:
        return Tasks(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def view(self, row: int, rank: int) -> int:
        """Which end of a communication a rank waits for: EVERYONE, or OWN + rank."""
        if self.needs[row] in SENDER_GOES_ON:
            return OWN + rank if rank == self.root[row] else EVERYONE
        if self.needs[row] == "all" or (self.needs[row] != "tree" and self.root[row] >= 0 and rank == self.root[row]):
            return EVERYONE
        return OWN + rank

    def views(self, row: Int, rank: Int) -> Int:
        """`view` of many at once."""
        from_all, handed = self.needs == "all", np.isin(self.needs, SENDER_GOES_ON)
        at_root = (rank == self.root[row]) & (self.needs[row] != "tree")
        everyone = np.where(handed[row], ~at_root, from_all[row] | ((self.root[row] >= 0) & at_root))
        found: Int = np.where(everyone, EVERYONE, OWN + rank)
        return found

    @cached_property  # it is asked of each task by itself, and each answer would look through all of them
    def shared(self) -> npt.NDArray[np.bool_]:
        """Whether nothing of it arrives anywhere before all have come."""
        found: npt.NDArray[np.bool_] = np.isin(self.needs, BOTH_SIDES)
        return found

    def views_of(self, row: int, rank: int, ranks: int) -> tuple[int, ...]:
        """The ends that depend on the arrival of `rank`."""
        if self.needs[row] in SENDER_GOES_ON:
            if self.needs[row] == "eager" and rank != self.root[row]:
                return ()
            return EVERYONE, OWN + int(self.root[row])
        if self.needs[row] == "tree":
            return tuple(OWN + i for i in self.holds_up[row].get(rank, (rank,)))
        sends = self.needs[row] == "root" and rank == self.root[row]
        return (EVERYONE, *(OWN + i for i in (range(ranks) if sends else (rank,))))


def find_tasks(
    collectives: pd.DataFrame,
    own: Sequence[RankOutline],
    events: ProgramEvents,
    first_end: Int,
    ranks: tuple[int, ...],
    leads: Int,
    run: RunInfo | None,
) -> Tasks:
    """Those of the matched table; then each rank's own, and the flows between its chains.

    own: of each rank; first_end: as `find_events` gives it; leads: [T] of each chain, the one that leads its rank: of
    the first of `ranks` it is 0
    """
    shared, alone = len(collectives), sum(of_rank.own_tasks for of_rank in own)
    home = _owner_steps(events, shared + alone)
    message = (collectives["name"] == SEND_RECV).to_numpy(bool)
    end = collectives["end_ns"].to_numpy(np.int64).copy()
    known = first_end < NEVER
    end[known] = np.maximum(first_end[known], collectives["last_ns"].to_numpy(np.int64)[known])
    of_all = (collectives["needs"] == "all").to_numpy(bool)
    latest = np.where(of_all, np.maximum(collectives["end_ns"].to_numpy(np.int64), end), end)
    eager = (collectives["needs"] == "eager").to_numpy(bool)
    last, sent = (collectives[name].to_numpy(np.int64) for name in ("last_ns", "root_ns"))
    transferred = np.where(eager, sent, last) + collectives["transfer_ns"].to_numpy(np.int64)
    end[message] = latest[message] = transferred[message]
    lane = collectives["group"].astype(str).to_numpy(object)
    backends = {name: backend_of(name, run) for name in set(lane.tolist())}
    place = {rank: i for i, rank in enumerate(ranks)}
    workers = [
        0 if sent and not backends[name].messages_queue else backends[name].workers or 0
        for name, sent in zip(lane.tolist(), message.tolist(), strict=True)
    ]
    found = Tasks(
        lane=lane,
        kind=kinds_of(collectives),
        gradient=(collectives["purpose"] == "gradient").to_numpy(bool),
        workers=np.array(workers, np.int64),
        needs=_needs(collectives, place),
        root=np.array([place.get(int(rank), -1) for rank in collectives["root_rank"].tolist()], np.int64),
        size=collectives["bytes"].to_numpy(np.float64),
        end=end,
        last=latest,
        home=home[:shared],
        owner=np.full(shared, -1),
        holds_up=_holds_up(collectives, place, run),
    )
    if not alone:
        return found
    first = shared
    parts = [found]
    for i, of_rank in enumerate(own):
        # The training thread has them: the last of the rank's chains.
        tasks, thread = of_rank.own, int(np.flatnonzero(leads == i)[-1])
        parts.append(_of_rank(tasks, thread, ranks[i], home[first : first + len(tasks)]))
        first += len(tasks)
        parts.append(_flows(of_rank.flows, home[first : first + len(of_rank.flows)]))
        first += len(of_rank.flows)
    return Tasks(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(found)))


def _needs(collectives: pd.DataFrame, place: Mapping[int, int]) -> npt.NDArray[np.object_]:
    """Of a broadcast along a tree whose root is not in the graph it is not known whom a rank waits for."""
    needs: npt.NDArray[np.object_] = collectives["needs"].to_numpy(object).copy()
    there = collectives["root_rank"].isin(list(place)).to_numpy(bool)
    needs[(needs == "tree") & ~there] = "none"
    return needs


def _holds_up(collectives: pd.DataFrame, place: Mapping[int, int], run: RunInfo | None) -> npt.NDArray[np.object_]:
    """`Tasks.holds_up` of the matched table. place: rank -> its index; those without one take no part."""
    found = np.full(len(collectives), None, object)
    along = collectives[(collectives["needs"] == "tree").to_numpy(bool)]
    for (group, root), mine in along.groupby(["group", "root_rank"], observed=True).indices.items():
        of_ranks = holds_up(members_of(str(group), run), int(root))
        of_index = {
            place[rank]: tuple(place[other] for other in held if other in place)
            for rank, held in of_ranks.items() if rank in place
        }  # fmt: skip
        for row in along.index[mine].tolist():
            found[row] = of_index
    return found


def _owner_steps(events: ProgramEvents, count: int) -> Int:
    """Index of the step that each of `count` tasks belongs to, -1: none of the graph's."""
    issues = events.what == ISSUE
    target, step = events.target[issues], events.step[issues]
    home = np.full(count, -1, np.int64)
    np.maximum.at(home, target, step)
    # A rank that issues it after the steps of the graph: then who waited for whom there is not known.
    last_in = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(last_in, target[step >= 0], events.when[issues][step >= 0])
    late = events.when[issues] > last_in[target]
    home[target[(step < 0) & late]] = -1
    return home


def _of_rank(own: LaneTasks, owner: int, rank: int, home: Int) -> Tasks:
    count = len(own)
    return Tasks(
        lane=np.array([f"{lane} of rank {rank}" for lane in own.lane.tolist()], object),
        kind=own.kind,
        gradient=np.zeros(count, bool),
        workers=np.ones(count, np.int64),
        needs=np.full(count, "all", object),
        root=np.full(count, -1),
        size=own.size.astype(np.float64),
        end=own.end,
        last=own.end,
        home=home,
        owner=np.full(count, owner),
        holds_up=np.full(count, None, object),
    )


def _flows(flows: Flows, home: Int) -> Tasks:
    count = len(flows)
    return Tasks(
        lane=flows.kind,
        kind=flows.kind,
        gradient=np.zeros(count, bool),
        workers=np.zeros(count, np.int64),
        needs=np.full(count, "all", object),
        root=np.full(count, -1),
        size=np.zeros(count),
        end=flows.end,
        last=flows.end,
        home=home,
        owner=np.full(count, -1),
        holds_up=np.full(count, None, object),
    )
