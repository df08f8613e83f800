"""`deepspeed.initialize`, and what is called before it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from .. import setup
from ..config import Config, load
from ..config.loading import read
from ..divide import stages_of
from ..engine import Engine
from ..zero.holder import holder
from ..zero.shard import ShardedParam

Source = str | Path | dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `tp_model_init` was called with."""

    size: int
    dtype: torch.dtype


_ASKED: Final[MutableMapping[nn.Module, _Asked]] = weakref.WeakKeyDictionary()
_ENGINES: Final[list[weakref.ref[Engine]]] = []


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """`dsprof.engine.initialize`, with what `tp_model_init` was asked for in the configuration.

    An `mpu` is taken if it has the ranks as the engine has them: `tensor_parallel.autotp_size` neighbours share each
    layer. Raises ValueError if not.
    """
    if dist_init_required is not False:
        setup.init_distributed(distributed_port=distributed_port)
    sources = [config, config_params, getattr(args, "deepspeed_config", None)]
    given = [source for source in sources if source is not None]
    asked = None if model is None else _ASKED.get(model)
    if len(given) == 1 and asked is not None:
        config = given[0] = _with_tensor_parallel(given[0], asked, model)
        args = config_params = None
    if len(given) == 1 and mpu is not None:
        _check_mpu(mpu, _loaded(given[0], model))
        mpu = None
    made = setup.initialize(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu,
        dist_init_required, collate_fn, config, mesh_param, config_params,
    )  # fmt: skip
    _ENGINES.append(weakref.ref(made[0]))
    return made


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, *, tp_group: Any = None
) -> nn.Module:
    """Have `initialize` cut the layers of `model` over `tp_size` ranks; until then it stays as it is, and is returned.

    Raises ValueError for a `tp_group` that is not this rank's, which are the `tp_size` neighbours it is among.
    """
    if config is not None:
        raise ValueError("tp_model_init: config is not supported; give the configuration to initialize")
    if tp_group is not None:
        first = dist.get_rank() // tp_size * tp_size
        ranks = dist.get_process_group_ranks(tp_group)
        if ranks != list(range(first, first + tp_size)):
            raise ValueError(
                f"tp_model_init: tp_group has the ranks {ranks}, and the engine's tensor-parallel ranks are neighbours:"
                f" {first} to {first + tp_size - 1} here. Make it of these, or leave it out"
            )
    _ASKED[model] = _Asked(tp_size, dtype)
    return model


def DeepSpeedConfig(config: Source, mpu: Any = None, mesh_device: Any = None) -> Config:
    """The configuration as the engine has understood it, for the ranks of this job; a key is an attribute.

    Raises ConfigError for one that cannot be used.
    """
    if mesh_device is not None:
        raise ValueError("DeepSpeedConfig: mesh_device is not supported; leave it out")
    loaded = _loaded(config)
    if mpu is not None:
        _check_mpu(mpu, loaded)
    return loaded


def last_engine(asker: str) -> Engine:
    """The engine that was made last. Raises RuntimeError if there is none (any more)."""
    alive = [engine for ref in _ENGINES if (engine := ref()) is not None]
    if not alive:
        raise RuntimeError(f"{asker}: there is no engine yet; call deepspeed.initialize first")
    return alive[-1]


def engine_of(param: nn.Parameter) -> tuple[Engine, ShardedParam] | None:
    """The engine that trains `param`, and what it has of it; None if none does (any more)."""
    held = holder(param)
    for ref in reversed(_ENGINES):
        engine = ref()
        if engine is not None and held is not None and engine.zero.by_param.get(param) is held.sharded:
            return engine, held.sharded
    return None


def _loaded(source: Source, model: nn.Module | None = None) -> Config:
    """The configuration, for this job and, if it is known, this model."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return load(source, world_size=size, pipeline_stages=None if model is None else stages_of(model))


def _with_tensor_parallel(source: Source, asked: _Asked, model: nn.Module | None) -> dict[str, Any]:
    """The configuration with the size that was asked for, which it may name itself."""
    raw = dict(read(Path(source)) if isinstance(source, str | Path) else source)
    section = dict(raw.get("tensor_parallel") or {})
    for key in ("autotp_size", "tp_size"):
        if section.get(key, asked.size) != asked.size:
            raise ValueError(
                f"initialize: tp_model_init was called with tp_size={asked.size}, and the configuration has "
                f"tensor_parallel.{key} = {section[key]}: give both the same, or leave one of them out"
            )
    if not section.keys() & {"autotp_size", "tp_size"}:
        section["autotp_size"] = asked.size
    raw["tensor_parallel"] = section
    loaded = _loaded(raw, model)
    dtype = torch.bfloat16 if loaded.bf16.enabled else torch.float16 if loaded.fp16.enabled else torch.float32
    if dtype != asked.dtype:
        raise ValueError(
            f"initialize: tp_model_init was called with dtype={asked.dtype}, and the configuration asks for {dtype}: "
            'write "bf16": {"enabled": true}, "fp16", or neither, as tp_model_init has it'
        )
    return raw


def _check_mpu(mpu: Any, config: Config) -> None:
    """Raise ValueError unless the script's own idea of who shares layers is the engine's."""
    # Megatron renamed them.
    size = (getattr(mpu, "get_tensor_model_parallel_world_size", None) or mpu.get_model_parallel_world_size)()
    rank = (getattr(mpu, "get_tensor_model_parallel_rank", None) or mpu.get_model_parallel_rank)()
    ours = config.tensor_parallel.size
    mine = dist.get_rank() % ours if dist.is_initialized() else 0
    if (size, rank) != (ours, mine):
        raise ValueError(
            f"initialize: by mpu this rank is number {rank} of {size} that share each layer, and by the configuration "
            f"number {mine} of {ours}: write tensor_parallel.autotp_size, which cuts whole layers over ranks that are "
            "neighbours (layers that the script has cut itself are not supported)"
        )
