"""The watchdog of a rank: where nothing has been recorded for the time-out, where each of its threads stands becomes a
fact. It calls nothing hung: that takes all ranks (`dsprof.live.waiting`).

It is a thread that reads this rank's own records every few seconds. No hook knows of it, and no signal is handled. A
thread that holds the interpreter's lock keeps it from running: where there is a native helper, a thread of that one
writes the stacks then, without the lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from dsprof.live.activity import Activity, kernel_threads, name_thread
from dsprof.live.frames import user_site
from dsprof.live.tail import Tail
from dsprof.live.waiting import RankState
from dsprof.ranges import parse_hang_timeout
from dsprof.schema import HANG_TIMEOUT, STACKS_FILE, STANDSTILL, WENT_ON

from ..capture.identity import setting
from ..capture.open_capture import OpenCapture
from ..communication import process_groups
from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..system.clock import now_ns
from . import thread_stacks

SHORTEST_LOOK_S: Final = 1.0
LONGEST_LOOK_S: Final = 3.0
LOCKS_EVERY_S: Final = 1.0
"""How often the helper looks whether Python can run at all."""
LOOKS: Final = 200
"""How often it looks: while the rank goes on so many times in the time-out, within limits, and else as often as it may.
A look takes some tenths of a millisecond, and what it reads takes the place of the training's data in the caches."""
MOST_TOLD: Final = 20
"""Standstills of one run that are facts: of a job whose steps take longer than the time-out, each is one."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Watch this rank, once it has peers. Raises ValueError for a time-out that is none."""
    timeout_s = parse_hang_timeout(setting("DSPROF_HANG_TIMEOUT") or HANG_TIMEOUT)
    if not timeout_s:
        return []
    watchdog = Watchdog(capture, timeout_s)
    watchdog.begin_with_peers()
    capture.samples.append(watchdog.stepped)
    return [watchdog.stop]


class Watchdog:
    """One rank's."""

    def __init__(self, capture: OpenCapture, timeout_s: float, clock: Callable[[], int] = now_ns) -> None:
        self._capture, self._timeout_s, self._clock = capture, timeout_s, clock
        self._usual_s = min(max(timeout_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        self._pause_s = self._usual_s
        self._tail = Tail(capture.folder)
        self._process = os.getpid()
        self._activity = Activity(self._process)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._alone: Callable[[], object] = lambda: None
        """The default group, where it is known to have this process alone: a job of one comes here after each step."""
        recorder = capture.recorder
        self._lock_watch = recorder.lock_watch if isinstance(recorder, NativeRecorder) else None
        self._training = threading.main_thread().ident or 0
        self._moved_ns = clock()
        self._told_ns = 0
        """The standstill that is a fact began then; 0: none is under way."""
        self._told = 0

    def begin_with_peers(self) -> None:
        """Start the thread, if this process is in a group of several."""
        import torch.distributed as dist

        if self._thread is not None or not dist.is_available():
            return
        world = dist.group.WORLD
        if world is None or self._alone() is world:
            return
        if world.size() < 2:
            self._alone = weakref.ref(world)
            return
        if self._lock_watch is not None:
            sooner_s = max(self._timeout_s - 2 * self._usual_s, SHORTEST_LOOK_S)  # to be there when the launcher looks
            self._lock_watch.start(str(self._capture.folder / STACKS_FILE), sooner_s, LOCKS_EVERY_S)
            self._lock_watch.feed(self._training)
        self._thread = threading.Thread(target=self._run, name="dsprof-watchdog", daemon=True)
        self._thread.start()

    def stepped(self, _: int = 1) -> None:
        """The calling thread has taken steps."""
        self._training = threading.get_ident()
        if self._thread is None:
            self.begin_with_peers()

    def stop(self) -> None:
        self._stop.set()
        if self._lock_watch is not None and self._process == os.getpid():
            self._lock_watch.stop()
        if self._thread is not None:
            self._thread.join(SHORTEST_LOOK_S)

    def _run(self) -> None:
        name_thread("dsprof-watchdog")
        while not self._stop.wait(self._pause_s):
            try:
                if self._lock_watch is not None:
                    self._lock_watch.feed(self._training)
                self.look()
            except FileNotFoundError:  # the capture was moved away
                return
            except Exception as error:
                count_error("the watchdog", error)
                return

    def look(self) -> None:
        """Has anything moved? If not for the time-out, say where everything stands."""
        now = self._clock()
        if self._tail.follow() or not self._capture.is_on():
            if self._told_ns:
                self._capture.write_fact({"fact": WENT_ON, "since_ns": self._told_ns, "at_ns": now})
                self._told_ns = 0
            self._moved_ns = now
            self._pause_s = self._usual_s
            return
        self._pause_s = SHORTEST_LOOK_S
        still_s = (now - self._moved_ns) / 1e9
        if still_s < self._timeout_s / 2 - self._usual_s or self._told_ns or self._told >= MOST_TOLD:
            return
        self._activity.sample(now / 1e9)
        # It may have stood still since soon after the look before, and the launcher is not to say so first.
        if still_s + self._usual_s - SHORTEST_LOOK_S >= self._timeout_s:
            self._told += 1
            self._told_ns = self._moved_ns
            self._capture.write_fact(self._describe(now))

    def _describe(self, now: int) -> dict[str, Any]:
        """Where this rank stands."""
        process_groups.state_groups(self._capture.write_fact)
        state = self._own_state()
        threads = thread_stacks.python_threads(self._training)
        training: list[thread_stacks.Frame] = next((thread["frames"] for thread in threads if thread["trains"]), [])
        return {
            "fact": STANDSTILL,
            "since_ns": self._moved_ns,
            "at_ns": now,
            "timeout_s": self._timeout_s,
            "works": not state.device_wait and self._activity.works(self._timeout_s / 2),
            "phases": list(state.phases),
            "under_way": [operation.words for operation in state.open],
            "site": user_site(training),
            "threads": threads,
            "tasks": kernel_threads(self._process),
        }

    def _own_state(self) -> RankState:
        return self._tail.state(-1, lambda group: None)
