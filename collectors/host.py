"""Pauses of the interpreter: Python's garbage collector stops the rank, and so every rank that waits for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import Kind

if TYPE_CHECKING:
    from .record import Recorder

SHORTEST_NS: Final = 100_000
"""Young collections run hundreds of times a step and take microseconds: not worth a record."""


def install(recorder: Recorder) -> Callable[[], None]:
    """Record collections of 0.1 ms and more; `value` is the generation."""
    name = recorder.intern("gc")
    clock = time.monotonic_ns
    began = 0

    def on_collection(event: str, info: dict[str, Any]) -> None:
        nonlocal began
        if event == "start":
            began = clock()
        elif began:
            end = clock()
            if end - began >= SHORTEST_NS:
                recorder.put(Kind.PAUSE, name, began, end, float(info["generation"]), -1)
            began = 0

    gc.callbacks.append(on_collection)

    def uninstall() -> None:
        if on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)

    return uninstall
