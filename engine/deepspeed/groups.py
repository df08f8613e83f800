"""`deepspeed.utils.groups`: which ranks the engine that was made last has this one work with.

DeepSpeed's `model_parallel` here means the ranks that share layers. Without an engine RuntimeError is raised: how ranks
are divided, its configuration says.
"""

from __future__ import annotations

import functools

import torch.distributed as dist

from ..comm.groups import Parallel
from ..comm.mesh import Axis
from .start import last_engine
from .utils import get_world_group


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with the same part of the model, which train on other data."""
    return _parallel("get_data_parallel_group").data.group or _alone(get_world_group())


def get_data_parallel_world_size() -> int:
    """How many those are."""
    return _parallel("get_data_parallel_world_size").mesh.dp


def get_data_parallel_rank() -> int:
    """Which of them this rank is."""
    return _parallel("get_data_parallel_rank").mesh.dp_rank


def get_data_parallel_group_ranks() -> list[int]:
    """Their global ranks."""
    return _ranks("get_data_parallel_group_ranks", "dp")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that share this one's layers, and train on the same data."""
    return _parallel("get_tensor_model_parallel_group").tensor.group or _alone(get_world_group())


def get_tensor_model_parallel_world_size() -> int:
    """How many those are."""
    return _parallel("get_tensor_model_parallel_world_size").mesh.tp


def get_tensor_model_parallel_rank() -> int:
    """Which of them this rank is."""
    return _parallel("get_tensor_model_parallel_rank").mesh.tp_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of them, whose data the others are to have."""
    return _ranks("get_tensor_model_parallel_src_rank", "tp")[0]


def get_broadcast_src_rank() -> int:
    """The global rank of the first that has the same part of the model."""
    return get_data_parallel_group_ranks()[0]


def get_sequence_parallel_world_size() -> int:
    """Sequences are not divided over ranks."""
    return 1


def get_sequence_parallel_rank() -> int:
    """The same."""
    return 0


def clone_world_group() -> dist.ProcessGroup:
    """All ranks of the job."""
    return get_world_group()


def _parallel(asker: str) -> Parallel:
    return last_engine(f"deepspeed.utils.groups.{asker}").parallel


def _ranks(asker: str, axis: Axis) -> list[int]:
    mesh = _parallel(asker).mesh
    return next(ranks for ranks in mesh.sets(axis) if mesh.rank in ranks)


@functools.lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone, of those of `world`: torch would take None for all. Others need not know of it."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    return group
