"""Errors inside the profiler: they must not reach the job, and must not be hidden either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from . import identity

LONGEST_LIST: Final = 20

noted: list[str] = []
"""Where it happened and what, for meta.json."""


def count_error(where: str, error: BaseException) -> None:
    """Note an error, in words, for the capture under way or to come."""
    if len(noted) < LONGEST_LIST:
        noted.append(f"{where}: {type(error).__name__}: {error}")


def report_failure(doing: str, error: BaseException) -> None:
    """A failure after which there may be no capture to note it in: leave a word in the run folder, never on stderr."""
    count_error(doing, error)
    folder = identity.setting("DSPROF_RUN")
    if not folder:
        return
    try:
        with open(Path(folder) / f"error.{os.getpid()}.txt", "a") as file:
            file.write(f"{doing}: {type(error).__name__}: {error}\n")
    except OSError:
        pass  # the folder is gone or the disk full: the launcher reports the missing rank
