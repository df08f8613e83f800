"""`deepspeed.zero`, and what scripts ask parameters of stage 3: `hasattr(p, "ds_id")`, `p.ds_status`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..config.loading import read
from ..zero import GatheredParameters
from ..zero import Init as _Init
from ..zero.registry import holder
from ..zero.shard import ShardedParam
from .start import engine_of

__all__ = [
    "DESCRIPTIONS",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "describe_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

BATCH_SIZES: Final = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu"})
"""The keys of which one is enough."""


class Init(_Init):
    """`dsprof.engine.zero.Init`, for a configuration whose "auto" values are still to be filled in.

    Transformers makes the model before it knows them all. They are taken as not written, as DeepSpeed does; of batch
    sizes, which change nothing here, 1 is taken where none is left.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None, *args: Any, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory,
            _settled(config_dict_or_path), _settled(config), *args, **others,
        )  # fmt: skip


def _settled(source: dict[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """The configuration without its "auto" values."""
    if source is None:
        return None
    settled = _without_auto(read(Path(source)) if isinstance(source, str | Path) else source)
    if not settled.keys() & BATCH_SIZES:
        settled["train_micro_batch_size_per_gpu"] = 1
    return settled


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


def _cut(param: nn.Parameter) -> ShardedParam:
    """Raises AttributeError for a parameter that stage 3 has not, so that `hasattr` is False."""
    found = holder(param)
    if found is not None and found.sharded.persistent:
        known = engine_of(param)
        if known is None or known[0].zero.settings.stage < 3:
            found = None
    if found is None:
        raise AttributeError(f"a {type(param).__name__} has ds_* attributes while ZeRO stage 3 has it")
    return found.sharded


def _id(param: nn.Parameter) -> int:
    return _cut(param).index


def _numel(param: nn.Parameter) -> int:
    return _cut(param).numel


def _shape(param: nn.Parameter) -> torch.Size:
    return _cut(param).shape


def _status(param: nn.Parameter) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if _cut(param).resident else ZeroParamStatus.NOT_AVAILABLE


def _piece(param: nn.Parameter) -> torch.Tensor:
    return _cut(param).shard


def _piece_numel(param: nn.Parameter) -> Callable[[], int]:
    found = _cut(param)
    return lambda: found.cut.chunk


DESCRIPTIONS: Final[Mapping[str, Callable[[nn.Parameter], Any]]] = {
    "ds_id": _id,
    "ds_numel": _numel,
    "ds_shape": _shape,
    "ds_status": _status,
    "ds_tensor": _piece,
    "partition_numel": _piece_numel,
}
"""Attribute -> what it says of a parameter."""
