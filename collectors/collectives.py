"""Collectives: every c10d operation as a `comm` row, and every wait for one as a `wait` row.

All of torch's communication, whoever asks for it (DDP's reducer in C++, FSDP, DTensor, plain `dist` calls), passes
the operators `c10d::*`. A kernel at the dispatch key BackendSelect comes before every backend's own: in C++
(`native/collectives.hpp`), or where that cannot be had in Python (`collective_kernels.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from dsprof.schema import COLLECTIVE_NAMES, Kind

from .collective_kernels import PythonHooks
from .native import NativeRecorder
from .record import PyRecorder, Recorder

OP_TYPES: Final = {
    0: "broadcast",
    1: "all_reduce",
    2: "all_reduce",
    3: "reduce",
    4: "all_gather",
    5: "all_gather",
    6: "all_gather",
    7: "gather",
    8: "scatter",
    9: "reduce_scatter",
    10: "all_to_all",
    11: "all_to_all",
    12: "send",
    13: "recv",
    14: "recv",
    15: "barrier",
    16: "reduce_scatter",
    19: "reduce_scatter",
}
"""`c10d::OpType` of a work (Work.hpp) -> the name of its wait; of any other it is `wait`."""

Uninstall = Callable[[], None]


def install(recorder: Recorder) -> Uninstall:
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
    undo = [hooks.install(), _watch_waits(recorder, hooks.waited), _watch_destroy(hooks.renew_groups)]

    def uninstall() -> None:
        while undo:
            undo.pop()()

    return uninstall


class NativeHooks:
    """The switch of the hooks in C++."""

    def __init__(self, recorder: NativeRecorder) -> None:
        self._recorder = recorder
        self.renew_groups: Callable[[], None] = recorder.renew_groups

    def install(self) -> Uninstall:
        self._recorder.install_collectives(COLLECTIVE_NAMES)
        uninstall: Uninstall = self._recorder.uninstall_collectives
        return uninstall

    def waited(self, work: Any) -> None:
        """gloo itself says when a send or a receive has been waited for."""


def _watch_waits(recorder: Recorder, waited: Callable[[Any], None]) -> Uninstall:
    """Record `Work.wait`: where the caller stood still. Waits inside C++ (DDP's reducer) are not seen."""
    from torch.distributed import Work

    original = Work.wait
    kind, other = int(Kind.WAIT), recorder.intern("wait")
    names = {op_type: recorder.intern(name) for op_type, name in OP_TYPES.items()}
    begin, end = recorder.begin, recorder.end

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = begin(kind, names.get(self._get_op_type(), other))
        try:
            result = original(self, *args, **kwargs)
            waited(self)  # a wait that raises ends nothing but itself
            return result
        finally:
            end(handle)

    Work.wait = wait  # type: ignore[method-assign]

    def uninstall() -> None:
        if Work.wait is wait:
            Work.wait = original  # type: ignore[method-assign]

    return uninstall


def _watch_destroy(renew_groups: Callable[[], None]) -> Uninstall:
    """Notice when the default group is destroyed."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not distributed.is_initialized():
            renew_groups()
        return result

    modules: list[Any] = [distributed, distributed_c10d]
    for module in modules:
        module.destroy_process_group = destroy_process_group

    def uninstall() -> None:
        for module in modules:
            if module.destroy_process_group is destroy_process_group:
                module.destroy_process_group = original

    return uninstall
