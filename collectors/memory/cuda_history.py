"""The allocation history of CUDA (level full), and snapshots of what the allocators hold: files of a capture that
merging reads into the trace's side tables (`schema.SNAPSHOT_NAME`, `schema.OOM_SNAPSHOT_NAME`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import replacing
from dsprof.schema import OOM_SNAPSHOT_NAME, SNAPSHOT_NAME

from ..capture import identity
from ..hooking.errors import count_error
from ..hooking.statements import Fact
from .cuda_memory import Cuda, TorchCuda

MOST_EVENTS: Final = 100_000
"""Of each device, that are kept; about 1 KB each, with its stack."""


class History:
    """One process's. torch keeps the last events and drops those before."""

    def __init__(self, cuda: Cuda, most: int = MOST_EVENTS) -> None:
        self._cuda, self._most = cuda, most
        self._unwatch: Callable[[], None] | None = None
        self.recording = False
        """We have it recorded."""
        self.theirs = False
        """The script has."""

    def begin(self) -> None:
        """Record from now on, or as soon as CUDA is in use."""
        process = os.getpid()

        def begin() -> None:
            try:
                if os.getpid() == process:  # not in a child that was forked before CUDA was in use
                    self._begin()
            except Exception as error:
                count_error("the memory history", error)

        self._cuda.when_initialized(begin)

    def _begin(self) -> None:
        if self.recording or self.theirs:
            return
        if self._cuda.records_history():
            self.theirs = True
            return
        self._cuda.record_history(self._most)
        self.recording = True
        if self._unwatch is None:
            self._unwatch = self._cuda.watch_recording(self._taken_over)

    def _taken_over(self) -> None:
        self.recording, self.theirs = False, True

    def stop(self) -> None:
        """What was recorded stays to be read."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self.recording:
            self.recording = False
            self._cuda.record_history(None)

    def overflowed(self, snapshot: dict[str, Any]) -> list[int]:
        """Devices whose first events are gone."""
        traces = snapshot.get("device_traces", [])
        return [device for device, events in enumerate(traces) if len(events) >= self._most]


class Snapshots:
    """Writes snapshots into a capture's folder, and notes of what they lack."""

    def __init__(self, cuda: Cuda, history: History, folder: Path, write_fact: Callable[[Fact], None]) -> None:
        self._cuda, self._history, self._folder, self._write_fact = cuda, history, folder, write_fact

    def write(self, *, out_of_memory: bool = False) -> str:
        """Write one, in the place of the last of its kind; its file's name. Raises what torch and the disk do."""
        snapshot = self._cuda.snapshot()
        name = OOM_SNAPSHOT_NAME if out_of_memory else SNAPSHOT_NAME
        with (
            replacing(self._folder / name) as temporary,
            temporary.open("wb") as file,
        ):  # closed before it takes the place
            pickle.dump(snapshot, file, protocol=4)
        for device in self._history.overflowed(snapshot) if self._history.recording else ():
            self._note(
                f"the memory history of device {device} begins with its last {self._history._most:,} events: what came "
                "before was overwritten (capture fewer steps, --steps A:B)"
            )
        return name

    def _note(self, text: str) -> None:
        self._write_fact({"fact": "note", "text": text})


_history: History | None = None


def history() -> History:
    """This process's."""
    global _history
    if _history is None:
        _history = History(TorchCuda())
    return _history


def watch() -> None:
    """Record from the first use of CUDA on, which is before a capture opens: the model is made before it is trained.
    Not of a run of which a part is captured only."""
    if not (identity.setting("DSPROF_STEPS") or identity.setting("DSPROF_DELAY")):
        history().begin()
