"""Arming a process: a few things are patched, and wait.

The capture opens when the process shows itself to be a rank, by joining a process group, by a backward pass or by
taking an optimizer step, so the torchrun agent, DataLoader workers and helper programs that inherit the environment
never open one.
"""

from __future__ import annotations

import contextlib
from typing import Any

from . import free_threaded, identity
from .collector import FULL
from .wrap import stands_for

_armed = False


def arm() -> None:
    """Arm this process, once. Never raises."""
    global _armed
    if _armed:  # both the entry point and the bootstrap ran
        return
    _armed = True
    try:
        why = free_threaded.refusal()
        if why is not None:
            identity.remember_settings()
            free_threaded.decline(why)
            return
        _watch()
    except Exception as error:  # the job matters more than its profile
        _report("arming", error)


def _watch() -> None:
    """Wrap `init_process_group`, and hook the first backward pass and the first optimizer step."""
    import torch.distributed as dist

    from . import facts, hints, memory_parts, optimizers, phases

    identity.remember_settings()
    hints.watch()
    facts.watch_dataloaders()
    phases.watch(_start_training)
    optimizers.watch(_start_training)
    memory_parts.watch()
    if identity.setting("DSPROF_LEVEL") == FULL:
        from . import memory_history

        memory_history.watch()

    if dist.is_available():
        from torch.distributed import distributed_c10d as c10d

        join = c10d.init_process_group

        @stands_for(join)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                result = join(*args, **kwargs)
            except Exception as error:
                hints.refused(error)
                raise
            _start()
            return result

        # Private callers (DeviceMesh) look it up in distributed_c10d, users in torch.distributed.
        c10d.init_process_group = init_process_group
        dist.init_process_group = init_process_group


def _start() -> None:
    try:
        from .session import start

        start()
    except Exception as error:
        _report("starting the capture", error)


def _start_training() -> None:
    try:
        from torch.utils.data import get_worker_info

        from . import hints

        if get_worker_info() is not None:  # a DataLoader's worker that computes gradients is no rank
            return
        hints.training()
    except Exception as error:
        _report("starting the capture", error)
    _start()


def _report(doing: str, error: Exception) -> None:
    from .interrupts import by_handler

    if by_handler(error):
        raise error
    with contextlib.suppress(Exception):
        from .errors import report_failure

        report_failure(doing, error)
