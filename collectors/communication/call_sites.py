"""Which lines of the script issue which collectives, so that ranks that disagree about one can be told where each
issued its own: a `mark` for each line and for each name, size and type of what it issues. Where several lines issue the
same, none of them is to be taken for the one that issued a certain collective.

To look at the stack takes microseconds, so at level light not every call is looked at, but the first of those that are
alike, and then one of many. The twin in C++ is `native/call_sites.hpp`.
"""

from __future__ import annotations

from typing import Final

from dsprof.schema import ALL_MARKED, CALL_SITE, Kind

from ..capture.open_capture import OpenCapture
from ..hooking.uninstall import Uninstall, replace_attribute
from ..native import NativeRecorder
from ..recorder.python_recorder import PyRecorder
from ..recorder.record import Recorder
from ..recorder.source_locations import SourceLocations
from ..system.clock import now_ns

EVERY: Final = 61
"""Of those alike that come after the first ALL_MARKED, one in so many is looked at, at level light. A prime number, as
steps repeat themselves."""
MOST: Final = 2000
"""Lines, of a name, size and type each, that are marked; where there are more, a mark without a name says so."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Mark the lines that issue collectives from now on."""
    recorder, every = capture.recorder, 1 if capture.full else EVERY
    if isinstance(recorder, NativeRecorder):
        recorder.install_call_sites(ALL_MARKED, every, MOST)
        return [recorder.uninstall_call_sites]
    if isinstance(recorder, PyRecorder):
        return [replace_attribute(recorder, "note_call", CallSites(recorder, every).note)]
    return []


class CallSites:
    """Those of one capture, for the hooks in Python."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self._recorder = recorder
        self._every = every
        self._here = SourceLocations(recorder).here
        self._mark = recorder.intern(CALL_SITE)
        self._times: dict[tuple[int, int, int], int] = {}
        self._known: set[tuple[int, int, int, int]] = set()

    def note(self, name: int, bytes: int, dtype: int, issue_ns: int) -> None:
        """This thread is about to issue one (`issue_ns` 0), or issued it then. `name` is an id, `dtype` an index into
        DTYPES."""
        if len(self._known) > MOST:
            return
        alike = name, bytes, dtype
        times = self._times[alike] = self._times.get(alike, 0) + 1
        if times > ALL_MARKED and (times - ALL_MARKED) % self._every:
            return
        site = self._here()
        known = (*alike, site)
        if known in self._known:
            return
        if len(self._known) == MOST:
            name, bytes, dtype, site = 0, -1, 0, 0
        at = issue_ns or now_ns()
        mark = Kind.MARK, self._mark, at, at, 0, dtype, bytes, 0, 0, -1, -1, 0, name, -1, site
        if self._recorder.span(*mark):  # else the capture is off
            self._known.add(known)
