"""Leaving a rank its part of the model: the layers of its pipeline stages, and its share of each; and what it has in
common with other ranks of its replica then.

At the end: every rank is held to the same configuration and model, before anything is sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from dsprof.words import did_you_mean, fits, joined

from ..comm.comm import open_comm
from ..comm.consensus import first_difference, gather_objects
from ..comm.lane import Inline
from ..comm.mesh import Mesh, Parallel
from ..config import Config, ConfigError
from ..config.parallel import stage_speeds
from ..hooks import Hooks
from ..pipe.layers import check_agreement
from ..pipe.module import PipelineModule, TiedParameters
from ..tensor.rng import same_random_numbers
from ..tensor.sharding import partial_parameters, shard_of
from ..tree import leaves
from ..zero.shard import find_sharded
from ..zero.shared_params import SharedParameters, Sharing


def stages_of(model: nn.Module) -> int | None:
    """Pipeline ranks that the model itself asks for; None if it leaves that to the configuration, 0 for no pipeline."""
    return model.placement.num_stages if isinstance(model, PipelineModule) else 0


def arrange(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Have a pipeline's layers where the configuration wants them."""
    pipeline = config.pipeline
    if not isinstance(model, PipelineModule):
        return
    given = {key: getattr(pipeline, key) for key in pipeline.model_fields_set}
    # Their values agree (`check_same_config`); that a rank gives one, and another leaves it to the model, is no value.
    check_agreement(
        {
            **{f"pipeline.{key}": given.get(key) for key in ("virtual_stages", "partition_method")},
            "pipeline.layer_costs": "a file" if pipeline.layer_costs is not None else None,
        }
    )
    speeds, before = config.heterogeneous.speeds, (model.placement.virtual_stages, model.partition_method)
    model.placement.virtual_stages = given.get("virtual_stages", model.placement.virtual_stages)
    model.partition_method = given.get("partition_method", model.partition_method)
    model.activation_checkpoint_interval = given.get(
        "activation_checkpoint_interval", model.activation_checkpoint_interval
    )
    if pipeline.layer_costs is not None:
        model.costs = pipeline.layer_costs
    if isinstance(speeds, tuple):
        model.speeds = stage_speeds(speeds, mesh.pp, mesh.tp)
    differs = before != (model.placement.virtual_stages, model.partition_method) or model.speeds is not None
    if differs or not model.placement.bounds or pipeline.layer_costs is not None:
        model.arrange_everywhere(mesh.pp, mesh.pp_rank)
    if model.placement.virtual_stages > 1 and pipeline.schedule != "interleaved":
        raise ConfigError([
            f'pipeline.schedule: "{pipeline.schedule}" knows one stage a rank, and the PipelineModule has '
            f'{model.placement.virtual_stages}; write "interleaved", or build it with virtual_stages=1'
        ])  # fmt: skip
    topology = model.placement.topology()
    if "model" in topology.get_axis_names():
        asked = topology.get_dim("model")
        if asked != mesh.tp:
            raise ConfigError([
                f"tensor_parallel.autotp_size: {mesh.tp}, and the PipelineModule's topology has {asked} model-parallel "
                f'ranks; write "autotp_size": {asked}'
            ])  # fmt: skip
    model.forget_others()


def shard_layers(model: nn.Module, config: Config, parallel: Parallel, device: torch.device, example: Any) -> None:
    """Leave this rank its part of every layer, if layers are to be sharded. `example` is what the model's forward
    takes; it is None where that can be made up."""
    section = config.tensor_parallel
    if section.size == 1:
        return
    early = [name for name, param in model.named_parameters() if find_sharded(param) is not None]
    if early:
        raise ValueError(
            f"initialize: zero.Init has divided {early[0]} among all ranks, and with tensor parallelism it is to be "
            "sharded first; build the model without zero.Init"
        )
    from ..planner import parallelize, parallelize_pipeline  # much code, which most trainings have no use for

    wanted = section.plan
    if wanted is not None and parallel.mesh.pp > 1:
        wanted = _here(wanted, model, parallel)
    where: Any = {"sequence_parallel": section.sequence_parallel, "example": example, "everyone": parallel.everyone}
    notes: list[str] = []
    if isinstance(model, PipelineModule):
        plan, notes = parallelize_pipeline(model, parallel.tensor, wanted, **where)
    else:
        plan = parallelize(model, parallel.tensor, wanted, **where)
    same_random_numbers(parallel.tensor, device)
    said = _of_each_stage(str(plan), parallel)
    if parallel.mesh.rank == 0:
        print(*said, *notes, sep="\n", file=sys.stderr)


def _of_each_stage(plan: str, parallel: Parallel) -> list[str]:
    """The plans of all pipeline ranks, each under its number. On all ranks."""
    mesh = parallel.mesh
    if mesh.pp == 1:
        return [plan]
    plans = gather_objects(plan if mesh.dp_rank == mesh.tp_rank == 0 else "", parallel.everyone)
    return [
        line for stage in range(mesh.pp)
        for line in (f"pipeline rank {stage}:", plans[stage * mesh.dp * mesh.tp])
    ]  # fmt: skip


def _here(plan: dict[str, str], model: nn.Module, parallel: Parallel) -> dict[str, str]:
    """What a plan for the whole model says of the layers on this stage. On all ranks."""
    mine = [name for name, _ in model.named_modules()]
    names = dict.fromkeys(name for stage in gather_objects(mine, parallel.everyone) for name in stage)
    for pattern in plan:
        if not any(fits(name, pattern) for name in names):
            hint = did_you_mean(pattern, names, above=0.3)
            raise ConfigError([f"tensor_parallel.plan: no stage has a module {pattern!r}{hint}"])
    return {pattern: style for pattern, style in plan.items() if any(fits(name, pattern) for name in mine)}


def share_parameters(model: nn.Module, parallel: Parallel, hooks: Hooks) -> SharedParameters:
    """Parameters that several ranks of a replica hold, once layers are sharded: tied across stages, or replicated over
    tensor-parallel ranks. On all ranks."""
    mesh = parallel.mesh
    sharings: list[Sharing] = []
    copies: list[nn.Parameter] = []
    if isinstance(model, PipelineModule):
        sharings += [_tied(tie, mesh, hooks) for tie in model.ties()]
    if mesh.tp > 1:
        partial = set(partial_parameters(model))
        whole = [param for param in model.parameters() if shard_of(param) is None]
        first = mesh.tp_rank == 0
        for is_partial in (False, True):
            params = [param for param in whole if (param in partial) == is_partial]
            sharings.append(Sharing(parallel.tensor, params, counted=first, partial=is_partial))
        shards = [(param, shard_of(param)) for param in model.parameters()]
        copies = [param for param, shard in shards if shard is not None and not shard.counts]
    return SharedParameters(sharings, copies)


def _tied(tie: TiedParameters, mesh: Mesh, hooks: Hooks) -> Sharing:
    """Among the ranks of its stages, those of the same replica and part share it."""
    sets = [[ranks[at] for at in tie.ranks] for ranks in mesh.sets("pp")]
    comm = open_comm(sets, lambda: Inline(hooks))
    shapes = gather_objects([tuple(param.shape) for param in tie.params], comm)
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"tensor_parallel.plan: {tie.name} is tied across the pipeline stages {list(tie.ranks)}, which shard it to "
            f'{shapes}; give its layers the same style on all, or "whole"'
        )
    return Sharing(comm, tie.params, counted=mesh.pp_rank == tie.ranks[0], partial=True)


# --- Ranks that are to have the same configuration and model are held to that before anything is sent, and begin with
# the same weights.


OF_A_RANK: Final[Any] = {
    **dict.fromkeys(
        ("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "aio", "comms_logger",
         "flops_profiler", "tensorboard", "csv_monitor"), True,
    ),
    "zero_optimization": {
        name: {"nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
               "pipeline_write", "fast_init"}
        for name in ("offload_param", "offload_optimizer")
    },
    "pipeline": {"layer_costs"},
}  # fmt: skip
"""Keys that may differ between ranks: what is reported, and where a host has its disks and memory."""


def check_same_config(config: Config) -> None:
    """Raise ValueError on all ranks of the job if they do not train by the same configuration. On all ranks."""
    values = leaves(config.model_dump(mode="json", exclude=OF_A_RANK))
    found = first_difference({joined(*path): value for path, value in values})
    if found is not None:
        raise ValueError(
            f"initialize: the ranks have different configurations, first in {found.key}: {found.listed(json.dumps)}: "
            "pass the same one on every rank"
        )


def check_same_model(model: nn.Module, parallel: Parallel, names: Mapping[nn.Parameter, str] | None = None) -> None:
    """Raise ValueError on all ranks of the job if those of one pipeline stage have different models: parameters or
    buffers with other names, shapes or dtypes, in another order, or frozen on some ranks only.

    Before layers are sharded over tensor-parallel ranks; on all ranks. Where they agree, 8 bytes of each are sent.
    `names` are those of the parameters in the whole model, where this is a part of it.
    """
    mesh, lines = parallel.mesh, dict(enumerate(_described(model, names)))
    found = first_difference(lines, parallel.everyone, mesh.sets("dp", "tp"))
    if found is not None:
        where = f" on the pipeline stage {min(found.said) // (mesh.dp * mesh.tp)}" if mesh.pp > 1 else ""
        raise ValueError(
            f"initialize: the ranks have different models{where}, first where "
            f"{found.listed(lambda line: line or 'nothing')}: build the same one on every rank, from the same "
            "arguments, with the same parameters frozen"
        )


@torch.no_grad()
def broadcast_model(tensors: list[torch.Tensor], parallel: Parallel) -> None:
    """Have the ranks that are to have the same weights begin with those of the first: replicas, and before layers are
    sharded, tensor-parallel ranks. On all ranks."""
    for comm in (parallel.tensor, parallel.data):
        for tensor in tensors:
            comm.broadcast(tensor.data, 0, "parameter").wait()


def _described(model: nn.Module, names: Mapping[nn.Parameter, str] | None) -> list[str]:
    """What has to agree, a line for each parameter and each buffer."""
    lines = []
    for name, param in model.named_parameters():
        whole = name if names is None else names[param]
        lines.append(f"{whole} {_kind(param)}{'' if param.requires_grad else ', frozen'}")
    return lines + [f"the buffer {name} {_kind(buffer)}" for name, buffer in model.named_buffers()]


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
