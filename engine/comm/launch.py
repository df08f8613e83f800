"""Joining the job's process group, under torchrun, SLURM, MPI or no launcher at all."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job's process group, unless that has been done: NCCL with GPUs, else gloo. Arguments as DeepSpeed's.

    Without a launcher (no RANK in the environment, nor under SLURM or MPI) the process is a job of its own.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if auto_mpi_discovery and "RANK" not in os.environ:
        _learn_rank(distributed_port)
    if init_method is None and "RANK" not in os.environ and rank < 0:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, **more)
        return
    if torch.cuda.is_available():
        local_device()
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, **more)


LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Variables by which other launchers than torchrun give a process its rank, the number of ranks, and its local rank."""


def _learn_rank(port: int | None) -> None:
    for rank, size, local in LAUNCHERS:
        if rank in os.environ and size in os.environ:
            os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ[rank], os.environ[size]
            os.environ.setdefault("LOCAL_RANK", os.environ.get(local, "0"))
            os.environ.setdefault("MASTER_PORT", str(port or 29500))
            if os.environ["WORLD_SIZE"] == "1":
                os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            return


def rank_and_size() -> tuple[int, int]:
    """Which of the job's ranks this process is, and how many there are; 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def local_device() -> torch.device:
    """The GPU of this local rank, made the current one, or the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", _own_gpu(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()))
        torch.cuda.set_device(device)  # streams and events are made on the current one
        return device
    return torch.device("cpu")


def _own_gpu(local_rank: int, visible: int) -> int:
    """The number of this rank's GPU among those that its process sees. Where each rank is shown its own alone, as by
    SLURM's --gpus-per-task=1, local ranks are counted all the same. Raises RuntimeError if that is ambiguous."""
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise RuntimeError(
            f"LOCAL_RANK is {local_rank}, and this process sees {visible} GPUs, numbered from 0: start as many ranks "
            "on a machine as it has GPUs, or let each rank see one, its own (CUDA_VISIBLE_DEVICES, --gpus-per-task=1)"
        )
    return local_rank
