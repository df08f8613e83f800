"""`deepspeed.utils.groups`: which ranks the engine that was made last has this one work with.

DeepSpeed's `model_parallel` here means the ranks that share layers. Without an engine RuntimeError is raised: how ranks
are divided, its configuration says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..comm.mesh import Parallel
from .start import last_engine
from .utils import get_world_group

T = TypeVar("T")


def _of_engine(asker: str, answer: Callable[[Parallel], T]) -> Callable[[], T]:
    def ask() -> T:
        return answer(last_engine(f"deepspeed.utils.groups.{asker}").parallel)

    return ask


@functools.lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone, of those of `world`: torch would take None for all. Others need not know of it."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    return group


# The ranks with the same part of the model, which train on other data.
get_data_parallel_group = _of_engine(
    "get_data_parallel_group", lambda parallel: parallel.data.group or _alone(get_world_group())
)
get_data_parallel_world_size = _of_engine("get_data_parallel_world_size", lambda parallel: parallel.mesh.dp)
get_data_parallel_rank = _of_engine("get_data_parallel_rank", lambda parallel: parallel.mesh.dp_rank)
get_data_parallel_group_ranks = _of_engine("get_data_parallel_group_ranks", lambda parallel: parallel.mesh.peers("dp"))
get_broadcast_src_rank = _of_engine("get_broadcast_src_rank", lambda parallel: parallel.mesh.peers("dp")[0])

# The ranks that share this one's layers, and train on the same data, which the first of them may have read.
get_tensor_model_parallel_group = _of_engine(
    "get_tensor_model_parallel_group", lambda parallel: parallel.tensor.group or _alone(get_world_group())
)
get_tensor_model_parallel_world_size = _of_engine(
    "get_tensor_model_parallel_world_size", lambda parallel: parallel.mesh.tp
)
get_tensor_model_parallel_rank = _of_engine("get_tensor_model_parallel_rank", lambda parallel: parallel.mesh.tp_rank)
get_tensor_model_parallel_src_rank = _of_engine(
    "get_tensor_model_parallel_src_rank", lambda parallel: parallel.mesh.peers("tp")[0]
)


def get_sequence_parallel_world_size() -> int:
    """Sequences are not divided over ranks."""
    return 1


def get_sequence_parallel_rank() -> int:
    """The same."""
    return 0
