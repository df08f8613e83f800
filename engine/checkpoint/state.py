"""What is saved under which name, and what of the weights a rank holds.

Names in a checkpoint, tensors first:

    weight/NAME             a parameter: its master, in fp32 where the model is in half precision
    buffer/NAME             a persistent buffer, as the first replica has it
    buffer/NAME/R           as rank R has it, where that is otherwise
    optimizer/KEY/NAME      the optimizer's state KEY of a parameter, element by element
    optimizer/KEY/NAME/R    such a state of rank R that is not the parameter's, element by element

    training                counters, loss scale, shapes, how the job's ranks were divided, where the data stand
    optimizer  lr_scheduler  client_state
    rank/R                  what is rank R's own: its random number generators

NAME is the parameter's in the whole model, whichever pipeline stage has it; where tensor-parallel ranks have parts of
it, NAME@P/N is part P of N. What several ranks have alike is written once.

At the end: parameters that tensor-parallel ranks have in parts, from one way of sharding them to another.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from ..data import ShardedLoader
from ..tensor.sharding import TensorShard, shard_of
from ..training_state import Training
from ..zero.shard import ShardedParam
from .dcp import Contents, Piece
from .folder import CheckpointError, unpack

T = TypeVar("T")

FORMAT: Final = 2


# --- what a rank has of the model


@dataclass(frozen=True, slots=True)
class Holdings:
    """What there is of the model on one rank, by names in the whole model. Replicas have the same."""

    weights: dict[str, torch.Size]
    """Shapes of the parameters before layers were sharded."""
    shards: dict[str, dict[str, int | list[int]]]
    """How they are sharded, those that are."""
    frozen: list[str]
    buffers: dict[str, torch.Size]
    aliases: dict[str, str]
    """Further names of parameters, tied ones -> those in `weights`."""


def holdings(training: Training, *, without_frozen: bool = False) -> Holdings:
    """What this rank has."""
    params = [param for param in training.zero.params if param.trainable or not without_frozen]
    shards = {param.name: tensor_shard(param) for param in params}
    return Holdings(
        {param.name: whole_shape(param) for param in params},
        {name: shard.to_dict() for name, shard in shards.items() if shard is not None},
        [param.name for param in params if not param.trainable],
        {name: buffer.shape for name, buffer in buffers(training.module).items()},
        {name: held for name, held in names(training).items() if held != name and held in shards},
    )


def about_training(contents: Contents) -> dict[str, Any]:
    """The value "training" of a checkpoint. Raises CheckpointError for one of another format."""
    found: dict[str, Any] = unpack(contents.value("training"), "training")
    if found["format"] != FORMAT:
        raise CheckpointError(f"it has format {found['format']}, and this version of dsprof reads {FORMAT}")
    return found


def names(training: Training) -> dict[str, str]:
    """All names that this rank's parameters have in a state dict, tied ones several -> those in the whole model."""
    by_param = training.zero.by_param
    return {name: by_param[param].name for name, param in training.module.named_parameters(remove_duplicate=False)}


def merged(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """All of `parts` in one; of what several have, the first's."""
    found: dict[str, T] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, value)
    return found


# --- weights and buffers


def weight(param: ShardedParam, *, masters: bool) -> Piece:
    """What this rank holds of a parameter: the master's elements where it has one and `masters` count, which they do if
    there is an optimizer; else the parameter's own.
    """
    name = f"weight/{param.name}"
    if masters and param.trainable:
        whole = param.partition.num_shards == 1
        return Piece(name, param.master.data.view(-1), param.numel, param.start, everywhere=whole)
    if param.persistent:
        return Piece(name, param.flat, param.numel, everywhere=True)
    fetch = None if param.store is None else partial(_fetch, param)
    return Piece(name, param.shard, param.numel, param.start, fetch=fetch)


def _fetch(param: ShardedParam) -> Tensor:
    shard = torch.empty(param.shard.shape, dtype=param.shard.dtype)
    param.read_shard(shard)
    return shard


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, by all names they have: a stage of a pipeline does not know which of them others use."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def own_buffer(name: str, rank: int) -> str:
    """What the buffer `name` of one rank is called."""
    return f"buffer/{name}/{rank}"


def digests(module: nn.Module) -> dict[str, bytes]:
    """A hash of each persistent buffer, bit for bit."""
    return {name: _digest(buffer) for name, buffer in buffers(module).items()}


def _digest(buffer: Tensor) -> bytes:
    host = buffer.detach().cpu().contiguous()
    content = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    return hashlib.blake2b(content, digest_size=16).digest()


def loader_of(training: Training) -> ShardedLoader | None:
    """The engine's own loader; one of the script's is the script's to set."""
    loader = training.training_dataloader
    return loader if isinstance(loader, ShardedLoader) else None


# --- Parameters that tensor-parallel ranks have in parts, and how these come from one sharding to another

# Part P of N of a parameter NAME is a tensor of its own in a checkpoint, NAME@P/N, and so is that part of what the
# optimizer keeps for each element. Who has the parameter sharded into the same parts reads its own; anybody else reads
# all parts of one parameter, joins them, and takes from the whole what is its own.


def tensor_shard(param: ShardedParam) -> TensorShard | None:
    """How `param` is sharded over tensor-parallel ranks; None if each of them has the whole."""
    return shard_of(param.param)


def whole_shape(param: ShardedParam) -> torch.Size:
    """Of the parameter before layers were sharded."""
    shard = tensor_shard(param)
    return param.shape if shard is None else torch.Size(shard.shape)


def part_name(name: str, shard: TensorShard | None) -> str:
    """What the part of `name` is called that a rank with this `shard` has."""
    return name if shard is None else f"{name}@{shard.rank // shard.copies}/{shard.num_shards}"


def join(shard: TensorShard, parts: Sequence[Tensor]) -> Tensor:
    """The whole, from each of the different parts once, in order."""
    return shard.join([parts[rank // shard.copies].view(shard.local_shape) for rank in range(shard.size)])


def same_sharding(one: TensorShard | None, other: TensorShard | None) -> bool:
    """Whether two shardings make the same parts, whichever of them a rank has, and however many ranks have the same."""
    if one is None or other is None:
        return one is other
    same = one.dim == other.dim and one.bands == other.bands and one.num_shards == other.num_shards
    return same and one.shape == other.shape


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements to be read: those of `piece`, which are some of this rank's part of the tensor of that name."""

    piece: Piece
    shard: TensorShard | None = None
    """How the parameter is sharded here."""
    saved: TensorShard | None = None
    """How it is sharded in the checkpoint, by any of its ranks."""

    @property
    def direct(self) -> bool:
        """Whether the part that the checkpoint has is the one that is wanted."""
        return same_sharding(self.shard, self.saved)

    def sources(self, device: str) -> list[Piece]:
        """What is to be read: to where it belongs, or parts that are to be `put` there, with memory on `device`."""
        if self.direct:
            return [replace(self.piece, name=part_name(self.piece.name, self.shard))]
        if self.piece.flat.numel() == 0:
            return []
        name, dtype = self.piece.name, self.piece.flat.dtype
        shard = self.saved
        parts = [None] if shard is None else [shard.of_rank(rank) for rank in range(0, shard.size, shard.copies)]
        numel = self._shape.numel()
        return [Piece(part_name(name, part), torch.empty(numel, dtype=dtype, device=device), numel) for part in parts]

    def put(self, sources: Sequence[Piece]) -> None:
        """Fill `piece` from its `sources`, which have been read."""
        flats = [source.flat for source in sources]
        whole = flats[0].view(self._shape) if self.saved is None else join(self.saved, flats)
        mine = whole if self.shard is None else self.shard.take(whole)
        start, length = self.piece.start, self.piece.flat.numel()
        self.piece.flat.copy_(mine.reshape(-1)[start : start + length])

    @property
    def _shape(self) -> torch.Size:
        """Of what is read where it is not what is wanted: of the whole, or of each of the parts in the checkpoint."""
        if self.saved is not None:
            return torch.Size(self.saved.local_shape)
        assert self.shard is not None
        return torch.Size(self.shard.shape)


def read(contents: Contents, wanted: Sequence[Wanted]) -> None:
    """Fill what is wanted. Of what is sharded another way, one parameter's tensor at a time is in memory as a whole."""
    contents.read([piece for each in wanted if each.direct for piece in each.sources("cpu")])
    for each in wanted:
        if not each.direct:
            sources = each.sources("cpu")
            contents.read(sources)
            if sources:
                each.put(sources)
