"""The exception that ends a process before it has a capture: `uncaught.<pid>.json` in the run folder.

A script that dies between `import torch` and its first step has joined no process group and taken no step, so there is
no capture in which `uncaught_exception` could tell of it. The launcher knows its ranks by their processes, and takes no
notice of what other processes leave. Before torch is imported nothing of dsprof is in the process.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

from dsprof.atomic import write_atomically
from dsprof.names import host_name

from ..capture import identity
from ..hooking.errors import count_error
from .uncaught_exception import describe, is_failure


def watch() -> None:
    """Tell, as this process ends, what ended it; only for a launcher that reads it."""
    if identity.setting("DSPROF_RUN"):
        atexit.register(_at_exit, os.getpid())


def _at_exit(watched: int) -> None:
    if os.getpid() == watched and not hasattr(sys, "ps1"):
        tell(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def tell(error: object) -> None:
    """Leave a word of this exception, unless it is no failure or this process has a capture. Never raises."""
    try:
        folder = Path(identity.setting("DSPROF_RUN"))
        host, process = host_name(), os.getpid()
        if is_failure(error) and not any((folder / "capture").glob(f"rank*.{host}.{process}")):
            words = json.dumps({**describe(error), "host": host})
            write_atomically(folder / f"uncaught.{process}.json", words + "\n")
    except Exception as failed:
        count_error("an uncaught exception", failed)
