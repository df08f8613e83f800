"""Offloading: states and parameters that are not in use lie in host memory or in files.

    disk        files that are read and written beside the computation, and the memory for that
    optimizer   masters and the optimizer's states in a file, tile by tile
    params      this rank's shards of the parameters (stage 3) in a file
    build       all of it, as a configuration says; in memory, too

Nobody outside of it has to know where anything is: masters and states are seen in `States.through`, shards of
parameters by `ShardedParam.read_shard`.
"""

from .build import InMemory, Offload, States, open_offload
from .disk import OffloadError

__all__ = ["InMemory", "Offload", "OffloadError", "States", "open_offload"]
