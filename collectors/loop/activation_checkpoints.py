"""Activation checkpointing by torch: the lines of the script whose activations are computed again in backward.

Only the first calls are looked at. `torch.utils.checkpoint.checkpoint` itself is left as it is, since torch.compile
knows it by its identity; what is wrapped is called by it, eagerly.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from dsprof.schema import CHECKPOINTED_FACT

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import private
from ..hooking.caller import caller
from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, replace_attribute
from ..hooking.wrap import stands_for

MODULE: Final = "torch.utils.checkpoint"
GENERATOR: Final = "_checkpoint_without_reentrant_generator"
"""Called for each piece that is checkpointed: (function, preserve, context_fn, ...)."""
MOST_LOOKED_AT: Final = 64
"""Calls: a model's blocks are called in one line, or in a few."""


def install(_: OpenCapture) -> list[Uninstall]:
    """State which lines checkpoint activations from now on."""
    return [when_imported(MODULE, _watch)]


def _watch(module: ModuleType) -> Uninstall:
    original = private.find(f"{MODULE}:{GENERATOR}")
    if original is None:
        return lambda: None
    return replace_attribute(module, GENERATOR, _noting(original, getattr(module, "noop_context_fn", None)))


def _noting(original: Any, keeps_nothing: Any) -> Any:
    left = MOST_LOOKED_AT
    known: set[tuple[str | None, bool]] = set()

    def note(args: tuple[Any, ...]) -> None:
        selective = len(args) > 2 and args[2] is not keeps_nothing
        site, framework = caller()
        if (site, selective) not in known:
            known.add((site, selective))
            facts.state({"fact": CHECKPOINTED_FACT, "site": site, "framework": framework, "selective": selective})

    @stands_for(original)
    def checkpoint_without_reentrant(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            try:
                note(args)
            except Exception as error:
                count_error("activation checkpointing", error)
        return original(*args, **kwargs)

    return checkpoint_without_reentrant
