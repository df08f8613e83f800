"""A client's optimizer, made to step the masters in place of the model's parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .build import ELEMENTWISE
from .muon import Muon
from .onebit import OneBitAdam
from .tiled import Lamb, Lion, Shard, Shards, whole

_NEVER: Final[Mapping[type[Optimizer], str]] = {
    torch.optim.LBFGS: "it evaluates the model several times a step, on parameters of its own",
    torch.optim.SparseAdam: "it takes sparse gradients only, and those of masters are dense",
}
"""Optimizers that cannot step masters at all -> why."""

_WHOLE_ONLY: Final[Mapping[type[Optimizer], str]] = {
    torch.optim.Adafactor: "it works with rows and columns of whole matrices",
    torch.optim.Muon: 'it works with whole matrices; "optimizer": {"type": "Muon"} in the config gathers them',
    Lamb: "it must know how they are partitioned, so it has to be made from the config's optimizer section",
    Muon: "it must know how they are partitioned, so it has to be made from the config's optimizer section",
}
"""Optimizers that cannot step shards of parameters, or not as the client makes them -> why."""

_SCALARS: Final = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number, and so has the shape of a 0-d parameter by chance."""


def adopt(
    optimizer: Optimizer,
    replace: Mapping[nn.Parameter, nn.Parameter],
    *,
    shards: Shards | None = None,
    allow_untested: bool = False,
) -> Adopted:
    """Put masters where the optimizer's parameter groups have parameters of the model, in place.

    `replace` maps the latter to the former; frozen parameters are dropped. The groups keep their options, and state
    that the optimizer already has is sharded as its master is. `shards` says which masters are shards;
    `allow_untested` is `zero_allow_untested_optimizer`. What is returned gives the optimizer back.

    Raises ValueError as `check_client` does, and for state that cannot be sharded.
    """
    described = shards or {}
    check_client(optimizer, replace, any(not shard.whole for shard in described.values()), allow_untested)
    states: dict[Tensor, dict[str, Any]] = {}
    chosen: list[list[int]] = []
    for group in optimizer.param_groups:
        kept = [at for at, param in enumerate(group["params"]) if param in replace]
        chosen.append(kept)
        for param in (group["params"][at] for at in kept):
            master = replace[param]
            if param in optimizer.state:
                states[master] = _shard_state(
                    optimizer.state[param], param, master, described.get(master) or whole(master)
                )
    # Nothing is changed before all of it is known to be right.
    adopted = Adopted(optimizer, {master: param for param, master in replace.items()}, described)
    for group, kept in zip(optimizer.param_groups, chosen, strict=True):
        group["params"] = [replace[group["params"][at]] for at in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][at] for at in kept]
    optimizer.state.clear()
    optimizer.state.update(states)
    return adopted


class Adopted:
    """A script's optimizer, from the moment before it is adopted until it is given back."""

    def __init__(self, optimizer: Optimizer, params: Mapping[Tensor, nn.Parameter], shards: Shards) -> None:
        """`params`: master -> parameter of the model."""
        self._optimizer = optimizer
        self._params = params
        self._shards = shards
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state: dict[Tensor, Any] | None = dict(optimizer.state)
        """None once the engine trains: it would keep as much as sharding saves."""
        self._others: dict[Tensor, Any] = {}
        """State of parameters that are not trained."""

    def settle(self) -> None:
        """The engine is made: the optimizer is given back with what it has then, and not as it was."""
        left = {id(param) for param in self._params.values()}
        self._others = {param: state for param, state in (self._state or {}).items() if id(param) not in left}
        self._state = None
        self._groups = [
            {
                key: [(at, item) for at, item in enumerate(group[key]) if id(group["params"][at]) not in left]
                for key in ("params", "param_names")
                if key in group
            }
            for group in self._groups
        ]

    def give_back(self, *, in_memory: bool = True) -> None:
        """Put the model's parameters where their masters are, and the frozen ones where they were.

        State of masters that are whole, and where their parameters are, goes with them, in the parameters' precision;
        what else masters have is dropped, all of it if states are not `in_memory`. If the engine never came to be
        everything is as before.
        """
        optimizer = self._optimizer
        if self._state is not None:
            for group, before in zip(optimizer.param_groups, self._groups, strict=False):
                group.clear()
                group.update(before)
            optimizer.state.clear()
            optimizer.state.update(self._state)
            return
        for group in optimizer.param_groups:
            group["params"] = [self._params.get(param, param) for param in group["params"]]
        for group, frozen in zip(optimizer.param_groups, self._groups, strict=False):
            for key, items in frozen.items():
                for at, item in items:
                    group[key].insert(at, item)
        for master in [key for key in optimizer.state if key in self._params]:
            state, param = optimizer.state.pop(master), self._params[master]
            shard = self._shards.get(master)
            if in_memory and (shard is None or shard.whole) and master.device == param.device:
                optimizer.state[param] = _whole_state(state, param, master)
        optimizer.state.update(self._others)


def settles_groups(optimizer: Optimizer) -> bool:
    """Whether it cannot have other parameters than those it was made with."""
    return isinstance(optimizer, Muon | OneBitAdam)


def renew(optimizer: Optimizer, replace: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put masters where parameters of the model have come into the optimizer's groups since it was adopted or made, as
    by `add_param_group`. `replace` maps the latter to the former.

    Raises ValueError for a parameter that has no master, or comes a second time, and for optimizers that settle their
    groups when they are made; nothing is changed then.
    """
    if settles_groups(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} settles its parameter groups when it is made: give initialize all of them"
        )
    masters = set(replace.values())
    seen: set[nn.Parameter] = set()
    groups: list[list[nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append([])
        for param in group["params"]:
            master = param if param in masters else replace.get(param)
            if master is None or master in seen:
                raise ValueError(
                    f"the optimizer's parameter group {number} has a parameter of shape {tuple(param.shape)} that "
                    + ("another one has, too" if master is not None else "the engine does not train: it is of another "
                       "model, or was frozen when the engine was made. Unfreeze what is to be trained later before "
                       "initialize, and leave it out of the optimizer until then")
                )  # fmt: skip
            seen.add(master)
            groups[-1].append(master)
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params


def check_client(
    optimizer: Optimizer, known: Container[nn.Parameter], sharded: bool, allow_untested: bool = False
) -> None:
    """Raise ValueError for an optimizer that cannot work on masters, or, where they are `sharded`, on shards (or if
    that is not known), and for one with a parameter to train that is not `known`."""
    _check_kind(optimizer, sharded, allow_untested)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known and param.requires_grad:
                raise ValueError(
                    f"the optimizer's parameter group {number} has a parameter of shape {tuple(param.shape)} that the "
                    "model does not have; make the optimizer from the parameters of the model given to initialize"
                )


def _check_kind(optimizer: Optimizer, sharded: bool, allow_untested: bool) -> None:
    name = type(optimizer).__name__
    for kind, why in _NEVER.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"the optimizer {name} cannot be used with the engine: {why}")
    if not sharded or type(optimizer) in (*ELEMENTWISE, Lion):
        return
    for kind, why in _WHOLE_ONLY.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"the optimizer {name} cannot step partitioned parameters (ZeRO stages 1 to 3): {why}")
    if not allow_untested:
        raise ValueError(
            f"the optimizer {name} is not known to work on partitioned parameters (ZeRO stages 1 to 3). If it treats "
            'each element of a parameter by itself, write "zero_allow_untested_optimizer": true; else use stage 0'
        )


def _shard_state(state: dict[str, Any], param: Tensor, master: Tensor, shard: Shard) -> dict[str, Any]:
    """The master's part of a parameter's state: its shard of tensors as large as the parameter, the rest as it is."""
    result = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key in _SCALARS or (value.numel() == 1 and param.numel() != 1):
            result[key] = value
        elif value.shape == param.shape:
            dtype = master.dtype if value.is_floating_point() else value.dtype
            result[key] = shard.mine(value).view(master.shape).to(master.device, dtype, copy=True)
        else:
            raise ValueError(
                f"the optimizer's state {key!r} has shape {tuple(value.shape)}, for a parameter of shape "
                f"{tuple(param.shape)}: it cannot be carried over to its master. Give initialize a fresh optimizer"
            )
    return result


def _whole_state(state: dict[str, Any], param: Tensor, master: Tensor) -> dict[str, Any]:
    """The parameter's state, from that of a master which is the whole of it."""
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == master.shape and key not in _SCALARS:
            value = value.reshape(param.shape).to(dtype=param.dtype if value.is_floating_point() else value.dtype)
        result[key] = value
    return result


class StepGuard:
    """Lets an optimizer step while the engine has it do so, and not when the script calls it: its masters have no
    gradients then, and new weights would reach no rank."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._allowed = False
        self._handle = optimizer.register_step_pre_hook(self._check)

    def __enter__(self) -> None:
        self._allowed = True

    def __exit__(self, *_: object) -> None:
        self._allowed = False

    def remove(self) -> None:
        """The optimizer is the script's."""
        self._handle.remove()

    def _check(self, *_: object) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step: the engine steps the optimizer: write engine.backward(loss) and engine.step() in the "
                "place of loss.backward(), optimizer.step() and optimizer.zero_grad()"
            )
