"""Which rank this process is, and the run folder its capture belongs to."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsprof.schema import host_name, new_run_id, parse_ranks

RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

FOLDER_KEY: Final = "dsprof/run-folder"
FOLDER_PATIENCE_S: Final = 10.0
"""How long a rank waits for rank 0 to name the folder; rank 0's process may not be armed at all."""


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
        return f"rank{self.rank:05d}.{self.restart}.{self.host}.{self.pid}"


_remembered: dict[str, str] = {}


def remember_settings() -> None:
    """Keep DSPROF_* as they are when the process is armed: a script may clean its environment, or change directory."""
    _remembered.update({name: value for name, value in os.environ.items() if name.startswith("DSPROF")})
    _remembered["DSPROF_DIR"] = os.path.abspath(os.environ.get("DSPROF_DIR") or "dsprof-out")


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
    """The launcher's run folder; without a launcher one that rank 0 names and tells through the job's own store.

    Makes nothing on disk. Rank 0 must call this even where it is not captured itself, or the others wait for a name.
    """
    given = setting("DSPROF_RUN")
    if given:
        return Path(given)
    parent = Path(setting("DSPROF_DIR") or "dsprof-out").absolute()
    mine = parent / new_run_id(Path(sys.argv[0] or "python").stem)
    store = _job_store() if identity.world_size > 1 else None
    if store is None:
        return mine
    if identity.rank == 0:
        if not store.check([FOLDER_KEY]):  # named once, however often this is called
            store.set(FOLDER_KEY, str(mine))
        return Path(store.get(FOLDER_KEY).decode())
    deadline = time.monotonic() + FOLDER_PATIENCE_S
    while time.monotonic() < deadline:
        if store.check([FOLDER_KEY]):
            return Path(store.get(FOLDER_KEY).decode())
        time.sleep(0.02)
    return parent / f"{mine.name}-rank{identity.rank}"


def _job_store() -> Any:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return c10d._get_default_store()
