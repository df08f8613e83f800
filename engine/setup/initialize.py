"""`initialize`: from a model and a configuration to an engine."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .. import activation_checkpoint, optim
from ..activation_checkpoint import policies
from ..comm.comm import Comm, open_comm
from ..comm.lane import open_lane
from ..comm.launch import init_distributed, local_device
from ..comm.mesh import Mesh, mesh_of, open_parallel
from ..config import Config, load
from ..data import ShardedLoader
from ..hooks import Hooks
from ..offload import open_offload
from ..offload.build import idle_pipelines
from ..optim import lr
from ..optim.loss_scaler import loss_scaler, model_dtype
from ..pipe.module import PipelineModule
from ..pipe.p2p import open_links
from ..tensor.sharding import sharded_parameters
from ..train.engine import Engine
from ..train.pipeline_engine import PipelineEngine
from ..training import Training
from ..zero import Comms, Zero, ZeroSettings
from ..zero.holder import EarlyParam, holder
from ..zero.shard import ShardedParam
from ..zero.validate import refuse_lazy, refuse_overlaps
from .arguments import check_arguments, parameter_groups
from .parallelize import arrange, shard_layers, stages_of
from .replicas import share
from .sync import broadcast_model, check_same_model


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
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
    *,
    train_dataloader: Any = None,
    example: Any = None,
    link: float | None = None,
) -> tuple[Engine | PipelineEngine, torch.optim.Optimizer | None, Any, Any]:
    """(engine, optimizer, dataloader, lr_scheduler), with the arguments of `deepspeed.initialize`.

    `config` is a dict or the path of a JSON file; `config_params` and `args.deepspeed_config` are older names of it.
    `optimizer` may be made already, or a function of the parameters; so may `lr_scheduler`, of the optimizer.
    `train_dataloader` is returned as it is, which some tutorials rely on. `example` is what the model's forward takes,
    a tuple of arguments or a dict of them by name, and of a pipeline the input of its first layer: needed where layers
    are sharded over ranks and no input can be made up. `link` (bytes/s) models an interconnect on CPUs: gradients and
    parameters then take at least their bytes over it, so that overlap and bucket sizes can be tried on one machine.
    Raises ConfigError for a configuration that cannot be, ValueError for arguments that contradict each other.
    """
    check_arguments(args, model_parameters)
    if model is None:
        raise ValueError("initialize: no model; pass model=")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; make one of it" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"initialize: model must be an nn.Module, and is {what}")
    if training_data is not None and train_dataloader is not None:
        raise ValueError("initialize: training_data and train_dataloader: pass one of them")
    for name, given in (("mpu", mpu), ("mesh_param", mesh_param)):
        if given is not None:
            raise ValueError(
                f"initialize: {name} is not supported: ranks are divided by the configuration; write "
                '"tensor_parallel": {"autotp_size": ...} and "pipeline": {"stages": ...} there, and leave it out'
            )
    refuse_lazy(model)
    for param in model.parameters():
        found = holder(param)
        if found is not None and not isinstance(found.sharded, EarlyParam):
            raise ValueError("initialize: the model has an engine already; call its destroy() first, on all ranks")
    _refuse_sharded(model)
    source = _config_of(args, config, config_params)
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    settings = load(source, world_size=world_size, pipeline_stages=stages_of(model))
    if rank == 0:
        for warning in settings.warnings:
            warnings.warn(warning, stacklevel=2)
        if settings.dump_state:
            print(settings.model_dump_json(indent=2))

    vain = list(_in_vain(optimizer, lr_scheduler, settings))
    own = {"optimizer": optimizer, "scheduler": lr_scheduler}
    settings = settings.model_copy(update={name: None for name, passed in own.items() if passed is not None})

    hooks = Hooks()
    device = local_device()
    mesh = mesh_of(settings.pipeline.stages, settings.tensor_parallel.size)
    arrange(model, settings, mesh)
    refuse_lazy(model)  # a pipeline's layers may be new
    refuse_overlaps(model)
    _place(model, device, model_dtype(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled))
    parallel = open_parallel(mesh, hooks)
    check_same_model(model, parallel, model.names() if isinstance(model, PipelineModule) else None)
    broadcast_model([*(p for p in model.parameters() if holder(p) is None), *model.buffers()], parallel)
    shard_layers(model, settings, parallel, device, example)
    shared = share(model, parallel, hooks)
    shared.agree()
    activation_checkpoint.attach(hooks, settings.activation_checkpointing)
    undo = policies.from_config(settings.activation_checkpointing).apply(model, hooks)
    offload = open_offload(settings, device, hooks, rank)
    _check_parameters(model, settings)
    zero = Zero(
        model, ZeroSettings.of(settings), _open_comms(settings, mesh, device, hooks, link), hooks,
        make_master=offload.states.make_master, take_piece=offload.take_piece,
        names=model.names() if isinstance(model, PipelineModule) else None,
    )  # fmt: skip
    made = _optimizer(optimizer, model_parameters, settings, zero, parallel.data, hooks)
    scheduler = _scheduler(lr_scheduler, settings, made)
    for note in (*vain, *offload.notes) if rank == 0 else ():
        warnings.warn(note, stacklevel=2)
    loader = train_dataloader
    if training_data is not None:
        loader = _loader(training_data, settings, mesh, collate_fn)
    training = Training(
        model,
        settings,
        zero,
        parallel,
        shared,
        made,
        scheduler,
        loss_scaler(settings.fp16),
        offload.states,
        hooks,
        loader,
    )
    engine: Engine | PipelineEngine
    if isinstance(model, PipelineModule):
        links = open_links(mesh, device, hooks, wraps=model.placement.virtual_stages > 1)
        engine = PipelineEngine(training, offload, undo, links=links)
    else:
        engine = Engine(training, offload, undo)
    for note in idle_pipelines(settings, engine.optimizer_step.tiles) if rank == 0 else ():
        warnings.warn(note, stacklevel=2)
    return engine, made, loader, scheduler


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    by_args = getattr(args, "deepspeed_config", None)
    given = [name for name, value in
             (("config", config), ("config_params", config_params), ("args.deepspeed_config", by_args))
             if value is not None]  # fmt: skip
    if not given:
        raise ValueError("initialize: no configuration; pass config= (a dict or the path of a JSON file)")
    if len(given) > 1:
        raise ValueError(f"initialize: {' and '.join(given)}: pass one of them")
    return next(value for value in (config, config_params, by_args) if value is not None)


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers an engine has sharded: destroy() does not make them whole again."""
    name = next((name for name, _, _ in sharded_parameters(model)), None)
    if name is not None:
        raise ValueError(
            f"initialize: {name} is sharded over tensor-parallel ranks already, by an engine before: build the model "
            "anew, and load_checkpoint what that one saved"
        )


def _check_parameters(model: nn.Module, config: Config) -> None:
    """Raise ValueError for what no setting of the engine can train."""
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ValueError(f"initialize: {name} is complex, which the engine does not train; keep its real view")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and config.zero_optimization.stage >= 2:
            raise ValueError(
                f"initialize: {name or 'the model'} is an embedding with sparse=True, and its gradients travel as rows "
                "in ZeRO stages 0 and 1 only: write one of these, or sparse=False"
            )


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Bring the model to `device` and its floating-point tensors to `dtype`; what zero.Init has sharded, it has
    placed."""
    early = [param for param in model.parameters() if holder(param) is not None]
    if not early:
        model.to(device=device, dtype=dtype)
        return
    for param in early:
        if dtype is not None and param.is_floating_point() and param.dtype != dtype:
            raise ValueError(
                f"initialize: zero.Init made parameters of {param.dtype}, and the configuration asks for {dtype}: "
                "give zero.Init the same configuration (config_dict_or_path=)"
            )
    for tensor in (*(p for p in model.parameters() if holder(p) is None), *model.buffers()):
        tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _open_comms(config: Config, mesh: Mesh, device: torch.device, hooks: Hooks, link: float | None) -> Comms:
    def comm(name: str, sets: list[list[int]]) -> Comm:
        return open_comm(sets, lambda: open_lane(name, device, hooks, link))

    replicas = mesh.sets("dp")
    near = None
    size = config.zero_optimization.zero_hpz_partition_size
    if config.zero_optimization.stage == 3 and size > 1:
        neighbours = [ranks[first : first + size] for ranks in replicas for first in range(0, mesh.dp, size)]
        near = comm("near", neighbours)
    return Comms(comm("gradients", replicas), comm("parameters", replicas), near)


def _optimizer(
    given: Any, model_parameters: Iterable[Any] | None, config: Config, zero: Zero, main: Comm, hooks: Hooks
) -> torch.optim.Optimizer | None:
    """The script's optimizer or the configuration's, over the masters."""
    masters = {p.param: p.master for p in zero.trainable if p.master is not None}
    shards = {p.master: _shard(p, zero, main) for p in zero.trainable if p.master is not None}
    listed = list(masters) if model_parameters is None else list(model_parameters)
    groups = parameter_groups(listed)
    for param in [p for group in groups for p in group["params"]]:
        if param not in zero.by_param:
            raise ValueError(
                f"initialize: model_parameters has a parameter of shape {tuple(param.shape)} that the model does not "
                "have; pass those of the same model"
            )
    if model_parameters is not None and not listed and masters:
        raise ValueError(
            "initialize: model_parameters is empty, and the model has parameters to train: leave it out, or list them "
            "when the model has its layers (a PipelineModule without num_stages has none before)"
        )
    if given is not None:
        several = any(isinstance(item, Mapping) for item in listed)  # whose parameters may have been a generator's
        client = given if isinstance(given, torch.optim.Optimizer) else given(groups if several else listed)
        if client is given and model_parameters is not None and main.rank == 0:
            _compare(groups, client.param_groups)
        optim.adopt(client, masters, shards=shards, allow_untested=config.zero_allow_untested_optimizer)
        return client
    if config.optimizer is None:
        return None
    groups = [{**group, "params": [masters[p] for p in group["params"] if p in masters]} for group in groups]
    return optim.build(
        config.optimizer.type, config.optimizer.params.arguments(), groups, shards=shards, group=main.group, hooks=hooks
    )


def _shard(param: ShardedParam, zero: Zero, main: Comm) -> optim.Shard:
    """What the optimizer is to know of a master."""
    pieces = param.partition.pieces
    bounds = tuple(param.partition.bounds(row) for row in range(pieces))
    group = main.group if pieces > 1 else None
    return optim.Shard(param.shape, bounds, group, optim.wants_muon(param.name, param.param))


def _compare(listed: list[dict[str, Any]], stepped: list[dict[str, Any]]) -> None:
    """Warn if `model_parameters` are others than those of the script's optimizer, which counts."""
    ours, theirs = ({id(p) for group in groups for p in group["params"] if p.requires_grad}
                    for groups in (listed, stepped))  # fmt: skip
    if ours != theirs:
        warnings.warn(
            f"initialize: model_parameters has {len(ours - theirs)} parameters to train that optimizer= has not, and "
            f"not {len(theirs - ours)} that it has; it has no effect: the optimizer's own are trained",
            stacklevel=4,
        )


def _in_vain(optimizer: Any, scheduler: Any, config: Config) -> Iterator[str]:
    """What the configuration says without effect beside what the script passes."""
    if optimizer is not None and config.optimizer is not None:
        yield "optimizer: has no effect; the script passes its own to initialize"
    if scheduler is not None and config.scheduler is not None:
        yield "scheduler: has no effect; the script passes its own to initialize"
    elif optimizer is None and config.optimizer is None and config.scheduler is not None:
        yield 'scheduler: has no effect; there is no optimizer: write "optimizer" too, or pass one to initialize'


def _scheduler(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not callable(getattr(given, "step", None)) else given
    if config.scheduler is None or optimizer is None:
        return None
    return lr.build(config.scheduler.type, config.scheduler.params.arguments(), optimizer)


def _loader(data: Any, config: Config, mesh: Mesh, collate_fn: Any) -> Any:
    if isinstance(data, DataLoader):
        return data  # made by the script, which is then responsible for the split over the ranks
    return ShardedLoader(
        data, batch_size=config.train_micro_batch_size_per_gpu, rank=mesh.dp_rank, world_size=mesh.dp,
        collate_fn=collate_fn, drop_last=config.dataloader_drop_last,
    )  # fmt: skip


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads; returns `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (the script decides)")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine's configuration, a JSON file")
    return parser
