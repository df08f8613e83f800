"""`deepspeed.utils.groups`: which ranks the engine that was made last has this one work with.

DeepSpeed's `model_parallel` here means the ranks that share layers. Without an engine RuntimeError is raised: how ranks
are divided, its configuration says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

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


_ANSWERS: Final[Mapping[str, Callable[[Parallel], Any]]] = {
    **ANSWERS,
    # Of the ranks with the same part of the model, and of those that share layers, the first.
    "get_broadcast_src_rank": lambda parallel: parallel.mesh.peers("dp")[0],
    "get_tensor_model_parallel_src_rank": lambda parallel: parallel.mesh.peers("tp")[0],
    "get_sequence_parallel_world_size": lambda parallel: parallel.mesh.sp,
    "get_sequence_parallel_rank": lambda parallel: parallel.mesh.sp_rank,
}
"""Name -> what the engine that was made last answers."""


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in _ANSWERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def ask() -> Any:
        found = _ANSWERS[name](last_engine(f"deepspeed.utils.groups.{name}").parallel)
        return _alone(get_world_group()) if found is None else found

    return ask
