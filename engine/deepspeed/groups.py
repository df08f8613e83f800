"""`deepspeed.utils.groups`: which ranks the engine that was made last has this one work with.

DeepSpeed's `model_parallel` here means the ranks that share layers. Without an engine RuntimeError is raised: how ranks
are divided, its configuration says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..comm.mesh import Parallel
from ..pipe.topology import ANSWERS
from .start import last_engine
from .utils import get_world_group


@functools.lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone, of those of `world`: torch would take None for all. Others need not know of it."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    return group


def _of_engine(name: str, answer: Callable[[Parallel], Any] | None = None) -> Callable[[], Any]:
    """What the grid of the engine that was made last answers by this name, or `answer` if it has none."""

    def ask() -> Any:
        parallel = last_engine(f"deepspeed.utils.groups.{name}").parallel
        found = (answer or ANSWERS[name])(parallel)
        return _alone(get_world_group()) if found is None else found

    return ask


# The ranks with the same part of the model, which train on other data.
get_data_parallel_group = _of_engine("get_data_parallel_group")
get_data_parallel_world_size = _of_engine("get_data_parallel_world_size")
get_data_parallel_rank = _of_engine("get_data_parallel_rank")
get_data_parallel_group_ranks = _of_engine("get_data_parallel_group_ranks")
get_broadcast_src_rank = _of_engine("get_broadcast_src_rank", lambda parallel: parallel.mesh.peers("dp")[0])

# The ranks that share this one's layers, and train on the same data, which the first of them may have read.
get_tensor_model_parallel_group = _of_engine("get_tensor_model_parallel_group")
get_tensor_model_parallel_world_size = _of_engine("get_tensor_model_parallel_world_size")
get_tensor_model_parallel_rank = _of_engine("get_tensor_model_parallel_rank")
get_tensor_model_parallel_src_rank = _of_engine(
    "get_tensor_model_parallel_src_rank", lambda parallel: parallel.mesh.peers("tp")[0]
)


def get_sequence_parallel_world_size() -> int:
    """Sequences are not divided over ranks."""
    return 1


def get_sequence_parallel_rank() -> int:
    """The same."""
    return 0
