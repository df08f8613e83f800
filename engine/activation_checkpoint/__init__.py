"""DeepSpeed's `deepspeed.checkpointing`: activation checkpointing that a model's own code calls for.

As in DeepSpeed these settings are the process's, not one engine's. `policies` has what a configuration checkpoints in a
model that calls for nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..comm.launch import rank_and_size
from ..config import load
from ..config.config import ActivationCheckpointingConfig
from ..hooks import Hooks
from .policies import Region


@dataclass
class _Settings:
    hooks: Hooks = field(default_factory=Hooks)
    on_host: bool = False
    configured: bool = False
    mpu: Any = None


_settings: Final = _Settings()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` and keep its arguments alone; backward calls it again, with the same random numbers.

    Returns what it returns, but, as DeepSpeed does, a tuple for a list, and the single element for a tuple of one.
    """
    outputs = region_of(function)(function, *args, **kwargs)
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    return outputs


def region_of(function: Callable[..., Any]) -> Region:
    """What calls `function` so, and returns what it returns."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return Region(_settings.hooks, name, on_host=_settings.on_host)


def configure(
    mpu_: Any,
    deepspeed_config: str | Path | dict[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` works from now on; an argument that is given goes before the configuration's key.

    One of these has an effect here, `checkpoint_in_cpu` (the key `cpu_checkpointing`); the others are warned about.
    Raises ValueError for `partition_activations` with a model-parallel group, which is not supported.
    """
    if partition_activations and mpu_ is not None and ask(mpu_, "world_size") > 1:
        raise ValueError(
            "partition_activations over a model-parallel group is not supported: leave it out, or use "
            "checkpoint_in_cpu to free the memory instead"
        )
    others = {
        "partition_activations": partition_activations, "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints, "synchronize": synchronize, "profile": profile,
    }  # fmt: skip
    for name, value in others.items():
        if value:
            warnings.warn(f"checkpointing.configure({name}={value!r}) has no effect", stacklevel=2)
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        loaded = load(deepspeed_config, world_size=rank_and_size()[1])
        checkpoint_in_cpu = loaded.activation_checkpointing.cpu_checkpointing
    _settings.on_host = bool(checkpoint_in_cpu)
    _settings.configured = True
    _settings.mpu = mpu_


def is_configured() -> bool:
    """Whether `configure` was called. `checkpoint` works without it, too."""
    return _settings.configured


def reset() -> None:
    """For DeepSpeed's buffers of contiguous checkpoints. Here nothing outlives a backward, so nothing is to be done."""


def attach(hooks: Hooks, section: ActivationCheckpointingConfig) -> None:
    """Until the next call, report recomputations through these `hooks` of an engine, and do as its configuration says
    unless `configure` did. Engines call it with every forward: a process may train several."""
    _settings.hooks = hooks
    if not _settings.configured:
        _settings.on_host = section.cpu_checkpointing


def model_parallel_rank() -> int:
    """This rank among those that share layers, by what `configure` was given."""
    return 0 if _settings.mpu is None else ask(_settings.mpu, "rank")


def ask(mpu: Any, what: str, caller: str = "checkpointing.configure") -> int:
    """What it says of the ranks that share layers; Megatron renamed its functions. Raises ValueError without one."""
    found = getattr(mpu, f"get_tensor_model_parallel_{what}", None) or getattr(mpu, f"get_model_parallel_{what}", None)
    if found is None:
        raise ValueError(
            f"{caller}: mpu ({type(mpu).__name__}) has no get_model_parallel_{what}(), which says what ranks "
            'share layers: leave it out; for one that divides sequences over ranks write "sequence_parallel_size" in '
            "the configuration"
        )
    return int(found())
