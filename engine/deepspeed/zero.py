"""`deepspeed.zero`, and what scripts ask parameters of stage 3: `hasattr(p, "ds_id")`, `p.ds_status`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..config.loading import read
from ..zero import GatheredParameters as GatheredParameters
from ..zero import Init as _Init
from ..zero.shard import ShardedParam, find_sharded
from .start import engine_of

BATCH_SIZES: Final = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu"})
"""The keys of which one is enough."""


class Init(_Init):
    """`dsprof.engine.zero.Init`, for a configuration whose "auto" values are still to be filled in.

    Transformers makes the model before it knows them all. They are taken as not written, as DeepSpeed does; of batch
    sizes, which change nothing here, 1 is taken where none is left.
    """

    def settled(self, source: dict[str, Any] | str | Path) -> dict[str, Any] | str | Path:
        """The configuration without its "auto" values."""
        found = _without_auto(read(Path(source)) if isinstance(source, str | Path) else source)
        if not found.keys() & BATCH_SIZES:
            found["train_micro_batch_size_per_gpu"] = 1
            found.pop("heterogeneous", None)  # how it would be divided changes nothing here, either
        return found


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != "auto"
    }


class ZeroParamStatus(enum.Enum):
    """Whether a parameter of stage 3 is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """Whether a parameter is sharded."""

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


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device
) -> Callable[..., torch.Tensor]:
    """`fn`: DeepSpeed's zero.Init changes type and place of all tensors that are made in its block, and Transformers
    replaces this function so that it spares some. Here all are spared; parameters alone are placed."""
    return fn


def describe_parameters() -> None:
    """Have the parameters of stage 3, and no others, say what is theirs as DeepSpeed's do, from now on.

    Many scripts gather only those when they save a model, and would write what is left of the others.
    """
    for name, describe in DESCRIPTIONS.items():
        setattr(nn.Parameter, name, property(describe))


def _sharded(param: nn.Parameter) -> ShardedParam:
    """Raises AttributeError for a parameter that stage 3 has not, so that `hasattr` is False."""
    found = find_sharded(param)
    if found is not None and found.persistent:
        known = engine_of(param)
        if known is None or known[0].zero.settings.stage < 3:
            found = None
    if found is None:
        raise AttributeError(f"a {type(param).__name__} has ds_* attributes while ZeRO stage 3 has it")
    return found


DESCRIPTIONS: Final[Mapping[str, Callable[[nn.Parameter], Any]]] = {
    "ds_id": lambda param: _sharded(param).index,
    "ds_numel": lambda param: _sharded(param).numel,
    "ds_shape": lambda param: _sharded(param).shape,
    "ds_status": lambda param: ZeroParamStatus.AVAILABLE if _sharded(param).resident else ZeroParamStatus.NOT_AVAILABLE,
    "ds_tensor": lambda param: _sharded(param).shard,
    "partition_numel": lambda param: partial(getattr, _sharded(param), "width"),
}
"""Attribute -> what it says of a parameter."""
