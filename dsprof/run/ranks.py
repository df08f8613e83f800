"""The processes of a run's ranks: how each ended, and what it captured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

BY_HAND: Final = 128 + signal.SIGINT
INTERRUPTED: Final = (BY_HAND, 128 + signal.SIGTERM)
"""Status of a run that was stopped from the keyboard; of one that was stopped by somebody, a scheduler perhaps."""

Process = TypeVar("Process", "RankExit", "RankInfo")


@dataclass
class RankExit:
    """How one rank's process ended, as its launcher saw it."""

    rank: int
    host: str
    pid: int
    code: int | None
    """Exit status as the operating system gave it: 0..255; None when it ended by a signal."""
    signal: int | None
    ended_ns: int | None
    """Monotonic clock of the host, for telling who died first."""
    restart: int = 0
    """Which elastic restart of the job the process belonged to."""
    stopped: bool = False
    """The launcher ended it: another rank had failed, or the job was interrupted."""
    ended_epoch_ns: int | None = None
    """The same moment by the host's wall clock, for telling who died first on which host."""

    @property
    def status(self) -> int:
        """What a shell would report: the exit code, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code or 0

    @property
    def how(self) -> str:
        """What ended it: `exit status 7`, `SIGKILL`."""
        if self.signal is None:
            return "running or unknown" if self.code is None else f"exit status {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:  # a real-time signal, or one of another platform
            return f"signal {self.signal}"


@dataclass
class RankInfo:
    """One rank's capture, as merged."""

    rank: int
    restart: int
    host: str
    pid: int
    capture: str
    """Name of its folder under capture/."""
    native: bool
    last_step: int
    """Last completed step; -1: none."""
    records: int
    dropped: int
    """Records not written: the disk was full, or the capture reached its size limit."""
    damaged: int
    """Records that could not be read back: torn or corrupt."""
    errors: int
    """Errors inside the collectors: caught, counted, and of no consequence to the job."""
    closed: bool
    """The capture was closed in order (not by a kill)."""
    started_ns: int | None = None
    """When the process began, by the monotonic clock of its host; None where that is not known."""
    opened_ns: int | None = None
    """When capturing began."""
    closed_ns: int | None = None
    """When it ended; None where it was not closed in order."""
    clock: str = ""
    """Names the monotonic clock that its times are of; empty where that is not known, and its host stands for it."""

    @property
    def clock_name(self) -> str:
        """Ranks of which it is the same read one clock."""
        return self.clock or self.host


def last_processes(processes: Iterable[Process]) -> list[Process]:
    """The last process of each rank, by rank: how it ended, or what it captured.

    Restarts are counted by each host's launcher: one host may be at its second while another is at its first. A rank
    that moved to another host has its last process there, and one that a shrunken job no longer has is gone.
    """
    every = list(processes)
    last: dict[str, int] = {}
    for item in every:
        last[item.host] = max(last.get(item.host, 0), item.restart)
    final = [item for item in every if item.restart == last[item.host]]
    by_rank = {item.rank: item for item in sorted(final, key=lambda item: item.restart)}
    return [by_rank[rank] for rank in sorted(by_rank)]


def failures(exits: list[RankExit]) -> list[RankExit]:
    """Ranks whose last process failed by itself, the first to end first."""
    failed = [item for item in last_processes(exits) if item.status and not item.stopped]
    return sorted(failed, key=lambda item: item.ended_epoch_ns or item.ended_ns or sys.maxsize)
