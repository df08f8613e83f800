"""A thread beside the training, which looks at something now and then.

It never holds up the job: it is a daemon, what it does not finish within a moment when the capture closes is left
undone, and what it imports it imports with forks held back, since a fork in the middle of an import would leave the
child with that module's lock taken for good.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, Final

from dsprof.live.activity import name_thread

from ..hooking.errors import count_error

EVERY_S: Final = 1.0
LAST_WAIT_S: Final = 0.5
"""For a look that is under way when the capture closes: a driver may hang."""

Poller = Generator[None, None, None]
"""Each step of it is a look; what it does when it is closed, it does at the end."""


class _Imports:
    """Imports that forks of this process wait for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._held = False

    def hold_forks(self) -> None:
        """On the training thread, so that no fork is half done."""
        if not self._held:
            self._held = True
            enter, leave = self.lock.acquire, self.lock.release
            os.register_at_fork(before=enter, after_in_parent=leave, after_in_child=leave)


_imports = _Imports()


def import_on_side_thread(name: str) -> Any:
    """Import a module that a training process would not have. Raises what the import does."""
    with _imports.lock:
        return importlib.import_module(name)


class SideThread:
    """Looks every so often on a thread of its own, until there is no more to see, or `stop`.

    looks: on that thread, what makes the looks
    every_s: how long to wait after each, or what says so then
    """

    def __init__(self, name: str, looks: Callable[[], Poller], every_s: float | Callable[[], float] = EVERY_S) -> None:
        self._name, self._looks, self._every_s = name, looks, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dsprof-{name}", daemon=True)

    @property
    def stopping(self) -> bool:
        """Nothing is to be written any more: the capture may be closed."""
        return self._stopping.is_set()

    def start(self) -> None:
        _imports.hold_forks()
        self._thread.start()

    def stop(self) -> None:
        """Have no more looks begin; of one that is under way, wait a moment for the end."""
        self._stopping.set()
        self._thread.join(LAST_WAIT_S)

    def _run(self) -> None:
        name_thread(self._thread.name)
        looks = self._looks()
        try:
            for _ in looks:
                every_s = self._every_s
                if self._stopping.wait(every_s() if callable(every_s) else every_s):
                    break
            looks.close()
        except Exception as error:
            if not self.stopping:
                count_error(self._name, error)
