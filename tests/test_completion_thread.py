"""The thread of the recorder in Python that waits for works."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from dsprof.collectors.communication.completion_thread import CompletionThread


class Work:
    """What holds the tensors of a collective."""


def test_what_waits_for_its_turn_is_not_kept() -> None:
    """On busy cores that is late, and each work has what was gathered."""
    watcher = CompletionThread(lambda work: None, lambda work: None)
    watcher._thread = threading.Thread()  # one that is never given a core
    works: list[Any] = [Work() for _ in range(3)]
    for work in works:
        watcher.add(work)
    alive = [weakref.ref(work) for work in works]
    del work
    works.clear()
    assert [one() for one in alive] == [None] * 3
    watcher._thread = None
    watcher.stop()
