"""What is saved under which name, and what of the weights a rank holds.

Names in a checkpoint, tensors first:

    weight/NAME             a parameter: its master, in fp32 where the model is in half precision
    buffer/NAME             a persistent buffer, as the first replica has it
    buffer/NAME/R           as rank R has it, where that is otherwise
    optimizer/KEY/NAME      the optimizer's state KEY of a parameter, element by element
    optimizer/KEY/NAME/R    such a state of rank R that is not the parameter's, element by element

    training                counters, loss scale, shapes, how the job's ranks were divided, where the data stand
    optimizer  lr_scheduler  client_state
    rank/R                  what is rank R's own: its random number generators

NAME is the parameter's in the whole model, whichever pipeline stage has it; where tensor-parallel ranks have parts of
it, NAME@P/N is part P of N. What several ranks have alike is written once.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from ..data import ShardedLoader
from ..training_state import Training
from ..zero.shard import ShardedParam
from .dcp import Contents, Piece
from .folder import CheckpointError
from .reshard import tensor_shard, whole_shape
from .serialize import unpack

T = TypeVar("T")

FORMAT: Final = 2


# --- what a rank has of the model


@dataclass(frozen=True, slots=True)
class Holdings:
    """What there is of the model on one rank, by names in the whole model. Replicas have the same."""

    weights: dict[str, torch.Size]
    """Shapes of the parameters before layers were sharded."""
    shards: dict[str, dict[str, int | list[int]]]
    """How they are sharded, those that are."""
    frozen: list[str]
    buffers: dict[str, torch.Size]
    aliases: dict[str, str]
    """Further names of parameters, tied ones -> those in `weights`."""


def holdings(training: Training, *, without_frozen: bool = False) -> Holdings:
    """What this rank has."""
    params = [param for param in training.zero.params if param.trainable or not without_frozen]
    shards = {param.name: tensor_shard(param) for param in params}
    return Holdings(
        {param.name: whole_shape(param) for param in params},
        {name: shard.to_dict() for name, shard in shards.items() if shard is not None},
        [param.name for param in params if not param.trainable],
        {name: buffer.shape for name, buffer in buffers(training.module).items()},
        {name: held for name, held in names(training).items() if held != name and held in shards},
    )


def about_training(contents: Contents) -> dict[str, Any]:
    """The value "training" of a checkpoint. Raises CheckpointError for one of another format."""
    found: dict[str, Any] = unpack(contents.value("training"), "training")
    if found["format"] != FORMAT:
        raise CheckpointError(f"it has format {found['format']}, and this version of dsprof reads {FORMAT}")
    return found


def names(training: Training) -> dict[str, str]:
    """All names that this rank's parameters have in a state dict, tied ones several -> those in the whole model."""
    by_param = training.zero.by_param
    return {name: by_param[param].name for name, param in training.module.named_parameters(remove_duplicate=False)}


def merged(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """All of `parts` in one; of what several have, the first's."""
    found: dict[str, T] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, value)
    return found


# --- weights and buffers


def weight(param: ShardedParam, *, masters: bool) -> Piece:
    """What this rank holds of a parameter: the master's elements where it has one and `masters` count, which they do if
    there is an optimizer; else the parameter's own.
    """
    name = f"weight/{param.name}"
    if masters and param.trainable:
        whole = param.partition.num_shards == 1
        return Piece(name, param.master.data.view(-1), param.numel, param.start, everywhere=whole)
    if param.persistent:
        return Piece(name, param.flat, param.numel, everywhere=True)
    fetch = None if param.store is None else partial(_fetch, param)
    return Piece(name, param.shard, param.numel, param.start, fetch=fetch)


def _fetch(param: ShardedParam) -> Tensor:
    shard = torch.empty(param.shard.shape, dtype=param.shard.dtype)
    param.read_shard(shard)
    return shard


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, by all names they have: a stage of a pipeline does not know which of them others use."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def own_buffer(name: str, rank: int) -> str:
    """What the buffer `name` of one rank is called."""
    return f"buffer/{name}/{rank}"


def digests(module: nn.Module) -> dict[str, bytes]:
    """A hash of each persistent buffer, bit for bit."""
    return {name: _digest(buffer) for name, buffer in buffers(module).items()}


def _digest(buffer: Tensor) -> bytes:
    host = buffer.detach().cpu().contiguous()
    content = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    return hashlib.blake2b(content, digest_size=16).digest()


def loader_of(training: Training) -> ShardedLoader | None:
    """The engine's own loader; one of the script's is the script's to set."""
    loader = training.training_dataloader
    return loader if isinstance(loader, ShardedLoader) else None
