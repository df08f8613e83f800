"""Loading a checkpoint, from beginning to end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.consensus import World, gather_objects
from ..optim.onebit import OneBitAdam
from ..tensor.sharding import TensorShard
from ..training_state import Training
from ..zero.gather import update_shards
from ..zero.shard import ShardedParam
from .dcp import Contents, Piece
from .folder import CheckpointError, find, set_random_states, unpack
from .optimizer import OptimizerLoading, OptimizerState, group_names
from .saving import COUNTERS
from .state import (
    Holdings,
    Wanted,
    about_training,
    buffers,
    holdings,
    loader_of,
    merged,
    own_buffer,
    read,
    tensor_shard,
    weight,
)


def load(
    training: Training,
    load_dir: str | os.PathLike[str],
    tag: str | int | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from the checkpoint `load_dir`/`tag`, by default the one that `load_dir`/latest names. On all ranks.

    Returns its path and the client's state. Without a file `latest` nothing is loaded, which is warned about, and
    both are None. With `load_module_strict`, parameters and buffers must be those of the checkpoint; else what both
    have is loaded. `load_module_only` loads the weights and nothing else. The loader that `initialize` made of
    `training_data` goes on behind the samples that were taken. Random number generators, and buffers of which each
    rank had its own values, go on as they were if there are as many pipeline, data-parallel and tensor-parallel ranks
    as there were; else buffers are as the first replica had them.

    Raises CheckpointError on all ranks. If that is because a file cannot be read, the weights may be neither the old
    ones nor the new, and the engine neither steps nor saves before another load; nothing is touched before it is known
    that the checkpoint fits and is complete. What a step that failed half-way left behind is over when the weights and,
    if there is an optimizer, its states are loaded.
    """
    world, folder = World(CheckpointError), Path(load_dir)
    with training.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        name = world.from_first(f"no checkpoint was loaded from {folder}", lambda: find(folder, tag))
        if name is None:
            warnings.warn(
                f"no checkpoint was loaded: there is no file {folder / 'latest'}. If there should be one, check "
                "the folder, or give load_checkpoint a tag",
                stacklevel=3,
            )
            return None, None
        path = folder / name
        doing = f"checkpoint {path} was not loaded"
        optimizer = training.optimizer
        mine = world.together(doing, lambda: _OfRank(
            holdings(training), [] if optimizer is None else group_names(optimizer, training.zero)
        ))  # fmt: skip
        replica = gather_objects(mine, training.parallel.model)
        loading = world.together(doing, lambda: _Loading(training, path, world, replica, strict=load_module_strict))
        if not load_module_only:
            world.together(
                doing, lambda: loading.with_training(optimizer=load_optimizer_states, lr=load_lr_scheduler_states)
            )
        world.together(doing, loading.check)
        try:
            with training.hooks.span("copy", "checkpoint_read", purpose="checkpoint", bytes=loading.bytes):
                world.together(doing, loading.read)
            world.together(doing, loading.finish)
            loading.publish()
        except BaseException as error:
            training.fail("a load of a checkpoint", error)
            raise
        if loading.complete:
            training.recover()
    return str(path), loading.client_state


@dataclass(frozen=True, slots=True)
class _OfRank:
    """What there is to be loaded on one rank."""

    holdings: Holdings
    groups: list[list[str]]
    """Names in the optimizer's parameter groups."""


class _Loading:
    """One load on one rank, of whose `replica` all ranks say what they have. Of its methods, `publish` alone
    communicates.
    """

    def __init__(
        self, training: Training, path: Path, world: World, replica: Sequence[_OfRank], *, strict: bool
    ) -> None:
        self._job = training
        self._world = world
        self._replica = replica
        self._contents = Contents(path)
        self._training = about_training(self._contents)
        mesh = training.parallel.mesh
        self._same_ranks = tuple(self._training["mesh"]) == (mesh.pp, mesh.dp, mesh.tp)
        self._shards = {name: TensorShard.from_dict(shard) for name, shard in self._training["cuts"].items()}
        self.client_state: dict[str, Any] = self._value("client_state")
        self._optimizer: OptimizerLoading | None = None
        self._lr_state: dict[str, Any] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._params = self._parameters(strict)
        self._buffers = self._buffer_pieces(strict)
        self._module_only = True

    @property
    def complete(self) -> bool:
        """Whether it is all that a step changes."""
        whole = len(self._params) == len(self._job.zero.params)
        return whole and (self._job.optimizer is None or self._optimizer is not None)

    @property
    def bytes(self) -> int:
        """To be read."""
        return sum(piece.flat.nbytes for piece in self._sources())

    def with_training(self, *, optimizer: bool, lr: bool) -> None:
        """Load more than the module: counters, loss scale, random numbers, and, if wanted, optimizer and schedule."""
        self._module_only = False
        training = self._job
        if optimizer and training.optimizer is not None:
            saved = self._optional("optimizer")
            if saved is not None:
                self._optimizer = OptimizerLoading(
                    training.optimizer, OptimizerState(**saved), training.zero, self._contents,
                    rank=self._world.rank, same_ranks=self._same_ranks, shards=self._shards,
                    groups=[other.groups for other in self._replica],
                )  # fmt: skip
        if lr and training.lr_scheduler is not None:
            saved = self._optional("lr_scheduler")
            mine = type(training.lr_scheduler).__name__
            if saved is not None and saved["kind"] != mine:
                raise CheckpointError(
                    f"it has the state of the schedule {saved['kind']}, and the schedule is {mine}; configure it as it "
                    "was, or load with load_lr_scheduler_states=False"
                )
            self._lr_state = None if saved is None else saved["state"]

    def check(self) -> None:
        """Raise CheckpointError if something to be read is missing."""
        self._contents.plan(self._sources())

    def read(self) -> None:
        """Read the tensors to where they belong: masters and optimizer states as they come into memory."""
        training = self._job
        training.zero.begin_update()
        if self.complete:
            training.states.recover()
        rest = dict.fromkeys(self._params)
        for tile in training.states.through() if training.optimizer is not None else ():
            loaded = [param for param in tile if param in rest]
            wanted = self._weights(loaded, masters=True)
            if self._optimizer is not None:
                wanted += [each for param in tile for each in self._optimizer.room(param)]
            read(self._contents, wanted)
            update_shards(loaded)
            for param in loaded:
                del rest[param]
        read(self._contents, self._weights([param for param in rest if param.store is None], masters=False))
        self._contents.read(self._buffers)
        for param in rest:
            if param.store is not None:
                flat = torch.empty(param.shard.shape, dtype=param.shard.dtype)
                piece = Piece(f"weight/{param.name}", flat, param.numel, param.start)
                read(self._contents, [self._wanted(param, piece)])
                param.write_shard(flat)
        for target, source in self._copies:
            target.copy_(source.view(target.shape))

    def finish(self) -> None:
        """Set everything that is no tensor."""
        training = self._job
        if self._module_only:
            return
        if self._optimizer is not None:
            self._optimizer.finish()
        if self._lr_state is not None:
            training.lr_scheduler.load_state_dict(self._lr_state)
        if training.scaler.dynamic and self._training["loss_scaler"] is not None:
            training.scaler.load_state_dict(self._training["loss_scaler"])
        for name in COUNTERS:
            setattr(training, name, self._training["counters"][name])
        training.begin_step()
        training.hooks.step = training.global_steps
        loader = loader_of(training)
        if loader is not None:
            loader.load_state_dict(self._training.get("data"))
        if self._same_ranks:
            own = self._value(f"rank/{self._world.rank}")
            set_random_states(own["random"], training.device)

    def publish(self) -> None:
        """Bring what the ranks have read to all that need it."""
        zero, parallel = self._job.zero, self._job.parallel
        zero.reducer.clear()
        _, _, tensor_parallel = self._training["mesh"]
        orders = self._training["reduction_orders"]
        if not self._module_only and len(orders) == parallel.model.size and tensor_parallel == parallel.mesh.tp:
            order = orders[parallel.model.rank]
            if order is not None:
                zero.reducer.set_order(order)
        if isinstance(self._job.optimizer, OneBitAdam):
            zero.reducer.leave_unreduced(self._job.optimizer.wants_local_gradients)
        for param in zero.params:
            param.secondary = None
        if zero.settings.stage and self._job.optimizer is not None:
            whole = [param for param in zero.trainable if param.persistent]
            zero.gatherer.gather(whole, zero.settings.allgather_bucket_size)

    # --- what there is to load

    def _sources(self) -> list[Piece]:
        """All that is to be read; what is not in memory, by its shape."""
        wanted = self._weights(self._params, masters=self._job.optimizer is not None)
        wanted += self._optimizer.expected if self._optimizer is not None else []
        return [piece for each in wanted for piece in each.sources("meta")] + self._buffers

    def _weights(self, params: Iterable[ShardedParam], *, masters: bool) -> list[Wanted]:
        return [self._wanted(param, weight(param, masters=masters)) for param in params]

    def _wanted(self, param: ShardedParam, piece: Piece) -> Wanted:
        return Wanted(piece, tensor_shard(param), self._shards.get(param.name))

    def _parameters(self, strict: bool) -> list[ShardedParam]:
        everywhere = [other.holdings for other in self._replica]
        optional = [name for each in everywhere for name in each.frozen] if self._training["without_frozen"] else []
        shapes = merged(each.weights for each in everywhere)
        common = _common("parameters", shapes, self._training["weights"], optional, strict)
        return [param for param in self._job.zero.params if param.name in common]

    def _buffer_pieces(self, strict: bool) -> list[Piece]:
        shapes = merged(other.holdings.buffers for other in self._replica)
        common = _common("buffers", shapes, self._training["buffers"], [], strict)
        pieces: list[Piece] = []
        taken: set[int] = set()
        for name, buffer in buffers(self._job.module).items():
            if name not in common or id(buffer) in taken:
                continue
            taken.add(id(buffer))
            flat = buffer.view(-1) if buffer.is_contiguous() else torch.empty_like(buffer.reshape(-1))
            if not buffer.is_contiguous():
                self._copies.append((buffer, flat))
            own = own_buffer(name, self._world.rank)
            saved_as = own if self._same_ranks and own in self._contents else f"buffer/{name}"
            pieces.append(Piece(saved_as, flat, buffer.numel()))
        return pieces

    def _value(self, name: str) -> Any:
        return unpack(self._contents.value(name), name)

    def _optional(self, name: str) -> Any:
        if name in self._contents:
            return self._value(name)
        warnings.warn(f"the checkpoint was saved without {name}: it begins from the start", stacklevel=7)
        return None


def _common(
    what: str, mine: Mapping[str, torch.Size], saved: Mapping[str, torch.Size], optional: Iterable[str], strict: bool
) -> set[str]:
    """Names that both have. Raises CheckpointError for a difference in shape and, if `strict`, for one in names."""
    missing = sorted(mine.keys() - saved.keys() - set(optional))
    unexpected = sorted(saved.keys() - mine.keys())
    texts = [
        f"{len(names)} {what} that the {whose} has not, the first: {names[0]}"
        for whose, names in (("checkpoint", missing), ("model", unexpected))
        if names
    ]
    if texts and strict:
        raise CheckpointError(
            f"there are {'; and '.join(texts)}. To load what both have, give load_module_strict=False"
        )
    if texts:
        warnings.warn(f"load_checkpoint: there are {'; and '.join(texts)}", stacklevel=8)
    common = mine.keys() & saved.keys()
    for name in mine:
        if name in common and mine[name] != saved[name]:
            raise CheckpointError(
                f"{name} has shape {tuple(saved[name])} in the checkpoint, and {tuple(mine[name])} in the model"
            )
    return common
