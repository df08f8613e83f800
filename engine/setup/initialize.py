"""`initialize`: from a model and a configuration to an engine."""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .. import activation_checkpoint, optim
from ..activation_checkpoint import policies
from ..comm.comm import Comm, open_comm
from ..comm.consensus import failing_together, gather_objects
from ..comm.lane import open_lane
from ..comm.launch import init_distributed, local_device
from ..comm.mesh import Mesh, Parallel, mesh_of, open_parallel
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
from ..sequence import SequenceParallel
from ..train.engine import Engine
from ..train.pipeline_engine import PipelineEngine
from ..training_state import Training
from ..zero import Comms, Zero
from ..zero.gather import Agreement
from ..zero.packed import Nodes
from ..zero.shard import ShardedParam, find_sharded
from ..zero.validate import abandoned, refuse_lazy, refuse_overlaps
from ..zero.zero import GRADIENTS
from . import arguments
from .parallelize import (
    arrange,
    broadcast_model,
    check_same_config,
    check_same_model,
    shard_layers,
    share_parameters,
    stages_of,
)

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
    model = arguments.check_model(model)
    arguments.check_arguments(args, optimizer, model_parameters, {"mpu": mpu, "mesh_param": mesh_param})
    if training_data is not None and train_dataloader is not None:
        raise ValueError("initialize: training_data and train_dataloader: pass one of them")
    source = arguments.config_of(args, config, config_params)
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    settings = load(source, world_size=world_size, pipeline_stages=stages_of(model))
    check_same_config(settings)
    mesh, device = (
        mesh_of(settings.pipeline.stages, settings.tensor_parallel.size, settings.sequence_parallel_size),
        local_device(),
    )
    hooks = Hooks()
    if mesh.rank == 0:
        for warning in (*settings.warnings, *arguments.in_vain(optimizer, lr_scheduler, settings)):
            warnings.warn(warning, stacklevel=2)
        if settings.dump_state:
            print(settings.model_dump_json(indent=2))
        warn_untried(device, world_size)
    if settings.heterogeneous.speeds == "measure":
        from .measure_speed import with_measured_speeds

        settings = with_measured_speeds(
            model, settings, mesh, device, example, training_data, train_dataloader, collate_fn
        )
    if settings.heterogeneous.memory == "measure":
        from .measure_memory import with_measured_memory

        settings = with_measured_memory(settings, mesh.rank, device)
    unequal = settings.unequal_shares(world_size)
    if unequal is not None:
        settings = settings.model_copy(update={"train_micro_batch_size_per_gpu": unequal[mesh.dp_rank]})
    own = {"optimizer": optimizer, "scheduler": lr_scheduler}
    settings = settings.model_copy(update={name: None for name, passed in own.items() if passed is not None})
    arrange(model, settings, mesh)
    refuse_lazy(model)  # a pipeline's layers may be new
    refuse_overlaps(model)
    listed = arguments.listed_parameters(model_parameters, model)
    arguments.check_parameters(model, settings)
    if isinstance(optimizer, torch.optim.Optimizer):
        trained = any(param.requires_grad for param in model.parameters())
        sharded = settings.zero_optimization.stage > 0 and mesh.dp > 1 and trained
        optim.check_client(optimizer, set(model.parameters()), sharded, settings.zero_allow_untested_optimizer)
    loader = train_dataloader
    if training_data is not None:
        # Of unequal shares a script's own loader may suit those of some ranks alone.
        with failing_together("initialize", error=ValueError) if unequal else contextlib.nullcontext():
            loader = _loader(training_data, settings, mesh, collate_fn, unequal)
    _bring(model, device, model_dtype(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled))
    with _closed_on_failure(model) as opened:
        parallel = _place(model, mesh, hooks, opened)
        training, links = _divide(model, settings, parallel, device, hooks, opened, example, link)
        training.training_dataloader = loader
        engine = _assemble(training, optimizer, listed, lr_scheduler, links, opened)
    return engine, training.optimizer, loader, training.lr_scheduler


def _place(model: nn.Module, mesh: Mesh, hooks: Hooks, opened: contextlib.ExitStack) -> Parallel:
    """This rank's groups, whose ranks have the same model from now on."""
    parallel = open_parallel(mesh, hooks)
    opened.callback(parallel.close)
    check_same_model(model, parallel, model.names() if isinstance(model, PipelineModule) else None)
    broadcast_model([*(p for p in model.parameters() if find_sharded(p) is None), *model.buffers()], parallel)
    return parallel


def _divide(
    model: nn.Module, config: Config, parallel: Parallel, device: torch.device, hooks: Hooks,
    opened: contextlib.ExitStack, example: Any, link: float | None,
) -> tuple[Training, Links]:  # fmt: skip
    """Leave this rank its part of each layer, and its shards of what data-parallel ranks divide among them: all that
    is trained, with nothing yet that trains it."""
    shard_layers(model, config, parallel, device, example)
    shared = share_parameters(model, parallel, hooks)
    opened.callback(shared.close)
    shared.agree()
    links: Links = {}
    of_pipeline: dict[str, Any] = {}
    if isinstance(model, PipelineModule):
        links = open_links(parallel.mesh, device, hooks, wraps=model.placement.virtual_stages > 1)
        of_pipeline = {"names": model.names(), "stages": model.stages_of_parameters()}
    for each in links.values():
        opened.callback(each.close)
    comms = _open_comms(config, parallel, device, hooks, link)
    for comm in comms.all():
        opened.callback(comm.close)
    sequence = _share_sequences(model, config, parallel, device, hooks, opened, link)
    between = [group for each in links.values() for group in each.groups]
    if sequence is not None and sequence.comm.group is not None:
        between.append(sequence.comm.group)
    peers = Peers(parallel.everyone, [*(comm.group for comm in (*parallel.all(), *comms.all())), *between])
    opened.callback(peers.close)
    agreement: Agreement | None = None
    if config.fp8.enabled:
        from ..precision import choose  # code that most trainings have no use for
        from ..precision.device import arithmetic

        with failing_together("initialize", parallel.everyone):
            by = arithmetic(device, config.fp8.recipe)
        undo, agreement = choose.attach(model, config, by, device, parallel)
        opened.callback(undo)
    with failing_together("initialize", parallel.everyone):
        activation_checkpoint.attach(hooks, config.activation_checkpointing)
        opened.callback(policies.from_config(config.activation_checkpointing).apply(model, hooks))
        offload = open_offload(config, device, hooks, parallel.mesh.rank)
        opened.callback(offload.close)
    with failing_together("initialize", parallel.everyone):
        zero = Zero(
            model, config, comms, hooks,
            make_master=offload.states.make_master, offload_shard=offload.offload_shard, agreement=agreement,
            **of_pipeline,
        )  # fmt: skip
        opened.callback(zero.close, whole=False)  # others may have none
        for note in offload.notes if parallel.mesh.rank == 0 else ():
            warnings.warn(note, stacklevel=3)
    opened.callback(zero.close)
    scaler = loss_scaler(config.fp16)
    return Training(model, config, zero, parallel, shared, scaler, offload.states, hooks, peers, sequence), links


def _share_sequences(
    model: nn.Module, config: Config, parallel: Parallel, device: torch.device, hooks: Hooks,
    opened: contextlib.ExitStack, link: float | None,
) -> SequenceParallel | None:  # fmt: skip
    """The ranks that this one shares sequences with; None without any."""
    if parallel.mesh.sp == 1:
        return None
    comm = open_comm(parallel.mesh.sequence_sets(), lambda: open_lane("context", device, hooks, link))
    opened.callback(comm.close)
    return SequenceParallel(comm, config.context_parallel, model)


def _assemble(
    training: Training, optimizer: Any, listed: list[Any] | None, scheduler: Any, links: Links,
    opened: contextlib.ExitStack,
) -> Engine | PipelineEngine:  # fmt: skip
    """The engine: what trains it, and takes its steps."""
    config, parallel, module = training.config, training.parallel, training.module
    with failing_together("initialize", parallel.everyone):
        training.optimizer, adopted = _optimizer(optimizer, listed, config, training.zero, parallel.data)
        if adopted is not None:
            opened.callback(adopted.give_back, in_memory=isinstance(training.states, InMemory))
        training.lr_scheduler = _scheduler(scheduler, config, training.optimizer)
    with failing_together("initialize", parallel.everyone):
        engine: Engine | PipelineEngine
        if isinstance(module, PipelineModule):
            engine = PipelineEngine(training, opened, links=links)
        else:
            engine = Engine(training, opened)
        for note in idle_pipelines(config, engine.optimizer_step.tiles) if parallel.mesh.rank == 0 else ():
            warnings.warn(note, stacklevel=3)
    training.zero.settle()
    if adopted is not None:
        adopted.settle()
    return engine


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


def _bring(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
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


def _open_comms(config: Config, parallel: Parallel, device: torch.device, hooks: Hooks, link: float | None) -> Comms:
    def comm(name: str, sets: list[list[int]]) -> Comm:
        return open_comm(sets, lambda: open_lane(name, device, hooks, link))

    mesh, near, zero = parallel.mesh, None, config.zero_optimization
    replicas = mesh.sets("dp")
    size = zero.zero_hpz_partition_size
    if zero.stage == 3 and size > 1:
        neighbours = [ranks[first : first + size] for ranks in replicas for first in range(0, mesh.dp, size)]
        near = comm("near", neighbours)
    nodes = None
    machines = ranks_by_machine(replicas, _ranks_a_machine(parallel)) if zero.zero_quantized_gradients else None
    if machines is not None:
        across = [list(ranks) for of_replica in machines for ranks in zip(*of_replica, strict=True)]
        within = [ranks for of_replica in machines for ranks in of_replica]
        nodes = Nodes(comm(GRADIENTS[1], within), comm(GRADIENTS[2], across))
    hosts = None if parallel.data_hosts is parallel.data else parallel.data_hosts
    return Comms(comm("gradients", replicas), comm("parameters", replicas), near, nodes, hosts)


def _ranks_a_machine(parallel: Parallel) -> int:
    """As the launcher's LOCAL_WORLD_SIZE says; 0 where it is not set, or not the same on all ranks. On all ranks."""
    said = set(gather_objects(os.environ.get("LOCAL_WORLD_SIZE", ""), parallel.everyone))
    size = said.pop()
    return int(size) if not said and size.isdecimal() else 0


def ranks_by_machine(sets: Sequence[Sequence[int]], size: int) -> list[list[list[int]]] | None:
    """Each of the `sets` of ranks by the machines they are on, which have `size` ranks each (0: not known); None where
    none has ranks on several machines, or they do not have equally many on each."""
    if size < 1:
        return None
    found = [[list(ranks) for _, ranks in groupby(each, lambda rank: rank // size)] for each in sets]
    sizes = {len(ranks) for each in found for ranks in each}
    return found if len(sizes) == 1 and min(sizes) > 1 and len(found[0]) > 1 else None


def _optimizer(
    given: Any, parameters: list[Any] | None, config: Config, zero: Zero, main: Comm
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
    params = config.optimizer.params.arguments()
    return optim.build(config.optimizer.type, params, groups, shards=shards, comm=main), None


def _shard(param: ShardedParam, main: Comm) -> optim.Shard:
    """What the optimizer is to know of a master."""
    ranks = param.partition.num_shards
    bounds = tuple(param.partition.bounds(rank) for rank in range(ranks))
    return optim.Shard(param.shape, bounds, main if ranks > 1 else None, optim.wants_muon(param.name, param.param))


def _scheduler(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not callable(getattr(given, "step", None)) else given
    if config.scheduler is None or optimizer is None:
        return None
    return lr.build(config.scheduler.type, config.scheduler.params.arguments(), optimizer)


def _loader(data: Any, config: Config, mesh: Mesh, collate_fn: Any, unequal: list[int] | None) -> Any:
    mine = config.train_micro_batch_size_per_gpu
    if isinstance(data, DataLoader):  # made by the script, which is then responsible for the split over the ranks
        if unequal and mine and data.batch_size not in (None, mine):
            raise ValueError(
                f"initialize: training_data gives batches of {data.batch_size} samples, and by heterogeneous.speeds "
                f"this rank gets {mine}: pass the data set, or a DataLoader of that batch_size with this rank's samples"
            )
        return data
    return ShardedLoader(
        data, batch_size=mine, rank=mesh.replica, world_size=mesh.replicas, collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last, shares=unequal,
    )  # fmt: skip


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads; returns `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (the script decides)")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine's configuration, a JSON file")
    return parser
