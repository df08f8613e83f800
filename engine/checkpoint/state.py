"""What is saved under which name, and what of the weights a rank holds.

Names in a checkpoint, tensors first:

    weight/NAME             a parameter: its master, in fp32 where the model is in half precision
    buffer/NAME             a persistent buffer; rank 0's counts
    optimizer/KEY/NAME      the optimizer's state KEY of a parameter, element by element
    optimizer/KEY/NAME/R    such a state of rank R that is not the parameter's, element by element

    training                counters, loss scale, shapes
    optimizer  lr_scheduler  client_state
    rank/R                  what is rank R's own: its random number generators
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..hooks import Hooks
from ..offload import States
from ..precision import LossScaler
from ..zero import Zero
from ..zero.shard import ShardedParam
from .pieces import Piece

if TYPE_CHECKING:
    from ..config import Config


class Trainee(Protocol):
    """What is saved and loaded: of an engine, this is all that is used."""

    module: nn.Module
    config: Config
    zero: Zero
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler
    hooks: Hooks
    states: States
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


# --- weights and buffers


def device_of(zero: Zero) -> torch.device:
    """Where the model is."""
    return next((param.param.device for param in zero.params), torch.device("cpu"))


def weights(params: Iterable[ShardedParam], *, masters: bool) -> list[Piece]:
    """What this rank holds of each parameter: the master's elements where it has one and `masters` count, which they do
    if there is an optimizer; else the parameter's own.
    """
    return [_weight(param, masters) for param in params]


def _weight(param: ShardedParam, masters: bool) -> Piece:
    name = f"weight/{param.name}"
    if masters and param.master is not None:
        return Piece(name, param.master.data.view(-1), param.numel, param.start, everywhere=param.cut.pieces == 1)
    if param.persistent:
        return Piece(name, param.flat, param.numel, everywhere=True)
    fetch = None if param.home is None else partial(_fetch, param)
    return Piece(name, param.shard, param.numel, param.start, fetch=fetch)


def _fetch(param: ShardedParam) -> Tensor:
    piece = torch.empty(param.shard.shape, dtype=param.shard.dtype)
    param.read_piece(piece)
    return piece


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return dict(found.values())
