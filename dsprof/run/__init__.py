"""A run, as it lies on disk.

ranks   the processes of its ranks: how each ended, and what it captured
info    run.json: what the run was
folder  where everything of it lies
find    which one a path names
"""

from __future__ import annotations

from .find import began, find_run, find_runs, runs_below
from .folder import DEFAULT_PARENT, FoundCapture, Hint, RunError, RunFolder, open_run
from .info import MOST_RANKS, HostPart, RunInfo, from_known, now
from .ranks import BY_HAND, INTERRUPTED, RankExit, RankInfo, failures, last_processes

__all__ = [
    "BY_HAND", "DEFAULT_PARENT", "INTERRUPTED", "MOST_RANKS", "FoundCapture", "Hint", "HostPart", "RankExit",
    "RankInfo", "RunError", "RunFolder", "RunInfo", "began", "failures", "find_run", "find_runs", "from_known",
    "last_processes", "now", "open_run", "runs_below",
]  # fmt: skip
