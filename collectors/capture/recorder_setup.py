"""What a capture is opened with: the folder it is written to, the recorder, the size limit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from dsprof.permissions import make_folders
from dsprof.ranges import parse_exit_wait, parse_size

from .. import native
from ..hooking.errors import count_error
from ..recorder.python_recorder import PyRecorder
from ..recorder.record import LIMIT_BYTES, Recorder
from . import free_space, scratch
from .facts import Fact
from .identity import Identity, setting
from .without_helper import SWITCHED_OFF, LeftOut, device_job, left_out


class CapturePlace(NamedTuple):
    """Where a capture is written: into `root`/capture, `limit` bytes at most. `copied`: not the run folder, a copier
    brings it there."""

    root: Path
    copied: bool
    limit: int
    notes: list[str]

    @property
    def written_first(self) -> Fact | None:
        """The fact that says where it is written first; None: nowhere else."""
        if not self.copied:
            return None
        within = self.root.parents[1]
        return {"fact": "written_first", "folder": str(within), "file_system": scratch.file_system(within)}


def place(run: Path, who: Identity, limit: int) -> CapturePlace:
    """Where this rank's capture is written, with a copier beside it where it needs one. `limit`: how large it may
    become where there is room."""
    try:
        ranks = free_space.ranks_here(os.environ, who.world_size)
        chosen = scratch.choose(run, setting("DSPROF_SCRATCH"), limit, ranks)
        notes = [chosen.note] if chosen.note else []
        if chosen.folder is None:
            return CapturePlace(run, False, limit, notes)
        if chosen.in_memory:  # it is not to stay there because the run folder cannot be made
            make_folders(run, ("capture",))
        local = chosen.folder / "capture" / who.folder_name
        scratch.make_private(local)
        scratch.hold(local)
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


def recorder(folder: Path, limit: int, copied: bool) -> tuple[Recorder, bool, LeftOut]:
    """The recorder, whether it is the native one, and what is not recorded where it is not."""
    choice = setting("DSPROF_NATIVE").lower()
    reasons: list[str] = []
    if choice in ("0", "off", "false", "no"):
        reasons.append(SWITCHED_OFF)
    else:
        helper = native.load_or_build(wait=choice in ("1", "on", "true", "yes"), explain=reasons.append)
        if helper is not None:
            return helper.open(folder, limit, copied), True, LeftOut(frozenset(), "")
    return PyRecorder(folder, limit, copied), False, left_out("; ".join(reasons), _device())


def _device() -> str | None:
    """What shows that the job trains on a device. One of which that cannot be told is not to be slowed down, either."""
    try:
        return device_job()
    except Exception as error:  # something private of torch's that has moved
        count_error("what the job trains on", error)
        return "or perhaps not: it could not be told"
