"""Collectives: every c10d operation as a `comm` row, and every wait for one as a `wait` row.

All of torch's communication, whoever asks for it (DDP's reducer in C++, FSDP, DTensor, plain `dist` calls), passes
the operators `c10d::*`. A kernel at the dispatch key BackendSelect comes before every backend's own: in C++
(`native/collectives.hpp`), or where that cannot be had in Python (`collective_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from dsprof.schema import COLLECTIVE_NAMES

from . import waits
from .collective_kernels import KERNELS
from .collective_rows import PythonHooks
from .native import NativeRecorder
from .python_recorder import PyRecorder
from .record import Recorder
from .uninstall import Uninstall, in_reverse, replace_attribute
from .wrap import stands_for


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
    return in_reverse(_install(recorder, hooks))


def _install(recorder: Recorder, hooks: NativeHooks | PythonHooks) -> Iterator[Uninstall]:
    yield hooks.install()
    yield from waits.install(recorder, hooks.ends)
    yield _watch_destroy(hooks.renew_groups)


class NativeHooks:
    """The switch of the hooks in C++."""

    ends: Final = None
    """gloo itself tells when a collective is over, and of a send or a receive when it has been waited for."""

    def __init__(self, recorder: NativeRecorder) -> None:
        self._recorder = recorder
        self.renew_groups: Callable[[], None] = recorder.renew_groups

    def install(self) -> Uninstall:
        KERNELS.give_way()
        self._recorder.install_collectives(COLLECTIVE_NAMES)
        uninstall: Uninstall = self._recorder.uninstall_collectives
        return uninstall


def _watch_destroy(renew_groups: Callable[[], None]) -> Uninstall:
    """Notice when the default group is destroyed."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    original = distributed_c10d.destroy_process_group

    @stands_for(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not distributed.is_initialized():
            renew_groups()
        return result

    modules = (distributed, distributed_c10d)
    return in_reverse(replace_attribute(module, original.__name__, destroy_process_group) for module in modules)
