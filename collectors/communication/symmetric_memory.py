"""Symmetric memory: ranks read and write each other's there, by operators that are no collectives of c10d. dsprof sees
none of that, and says so once a job enters it. Nothing is done for each call.

Not where FSDP2 has its buffers in it: what moves them are collectives, which are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from dsprof.schema import SYMMETRIC_MEMORY_FACT

from ..capture import facts
from ..hooking import dynamo, private
from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall, replace_attribute
from ..hooking.wrap import stands_for

MEMORY: Final = "torch._C._distributed_c10d:_SymmetricMemory"
ENTRIES: Final = ("empty_strided_p2p", "rendezvous")
"""Its static methods through which memory is made and exchanged, by whichever function or generated code."""
ITSELF: Final = "torch.distributed._symmetric_memory"
BY_COLLECTIVES: Final = "torch.distributed.fsdp"


def watch() -> list[Uninstall]:
    """State the first use of it from now on."""
    memory = private.find(MEMORY)
    if memory is None:
        return []
    entered: list[Uninstall] = []

    def enter() -> None:
        while entered:
            entered.pop()()
        facts.state({"fact": SYMMETRIC_MEMORY_FACT})

    for name in ENTRIES:
        entered.append(replace_attribute(memory, name, staticmethod(_watched(getattr(memory, name), enter))))

    def uninstall() -> None:
        while entered:
            entered.pop()()

    return [uninstall]


def _watched(original: Callable[..., Any], enter: Callable[[], None]) -> Callable[..., Any]:
    @stands_for(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if not _by_collectives(sys._getframe(1)):
                enter()
        except Exception as error:
            count_error("symmetric memory", error)
        return original(*args, **kwargs)

    dynamo.skip_frame(call)
    return call


def _by_collectives(frame: FrameType | None) -> bool:
    """Whether it was called for memory that collectives move."""
    while frame is not None and _module(frame) == ITSELF:
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(BY_COLLECTIVES)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
