"""Launch hints: a script that wants to be started in another way leaves a word for the launcher.

`hint.<pid>.json` in the run folder: {"kind": "wants-ranks" | "wants-no-ranks", "reason": "..."}. The exception, and
with it how the job ends, stays what it is.
"""

from __future__ import annotations

import atexit
import json
import linecache
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from dsprof.atomic import write_atomically
from dsprof.redact import redact_text

from ..capture import identity
from ..hooking.errors import count_error
from ..hooking.wrap import stands_for

VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for a rank."""

RENDEZVOUS: Final = re.compile(r"environment variable (\w+) expected, but not set")
"""What `init_process_group` says where it is to find its place in the environment, and cannot."""

WITHOUT_NCCL: Final = ("doesn't have NCCL built in", "ProcessGroupNCCL is only supported with GPUs")
LONGEST_CHAIN: Final = 20

_main_process = os.getpid()
_refused: list[BaseException] = []
"""What `init_process_group` raised, as long as nothing has been trained since."""


def watch() -> None:
    """Leave a hint where this process turns out to want one; only for a launcher that reads it."""
    if not identity.setting("DSPROF_RUN"):
        return
    atexit.register(_at_exit)
    if _by_torchrun() and multiprocessing.parent_process() is None:
        _watch_spawning()


def _by_torchrun() -> bool:
    return "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def refused(error: BaseException) -> None:
    """`init_process_group` raised this. The script, or a library that runs it, may catch it and end all the same."""
    _refused[:] = [error]


def training() -> None:
    """The process trains: whatever it was refused, it does without."""
    _refused.clear()


def leave(kind: Literal["wants-ranks", "wants-no-ranks"], reason: str) -> None:
    """Write a hint. Never raises."""
    try:
        path = Path(identity.setting("DSPROF_RUN")) / f"hint.{os.getpid()}.json"
        write_atomically(path, json.dumps({"kind": kind, "reason": redact_text(reason)}) + "\n")
    except Exception as error:
        count_error("hint", error)


def _watch_spawning() -> None:
    """A script that starts its own ranks, in each rank of a launcher: they would wait for each other for ever."""
    import torch.multiprocessing as torch_multiprocessing

    module = sys.modules.get("torch.multiprocessing.spawn")
    for name in ("spawn", "start_processes"):
        original = getattr(module, name, None)
        if original is None:
            continue
        replacement = _telling(original)
        for place in (module, torch_multiprocessing):
            if getattr(place, name, None) is original:
                setattr(place, name, replacement)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @stands_for(original)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() == _main_process:
            leave("wants-no-ranks", "it starts its own processes with torch.multiprocessing")
        return original(*args, **kwargs)

    return spawn


def _at_exit() -> None:
    try:
        if os.getpid() != _main_process:
            return
        uncaught = getattr(sys, "last_value", None)
        for one in _chain(uncaught if isinstance(uncaught, BaseException) else next(iter(_refused), None)):
            missing = missing_variable(one)
            if missing is not None and not os.environ.get(missing):
                leave("wants-ranks", f"it needs {missing}, which is not set")
                return
            if _by_torchrun() and any(text in str(one) for text in WITHOUT_NCCL):
                leave("wants-no-ranks", "given ranks, it wants NCCL, and there is no GPU")
                return
    except Exception as error:
        count_error("hint", error)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The exception, what it was raised from, and so on."""
    found: list[BaseException] = []
    step = error
    while step is not None and len(found) < LONGEST_CHAIN:
        found.append(step)
        step = step.__cause__ or step.__context__
    return found


def missing_variable(error: BaseException) -> str | None:
    """The variable for want of which a process was ended by `error`; None if that is not why."""
    if isinstance(error, KeyError) and error.args and error.args[0] in VARIABLES:
        # os.environ["RANK"], not a dictionary of the script's own
        file = _last_place(error)[0]
        return str(error.args[0]) if file in (os.__file__, "<frozen os>") else None
    if isinstance(error, ValueError):
        told = RENDEZVOUS.search(str(error))
        return told[1] if told is not None and told[1] in VARIABLES else None
    if isinstance(error, TypeError):  # int(os.environ.get("RANK"))
        file, line = _last_place(error)
        text = linecache.getline(file, line)
        if "environ" in text or "getenv" in text:
            named = re.findall(r"[\"'](\w+)[\"']", text)
            return next((name for name in named if name in VARIABLES and name not in os.environ), None)
    return None


def _last_place(error: BaseException) -> tuple[str, int]:
    """File and line where it was raised."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
