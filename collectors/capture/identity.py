"""Which rank this process is, and the run folder its capture belongs to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsprof import permissions
from dsprof.names import CaptureName, host_name, new_run_id
from dsprof.ranges import parse_ranks

from ..hooking import private

RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

BEGAN_NS: Final = "DSPROF_BEGAN_NS"
"""Setting: when what is captured began, where that is not when the process did; its monotonic clock."""
FOLDER_KEY: Final = "dsprof/run-folder"


@dataclass(frozen=True)
class Identity:
    rank: int
    world_size: int
    local_rank: int | None
    restart: int
    host: str
    pid: int

    @property
    def folder_name(self) -> str:
        return str(CaptureName(self.rank, self.restart, self.host, self.pid))


_remembered: dict[str, str] = {}


def remember_settings() -> None:
    """Keep DSPROF_* as they are when the process is armed: a script may clean its environment, or change directory."""
    _remembered.update({name: value for name, value in os.environ.items() if name.startswith("DSPROF")})
    if os.environ.get("DSPROF_SCRATCH"):
        from .scratch import absolute

        _remembered["DSPROF_SCRATCH"] = absolute(os.environ["DSPROF_SCRATCH"])
    permissions.remember(os.environ.get(permissions.SHARED, ""))
    _remembered["DSPROF_DIR"] = os.path.abspath(os.environ.get("DSPROF_DIR") or "dsprof-out")


def use_settings(settings: dict[str, str]) -> Callable[[], None]:
    """Have these count in the place of those of the environment, which are taken anew; what is returned brings back
    those that counted before."""
    before = dict(_remembered)
    _remembered.clear()
    remember_settings()
    _remembered.update(settings)

    def bring_back() -> None:
        _remembered.clear()
        _remembered.update(before)

    return bring_back


def setting(name: str) -> str:
    """A DSPROF_* variable as it was when the process was armed, else as it is now; empty if unset."""
    return _remembered.get(name) or os.environ.get(name, "")


def _integer(*names: str) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def identify() -> Identity:
    """This process's place in the job: from its process group, else from the launcher's environment, else alone."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = _integer(*RANK_VARIABLES) or 0, _integer(*WORLD_VARIABLES) or 1
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=_integer("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        restart=_integer("TORCHELASTIC_RESTART_COUNT") or 0,
        host=host_name(),
        pid=os.getpid(),
    )


def selected(rank: int, ranks: str) -> bool:
    """Whether DSPROF_RANKS (`0,2-3`; empty: all) names `rank`. Raises ValueError on anything else."""
    chosen = parse_ranks(ranks)
    return not chosen or any(rank in part for part in chosen)


def run_folder(identity: Identity) -> Path:
    """The launcher's run folder; without a launcher the one that the first rank to come here names.

    It is told through the job's own store, where nobody waits: a rank that is not armed names none. Makes nothing on
    disk.
    """
    given = setting("DSPROF_RUN")
    if given:
        return Path(given)
    parent = Path(setting("DSPROF_DIR") or "dsprof-out").absolute()
    mine = parent / new_run_id(Path(sys.argv[0] or "python").stem)
    return agreed_folder(mine, FOLDER_KEY, identity.world_size)


def agreed_folder(mine: Path, key: str, world_size: int) -> Path:
    """The folder that the first rank to ask under `key` named: `mine`, of this rank alone or where it is the first."""
    store = _job_store() if world_size > 1 else None
    return mine if store is None else Path(os.fsdecode(store.compare_set(key, "", os.fspath(mine))))


def _job_store() -> Any:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    default_store = private.find("torch.distributed.distributed_c10d:_get_default_store")
    return default_store() if default_store is not None else None
