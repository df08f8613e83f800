"""What a capture is opened with: the folder it is written to, the recorder, the size limit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from dsprof.ranges import parse_exit_wait, parse_size

from . import native, room, scratch
from .identity import Identity, setting
from .python_recorder import PyRecorder
from .record import LIMIT_BYTES, Recorder


class CapturePlace(NamedTuple):
    """Where a capture is written: into `root`/capture, `limit` bytes at most. `copied`: not the run folder, a copier
    brings it there."""

    root: Path
    copied: bool
    limit: int
    notes: list[str]


def place(run: Path, who: Identity, limit: int) -> CapturePlace:
    """Where this rank's capture is written, with a copier beside it where it needs one. `limit`: how large it may
    become where there is room."""
    try:
        ranks = room.ranks_here(os.environ, who.world_size)
        chosen = scratch.choose(run, setting("DSPROF_SCRATCH"), limit, ranks)
        notes = [chosen.note] if chosen.note else []
        if chosen.folder is None:
            return CapturePlace(run, False, limit, notes)
        if chosen.in_memory:  # it is not to stay there because the run folder cannot be made
            (run / "capture").mkdir(parents=True, exist_ok=True)
        local = chosen.folder / "capture" / who.folder_name
        local.mkdir(parents=True, exist_ok=True)
        scratch.start_copier(local, run, who.host, scratch.OPEN_EVERY_S if chosen.in_memory else 0.0)
        return CapturePlace(chosen.folder, True, chosen.limit or limit, notes)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        note = f"captured into the run folder directly, as it cannot be copied from elsewhere: {error}"
        return CapturePlace(run, False, limit, [note])


def limit() -> int:
    """How large the capture may become, bytes. Raises ValueError."""
    given = setting("DSPROF_LIMIT")
    return parse_size(given) if given else LIMIT_BYTES


def exit_wait_s() -> float:
    """How long a rank waits at its end until its capture is copied. Raises ValueError."""
    return parse_exit_wait(setting("DSPROF_EXIT_WAIT"))


def recorder(folder: Path, limit: int, copied: bool) -> tuple[Recorder, bool, list[str]]:
    """The recorder, whether it is the native one, and why not."""
    choice = setting("DSPROF_NATIVE").lower()
    if choice in ("0", "off", "false", "no"):
        return PyRecorder(folder, limit, copied), False, []
    reasons: list[str] = []
    helper = native.load_or_build(wait=choice in ("1", "on", "true", "yes"), explain=reasons.append)
    if helper is not None:
        return helper.open(folder, limit, copied), True, []
    note = f"recorded in Python, which is slower, as there is no native helper: {'; '.join(reasons)}"
    return PyRecorder(folder, limit, copied), False, [note]
