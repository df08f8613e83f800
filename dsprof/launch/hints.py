"""Launch hints: what to type instead, where a job died because the script wants to be started in another way."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Final

from dsprof.run import Hint, RunFolder
from dsprof.schema import host_name

from .devices import visible_gpus
from .job import Job

WANTS_RANKS: Final = "wants-ranks"
WANTS_NO_RANKS: Final = "wants-no-ranks"
LONGEST_REASON: Final = 200


def launch_hints(folder: RunFolder, job: Job, flags: Sequence[str]) -> list[str]:
    """A sentence for each kind of wish that the job's processes left in the run folder, and that it was not granted.

    `flags` are those of dsprof itself that were typed: they stay in the line to type.
    """
    found: dict[str, str] = {}
    for hint in folder.read_hints():
        if hint.kind not in found and is_credible(folder, hint):
            found[hint.kind] = one_line(hint.reason)
    hints: list[str] = []
    if not job.has_ranks and WANTS_RANKS in found:
        hints.append(f"the script wants to be started with ranks ({found[WANTS_RANKS]}){with_ranks(job, flags)}")
    if (job.has_ranks or job.is_command) and WANTS_NO_RANKS in found:
        reason = found[WANTS_NO_RANKS]
        # May: one that asks for NCCL whatever its environment wants a GPU, and cannot be told from the others.
        hints.append(f"the script may want to be one process, started without ranks ({reason}){without(job, flags)}")
    return hints


def is_credible(folder: RunFolder, hint: Hint) -> bool:
    """A process that was captured had become a rank: it may spawn processes for purposes of its own."""
    return hint.kind != WANTS_NO_RANKS or folder.rank_of(host_name(), hint.pid) is None


def with_ranks(job: Job, flags: Sequence[str]) -> str:
    if job.is_command:
        return ": put torchrun, or another launcher that sets RANK, into the command after --"
    return typed(flags, "--nproc-per-node", str(visible_gpus(os.environ) or 2), *job.words)


def without(job: Job, flags: Sequence[str]) -> str:
    if job.is_command:
        return ": leave the launcher out of the command after --"
    if job.is_program:
        return typed(flags, "--", *job.words)
    if job.on_our_engine:  # which starts ranks itself, but for a command
        return typed(flags, "--", "python", *job.words)
    return typed(flags, *job.words)


def typed(flags: Sequence[str], *words: str) -> str:
    return f"; type: {shlex.join(['dsprof', 'run', *flags, *words])}"


def one_line(reason: str) -> str:
    """What another process wrote, fit for one line."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 3] + "..."
