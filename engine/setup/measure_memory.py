"""How much memory each rank has for what ZeRO shards: `"heterogeneous": {"memory": "measure"}`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import torch

from ..comm.consensus import gather_objects
from ..config import Config

LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
"""What the container may have of the host's memory, in bytes, or the word `max`."""


def with_measured_memory(config: Config, rank: int, device: torch.device) -> Config:
    """The configuration with the memory of all ranks in the place of "measure", the same on all, in hundredths of the
    largest. On all ranks.

    It is all that the rank's device has. Where the host has the optimizer's state, or the model, it is the rank's part
    of the host's memory: ranks of one host, as LOCAL_WORLD_SIZE counts them, have equal parts.
    """
    offload = config.zero_optimization.offload_optimizer
    by_host = device.type != "cuda" or (offload is not None and offload.device != "none")
    found = gather_objects(_of_host() if by_host else torch.cuda.get_device_properties(device).total_memory)
    memory = tuple(max(0.01, round(each / max(found), 2)) for each in found)
    if rank == 0:
        gib = ", ".join(f"{each / 2**30:.3g}" for each in found)
        print(f"heterogeneous: the ranks have {gib} GiB, so they hold shards as {list(memory)}", file=sys.stderr)
    return config.model_copy(update={"heterogeneous": config.heterogeneous.model_copy(update={"memory": memory})})


def _of_host() -> float:
    """Bytes of this rank's part of the host's memory."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
        there = min(there, int(LIMIT.read_text()))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return there / (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
