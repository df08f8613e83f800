"""The model alone, in one file, as `torch.load` and other programs take it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..zero.shard import ShardedParam
from .folder import replace_whole
from .state import Trainee, buffers
from .team import Team


def save_16bit_model(
    engine: Trainee,
    folder: str | os.PathLike[str],
    name: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the model's state dict, in the precision it runs in, to `folder`/`name`. On all ranks; rank 0 writes.

    Sharded parameters are gathered one after the other, so that only rank 0, in host memory, ever has all of them. In
    stage 3 this is done only if `stage3_gather_16bit_weights_on_model_save` says so: else nothing is written, and
    False returned. Raises CheckpointError on all ranks.
    """
    path = Path(folder) / name
    zero = engine.zero
    if zero.settings.stage == 3 and not engine.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
        warnings.warn(
            f"save_16bit_model: {path} was not written, because the parameters are sharded; set "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save to true",
            stacklevel=3,
        )
        return False
    team = Team()
    with engine.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        tensors: dict[ShardedParam, Tensor] = {}
        for param in zero.params:
            if param.trainable or not exclude_frozen_parameters:
                _collect(engine, param, tensors, team)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {
                key: tensors[zero.by_param[param]]
                for key, param in engine.module.named_parameters(remove_duplicate=False)
                if zero.by_param[param] in tensors
            }
            state |= {key: buffer.detach().cpu() for key, buffer in buffers(engine.module).items()}

            def put(file: BinaryIO) -> None:
                torch.save(state, file)

            with engine.hooks.span("copy", "checkpoint_write", purpose="checkpoint",
                                   bytes=sum(tensor.nbytes for tensor in tensors.values())):  # fmt: skip
                replace_whole(path, put)

        team.from_first(f"{path} was not written", write)
    return True


def _collect(engine: Trainee, param: ShardedParam, tensors: dict[ShardedParam, Tensor], team: Team) -> None:
    """Copy the whole of `param` to the host on rank 0, and leave it as it was."""
    absent = not param.resident
    if absent:
        engine.zero.gatherer.bring([param], param.numel)
    if team.rank == 0:
        tensors[param] = param.param.detach().to("cpu", copy=True)
    if absent:
        param.release()
