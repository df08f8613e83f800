"""Offloading: states and parameters that are not in use lie in host memory or in files.

    disk        files that are read and written beside the computation
    buffers     the memory that they are read to and written from
    optimizer   masters and the optimizer's states, tile by tile
    params      this rank's pieces of the parameters (stage 3)
    build       all of it, as a configuration says

Nobody outside of it has to know where anything is: masters and states are seen in `States.through`, pieces of
parameters by `ShardedParam.read_shard`.
"""

from .build import Offload, open_offload
from .disk import OffloadError
from .optimizer import InMemory, States

__all__ = ["InMemory", "Offload", "OffloadError", "States", "open_offload"]
