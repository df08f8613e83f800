"""What `dsprof doctor` says: what is wrong with a configuration and with the machine, and what to do.

Looking is the business of `machine`: what is said here can be tested without the machine it is about.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .machine import Machine
from .redact import redact_data, redact_text
from .slow_settings import slow_settings

if TYPE_CHECKING:
    from dsprof.engine.config import Config

GIB: Final = 2**30


@dataclass(frozen=True)
class Diagnosis:
    """All that `dsprof doctor` has to say."""

    machine: Machine
    source: Path | None = None
    """The configuration's file."""
    world_size: int = 1
    config: Config | None = None
    """None if there is none, or one with errors."""
    errors: tuple[str, ...] = ()
    """About the configuration."""
    warnings: tuple[str, ...] = ()
    """About the configuration, then about the machine."""
    moved: tuple[str, ...] = ()
    """About captures that killed processes left in memory or on a local disk."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "config": None if self.source is None else str(self.source),
            "world_size": self.world_size,
            "errors": [redact_text(error) for error in self.errors],
            "warnings": [redact_text(warning) for warning in self.warnings],
            "moved": list(self.moved),
            "effective": None if self.config is None else redact_data(self.config.model_dump(mode="json")),
            "machine": redact_data(asdict(self.machine)),
        }


def diagnose(source: Path | None, world_size: int, machine: Machine) -> Diagnosis:
    """What is to be said about a configuration for `world_size` ranks, and about the machine."""
    if source is None:
        return Diagnosis(machine, warnings=tuple(advice(machine)), world_size=world_size)
    from dsprof.engine.config import ConfigError, load

    try:
        config = load(source, world_size=world_size)
    except ConfigError as error:
        warnings = (*error.warnings, *advice(machine))
        return Diagnosis(machine, source, world_size, errors=tuple(error.problems), warnings=warnings)
    about = (*config.warnings, *slow_settings(config), *disks(config))
    return Diagnosis(machine, source, world_size, config, warnings=(*about, *advice(machine)))


def disks(config: Config) -> Iterator[str]:
    """What is wrong with the folders that states are offloaded to, as seen from here."""
    zero = config.zero_optimization
    for name, section in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if section is None or section.device != "nvme" or section.nvme_path is None:
            continue
        folder = next(path for path in (section.nvme_path, *section.nvme_path.absolute().parents) if path.exists())
        if not folder.is_dir():
            yield f"zero_optimization.{name}.nvme_path: {folder} is not a folder here; name one on the local disk"
        elif not os.access(folder, os.W_OK):
            yield f"zero_optimization.{name}.nvme_path: {folder} cannot be written here; name another folder"
        elif shutil.disk_usage(folder).free < GIB:
            free = shutil.disk_usage(folder).free / GIB
            yield f"zero_optimization.{name}.nvme_path: {free:.2f} GiB are free in {folder} here; name a larger disk"


# --- judging ------------------------------------------------------------------------------------


def advice(machine: Machine) -> Iterator[str]:
    """What is wrong with the machine, and what to do."""
    yield from _about_gpus(machine)
    if machine.shm_bytes is not None and machine.shm_free_bytes is not None:
        if machine.shm_bytes < GIB:
            yield (
                f"/dev/shm: {_gib(machine.shm_bytes)}, through which data loader workers and NCCL hand over data; in a"
                " container pass `--shm-size=8g` or `--ipc=host`"
            )
        elif machine.shm_free_bytes < machine.shm_bytes / 10:
            yield (
                f"/dev/shm: {_gib(machine.shm_free_bytes)} free of {_gib(machine.shm_bytes)};"
                " remove what dead jobs have left there"
            )
    for name, least, flag, why in (
        ("nofile", 4096, "-n 65536", "ranks and data loader workers open sockets and shared memory"),
        ("nproc", 4096, "-u 65536", "every rank starts dozens of threads"),
    ):
        limit = machine.limits.get(name)
        if limit is not None and limit < least:
            yield f"ulimit {flag[:2]}: {limit}, and {why}; write `ulimit {flag}` before the job starts"
    locked = machine.limits.get("memlock")
    if locked is not None and any(port.kind == "infiniband" for port in machine.ports):
        yield (
            f"ulimit -l: {_gib(locked)}, and InfiniBand locks the memory it sends from; write `ulimit -l unlimited`,"
            " in a container pass `--ulimit memlock=-1`"
        )
    for port in machine.ports:
        if port.kind == "infiniband" and not port.up:
            yield f"{port.name}: this InfiniBand port is not active; NCCL will use the others, or TCP"
    for name, cost in machine.costly.items():
        yield f"{name}: is set, so {cost}; unset it unless you are looking for a bug"
    yield from _about_allocators(machine.allocator)
    for name, lost in machine.lost.items():
        yield f"torch: {machine.versions.get('torch')} has no {name}, which dsprof uses, so {lost}"
    if machine.compiler is None and machine.helper is None:
        yield (
            "no C++ compiler: dsprof's native helper cannot be built, and the recorder in Python costs more, and"
            " records only phases and steps on GPUs; install g++, or run `dsprof build` where there is one"
        )


def _about_gpus(machine: Machine) -> Iterator[str]:
    if machine.torch_error is not None:
        yield f"torch: cannot be imported ({machine.torch_error}); install it again"
    elif machine.gpus and machine.versions.get("cuda") is None:
        yield (
            f"torch: {machine.versions.get('torch')} is built without CUDA, and there are {len(machine.gpus)} GPUs;"
            " install the CUDA build"
        )
    elif machine.visible_gpus and not machine.torch_sees_gpus:
        yield (
            f"torch: finds none of the GPUs; it is built for CUDA {machine.versions.get('cuda')}, and the driver"
            f" {machine.versions.get('driver')} is for CUDA {machine.versions.get('driver cuda')}:"
            " install a newer driver, or an older build of torch"
        )
    for index, gpu in enumerate(machine.gpus):
        if 0 < gpu.pcie_width < gpu.pcie_width_max:
            yield f"GPU {index}: uses {gpu.pcie_width} of its {gpu.pcie_width_max} PCIe lanes; check its slot"


def _about_allocators(variables: Mapping[str, str]) -> Iterator[str]:
    old, new = variables.get("PYTORCH_CUDA_ALLOC_CONF"), variables.get("PYTORCH_ALLOC_CONF")
    if old is not None and new is not None and old != new:
        yield f"PYTORCH_CUDA_ALLOC_CONF: {old}, and PYTORCH_ALLOC_CONF, which has taken its place, is {new}; unset it"
    for library in variables.get("LD_PRELOAD", "").replace(":", " ").split():
        if "/" in library and not Path(library).exists():
            yield f"LD_PRELOAD: {library} does not exist, so every program complains and runs without it; unset it"


def _gib(size: int) -> str:
    return f"{size / GIB:.2g} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
