"""The optimizer's state, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..zero import Zero
from ..zero.shard import Cut, ShardedParam
from .pieces import Contents, Piece
from .team import CheckpointError, Team

PER_RANK: Final = ("worker_error", "server_error")
"""Optimizer state that differs from rank to rank although the parameters do not: what 1-bit Adam still owes."""

MACHINE: Final = ("foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that say how a step is computed here, not what it does."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer's state, taken apart: `tensors`, and the rest of it as plain values."""

    kind: str
    """The name of the optimizer's class."""
    groups: list[dict[str, Any]]
    """Of each parameter group the names of its `params`, and its `options`."""
    entries: dict[str, dict[str, tuple[Any, ...]]]
    """Parameter -> key -> ("elements",), ("value", value), ("whole", shape) or ("rank", shape)."""
    tensors: list[Piece]


def optimizer_state(optimizer: torch.optim.Optimizer, zero: Zero, team: Team) -> OptimizerState:
    """Take the optimizer's state apart. What is one number for a parameter becomes a value, the rest tensors."""
    names = {id(param.master): param.name for param in zero.trainable}
    groups = [
        {
            "params": [names[id(master)] for master in group["params"]],
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]
    entries: dict[str, dict[str, tuple[Any, ...]]] = {}
    tensors: list[Piece] = []
    numbers = _numbers(optimizer, zero)
    for param in zero.trainable:
        master = param.master
        if master is None or not optimizer.state.get(master):
            continue
        entry: dict[str, tuple[Any, ...]] = {}
        entries[param.name] = entry
        for key, value in optimizer.state[master].items():
            name = f"optimizer/{key}/{param.name}"
            if not isinstance(value, Tensor) or key in numbers:
                entry[key] = ("value", value)
            elif key in PER_RANK or (value.shape != master.shape and param.cut.pieces > 1):
                entry[key] = ("rank", value.shape)
                tensors.append(Piece(f"{name}/{team.rank}", value.reshape(-1), value.numel()))
            elif value.shape == master.shape:
                entry[key] = ("elements",)
                everywhere = param.cut.pieces == 1
                tensors.append(Piece(name, value.reshape(-1), param.numel, param.start, everywhere))
            else:
                entry[key] = ("whole", value.shape)
                tensors.append(Piece(name, value.reshape(-1), value.numel(), everywhere=True))
    return OptimizerState(type(optimizer).__name__, groups, entries, tensors)


def _numbers(optimizer: torch.optim.Optimizer, zero: Zero) -> set[str]:
    """Keys whose value is one number a parameter. Of a 0-d parameter alone that could not be told."""
    return {"step"} | {
        key
        for param in zero.trainable
        if param.master is not None and param.master.ndim > 0
        for key, value in optimizer.state.get(param.master, {}).items()
        if isinstance(value, Tensor) and value.ndim == 0
    }


class OptimizerLoading:
    """Gives an optimizer the state that was saved: `room` for the tensors of a parameter, to be filled, then `finish`.

    Raises CheckpointError if the state is not one for this optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, saved: OptimizerState, zero: Zero, contents: Contents, ranks: int,
        team: Team,
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._saved = saved
        self._contents = contents
        self._same_ranks = ranks == team.size
        self._team = team
        self._names = {id(param.master): param.name for param in zero.trainable}
        self._on_device = {
            id(master)
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for master in group["params"]
        }
        self._check_groups()
        self.expected = [
            Piece(name, torch.empty(shape, dtype=dtype, device="meta").view(-1), numel, start)
            for param in zero.trainable
            for _, name, numel, start, shape, dtype in self._tensors(param)
        ]
        """All that is to be read, without memory."""

    def room(self, param: ShardedParam) -> list[Piece]:
        """Give the optimizer the parameter's state, but for the contents of its tensors, which are to be read to
        these.
        """
        master = param.master
        assert master is not None
        old = self._optimizer.state.pop(master, {})
        saved = self._saved.entries.get(param.name)
        if saved is None:
            return []
        state = {key: self._value(master, key, *how) for key, how in saved.items()}
        pieces = []
        for key, name, numel, start, shape, dtype in self._tensors(param):
            tensor = old.get(key)
            if not (isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype):
                tensor = torch.empty(shape, dtype=dtype, device=master.device)
            tensor = tensor.contiguous()
            state[key] = tensor
            pieces.append(Piece(name, tensor.view(-1), numel, start))
        self._optimizer.state[master] = state
        return pieces

    def finish(self) -> None:
        """Give the optimizer the options of its parameter groups."""
        for group, saved in zip(self._optimizer.param_groups, self._saved.groups, strict=True):
            for key, value in saved["options"].items():
                if key in MACHINE:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _tensors(self, param: ShardedParam) -> Iterator[tuple[str, str, int, int, torch.Size, torch.dtype]]:
        """Of each tensor to be read: key, name, elements in all, the first of this rank, and shape and dtype here."""
        master = param.master
        assert master is not None
        for key, (kind, *about) in self._saved.entries.get(param.name, {}).items():
            name, numel, start, shape = f"optimizer/{key}/{param.name}", param.numel, param.start, master.shape
            if kind == "whole":
                if param.cut.pieces > 1:
                    raise CheckpointError(
                        f"the optimizer's state {key!r} of {param.name} has shape {tuple(about[0])}, which cannot be "
                        "cut as parameters are: load it with ZeRO stage 0, or with load_optimizer_states=False"
                    )
                numel, start, shape = about[0].numel(), 0, about[0]
            elif kind == "rank" and self._same_ranks:
                name, numel, start, shape = f"{name}/{self._team.rank}", about[0].numel(), 0, about[0]
            elif kind != "elements":
                continue
            yield key, name, numel, start, shape, self._contents.dtype(name) or master.dtype

    def _value(self, master: nn.Parameter, key: str, kind: str, about: Any = None) -> Any:
        """What a key has before its tensor is read, if it has one to be read."""
        if kind == "value" and isinstance(about, Tensor):
            # As torch's optimizers have it: step counts on the host unless the device is to count.
            on_host = key == "step" and id(master) not in self._on_device
            return about.to("cpu" if on_host else master.device, copy=True)
        if kind == "rank" and not self._same_ranks:
            # Nobody's any more. At first it is zero, as large as the parameter or as a rank's part of it.
            part = torch.Size([Cut(master.numel(), self._team.size).chunk])
            return master.new_zeros(master.shape if about == master.shape else part)
        return about

    def _check_groups(self) -> None:
        mine = type(self._optimizer).__name__
        advice = "configure it as it was, or load with load_optimizer_states=False"
        if mine != self._saved.kind:
            raise CheckpointError(
                f"the checkpoint has the state of {self._saved.kind}, and the optimizer is {mine}; {advice}"
            )
        groups = [[self._names[id(master)] for master in group["params"]] for group in self._optimizer.param_groups]
        if len(groups) != len(self._saved.groups):
            raise CheckpointError(
                f"the checkpoint has {len(self._saved.groups)} parameter groups, and the optimizer {len(groups)}; "
                f"{advice}"
            )
        for number, (names, saved) in enumerate(zip(groups, self._saved.groups, strict=True)):
            odd = sorted(set(names) ^ set(saved["params"]))
            if odd:
                raise CheckpointError(
                    f"parameter group {number} differs: {odd[0]} is in that of the "
                    f"{'optimizer' if odd[0] in names else 'checkpoint'} only; {advice}"
                )
