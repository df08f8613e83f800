"""`deepspeed.initialize`, and what is called before it."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ..activation_checkpoint import ask
from ..comm.launch import init_distributed, rank_and_size
from ..config import Config, ConfigError, load
from ..config.loading import read
from ..setup.initialize import initialize as initialize_engine
from ..setup.parallelize import stages_of
from ..train.base_engine import BaseEngine
from ..zero.shard import ShardedParam, find_sharded
from .z3_leaf import check_leaves, get_z3_leaf_modules

Source = str | Path | dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `tp_model_init` was called with."""

    size: int
    dtype: torch.dtype


_ASKED: Final[MutableMapping[nn.Module, _Asked]] = weakref.WeakKeyDictionary()
_ENGINES: Final[list[weakref.ref[BaseEngine]]] = []


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
) -> tuple[BaseEngine, torch.optim.Optimizer | None, Any, Any]:
    """`dsprof.engine.initialize`, with what `tp_model_init` was asked for in the configuration.

    An `mpu` is taken if it has the ranks as the engine has them: `tensor_parallel.autotp_size` neighbours share each
    layer. Raises ValueError if not, for a model without elements, and for a leaf that stage 3 would not keep together.
    """
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    sources = [config, config_params, getattr(args, "deepspeed_config", None)]
    given = [source for source in sources if source is not None]
    asked = None if model is None else _ASKED.get(model)
    if model is not None:
        _check_elements(model)
    if len(given) == 1:
        source = given[0] if asked is None else _with_tensor_parallel(given[0], asked)
        config = source if mpu is not None else _counted_once(source)
        args = config_params = None
        if asked is not None:
            _check_dtype(asked, _loaded(config, model))
        if mpu is not None:
            _check_mpu(mpu, _loaded(config, model))
            mpu = None
        if model is not None and get_z3_leaf_modules(model):
            check_leaves(model, _loaded(config, model).zero_optimization.stage)
    made = initialize_engine(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu,
        dist_init_required, collate_fn, config, mesh_param, config_params,
    )  # fmt: skip
    _ENGINES.append(weakref.ref(made[0], _ENGINES.remove))
    return made


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, *, tp_group: Any = None
) -> nn.Module:
    """Have `initialize` shard the layers of `model` over `tp_size` ranks; until then it stays as it is, and is
    returned.

    Raises ValueError for a `config` with another size, and for a `tp_group` that is not this rank's, which are the
    `tp_size` neighbours it is among. Of the configuration no more is read here: `initialize` takes its own.
    """
    if config is not None:
        _check_size(tp_size, _raw(config))
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


def set_autotp_mode(training: bool = False) -> None:
    """Nothing is left to be done: `tensor_parallel` in the configuration has layers sharded for training."""
    if not training:
        raise ValueError(
            "set_autotp_mode: the engine trains and does not serve; write training=True, or leave it out: "
            "tensor_parallel in the configuration is enough"
        )


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


def last_engine(asker: str) -> BaseEngine:
    """The engine that was made last. Raises RuntimeError if there is none (any more)."""
    alive = [engine for ref in _ENGINES if (engine := ref()) is not None]
    if not alive:
        raise RuntimeError(f"{asker}: there is no engine yet; call deepspeed.initialize first")
    return alive[-1]


def engine_of(param: nn.Parameter) -> tuple[BaseEngine, ShardedParam] | None:
    """The engine that trains `param`, and what it has of it; None if none does (any more)."""
    held = find_sharded(param)
    for ref in reversed(_ENGINES):
        engine = ref()
        if engine is not None and held is not None and engine.zero.by_param.get(param) is held:
            return engine, held
    return None


def _loaded(source: Source, model: nn.Module | None = None) -> Config:
    """The configuration, for this job and, if it is known, this model."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return load(source, world_size=size, pipeline_stages=None if model is None else stages_of(model))


def _check_elements(model: nn.Module) -> None:
    """Raise ValueError for a model that was made where tensors have no elements."""
    name = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if name is not None:
        raise ValueError(
            f"initialize: {name} is on the meta device and has no elements: make the model within deepspeed.zero.Init, "
            "which shards parameters as they are made, or give it elements first, as model.to_empty(device=...) and "
            "load_state_dict do"
        )


def _raw(source: Source) -> dict[str, Any]:
    """The configuration as it is written; an empty one for what is none, of which `load` says why."""
    try:
        raw = read(Path(source)) if isinstance(source, str | Path) else source
    except ConfigError:
        return {}
    return dict(raw) if isinstance(raw, Mapping) else {}


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The number of ranks that share layers, under each name that the configuration has it by."""
    section = raw.get("tensor_parallel")
    return {key: section[key] for key in ("autotp_size", "tp_size") if key in section} if section else {}


def _check_size(size: int, raw: Mapping[str, Any]) -> None:
    """Raise ValueError if the configuration has another number of ranks that share layers."""
    for key, other in _sizes(raw).items():
        if other != size:
            raise ValueError(
                f"tp_model_init was called with tp_size={size}, and the configuration has tensor_parallel.{key} = "
                f"{other}: give both the same, or leave one of them out"
            )


def _with_tensor_parallel(source: Source, asked: _Asked) -> Source:
    """The configuration with the size that was asked for, which it may name itself."""
    raw = _raw(source)
    _check_size(asked.size, raw)
    if not raw or _sizes(raw):
        return source
    return {**raw, "tensor_parallel": {**(raw.get("tensor_parallel") or {}), "autotp_size": asked.size}}


def _counted_once(source: Source) -> Source:
    """The configuration with the samples of a step as `train_batch_size`, where it has a multiple of them.

    Without an mpu DeepSpeed multiplies by all ranks, and so counts a sample as often as ranks share its layers.
    Transformers and Accelerate write that number.
    """
    raw = _raw(source)
    total, micro = raw.get("train_batch_size"), raw.get("train_micro_batch_size_per_gpu")
    steps, size = raw.get("gradient_accumulation_steps", 1), max([1, *_sizes(raw).values()])
    rank, ranks = rank_and_size()
    if total is None or micro is None or size == 1 or ranks % size or total != micro * steps * ranks:
        return source
    if rank == 0:
        warnings.warn(
            f"train_batch_size = {total} counts each sample once for each of the {size} ranks that share its layers; "
            f"a step takes {total // size} samples ({micro} x {steps} micro-batches x {ranks // size} replicas)",
            stacklevel=3,
        )
    return {**raw, "train_batch_size": total // size}


def _check_dtype(asked: _Asked, config: Config) -> None:
    """Raise ValueError if the configuration trains in another type than tp_model_init was asked for."""
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else torch.float32
    if dtype != asked.dtype:
        raise ValueError(
            f"initialize: tp_model_init was called with dtype={asked.dtype}, and the configuration asks for {dtype}: "
            'write "bf16": {"enabled": true}, "fp16", or neither, as tp_model_init has it'
        )


def _check_mpu(mpu: Any, config: Config) -> None:
    """Raise ValueError unless the script's own idea of who shares layers is the engine's."""
    size, rank = ask(mpu, "world_size", "initialize"), ask(mpu, "rank", "initialize")
    ours = config.tensor_parallel.size
    mine = rank_and_size()[0] % ours
    if (size, rank) != (ours, mine):
        raise ValueError(
            f"initialize: by mpu this rank is number {rank} of {size} that share each layer, and by the configuration "
            f"number {mine} of {ours}: write tensor_parallel.autotp_size, which shards whole layers over ranks that "
            "are neighbours (layers that the script has sharded itself are not supported)"
        )
