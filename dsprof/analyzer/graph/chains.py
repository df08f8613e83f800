"""The chains of a rank: its training thread, and where its device was seen, the stream that computes.

An operation takes time on exactly one chain, in order. What a chain gives another one of its rank is a *flow*: a launch
(the device does not begin before the host asked), a sync (the host waits until the device is through), the end of a
step. In the graph a flow is a task that takes no worker: one chain issues it, the other waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..arrays import Float, Int
from ..budget.intervals import Intervals
from ..budget.lane_tasks import LaneTasks
from ..budget.step_budget import WORK, RankTime
from .events import OWN, TARGET, WHEN, Program, work_between
from .step_graph import PARTS

LAUNCH: Final = "launch"
SYNC: Final = "sync"
DEPENDS: Final = "depends"
STEP: Final = "step"
FLOWS: Final = (LAUNCH, SYNC, DEPENDS, STEP)
"""Kinds of flows: from the host to the device, from the device to the host, from one stream to another, and where a
step ends."""


@dataclass(frozen=True)
class Flows:
    """F of one rank. kind: [F]; issue, end: [F] ns, when it is given, and when it has arrived there."""

    kind: npt.NDArray[np.object_]
    issue: Int
    end: Int

    def __len__(self) -> int:
        return len(self.kind)

    @staticmethod
    def none() -> Flows:
        return Flows(np.empty(0, object), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class StreamTime:
    """Where the time of a device's stream goes.

    idle:      when it waits: for a launch, a communication, another stream
    parts:     part of PARTS -> when it does that; all the rest is compute
    """

    idle: Intervals
    parts: Mapping[str, Intervals]

    def work_between(self, when: Int) -> Float:
        """Own work between consecutive moments, [len(when) - 1, PARTS] in ms."""
        found = np.zeros((len(when) - 1, len(PARTS)))
        rest = np.diff(when) - np.diff(self.idle.before(when))
        for part, spans in self.parts.items():
            spent = np.diff((spans - self.idle).before(when))
            found[:, PARTS.index(part)] = spent / 1e6
            rest = rest - spent
        found[:, PARTS.index("compute")] += rest / 1e6
        return found

    def without_waits(self) -> StreamTime:
        return self


@dataclass(frozen=True)
class ThreadTime:
    """Where the time of a training thread goes. waits: when it stands still for its device, which is no work."""

    time: RankTime
    waits: Intervals = field(default_factory=Intervals.empty)

    def work_between(self, when: Int) -> Float:
        """Own work between consecutive moments, [len(when) - 1, PARTS] in ms."""
        found = work_between(self.time, when)
        if not len(self.waits.start):
            return found
        within = {part: np.diff(value) / 1e6 for part, value in self.time.before(when, self.waits).items()}
        other = PARTS.index("other")
        # What is not labelled is other, and so are waits for something unknown.
        unknown = (self.time.unbound & self.waits).before(when)
        found[:, other] -= (np.diff(self.waits.before(when)) + np.diff(unknown)) / 1e6
        for part, spent in within.items():
            if part != "outside_training":
                found[:, other] += spent
            if part in WORK:
                found[:, PARTS.index(part)] -= spent
        # What FSDP does for its units is told apart from compute; of a wait in it, that is where it goes from.
        compute, sharding = PARTS.index("compute"), PARTS.index("sharding")
        found[:, sharding] += np.minimum(found[:, compute], 0.0)
        return np.maximum(found, 0.0)

    def without_waits(self) -> ThreadTime:
        return replace(self, time=self.time.without_waits())


ChainTime = StreamTime | ThreadTime


@dataclass(frozen=True)
class Chain:
    """One chain of a rank: what it issued and waited for, where its time goes, and when each of its steps began and
    ended. numbers, begin, end: [N], numbers ascending; empty of a chain that leads: its steps are the rank's."""

    name: str
    program: Program
    time: ChainTime
    numbers: Int = field(default_factory=lambda: np.empty(0, np.int64))
    begin: Int = field(default_factory=lambda: np.empty(0, np.int64))
    end: Int = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class RankChains:
    """All chains of one rank. The first one *leads*: its steps are the rank's, and what it communicates it is that
    waits for it. own: what it issued to lanes of its own; flows: between its chains, whose targets follow those of
    `own`. launching: when the device was in phases of which the host had not launched the last yet: how long it stood
    idle then is not known. behind: the first of that, for as long as it came late to the phase: were it early, it might
    stand idle for so long more. incomplete: why not all of its device's time is known; empty: it is, or it has none.
    """

    chains: tuple[Chain, ...]
    time: RankTime
    own: LaneTasks
    flows: Flows = field(default_factory=Flows.none)
    launching: Intervals = field(default_factory=Intervals.empty)
    behind: Intervals = field(default_factory=Intervals.empty)
    incomplete: str = ""

    def outline(self) -> RankOutline:
        chains = tuple(
            ChainSteps(chain.name, chain.numbers, chain.begin, chain.end, chain.program[WHEN]) for chain in self.chains
        )
        return RankOutline(chains, self.own, self.flows)

    def without_waits(self) -> RankChains:
        """All that a graph is made of: what was waited for is in the programs."""
        chains = tuple(replace(chain, time=chain.time.without_waits()) for chain in self.chains)
        return replace(self, chains=chains, time=self.time.without_waits())


@dataclass(frozen=True, slots=True)
class ChainSteps:
    """The steps of a chain (`Chain`), and when its events are."""

    name: str
    numbers: Int
    begin: Int
    end: Int
    events: Int


@dataclass(frozen=True, slots=True)
class RankOutline:
    """What of a rank's chains (`RankChains`) is held of all ranks at once: not their programs, nor where time goes."""

    chains: tuple[ChainSteps, ...]
    own: LaneTasks
    flows: Flows

    @property
    def own_tasks(self) -> int:
        return len(self.own) + len(self.flows)


def of_thread(time: RankTime, program: Program) -> RankChains:
    """Of a rank without a device: its training thread is its only chain."""
    return RankChains((Chain("host", program, ThreadTime(time)),), time, time.lane_tasks)


def of_host(chains: RankChains) -> RankChains:
    """The rank with its training thread for its only chain: as it labels its time, with what it waited for."""
    host = chains.chains[-1]
    if len(chains.chains) == 1 or not isinstance(host.time, ThreadTime):
        return chains
    own, target = host.program[OWN], host.program[TARGET]
    kept = (own == 0) | (target < len(chains.own))
    program = tuple(column[kept] for column in host.program)
    alone = Chain(host.name, program, ThreadTime(chains.time))
    return replace(chains, chains=(alone,), flows=Flows.none())


def without_unseen_messages(chains: RankChains) -> RankChains:
    """The same of a rank with one chain, whose waits for messages of ranks that were not captured are no time of its
    own."""
    (chain,), time = chains.chains, chains.time.without_unseen_messages()
    return replace(chains, chains=(replace(chain, time=ThreadTime(time)),), time=time)


def without_own_lanes(chains: RankChains) -> RankChains:
    """The same, with what was issued to lanes of the rank's own as part of the thread's own work."""
    if not len(chains.own):
        return chains
    count = len(chains.own)

    def kept(chain: Chain) -> Chain:
        what, target, when, ended, action, own = chain.program
        stays = (own == 0) | (target >= count)
        program = what[stays], np.where(own == 1, target - count, target)[stays], when[stays], ended[stays]
        time = chain.time
        if isinstance(time, ThreadTime):
            time = replace(time, time=replace(time.time, lane_tasks=LaneTasks.none()))
        return replace(chain, program=(*program, action[stays], own[stays]), time=time)

    return replace(chains, chains=tuple(kept(chain) for chain in chains.chains), own=LaneTasks.none())
