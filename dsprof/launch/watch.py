"""Watches the ranks of a running job: says so when it hangs, and names the rank that it waits for.

The ranks' captures are live mappings, so their progress is read from there. A job hangs where no rank has begun or
ended anything for the time-out, ranks wait in a communication, and the rank that has not issued its part of it neither
works (CPU time, files, connections, its children's too) nor saves a checkpoint or compiles; or where ranks wait for
each other, or for different things under one number. See docs/hangs.md.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically
from dsprof.live.activity import Activity, kernel_children, kernel_threads, process_state
from dsprof.live.frames import short, user_site
from dsprof.live.tail import Tail
from dsprof.live.waiting import RankState, Stall, find_stall
from dsprof.names import host_name
from dsprof.run import RunFolder
from dsprof.schema import COPYING_FILE, HANGS_FILE, STANDSTILL, WENT_ON

from .talk import Talk

GRACE_S: Final = 1.5
"""For the ranks' own watchdogs, which look once a second, to say where they stand."""
MOST_BETWEEN_S: Final = 10.0
"""Between two looks at a job that stands still."""
SURE: Final = 2
"""Looks that must agree before it is said that a job which stands still does not hang: what a rank did just before it
fell asleep looks like work for one."""
AT_WORK: Final = {"checkpoint": "saves a checkpoint", "compile": "compiles"}
"""Phases that may take any time."""
ELSEWHERE: Final = 10
"""Times in a time-out that the captures of other hosts' ranks are looked at: there may be thousands, on a network."""
STOPPED: Final = "Tt"
GONE: Final = ("", "Z", "X")


@dataclass
class Rank:
    """A rank's process."""

    rank: int
    restart: int
    host: str
    process: int
    tail: Tail
    activity: Activity
    gone: bool = False


@dataclass(frozen=True)
class Told:
    """A hang that was told: what each rank had issued then (`RankState.count`), and the processes of its ranks."""

    stall: Stall
    issued: dict[int, int]
    processes: dict[int, int]


@dataclass(frozen=True)
class Judgement:
    """Of a job that stands still. `hangs`: it does; else `words` says why it is not called so."""

    hangs: bool
    words: str
    stall: Stall
    details: dict[str, Any] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    """By each rank (`RankState.count`)."""


class HangWatch:
    """The launcher's watch over one run."""

    def __init__(
        self,
        folder: Callable[[], RunFolder],
        talk: Talk,
        timeout_s: float,
        *,
        abort: bool = False,
        places: tuple[Path, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: the run folder as of now, which hosts agree on when they have met. `places`: what may stand for it
        on this host."""
        self._folder, self._talk, self._timeout_s, self._abort = folder, talk, timeout_s, abort
        self._places = places
        self._clock = clock
        self._host = host_name()
        self._ranks: dict[int, Rank] = {}
        self._moved = clock()
        self._elsewhere_at = clock()
        self._next = 0.0
        self._hangs: list[dict[str, Any]] = []
        self._told: Told | None = None
        self._noticed = 0
        """How often in a row it was judged to stand still, and not to hang."""

    def look(self) -> bool:
        """Called about once a second; whether the job is to be ended now."""
        now = self._clock()
        if self._follow():
            self._go_on(now)
            return False
        still_s = now - self._moved
        if still_s < self._timeout_s / 2 - 1 or self._told is not None:
            return False
        for rank in self._ranks.values():
            if rank.host == self._host:
                rank.activity.sample(now)
        if still_s < self._timeout_s + GRACE_S or now < self._next:
            return False
        self._next = now + min(MOST_BETWEEN_S, max(1.0, still_s - self._timeout_s))
        self._elsewhere_at = now
        if self._follow():
            self._go_on(now)
            return False
        judgement = self._judge()
        if judgement is None:
            return False
        if not judgement.hangs:
            self._noticed += 1
            if self._noticed == SURE:
                self._talk.say(f"no progress for {still_s:.0f} s, which is not called a hang: {judgement.words}")
            return False
        stall = judgement.stall
        concerned = {
            rank: one.process for rank, one in self._ranks.items() if rank in {*stall.waiters, *stall.culprits}
        }
        self._told = Told(stall, judgement.issued, concerned)
        self._talk.warn(f"{_kind(judgement.stall)}: {judgement.words}; nothing has moved for {still_s:.0f} s")
        what = "ending the job" if self._abort else "waiting on (--on-hang abort would end it; Ctrl-C does)"
        self._talk.say(what)
        said = {"still_s": round(still_s, 1), "went_on": False, "aborted": self._abort}
        self._hangs.append({**judgement.details, **said})
        self._write()
        return self._abort

    def end_ranks(self) -> None:
        """Kill those of this host's ranks that outlived whoever started them."""
        armed = f"DSPROF_RUN={self._folder().path}".encode()
        for one in self._ranks.values():
            if one.host == self._host and process_state(one.process) not in GONE:
                with suppress(
                    OSError
                ):  # by its environment it is a process of this job, and no later one of its number
                    if armed in Path(f"/proc/{one.process}/environ").read_bytes().split(b"\0"):
                        os.kill(one.process, signal.SIGKILL)

    # --- following

    def _follow(self) -> bool:
        """Whether any rank has moved."""
        moved = False
        for root in (*self._places, self._folder().path):  # a copy may be behind
            for (rank, restart, host, process), path in RunFolder(root).captures():
                known = self._ranks.get(rank)
                if known is not None and (known.restart, known.process, known.host) == (restart, process, host):
                    continue
                if known is not None and (restart, _alive(process, host, self._host)) <= (
                    known.restart,
                    _alive(known.process, known.host, self._host),
                ):
                    continue
                self._ranks[rank] = Rank(rank, restart, host, process, Tail(path), Activity(process))
                moved = True
        latest: dict[str, int] = {}
        for one in self._ranks.values():
            latest[one.host] = max(latest.get(one.host, 0), one.restart)
        self._ranks = {rank: one for rank, one in self._ranks.items() if one.restart == latest[one.host]}
        now = self._clock()
        everywhere = now >= self._elsewhere_at
        if everywhere:
            self._elsewhere_at = now + self._timeout_s / ELSEWHERE
        for one in self._ranks.values():
            if one.host != self._host and not everywhere:
                continue
            try:
                moved = one.tail.follow() or moved
            except OSError:  # it is being copied, or was removed
                continue
            if not one.gone and one.host == self._host and process_state(one.process) in GONE:
                one.gone = moved = True  # those that wait for it may be told so in a moment
        return moved

    def _go_on(self, now: float) -> None:
        """Something has moved."""
        if self._told is not None:
            if not self._went_on(self._told):
                return
            stood_s = now - self._moved
            self._talk.warn(f"the job goes on, after {stood_s:.0f} s")
            self._hangs[-1].update(went_on=True, stood_s=round(stood_s, 1))
            self._write()
        self._told, self._noticed = None, 0
        self._moved = now

    def _went_on(self, told: Told) -> bool:
        """Whether what was waited for has come, or the job was started anew. That something moved is no sign of it:
        ranks of a job that is ended (by a time-out of torch, by Ctrl-C on another host) close what was under way."""
        stall, here = told.stall, self._ranks
        if any(here[rank].process != process for rank, process in told.processes.items() if rank in here):
            return True
        members = self._members()
        try:
            if stall.kind == "missing":
                came = [here[rank].tail.state(rank, members) for rank in stall.culprits if rank in here]
                reached = [state.has_reached(stall.operation, stall.waiters[0]) for state in came]
                if reached and None not in reached:
                    return all(reached)
            waiting = [here[rank].tail.state(rank, members) for rank in stall.waiters if rank in here]
        except OSError:
            return False
        return any(state.count > told.issued.get(state.rank, 0) for state in waiting)

    def _write(self) -> None:
        try:
            write_atomically(self._folder().path / HANGS_FILE, json.dumps(self._hangs, indent=1) + "\n")
        except OSError as error:
            self._talk.warn(f"warning: {HANGS_FILE} could not be written ({error.strerror or error})")

    # --- judging

    def _judge(self) -> Judgement | None:
        """Whether it hangs; None where nobody waits, or that cannot be told."""
        try:
            if any(
                (one.tail.folder / COPYING_FILE).exists() and one.host != self._host for one in self._ranks.values()
            ):
                return None  # of that one only what was so long ago is here
            if any(one.tail.dropped() or one.tail.is_off() for one in self._ranks.values()):
                return None
            members = self._members()
            states = {rank: one.tail.state(rank, members) for rank, one in self._ranks.items()}
        except OSError:
            return None
        stall = find_stall(states, members)
        if stall is None:
            return None
        told = {rank: self._standstill(one) for rank, one in self._ranks.items()}
        words, culprits = stall.words, stall.culprits
        if stall.kind == "stuck":
            culprits = tuple(rank for rank in sorted(self._ranks) if self._frozen(rank))
            if not culprits:
                return Judgement(False, f"{words}: the network may be slow", stall)
        if stall.kind == "missing":
            working = {rank: self._work(states[rank], told[rank]) for rank in culprits}
            if None in working.values():
                return None
            at_work = [f"rank {rank} {what}" for rank, what in working.items() if what]
            if at_work:
                return Judgement(False, f"{words}, but {', '.join(at_work)}", stall)
        where = [said for rank in culprits if (said := self._where(states[rank], told[rank]))]
        if where:
            words += f"; {'; '.join(where)}"
        here = {rank: self._ranks[rank] for rank in culprits if self._here(rank)}
        details = {
            "code": stall.code, "kind": stall.kind, "words": words, "culprits": list(culprits),
            "waiters": list(stall.waiters), "operation": asdict(stall.operation),
            "ended": [rank for rank in culprits if self._ranks[rank].gone],
            "frozen": [rank for rank in culprits if self._frozen(rank)],
            "threads": {str(rank): kernel_threads(one.process) for rank, one in here.items()},
            "children": {str(rank): kernel_children(one.process) for rank, one in here.items()},
        }  # fmt: skip
        return Judgement(True, words, stall, details, {rank: state.count for rank, state in states.items()})

    def _members(self) -> Callable[[str], list[int] | None]:
        groups: dict[str, list[int]] = {}
        for one in self._ranks.values():
            for fact in one.tail.facts("group"):
                groups[str(fact.get("name"))] = list(fact.get("ranks") or [])
        return lambda name: groups.get(name) or groups.get(name.partition("#")[0])

    def _standstill(self, one: Rank) -> dict[str, Any] | None:
        """What the rank's own watchdog said of the standstill that is under way; None: nothing."""
        facts = one.tail.facts(STANDSTILL, WENT_ON)
        if not facts or facts[-1]["fact"] != STANDSTILL:
            return None
        # One that can say nothing any more has not said either that it went on.
        stale = one.host == self._host and facts[-1].get("at_ns", 0) / 1e9 < self._moved
        return None if stale else facts[-1]

    def _here(self, rank: int) -> bool:
        return bool(self._ranks[rank].host == self._host)

    def _frozen(self, rank: int) -> bool:
        return self._here(rank) and process_state(self._ranks[rank].process) in STOPPED and not self._ranks[rank].gone

    def _work(self, state: RankState, told: dict[str, Any] | None) -> str | None:
        """What a rank does that others wait for; empty: nothing; None: not known."""
        one = self._ranks[state.rank]
        if one.gone or self._frozen(state.rank):
            return ""
        for phase, what in AT_WORK.items():
            if phase in state.phases:
                return what
        if state.device_wait:  # which spins, and moves nothing
            return ""
        works = one.activity.works(self._timeout_s / 2) if self._here(state.rank) else (told or {}).get("works")
        return None if works is None else "works" if works else ""

    def _where(self, state: RankState, told: dict[str, Any] | None) -> str:
        """Where it stands."""
        rank = state.rank
        one = self._ranks[rank]
        if one.gone:
            return f"the process of rank {rank} has ended"
        if self._frozen(rank):
            return f"the process of rank {rank} is stopped (SIGSTOP, or a debugger)"
        stacks = [thread for thread in one.tail.lock_stacks() if thread["trains"]] if told is None else []
        site = user_site(stacks[0]["frames"]) if stacks else (told or {}).get("site")
        if told is None and self._here(rank):
            inside = f" at {short(site)}" if site else ""
            return f"rank {rank} does not answer: native code{inside} holds the interpreter's lock"
        phases = (told or {}).get("phases") or []
        phase = f" in {phases[-1]}" if phases else ""
        device = f", where it waits for its device ({state.device_wait})" if state.device_wait else ""
        return f"rank {rank} is at {short(site)}{phase}{device}" if site else f"rank {rank} is{phase}" if phase else ""


def _kind(stall: Stall) -> str:
    return "desync" if stall.code == "run.desync" else "hang"


def _alive(process: int, host: str, here: str) -> bool:
    return host != here or process_state(process) not in GONE
