"""The optimizer's state, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensor.sharding import TensorShard
from ..zero import Zero
from ..zero.shard import ShardedParam
from .dcp import Contents, Piece
from .folder import CheckpointError
from .state import Wanted, part_name, same_sharding, tensor_shard

PER_RANK: Final = ("worker_error", "server_error")
"""Optimizer state that differs from rank to rank although the parameters do not: what 1-bit Adam still owes. The first
is as large as the parameter, the second as one rank's part of it."""

MACHINE: Final = ("foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that say how a step is computed here, not what it does."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state but for its tensors, as plain values."""

    kind: str
    """The name of the optimizer's class."""
    groups: list[list[dict[str, Any]]]
    """Of each pipeline stage's parameter groups the names of their `params`, and their `options`."""
    entries: dict[str, dict[str, tuple[Any, ...]]]
    """Parameter -> key -> ("elements",), ("value", value), ("whole", shape) or ("rank", shape)."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, zero: Zero, rank: int, counts: Callable[[nn.Parameter], bool]
) -> tuple[OptimizerState, list[Piece]]:
    """Take the optimizer's state on this `rank` apart. What is one number for a parameter becomes a value, the rest
    tensors: those of parameters that this rank `counts`, and what is its own.
    """
    groups = [
        {"params": names, "options": {key: group[key] for key in group if key not in ("params", "param_names")}}
        for names, group in zip(group_names(optimizer, zero), optimizer.param_groups, strict=True)
    ]
    entries: dict[str, dict[str, tuple[Any, ...]]] = {}
    tensors: list[Piece] = []
    numbers = _numbers(optimizer, zero)
    for param in zero.trainable:
        master = param.master
        if not optimizer.state.get(master):
            continue
        entry: dict[str, tuple[Any, ...]] = {}
        entries[param.name] = entry
        shard, counted = tensor_shard(param), counts(param.param)
        for key, value in optimizer.state[master].items():
            name = f"optimizer/{key}/{param.name}"
            if not isinstance(value, Tensor) or key in numbers:
                entry[key] = ("value", value)
            elif key in PER_RANK or (value.shape != master.shape and param.partition.num_shards > 1):
                entry[key] = ("rank", value.shape)
                tensors.append(Piece(f"{name}/{rank}", value.reshape(-1), value.numel()))
            elif value.shape == master.shape:
                entry[key] = ("elements",)
                everywhere = param.partition.num_shards == 1
                if counted:
                    flat = value.reshape(-1)
                    tensors.append(Piece(part_name(name, shard), flat, param.numel, param.start, everywhere))
            else:
                entry[key] = ("whole", value.shape)
                if counted:
                    tensors.append(Piece(part_name(name, shard), value.reshape(-1), value.numel(), everywhere=True))
    return OptimizerState(type(optimizer).__name__, [groups], entries), tensors


def group_names(optimizer: torch.optim.Optimizer, zero: Zero) -> list[list[str]]:
    """Of each parameter group the names of its parameters."""
    names = {id(param.master): param.name for param in zero.trainable}
    return [[names[id(master)] for master in group["params"]] for group in optimizer.param_groups]


def _numbers(optimizer: torch.optim.Optimizer, zero: Zero) -> set[str]:
    """Keys whose value is one number a parameter. A 0-d parameter alone would not show that."""
    return {"step"} | {
        key
        for param in zero.trainable
        if param.master.ndim > 0
        for key, value in optimizer.state.get(param.master, {}).items()
        if isinstance(value, Tensor) and value.ndim == 0
    }


class OptimizerLoading:
    """Gives an optimizer the state that was saved: `room` for the tensors of a parameter, to be filled, then `finish`.

    Raises CheckpointError if the state is not one for this optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, saved: OptimizerState, zero: Zero, contents: Contents, *,
        rank: int, same_ranks: bool, shards: Mapping[str, TensorShard], groups: Iterable[Sequence[Sequence[str]]],
    ) -> None:  # fmt: skip
        """`same_ranks`: the job is divided as the one that saved, of which this is `rank`. `shards` are those of the
        parameters in the checkpoint that are sharded over tensor-parallel ranks, and `groups` the `group_names` of all
        ranks that have a part of the model.
        """
        self._optimizer = optimizer
        self._saved = saved
        self._contents = contents
        self._rank = rank
        self._same_ranks = same_ranks
        self._shards = shards
        self._ranks = zero.size
        self._names = group_names(optimizer, zero)
        self._on_device = {
            id(master)
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for master in group["params"]
        }
        self._check_groups(groups)
        self.expected = [wanted for param in zero.trainable for _, _, wanted in self._tensors(param)]
        """All that is to be read, without memory."""

    def room(self, param: ShardedParam) -> list[Wanted]:
        """Give the optimizer the parameter's state, but for the contents of its tensors, which are to be read to
        these.
        """
        master = param.master
        old = self._optimizer.state.pop(master, {})
        saved = self._saved.entries.get(param.name)
        if saved is None:
            return []
        state = {key: self._value(param, master, key, *how) for key, how in saved.items()}
        result = []
        for key, shape, wanted in self._tensors(param):
            tensor, dtype = old.get(key), wanted.piece.flat.dtype
            if not (isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype):
                tensor = torch.empty(shape, dtype=dtype, device=master.device)
            tensor = tensor.contiguous()
            state[key] = tensor
            result.append(replace(wanted, piece=replace(wanted.piece, flat=tensor.view(-1))))
        self._optimizer.state[master] = state
        return result

    def finish(self) -> None:
        """Give the optimizer the options of its parameter groups."""
        for number, (group, names) in enumerate(zip(self._optimizer.param_groups, self._names, strict=True)):
            # Stages may have options of their own: those count of the one that had most of these parameters.
            stages = [stage[number] for stage in self._saved.groups if number < len(stage)]
            common = [len({*names}.intersection(saved["params"])) for saved in stages]
            for key, value in stages[common.index(max(common))]["options"].items():
                if key in MACHINE:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _tensors(self, param: ShardedParam) -> Iterator[tuple[str, torch.Size, Wanted]]:
        """Of each tensor to be read: key, its shape here, and what is wanted, without memory."""
        master = param.master
        shard, saved = tensor_shard(param), self._shards.get(param.name)
        for key, (kind, *about) in self._saved.entries.get(param.name, {}).items():
            name, numel, start, shape = f"optimizer/{key}/{param.name}", param.numel, param.start, master.shape
            if kind == "whole":
                if param.partition.num_shards > 1 or not same_sharding(shard, saved):
                    raise CheckpointError(
                        f"the optimizer's state {key!r} of {param.name} has shape {tuple(about[0])}, which cannot be "
                        "sharded as parameters are: load it with ZeRO stage 0 and as many tensor-parallel ranks as it "
                        "was saved with, or with load_optimizer_states=False"
                    )
                numel, start, shape = about[0].numel(), 0, about[0]
            elif kind == "rank":
                name = f"{name}/{self._rank}"
                if not self._has_own(name):
                    if key not in PER_RANK:
                        raise CheckpointError(
                            f"the optimizer's state {key!r} of {param.name} is each rank's own, and can be loaded only "
                            "on ranks that are divided as they were: load it so, or with load_optimizer_states=False"
                        )
                    continue
                numel, start, shape = about[0].numel(), 0, about[0]
                shard = saved = None
            elif kind != "elements":
                continue
            dtype = self._contents.dtype(part_name(name, saved)) or master.dtype
            flat = torch.empty(shape, dtype=dtype, device="meta").view(-1)
            yield key, shape, Wanted(Piece(name, flat, numel, start), shard, saved)

    def _has_own(self, name: str) -> bool:
        """Whether a state that is each rank's own is there, and this rank's."""
        return self._same_ranks and name in self._contents

    def _value(self, param: ShardedParam, master: nn.Parameter, key: str, kind: str, about: Any = None) -> Any:
        """What a key has before its tensor is read, if it has one to be read."""
        if kind == "value" and isinstance(about, Tensor):
            # As torch's optimizers have it: step counts on the host unless the device is to count.
            on_host = key == "step" and id(master) not in self._on_device
            return about.to("cpu" if on_host else master.device, copy=True)
        if kind == "rank" and not self._has_own(f"optimizer/{key}/{param.name}/{self._rank}"):
            # Nobody's any more; at first it is zero.
            part = torch.Size([-(-master.numel() // self._ranks)])
            return master.new_zeros(master.shape if key == "worker_error" else part)
        return about

    def _check_groups(self, everywhere: Iterable[Sequence[Sequence[str]]]) -> None:
        mine = type(self._optimizer).__name__
        advice = "configure it as it was, or load with load_optimizer_states=False"
        if mine != self._saved.kind:
            raise CheckpointError(
                f"the checkpoint has the state of {self._saved.kind}, and the optimizer is {mine}; {advice}"
            )
        groups = _of_all(everywhere)
        were = _of_all([[group["params"] for group in stage] for stage in self._saved.groups])
        if len(groups) != len(were):
            raise CheckpointError(
                f"the checkpoint has {len(were)} parameter groups, and the optimizer {len(groups)}; {advice}"
            )
        for number, (names, saved) in enumerate(zip(groups, were, strict=True)):
            odd = sorted(names ^ saved)
            if odd:
                raise CheckpointError(
                    f"parameter group {number} differs: {odd[0]} is in that of the "
                    f"{'optimizer' if odd[0] in names else 'checkpoint'} only; {advice}"
                )


def _of_all(ranks: Iterable[Sequence[Sequence[str]]]) -> list[set[str]]:
    """Parameter groups of the whole model, by those of ranks that have a part of it each."""
    return [{name for group in groups for name in group} for groups in zip_longest(*ranks, fillvalue=())]
