"""What keeps a process from running although its threads have work: a CPU quota, want of memory, its own other threads.

Read once a second on a side thread (`machine_load`), each as a count of seconds or events since it began. What a system
does not tell is left out.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from dsprof import gauges

from ..hooking.statements import state
from ..system import proc

Reading = Iterable[tuple[str, float]]
"""Gauges with their values."""
MOST_THREADS: Final = 16
"""Of the script's own, that are looked at."""
MOST_NAMES: Final = 256
"""Of theirs, that are told in a process: one that makes a thread with a new name every step has any number, and a
capture only so many."""
OURS: Final = "dsprof-"
"""How the names of dsprof's own threads begin."""


class Throttled:
    """How long the CPU quotas of its cgroups have kept threads of the process waiting since the first look. Each counts
    for itself, what it did to other processes too, so that from one look to the next the longest counts."""

    def __init__(self) -> None:
        self._last: dict[Path, float] = {}
        """Folder of a cgroup -> seconds when it was looked at last."""
        self._seconds = 0.0

    def __call__(self, root: str) -> Reading:
        """0 where cgroups can be read, and none has a quota."""
        more, readable = 0.0, False
        for folder, version in proc.cgroups_of(proc.CPU, Path(root)):
            seconds = _cpu_stat(folder, version)
            if seconds is not None:
                readable = True
                more = max(more, seconds - self._last.get(folder, seconds))
                self._last[folder] = seconds
        if readable:
            self._seconds += more
            yield gauges.THROTTLED, self._seconds


def _cpu_stat(folder: Path, version: int) -> float | None:
    fields = dict(line.split(" ", 1) for line in proc.read(folder / "cpu.stat").decode().splitlines() if " " in line)
    if version == 2:  # where no quota can be set, only what was used is counted
        return int(fields.get("throttled_usec", 0)) / 1e6 if fields else None
    return int(fields["throttled_time"]) / 1e9 if "throttled_time" in fields else None


def state_limit(root: str = proc.PROC) -> None:
    """State how many cores the quota of its cgroups allows, where there is one: the lowest; and whether all of them can
    be seen, as a quota of one above a container stops what is in it, too."""
    state({"fact": "cpu_cgroups", "whole": proc.sees_every_cgroup(proc.CPU, Path(root))})
    limits = [
        (cores, folder)
        for folder, version in proc.cgroups_of(proc.CPU, Path(root))
        if (cores := _cores(folder, version))
    ]
    if limits:
        cores, folder = min(limits, key=lambda one: one[0])
        state({"fact": "cpu_limit", "cores": round(cores, 3), "cgroup": str(folder)})


def _cores(folder: Path, version: int) -> float | None:
    if version == 2:
        quota, _, period = proc.read(folder / "cpu.max").decode().strip().partition(" ")
    else:
        names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        quota, period = (proc.read(folder / name).decode().strip() for name in names)
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def read_faults(_: str) -> Reading:
    """Pages that had to be read from a disk, or from swap."""
    yield gauges.MAJOR_FAULTS, resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def read_memory_stall(root: str) -> Reading:
    """How long tasks of its cgroup stood still for want of memory (PSI); of the machine where the cgroup has none."""
    of_groups = [
        folder / "memory.pressure" for folder, version in proc.cgroups_of(proc.MEMORY, Path(root)) if version == 2
    ]
    for path in (*of_groups, Path(root) / "pressure" / "memory"):
        line = proc.read(path).decode().partition("\n")[0]
        if line.startswith("some "):
            yield gauges.MEMORY_STALL, int(line.rpartition("total=")[2]) / 1e6
            return


_names: set[str] = set()
"""Those that were told."""


def read_threads(root: str) -> Reading:
    """CPU time of the Python threads beside the first one: each holds the interpreter's lock while it runs Python."""
    spent: dict[str, float] = {}
    for thread in _threads():
        fields = proc.stat(f"self/task/{thread.native_id}", root)
        if fields and (thread.name in _names or len(_names) < MOST_NAMES):
            _names.add(thread.name)
            ticks = int(fields[proc.USER_TICKS]) + int(fields[proc.SYSTEM_TICKS])
            spent[thread.name] = spent.get(thread.name, 0.0) + ticks / proc.TICKS_A_SECOND
    for name, seconds in spent.items():
        yield gauges.PYTHON_THREAD + name, seconds


def _threads() -> Iterator[threading.Thread]:
    others = [
        thread for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.name.startswith(OURS) and thread.native_id
    ]  # fmt: skip
    yield from others[:MOST_THREADS]


READERS: Final = (Throttled(), read_faults, read_memory_stall, read_threads)
