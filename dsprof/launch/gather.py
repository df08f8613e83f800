"""Captures that were written to a local disk first: waiting until they are in the run folder, saying which are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsprof.collectors.capture import scratch
from dsprof.names import host_name
from dsprof.run import RunFolder
from dsprof.schema import COPYING_FILE

from .talk import Talk, shown

PATIENCE_S: Final = 300.0
"""For how long captures of this host may be on their way when the job has ended."""
PATIENCE_ELSEWHERE_S: Final = 60.0
"""And those of another, of which nobody here can tell whether they are."""
PATIENCE_FAILED_S: Final = 3.0
"""And one whose copying failed, and is tried again."""
LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True)
class Gathering:
    """What is done about captures that are not in the run folder yet."""

    folder: RunFolder
    talk: Talk
    places: tuple[Path, ...] = ()
    """What may stand for the run folder on this host."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def finish(self) -> None:
        """Wait for those under way, bring what nobody brings any more, and name what stays behind."""
        host, began, said = host_name(), self.clock(), False
        while pending := [item for item in self._waiting() if self._is_awaited(item, host, self.clock() - began)]:
            if not said and self.clock() - began > 1.0:
                said = True
                count = "one capture" if len(pending) == 1 else f"{len(pending)} captures"
                self.talk.say(f"waiting for {count} to be copied to {shown(self.folder.path)}")
            self.sleep(LOOK_EVERY_S)
        for item in self._waiting():
            here = item.state.host == host
            if here and not item.under_way(host) and scratch.bring(item, self.folder.path, self.places):
                continue
            self.talk.warn(f"warning: {self._what_stays(item)}")

    def _waiting(self) -> list[scratch.Waiting]:
        return scratch.waiting(self.folder.path, self.places)

    def _is_awaited(self, item: scratch.Waiting, host: str, waited_s: float) -> bool:
        patience = PATIENCE_S if item.state.host == host else PATIENCE_ELSEWHERE_S
        if item.state.error:
            patience = PATIENCE_FAILED_S
        return item.under_way(host) and waited_s < patience

    def _what_stays(self, item: scratch.Waiting) -> str:
        into = f"{shown(self.folder.capture)}/"
        why = f" ({item.state.error})" if item.state.error else ""
        if not scratch.is_stand_in(Path(item.state.local), self.folder.path):
            return (
                f"the capture of rank {item.rank} is not all in {into}{why}; its {COPYING_FILE} names a folder that "
                "does not stand for this run, which is left alone"
            )
        if item.state.gone:
            return (
                f"the capture of rank {item.rank} is not all in {into}: {item.state.local} on {item.state.host} was "
                "removed before all of it was copied; what was copied is analyzed. Keep cleaners of temporary files "
                "away from it, or name another folder by --scratch DIR"
            )
        return (
            f"the capture of rank {item.rank} is not all in {into}{why}; the rest is kept on {item.state.host}: "
            f"cp -r {shown(Path(item.state.local))} {into}"
        )
