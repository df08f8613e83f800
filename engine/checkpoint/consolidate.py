"""The model alone, in one file, as `torch.load` and other programs take it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..comm.consensus import World, gather_objects
from ..tensor.sharding import TensorShard
from ..training_state import Training
from .dcp import Contents, Piece
from .folder import CheckpointError, find, replace_whole, unpack
from .state import Wanted, about_training, buffers, join, merged, names, read, tensor_shard


def save_16bit_model(
    training: Training,
    save_dir: str | os.PathLike[str],
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the model's state dict, in the precision it runs in, to one file. On all ranks; rank 0 writes.

    Sharded parameters are gathered one after the other, and those of other pipeline stages and tensor-parallel ranks
    sent, so that only rank 0, in host memory, ever has all of them. In stage 3 this is done only if
    `stage3_gather_16bit_weights_on_model_save` says so: else nothing is written, and False returned. Raises
    CheckpointError on all ranks.
    """
    training.refuse_failed("save_16bit_model", CheckpointError)
    path = Path(save_dir) / save_filename
    zero = training.zero
    if zero.settings.stage == 3 and not training.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
        warnings.warn(
            f"save_16bit_model: {path} was not written, because the parameters are sharded; set "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save to true",
            stacklevel=3,
        )
        return False
    world = World(CheckpointError)
    with training.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        state = consolidated(training, with_frozen=not exclude_frozen_parameters)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = sum({id(tensor): tensor.nbytes for tensor in state.values()}.values())
            with training.hooks.span("copy", "checkpoint_write", purpose="checkpoint", bytes=size):
                replace_whole(path, partial(torch.save, state))

        world.from_first(f"{path} was not written", write)
    return True


@dataclass(frozen=True, slots=True)
class _SentTensor:
    """One tensor that a rank contributes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: TensorShard | None = None
    """If it is a part of the parameter `name`, which."""


@dataclass(frozen=True, slots=True)
class _Contribution:
    """What the state dict has from one rank: tensors in the order in which they come, and who is who."""

    params: list[_SentTensor]
    buffers: list[_SentTensor]
    names: dict[str, str]
    """All names of the parameters that are there, a tied one having several -> those they have in the whole model."""


def consolidated(training: Training, *, with_frozen: bool) -> dict[str, Tensor]:
    """The state dict in host memory, on rank 0; elsewhere it is empty. On all ranks.

    Each rank of the first replica sends rank 0 what it counts, and rank 0 takes them rank after rank.
    """
    parallel, zero = training.parallel, training.zero
    params = [p for p in zero.params if training.shared.counts(p.param) and (p.trainable or with_frozen)]
    kept = buffers(training.module)
    contribution = _Contribution(
        [_SentTensor(param.name, param.shape, param.param.dtype, tensor_shard(param)) for param in params],
        [_SentTensor(name, buffer.shape, buffer.dtype) for name, buffer in kept.items()],
        names(training),
    )
    replica = gather_objects(contribution, parallel.model)
    first_replica, receives = parallel.mesh.dp_rank == 0, parallel.mesh.rank == 0
    parts: dict[str, list[Tensor]] = {}
    for param in params:
        absent = not param.resident
        if not param.there:
            zero.gatherer.gather([param], param.numel)
        if receives:
            parts[param.name] = [_on_host(param.param)]
        elif first_replica:
            parallel.model.send(param.param, 0)
        if absent:
            param.release()
    if not receives:
        for buffer in kept.values() if first_replica else ():
            parallel.model.send(buffer, 0)
        return {}
    kept_buffers = {name: _on_host(buffer) for name, buffer in kept.items()}
    for source, other in enumerate(replica[1:], 1):
        for each in other.params:
            parts.setdefault(each.name, []).append(parallel.model.receive(each.shape, each.dtype, source).cpu())
        for each in other.buffers:
            kept_buffers.setdefault(each.name, parallel.model.receive(each.shape, each.dtype, source).cpu())
    shards = {each.name: each.shard for other in replica for each in other.params}
    wholes = {}
    for name in list(parts):
        shard, of_ranks = shards[name], parts.pop(name)
        wholes[name] = of_ranks[0] if shard is None else join(shard, of_ranks)
    everywhere = merged(other.names for other in replica)
    return {key: wholes[name] for key, name in everywhere.items() if name in wholes} | kept_buffers


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def weights_of(
    folder: str | os.PathLike[str], tag: str | int | None = None, *, without_frozen: bool = False
) -> dict[str, Tensor]:
    """The state dict of the model in checkpoint `folder`/`tag`, by default the one that `folder`/latest names.

    Floating-point parameters are in fp32, as the optimizer had them, and whole, whatever divided them; tied ones are
    one tensor under all their names. Buffers are as they were. `without_frozen` leaves frozen parameters out, as far
    as the optimizer's groups say. Raises CheckpointError.
    """
    place = Path(folder)
    below = find(place, tag)
    if below is None:
        raise CheckpointError(f"there is no file {place / 'latest'}: check the folder, or give a tag")
    contents = Contents(place / below)
    contents.check_files()
    training = about_training(contents)
    shapes: dict[str, torch.Size] = training["weights"]
    shards = training["cuts"]
    if without_frozen:
        if "optimizer" not in contents:
            raise CheckpointError(f"{place / below} was saved without an optimizer, and so does not say what is frozen")
        stages = unpack(contents.value("optimizer"), "optimizer")["groups"]
        trained = {name for groups in stages for group in groups for name in group["params"]}
        shapes = {name: shape for name, shape in shapes.items() if name in trained}
    found: dict[str, Tensor] = {}
    wanted: list[Wanted] = []
    for name, shape in shapes.items():
        saved = TensorShard.from_dict(shards[name]) if name in shards else None
        first = f"weight/{name}" if saved is None else f"weight/{name}@0/{saved.num_shards}"
        tensor = torch.empty(shape, dtype=_in_fp32(contents.dtype(first)))
        found[name] = tensor
        wanted.append(Wanted(Piece(f"weight/{name}", tensor.view(-1), tensor.numel()), None, saved))
    aliases: dict[str, str] = training.get("aliases", {})
    found |= {alias: found[name] for alias, name in aliases.items() if name in found}
    read(contents, wanted)
    buffers = {
        name: torch.empty(shape, dtype=contents.dtype(f"buffer/{name}") or torch.float32)
        for name, shape in training["buffers"].items()
        if f"buffer/{name}" in contents
    }
    contents.read([Piece(f"buffer/{name}", buffer.view(-1), buffer.numel()) for name, buffer in buffers.items()])
    return found | buffers


def _in_fp32(dtype: torch.dtype | None) -> torch.dtype:
    return torch.float32 if dtype is None or dtype in (torch.float16, torch.bfloat16) else dtype
