"""The process's memory as the kernel counts it, and what limits it."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..system import proc

LIMITS: Final = {1: "memory.limit_in_bytes", 2: "memory.max"}
"""Version of cgroups -> file of a cgroup's limit, bytes."""


@dataclass(frozen=True)
class HostLimits:
    """Bytes, None: no limit, or not known.

    cgroup:        the lowest of the cgroups that the process is in; path: that cgroup's folder
    address_space: RLIMIT_AS
    host:          the host's memory
    oom_kills:     how often the kernel had killed a process of that cgroup
    """

    cgroup: int | None
    path: str
    address_space: int | None
    host: int | None
    oom_kills: int | None

    @property
    def least(self) -> int | None:
        """Of what limits resident memory."""
        return min((one for one in (self.cgroup, self.host) if one is not None), default=None)


class HostMemory:
    """Reads /proc; `statm` stays open, as it is read after every step."""

    def __init__(self, root: Path = Path(proc.PROC), cgroups: Path = Path(proc.CGROUPS)) -> None:
        self._proc, self._cgroups = root, cgroups
        self._peak = 0
        self._statm = os.open(root / "self" / "statm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._statm)

    def now(self) -> tuple[int, int]:
        """Resident and virtual memory, bytes."""
        virtual, resident = os.pread(self._statm, 96, 0).split()[:2]
        return int(resident) * proc.PAGE, int(virtual) * proc.PAGE

    def resident_peak(self, resident: int = 0) -> int:
        """The most so far; not all kernels keep it, so it is no less than `resident` and what was told before."""
        self._peak = max(self._peak, resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return self._peak

    def limits(self) -> HostLimits:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        least, folder = min(self._cgroup_limits(), default=(None, None))
        return HostLimits(
            cgroup=least,
            path="" if folder is None else str(folder),
            address_space=None if soft == resource.RLIM_INFINITY else soft,
            host=self._of_host(),
            oom_kills=None if folder is None else oom_kills(folder),
        )

    def _of_host(self) -> int | None:
        found = re.search(r"^MemTotal:\s+(\d+) kB", proc.read_whole(self._proc / "meminfo"), re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def _cgroup_limits(self) -> list[tuple[int, Path]]:
        """Of the process's memory cgroup and those above it, as far as they are seen from here."""
        found = []
        for folder, version in proc.cgroups_of(proc.MEMORY, self._proc, self._cgroups):
            limit = proc.read_whole(folder / LIMITS[version]).strip()
            if limit.isdigit() and 0 < int(limit) < proc.UNLIMITED:
                found.append((int(limit), folder))
        return found


def oom_kills(folder: Path) -> int | None:
    """How often the kernel has killed a process of this cgroup for want of memory; None where it does not tell."""
    for name in ("memory.events", "memory.oom_control"):
        found = re.search(r"^oom_kill (\d+)", proc.read_whole(folder / name), re.MULTILINE)
        if found:
            return int(found[1])
    return None
