"""`deepspeed.zero`, and what scripts ask parameters of stage 3: `hasattr(p, "ds_id")`, `p.ds_status`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ..zero import GatheredParameters, Init
from ..zero.holder import holder
from ..zero.shard import ShardedParam

__all__ = [
    "DESCRIPTIONS",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "describe_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ZeroParamStatus(enum.Enum):
    """Whether a parameter of stage 3 is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """Whether a parameter is cut."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing is left to be done: a parameter that is used outside its module is fetched when it is read."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter takes a module and a parameter, not {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The opposite, and as little."""
    register_external_parameter(module, parameter)


def describe_parameters() -> None:
    """Have parameters that may be in pieces, and no others, say so as DeepSpeed's do, from now on.

    Many scripts gather only those when they save a model, and would write what is left of the others.
    """
    for name, describe in DESCRIPTIONS.items():
        setattr(nn.Parameter, name, property(describe))


def _cut(param: nn.Parameter) -> ShardedParam:
    """Raises AttributeError for a parameter that is whole at all times, so that `hasattr` is False."""
    found = holder(param)
    if found is None or found.sharded.persistent:
        raise AttributeError(f"a {type(param).__name__} has ds_* attributes while ZeRO stage 3 has it in pieces only")
    return found.sharded


def _id(param: nn.Parameter) -> int:
    return _cut(param).index


def _numel(param: nn.Parameter) -> int:
    return _cut(param).numel


def _shape(param: nn.Parameter) -> torch.Size:
    return _cut(param).shape


def _status(param: nn.Parameter) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if _cut(param).resident else ZeroParamStatus.NOT_AVAILABLE


DESCRIPTIONS: Final[Mapping[str, Callable[[nn.Parameter], Any]]] = {
    "ds_id": _id,
    "ds_numel": _numel,
    "ds_shape": _shape,
    "ds_status": _status,
}
"""Attribute -> what it says of a parameter."""
