"""`initialize`: from a model and a configuration to an engine."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .. import activation_checkpoint, optim
from ..activation_checkpoint import policies
from ..comm.comm import Comm, open_comm
from ..comm.consensus import failing_together
from ..comm.lane import open_lane
from ..comm.launch import init_distributed, local_device
from ..comm.mesh import Mesh, mesh_of, open_parallel
from ..comm.peers import Peers
from ..config import Config, load
from ..data import ShardedLoader
from ..hooks import Hooks
from ..offload import InMemory, open_offload
from ..offload.build import idle_pipelines
from ..optim import lr
from ..optim.loss_scaler import loss_scaler, model_dtype
from ..pipe.module import PipelineModule
from ..pipe.p2p import Links, open_links
from ..train.engine import Engine
from ..train.pipeline_engine import PipelineEngine
from ..training_state import Training
from ..zero import Comms, Zero, ZeroSettings
from ..zero.init import EarlyParam
from ..zero.shard import ShardedParam, find_sharded
from ..zero.validate import abandoned, refuse_lazy, refuse_overlaps
from . import arguments
from .parallelize import arrange, shard_layers, share_parameters, stages_of
from .sync import broadcast_model, check_same_config, check_same_model

_SAID: Final[list[str]] = []
"""What is warned of once."""


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
    Raises ConfigError for a configuration that cannot be, ValueError for arguments that contradict each other. Then
    the model and the optimizer are as before, but where they are and in which precision, and what pipelines and tensor
    parallelism divided. Once layers are divided, what fails on one rank fails on all: SharedError on the others.
    """
    arguments.check_arguments(args, model_parameters)
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
        if not isinstance(find_sharded(param), EarlyParam | None):
            raise ValueError(
                "initialize: the model has an engine already; call its destroy() first, on all ranks, or, where "
                "nothing refers to that engine any more, build the model anew"
            )
    if (left := abandoned(model)) is not None:
        raise ValueError(
            f"initialize: {left} is sharded (ZeRO stage 3), by an engine that is gone; build the model anew"
        )
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"initialize: optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    arguments.refuse_sharded(model)
    source = arguments.config_of(args, config, config_params)
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    settings = load(source, world_size=world_size, pipeline_stages=stages_of(model))
    check_same_config(settings)
    if rank == 0:
        for warning in settings.warnings:
            warnings.warn(warning, stacklevel=2)
        if settings.dump_state:
            print(settings.model_dump_json(indent=2))

    vain = list(arguments.in_vain(optimizer, lr_scheduler, settings))
    own = {"optimizer": optimizer, "scheduler": lr_scheduler}
    settings = settings.model_copy(update={name: None for name, passed in own.items() if passed is not None})

    hooks = Hooks()
    device = local_device()
    if rank == 0:
        warn_untried(device, world_size)
    mesh = mesh_of(settings.pipeline.stages, settings.tensor_parallel.size)
    arrange(model, settings, mesh)
    refuse_lazy(model)  # a pipeline's layers may be new
    refuse_overlaps(model)
    listed = None if model_parameters is None else list(model_parameters)
    if listed and any(isinstance(item, Mapping) for item in listed):
        listed = arguments.parameter_groups(listed)  # whose parameters may be a generator's
    arguments.check_parameters(model, settings)
    arguments.check_listed(listed, model)
    if isinstance(optimizer, torch.optim.Optimizer):
        trained = any(param.requires_grad for param in model.parameters())
        sharded = settings.zero_optimization.stage > 0 and mesh.dp > 1 and trained
        optim.check_client(optimizer, set(model.parameters()), sharded, settings.zero_allow_untested_optimizer)
    loader = train_dataloader
    if training_data is not None:
        loader = _loader(training_data, settings, mesh, collate_fn)
    _place(model, device, model_dtype(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled))
    with _closed_on_failure(model) as opened:
        parallel = open_parallel(mesh, hooks)
        opened.callback(parallel.close)
        check_same_model(model, parallel, model.names() if isinstance(model, PipelineModule) else None)
        broadcast_model([*(p for p in model.parameters() if find_sharded(p) is None), *model.buffers()], parallel)
        shard_layers(model, settings, parallel, device, example)
        shared = share_parameters(model, parallel, hooks)
        opened.callback(shared.close)
        shared.agree()
        links: Links = {}
        if isinstance(model, PipelineModule):
            links = open_links(mesh, device, hooks, wraps=model.placement.virtual_stages > 1)
        for each in links.values():
            opened.callback(each.close)
        comms = _open_comms(settings, mesh, device, hooks, link)
        for comm in comms.all():
            opened.callback(comm.close)
        joined = (parallel.data, parallel.model, parallel.tensor, parallel.everyone, *comms.all())
        between = [group for each in links.values() for group in each.groups]
        peers = Peers(parallel.everyone, [*(comm.group for comm in joined), *between])
        opened.callback(peers.close)
        with failing_together("initialize", parallel.everyone):
            activation_checkpoint.attach(hooks, settings.activation_checkpointing)
            opened.callback(policies.from_config(settings.activation_checkpointing).apply(model, hooks))
            offload = open_offload(settings, device, hooks, rank)
            opened.callback(offload.close)
        with failing_together("initialize", parallel.everyone):
            zero = Zero(
                model, ZeroSettings.of(settings), comms, hooks,
                make_master=offload.states.make_master, offload_shard=offload.offload_shard,
                names=model.names() if isinstance(model, PipelineModule) else None,
                stages=model.stages_of_parameters() if isinstance(model, PipelineModule) else None,
            )  # fmt: skip
            opened.callback(zero.close, whole=False)  # others may have none
        opened.callback(zero.close)
        with failing_together("initialize", parallel.everyone):
            made, adopted = _optimizer(optimizer, listed, settings, zero, parallel.data, hooks)
            if adopted is not None:
                opened.callback(adopted.give_back, in_memory=isinstance(offload.states, InMemory))
            scheduler = _scheduler(lr_scheduler, settings, made)
            for note in (*vain, *offload.notes) if rank == 0 else ():
                warnings.warn(note, stacklevel=2)
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
                peers,
                loader,
            )
        with failing_together("initialize", parallel.everyone):
            engine: Engine | PipelineEngine
            if isinstance(model, PipelineModule):
                engine = PipelineEngine(training, opened, links=links)
            else:
                engine = Engine(training, opened)
            for note in idle_pipelines(settings, engine.optimizer_step.tiles) if rank == 0 else ():
                warnings.warn(note, stacklevel=2)
        zero.settle()
        if adopted is not None:
            adopted.settle()
    return engine, made, loader, scheduler


def warn_untried(device: torch.device, world_size: int) -> None:
    """Once a process, until it is no longer true."""
    if device.type == "cuda" and world_size > 1 and not _SAID:
        _SAID.append("untried")
        warnings.warn(
            "initialize: this engine has not yet been run on several GPUs; its tests run on CPUs, on one GPU, and on "
            "one that is made up. Compare the first losses with those of torch's DistributedDataParallel before you "
            "trust a long run to it, and please tell what you find",
            stacklevel=3,
        )


@contextlib.contextmanager
def _closed_on_failure(model: nn.Module) -> Iterator[contextlib.ExitStack]:
    """What takes an engine off its model again; closed if the block raises, and left open for the engine if not."""
    opened = contextlib.ExitStack()
    try:
        yield opened
    except BaseException as error:
        if dist.is_initialized() and not isinstance(error, Exception):
            raise  # an interrupt, perhaps of this rank alone: the others would not come
        try:
            opened.close()
        except Exception as another:
            error.add_note(f"initialize, leaving the model: {type(another).__name__}: {another}")
        if (left := abandoned(model)) is not None:
            error.add_note(f"initialize left {left}, and perhaps others, sharded (ZeRO stage 3): build the model anew")
        raise


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Bring the model to `device` and its floating-point tensors to `dtype`; what zero.Init has sharded, it has
    placed."""
    early = [param for param in model.parameters() if find_sharded(param) is not None]
    if not early:
        model.to(device=device, dtype=dtype)
        return
    for param in early:
        if dtype is not None and param.is_floating_point() and param.dtype != dtype:
            raise ValueError(
                f"initialize: zero.Init made parameters of {param.dtype}, and the configuration asks for {dtype}: "
                "give zero.Init the same configuration (config_dict_or_path=)"
            )
    for tensor in (*(p for p in model.parameters() if find_sharded(p) is None), *model.buffers()):
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
    given: Any, parameters: list[Any] | None, config: Config, zero: Zero, main: Comm, hooks: Hooks
) -> tuple[torch.optim.Optimizer | None, optim.Adopted | None]:
    """The script's optimizer, and what gives it back, or the configuration's, over the masters."""
    masters = zero.masters
    shards = {masters[p.param]: _shard(p, main) for p in zero.trainable}
    listed = list(masters) if parameters is None else parameters
    if given is not None:
        client = given if isinstance(given, torch.optim.Optimizer) else given(listed)
        if client is given and parameters is not None and main.rank == 0:
            arguments.compare(arguments.parameter_groups(listed), client.param_groups)
        allow = config.zero_allow_untested_optimizer
        return client, optim.adopt(client, masters, shards=shards, allow_untested=allow)
    if config.optimizer is None:
        return None, None
    if not listed:
        listed = [{"params": []}]  # a pipeline stage without parameters steps with the others
    groups = [
        {**group, "params": [masters[p] for p in group["params"] if p in masters]}
        for group in arguments.parameter_groups(listed)
    ]
    built = optim.build(
        config.optimizer.type, config.optimizer.params.arguments(), groups, shards=shards, group=main.group, hooks=hooks
    )
    return built, None


def _shard(param: ShardedParam, main: Comm) -> optim.Shard:
    """What the optimizer is to know of a master."""
    ranks = param.partition.num_shards
    bounds = tuple(param.partition.bounds(rank) for rank in range(ranks))
    group = main.group if ranks > 1 else None
    return optim.Shard(param.shape, bounds, group, optim.wants_muon(param.name, param.param))


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
