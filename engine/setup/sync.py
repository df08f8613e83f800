"""Ranks that are to have the same configuration and model are held to that before anything is sent, and begin with the
same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from dsprof.words import joined

from ..comm.consensus import first_difference
from ..comm.mesh import Parallel
from ..config import Config
from ..tree import leaves

OF_A_RANK: Final[Any] = {
    **dict.fromkeys(
        ("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "aio", "comms_logger",
         "flops_profiler", "tensorboard", "csv_monitor"), True,
    ),
    "zero_optimization": {
        name: {"nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
               "pipeline_write", "fast_init"}
        for name in ("offload_param", "offload_optimizer")
    },
    "pipeline": {"layer_costs"},
}  # fmt: skip
"""Keys that may differ between ranks: what is reported, and where a host has its disks and memory."""


def check_same_config(config: Config) -> None:
    """Raise ValueError on all ranks of the job if they do not train by the same configuration. On all ranks."""
    values = leaves(config.model_dump(mode="json", exclude=OF_A_RANK))
    found = first_difference({joined(*path): value for path, value in values})
    if found is not None:
        raise ValueError(
            f"initialize: the ranks have different configurations, first in {found.key}: {found.listed(json.dumps)}: "
            "pass the same one on every rank"
        )


def check_same_model(model: nn.Module, parallel: Parallel, names: Mapping[nn.Parameter, str] | None = None) -> None:
    """Raise ValueError on all ranks of the job if those of one pipeline stage have different models: parameters or
    buffers with other names, shapes or dtypes, in another order, or frozen on some ranks only.

    Before layers are sharded over tensor-parallel ranks; on all ranks. Where they agree, 8 bytes of each are sent.
    `names` are those of the parameters in the whole model, where this is a part of it.
    """
    mesh, lines = parallel.mesh, dict(enumerate(_described(model, names)))
    found = first_difference(lines, parallel.everyone, mesh.sets("dp", "tp"))
    if found is not None:
        where = f" on the pipeline stage {min(found.said) // (mesh.dp * mesh.tp)}" if mesh.pp > 1 else ""
        raise ValueError(
            f"initialize: the ranks have different models{where}, first where "
            f"{found.listed(lambda line: line or 'nothing')}: build the same one on every rank, from the same "
            "arguments, with the same parameters frozen"
        )


@torch.no_grad()
def broadcast_model(tensors: list[torch.Tensor], parallel: Parallel) -> None:
    """Have the ranks that are to have the same weights begin with those of the first: replicas, and before layers are
    sharded, tensor-parallel ranks. On all ranks."""
    for comm in (parallel.tensor, parallel.data):
        for tensor in tensors:
            comm.broadcast(tensor.data, 0, "parameter").wait()


def _described(model: nn.Module, names: Mapping[nn.Parameter, str] | None) -> list[str]:
    """What has to agree, a line for each parameter and each buffer."""
    lines = []
    for name, param in model.named_parameters():
        whole = name if names is None else names[param]
        lines.append(f"{whole} {_kind(param)}{'' if param.requires_grad else ', frozen'}")
    return lines + [f"the buffer {name} {_kind(buffer)}" for name, buffer in model.named_buffers()]


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
