"""Whether the kernel killed a rank for want of memory: its cgroup counts how often it did, before the job and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsprof.collectors.memory.process_memory import oom_kills
from dsprof.names import host_name
from dsprof.run import RunFolder, RunInfo, failures

from .peak import facts_told


def note_oom_kills(folder: RunFolder, info: RunInfo) -> None:
    """Put into `info` how many processes were killed so, where ranks of this host ended by a signal and their cgroup
    counts it."""
    gone = [item.rank for item in failures(info.exits) if item.signal is not None and item.host == host_name()]
    told = facts_told(folder) if gone else {}
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for rank in gone:
        limits: dict[str, Any] = next(
            (fact for fact in reversed(told.get(rank, [])) if fact["fact"] == "memory_limits"), {}
        )
        before = limits.get("oom_kills")
        if limits.get("path") and isinstance(before, int):
            ranks_of.setdefault((str(limits["path"]), before), []).append(rank)
    for (path, before), ranks in ranks_of.items():
        now = oom_kills(Path(path))
        if now is not None and now > before:
            info.oom_kills.append({"ranks": sorted(ranks), "path": path, "kills": now - before})
