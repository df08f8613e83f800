"""Arming a process: a few things are patched, and wait.

The capture opens when the process shows itself to be a rank, by joining a process group, by a backward pass or by
taking an optimizer step, so the torchrun agent, DataLoader workers and helper programs that inherit the environment
never open one. Each of these, and each of what is seen before, is armed by itself: what of it fails costs that alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ..capture import identity
from ..capture.open_capture import FULL
from ..hooking.wrap import stands_for
from . import free_threaded

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
        _arm()
    except Exception as error:  # the job matters more than its profile
        _report("arming", error)


def is_armed() -> bool:
    """Whether this process is profiled as a whole."""
    return _armed


def _arm() -> None:
    from ..hooking.hook_parts import HookPart, install_each

    before_it_opens = (
        HookPart("settings that the script changes in its own environment count", _remember_settings),
        HookPart("a script that wants to be started in another way is not told so", _watch_hints),
        HookPart("what ends a script before its first step is not known", _watch_failure),
        HookPart("what --set asks for is not applied, and the configuration that ran is not known", _override),
        HookPart("how DataLoaders are set up is not known", _watch_dataloaders),
        HookPart("what memory is for (parameters, gradients, optimizer states) is not known", _watch_modules),
        HookPart("at --level full the history of CUDA memory begins with the capture", _watch_history),
    )
    opening = (
        HookPart("a process without a process group or an optimizer opens no capture", _watch_backward),
        HookPart("a process without a process group opens its capture with its first backward", _watch_optimizers),
        HookPart("a rank opens its capture only when it begins to train", _watch_process_group),
    )
    when_watched = (HookPart("a trial goes on to the end of the job, and its losses are not compared", _watch_trial),)
    install_each("arming", before_it_opens)
    failed: list[Exception] = []
    install_each("arming", opening, failed)
    install_each("arming", when_watched)
    if len(failed) == len(opening):  # there will be no capture to count that in
        _report("arming", failed[-1])


def _remember_settings() -> None:
    from ..capture import identity

    identity.remember_settings()


def _watch_hints() -> None:
    from . import launch_hints

    launch_hints.watch()


def _watch_failure() -> None:
    from ..failures import before_capture

    before_capture.watch()


def _override() -> None:
    from ..overrides.install import install

    install()


def _watch_dataloaders() -> None:
    from ..capture import facts

    facts.watch_dataloaders()


def _watch_modules() -> None:
    from ..memory import live_tensors

    live_tensors.watch()


def _watch_history() -> None:
    from ..capture import identity
    from ..memory import cuda_history

    if identity.setting("DSPROF_LEVEL") == FULL:
        cuda_history.watch()


def _watch_backward() -> None:
    from ..loop import phases

    phases.before_first(_start_training)


def _watch_optimizers() -> None:
    from ..loop import optimizers

    optimizers.before_first(_start_training)


def _watch_trial() -> None:
    from ..capture import identity

    if identity.setting("DSPROF_TRIAL"):
        from ..loop import trial

        trial.follow()


def _watch_process_group() -> None:
    """Wrap `init_process_group`."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    from . import launch_hints

    join = c10d.init_process_group

    @stands_for(join)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            result = join(*args, **kwargs)
        except Exception as error:
            launch_hints.refused(error)
            raise
        _start()
        return result

    # Private callers (DeviceMesh) look it up in distributed_c10d, users in torch.distributed.
    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def _start() -> None:
    try:
        from ..capture.session import start

        start()
    except Exception as error:
        _report("starting the capture", error)


def _start_training() -> None:
    try:
        from torch.utils.data import get_worker_info

        from . import launch_hints

        if get_worker_info() is not None:  # a DataLoader's worker that computes gradients is no rank
            return
        launch_hints.training()
    except Exception as error:
        _report("starting the capture", error)
    _start()


def _report(doing: str, error: Exception) -> None:
    from ..hooking.signals import by_handler

    if by_handler(error):
        raise error
    with contextlib.suppress(Exception):
        from ..capture.without_capture import report_failure

        report_failure(doing, error)
