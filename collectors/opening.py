"""What a capture is opened with: the folder it is written to, the recorder, the size limit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from dsprof.ranges import parse_size

from . import native, scratch
from .errors import count_error
from .helperless import SWITCHED_OFF, LeftOut, device_job, left_out
from .identity import Identity, setting
from .python_recorder import PyRecorder
from .record import LIMIT_BYTES, Recorder


class CapturePlace(NamedTuple):
    """Where a capture is written: into `root`/capture. `copied`: not the run folder, a copier brings it there."""

    root: Path
    copied: bool
    notes: list[str]


def place(run: Path, who: Identity) -> CapturePlace:
    """Where this rank's capture is written, with a copier beside it where it needs one."""
    try:
        chosen = scratch.choose(run, setting("DSPROF_SCRATCH"))
        if chosen.folder is None:
            return CapturePlace(run, False, [chosen.note] if chosen.note else [])
        local = chosen.folder / "capture" / who.folder_name
        scratch.make_private(local)
        scratch.start_copier(local, run, who.host)
        return CapturePlace(chosen.folder, True, [])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return CapturePlace(
            run, False, [f"captured into the run folder directly, as it cannot be copied from elsewhere: {error}"]
        )


def limit() -> int:
    """How large the capture may become, bytes. Raises ValueError."""
    given = setting("DSPROF_LIMIT")
    return parse_size(given) if given else LIMIT_BYTES


def recorder(folder: Path, limit: int) -> tuple[Recorder, bool, LeftOut]:
    """The recorder, whether it is the native one, and what is not recorded where it is not."""
    choice = setting("DSPROF_NATIVE").lower()
    reasons: list[str] = []
    if choice in ("0", "off", "false", "no"):
        reasons.append(SWITCHED_OFF)
    else:
        helper = native.load_or_build(wait=choice in ("1", "on", "true", "yes"), explain=reasons.append)
        if helper is not None:
            return helper.open(folder, limit), True, LeftOut(frozenset(), "")
    return PyRecorder(folder, limit), False, left_out("; ".join(reasons), _device())


def _device() -> str | None:
    """What shows that the job trains on a device. One of which that cannot be told is not to be slowed down, either."""
    try:
        return device_job()
    except Exception as error:  # something private of torch's that has moved
        count_error("what the job trains on", error)
        return "or perhaps not: it could not be told"
