"""Collectives: every c10d operation as a `comm` row, and every wait for one as a `wait` row.

All of torch's communication, whoever asks for it (DDP's reducer in C++, FSDP, DTensor, plain `dist` calls), passes
the operators `c10d::*`. A kernel at the dispatch key BackendSelect comes before every backend's own: in C++
(`native/collectives.hpp`), or where that cannot be had in Python (`collective_kernels.py`).
"""

from __future__ import annotations

from typing import Final

from dsprof.schema import COLLECTIVE_NAMES

from ..capture.open_capture import OpenCapture
from ..hooking.hook_parts import HookPart, in_parts
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..recorder.groups import watch_destroy
from ..recorder.python_recorder import PyRecorder
from ..recorder.record import Recorder
from . import symmetric_memory, waits
from .collective_kernels import KERNELS
from .collective_rows import PythonHooks


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record collectives and waits, and state where a job communicates beside them."""
    return [watch(capture.recorder), *symmetric_memory.watch()]


def watch(recorder: Recorder) -> Uninstall:
    """Record collectives and waits from now on, until the returned function is called."""
    import torch.distributed as dist

    if not dist.is_available():
        return lambda: None
    hooks: NativeHooks | PythonHooks
    if isinstance(recorder, NativeRecorder):
        hooks = NativeHooks(recorder)
    elif isinstance(recorder, PyRecorder):
        hooks = PythonHooks(recorder)
    else:
        raise TypeError(f"cannot record collectives with a {type(recorder).__name__}")
    parts = (
        HookPart("collectives are not recorded", hooks.install, decisive=True),
        *waits.parts(recorder, hooks.ends),
        HookPart(
            "groups made after the default one was destroyed go by the names of those before", hooks.watch_destroy
        ),
    )
    return in_parts("collectives", parts)


class NativeHooks:
    """The switch of the hooks in C++."""

    ends: Final = None
    """gloo itself tells when a collective is over, and of a send or a receive when it has been waited for."""

    def __init__(self, recorder: NativeRecorder) -> None:
        self._recorder = recorder

    def install(self) -> Uninstall:
        KERNELS.give_way()
        self._recorder.install_collectives(COLLECTIVE_NAMES)
        uninstall: Uninstall = self._recorder.uninstall_collectives
        return uninstall

    def watch_destroy(self) -> Uninstall:
        return watch_destroy(self._recorder.renew_groups)
