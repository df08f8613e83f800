"""What is recorded without the native helper: on the CPU everything, in Python; of a job that trains on a device only
its phases and steps. The host has to stay ahead of a device, and a Python function in front of every communication and
every module would hold it up, also on C++ threads, which would have to wait for the interpreter's lock.

It is decided before the collectors go in, as kernels in front of torch's operators cannot be taken out again while
threads communicate, and no driver is asked: to initialize CUDA could spoil a fork that the script has still to do. What
shows a job on a device is the backend of its process groups, or that it has begun to use one; of a job that joins a
group which tells neither, that it can see one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..catalogue import COLLECTORS, NATIVE
from ..hooking import private

NEED_HELPER: Final = frozenset(name for name, one in COLLECTORS.items() if one.each_call or NATIVE in one.needs)
"""Collectors whose hooks run for every communication, module, unit, action or call that waits for the device, and those
that record nothing without the helper: the device's times."""

SWITCHED_OFF: Final = "switched off by --native off or DSPROF_NATIVE"

VISIBLE: Final = {
    "cuda": (("nvidia[0-9]*", "nvhost-gpu", "dxg"), ("CUDA_VISIBLE_DEVICES",)),
    "hip": (("kfd", "dxg"), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "xpu": (("dri/renderD*",), ("ZE_AFFINITY_MASK",)),
}
"""What torch was built for (a name in `torch.version`) -> the driver's files in /dev, and the variables that choose
among the devices."""
NONE_CHOSEN: Final = ("", "-1", "none", "nodevfiles")
"""First device of such a variable: it hides all of them."""


class LeftOut(NamedTuple):
    """Collectors that are not installed, and a sentence that says what was not recorded, why, and what to do."""

    collectors: frozenset[str]
    note: str


def left_out(reason: str, device: str | None) -> LeftOut:
    """Of a capture without the native helper.

    reason: why there is no helper
    device: `device_job()`
    """
    if device is None:
        slower = f"recorded in Python, which is slower, as there is no native helper: {reason}"
        return LeftOut(frozenset(), "" if reason == SWITCHED_OFF else slower)
    mend = "run it without that" if reason == SWITCHED_OFF else "`dsprof build` makes it, then run the job again"
    note = f"only phases and steps were recorded of a job on a device ({device}): no native helper ({reason}); {mend}"
    return LeftOut(NEED_HELPER, note)


def device_job(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> str | None:
    """What shows that this process trains on a device, in words; None: nothing does. Asks no driver."""
    import torch

    joined = _backends()
    by_backend = [text for config in joined if (text := _of_backend(config)) is not None]
    if by_backend:
        return by_backend[0]
    for name in ("cuda", "xpu", _plugin()):
        module: Any = getattr(torch, name, None)
        if isinstance(module, ModuleType) and getattr(module, "is_initialized", lambda: False)():
            return f"torch.{name} is in use"
    # A process that has begun to compute without one computes on the CPU; after it has joined a group, it may still.
    return _visible(environ, dev) if joined else None


def _backends() -> list[str]:
    """Of the process groups that there are, such as `cpu:gloo,cuda:nccl`."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed import distributed_c10d as c10d

    return [str(config) for config in c10d._world.pg_backend_config.values()]


def _of_backend(config: str) -> str | None:
    """What a group's backends show: one that serves a device, and not the CPU as well."""
    pairs = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    of_cpu = pairs.pop("cpu", None)
    for device, backend in pairs.items():
        if backend != of_cpu and device != "meta":
            return f"a process group communicates by {backend} on {device}"
    return None


def _plugin() -> str:
    """The name of the device that a plugin of torch's brings, as `torch_npu` does; empty: none."""
    name = private.find("torch._C:_get_privateuse1_backend_name")
    given = "" if name is None else str(name())
    return "" if given == "privateuseone" else given


def _visible(environ: Mapping[str, str], dev: Path) -> str | None:
    """Which device the process can see, by the files of its driver."""
    import torch

    if _plugin():
        return f"a plugin for {_plugin()} devices is loaded"
    for built_for, (files, variables) in VISIBLE.items():
        there = any(True for pattern in files for _ in dev.glob(pattern))
        if not there or getattr(torch.version, built_for, None) is None:
            continue
        chosen = (environ[variable] for variable in variables if variable in environ)
        if all(text.split(",")[0].strip().lower() not in NONE_CHOSEN for text in chosen):
            return f"it can see one, and {variables[0]}= hides it from a job that computes on the CPU"
    return None
