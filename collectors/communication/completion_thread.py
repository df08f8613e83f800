"""The thread of the recorder in Python that waits for collectives."""

from __future__ import annotations

import datetime
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from dsprof.live.activity import name_thread

PATIENCE: Final = datetime.timedelta(seconds=0.2)


class CompletionThread:
    """A thread that waits for works in the order of issue, so that ends are known where the job itself does not wait
    in Python. gloo runs two works of a group at once: the end of one that overtakes another is seen late."""

    def __init__(self, over: Callable[[Any], None], failed: Callable[[Any], None]) -> None:
        self._over = over
        self._failed = failed
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, work: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsprof-complete", daemon=True)
            self._thread.start()
        # Weakly: when its turn comes, which may be late on busy cores, its tensors may be nobody's any more.
        self._works.put(weakref.ref(work))

    def stop(self) -> None:
        """End the thread, with what it waits for unfinished if need be."""
        self._stopping = True
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        from torch.distributed import Work

        name_thread("dsprof-complete")
        wait = getattr(Work.wait, "__wrapped__", Work.wait)  # torch's own, under our wrapper
        while True:
            waiting = self._works.get()
            if waiting is None:
                return
            work = waiting()
            if work is None:  # somebody's wait for it has returned
                continue
            # Never for long: a thread inside torch when the interpreter ends would take the process down with it.
            while not self._stopping or work.is_completed():
                ended = work.is_completed()
                try:
                    wait(work, PATIENCE)
                except Exception:  # not yet; or it failed, which its owner's wait will tell him
                    if ended:
                        self._failed(work)
                        break
                else:
                    self._over(work)
                    break
            del work
