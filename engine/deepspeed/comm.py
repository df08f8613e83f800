"""What `deepspeed.comm` has beyond torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist

from .start import last_engine


def get_local_rank() -> int:
    """This process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup:
    """All ranks of the job. Raises RuntimeError before `init_distributed`."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("get_world_group: there is none yet; call deepspeed.init_distributed() first")
    return world


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Print the communications so far of the engine that was made last (`comms_logger`); with `show_straggler` on all
    ranks at once."""
    if return_dict:
        raise ValueError(
            "log_summary: return_dict is not supported; the run's trace has each communication (trace/*.parquet), and "
            "findings.json what to make of them"
        )
    last_engine("log_summary").log_summary(show_straggler)
