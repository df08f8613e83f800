"""Failures where there is no capture that could say so: a line in the run folder tells the launcher."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from dsprof.permissions import make_named_folder, open_to_append

from ..hooking.errors import count_error, describe
from . import identity


def report_failure(doing: str, error: BaseException) -> None:
    """A failure after which there may be no capture to note it in: leave a word in the run folder, never on stderr.
    Raises what is a signal handler's again."""
    count_error(doing, error)
    leave_word(f"{doing}: {describe(error)}")


def leave_word(text: str) -> None:
    """Leave a line in the run folder, for where there is no capture that could say it. Never raises."""
    try:
        given = identity.setting("DSPROF_RUN")
        folder = Path(given) if given else _own_folder()
        with os.fdopen(open_to_append(folder / f"error.{os.getpid()}.txt"), "a") as file:
            file.write(f"{text}\n")
    except Exception:
        pass  # the folder is gone or the disk full: the launcher reports the missing rank


@functools.cache
def _own_folder() -> Path:
    """The run folder of a process without a launcher, in which no capture could be begun. Raises OSError."""
    folder = identity.run_folder(identity.identify())
    make_named_folder(folder)
    return folder
