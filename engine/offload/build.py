"""Offloading as a configuration says: where masters and the optimizer's states are between steps, and shards of
parameters (stage 3) between uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import Config
from ..hooks import Hooks
from ..zero.shard import ShardedParam
from ..zero.zero import tiles_of
from .disk import Disk
from .optimizer import OnDisk, Tiles
from .params import ShardFile, to_host


class States(Protocol):
    """Masters and states between steps. Made before the masters, and given the optimizer when it is there."""

    def make_master(self, param: ShardedParam) -> nn.Parameter:
        """The parameter that the optimizer steps; see `ShardedParam.make_master`."""

    def attach(self, optimizer: Optimizer, tiles: Tiles) -> None:
        """Of whom the states are, and what is stepped together. Once, before the first `through`."""

    def through(self) -> Iterator[Sequence[ShardedParam]]:
        """Each tile, its masters and states in memory until the next is asked for, to see or set them. What is done to
        them is kept, states that were added or replaced included."""

    def at_once(self, *, changed: bool = True) -> contextlib.AbstractContextManager[None]:
        """As `through`, all of them at once, for a checkpoint; kept if `changed`. Those in a file are mapped, and take
        no memory."""

    def recover(self) -> None:
        """Forget the writes that have failed: all masters and states are about to be set."""


class InMemory:
    """Masters and states in memory: the host's for a share `ratio` of the model's elements, else the device's.

    The share is spread evenly over the model, whole parameters each. Without a GPU the two memories are one, and
    nothing is copied.
    """

    def __init__(self, device: torch.device, ratio: float = 0.0, pin: bool = True) -> None:
        self._ratio = ratio
        self._pin = pin and device.type == "cuda"
        self._seen = 0
        self._tiles: Tiles = ()
        self.hosted: list[str] = []
        """Names of the parameters whose states are in host memory on purpose."""
        self.hosted_elements = 0

    def make_master(self, param: ShardedParam) -> nn.Parameter:
        if not self._choose(param):
            return param.make_master()
        return param.make_master(torch.device("cpu"), pin=self._pin)

    def attach(self, optimizer: Optimizer, tiles: Tiles) -> None:
        self._tiles = tiles

    def through(self) -> Iterator[Sequence[ShardedParam]]:
        yield from self._tiles

    def at_once(self, *, changed: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def recover(self) -> None:
        return

    def _choose(self, param: ShardedParam) -> bool:
        """Whether the share comes nearest to `ratio` with this one on the host too."""
        self._seen += param.numel
        if not self.hosted_elements + param.numel / 2 < self._ratio * self._seen:
            return False
        self.hosted.append(param.name)
        self.hosted_elements += param.numel
        return True


@dataclass(frozen=True, slots=True)
class Offload:
    """What of a model's training is elsewhere than on its device."""

    states: States
    """Masters and the optimizer's states."""
    offload_shard: Callable[[ShardedParam], None] | None
    """Moves this rank's shard of a parameter away; None where they stay."""
    disks: dict[Path, Disk] = field(default_factory=dict)
    shards: ShardFile | None = None
    """Where these shards are, if it is a file."""

    @property
    def notes(self) -> list[str]:
        """What the user may want to know, once shards have been taken."""
        found = [
            f"{disk.key}: {disk.note}, so files are read and written through the page cache"
            for disk in self.disks.values()
            if disk.note
        ]
        if self.shards is not None and self.shards.in_memory and not self.shards.records:
            found.append(
                f"zero_optimization.offload_param.max_in_cpu: lets all {self.shards.in_memory} elements of rank 0 stay "
                "in host memory, so nothing is on disk; write a smaller number, or 0"
            )
        return found

    def close(self) -> None:
        """Finish reading and writing, and free the room on the disks. Masters, states and shards there are lost."""
        for disk in self.disks.values():
            disk.close()


def open_offload(config: Config, device: torch.device, hooks: Hooks, rank: int = 0) -> Offload:
    """Offloading for a model on `device`. Sections that have no effect at the configuration's stage are passed over.

    Raises OffloadError if a file cannot be made where the configuration wants it.
    """
    zero = config.zero_optimization
    states, shards = zero.offload_optimizer, zero.offload_param
    disks: dict[Path, Disk] = {}

    def disk(name: str, folder: Path | None) -> Disk:
        assert folder is not None  # the configuration's rules see to it
        if folder not in disks:
            key = f"zero_optimization.{name}.nvme_path"
            disks[folder] = Disk(folder, config.aio, hooks, rank=rank, key=key)
        return disks[folder]

    store: States = InMemory(device)
    if states is not None and zero.stage >= 1:
        if states.device == "cpu":
            store = InMemory(device, states.ratio, states.pin_memory)
        elif states.device == "nvme":
            store = OnDisk(disk("offload_optimizer", states.nvme_path), device, states)
    take: Callable[[ShardedParam], None] | None = None
    file: ShardFile | None = None
    if shards is not None and zero.stage == 3:
        if shards.device == "cpu":
            take = partial(to_host, pin=shards.pin_memory)
        elif shards.device == "nvme":
            file = ShardFile(disk("offload_param", shards.nvme_path), device, shards)
            take = file.take
    return Offload(store, take, disks, file)


def idle_pipelines(config: Config, tiles: Sequence[Sequence[ShardedParam]]) -> Iterator[str]:
    """A warning for each key that is to have the disk work beside the step, where a single tile leaves nothing to."""
    zero = config.zero_optimization
    section = zero.offload_optimizer
    if section is None or section.device != "nvme" or zero.stage < 1 or len(tiles) != 1:
        return
    elements = sum(param.partition.largest for param in tiles[0])
    # As many tiles as there are buffers, so that one is read and one written while one is stepped.
    size = max(1, -(-elements // max(3, section.buffer_count)))
    if len(tiles_of(tiles[0], size)) > 1:
        instead = f'write "sub_group_size": {size} or less'
    else:
        instead = "there is one parameter, and a tile has one at least"
    for key in ("pipeline_read", "pipeline_write"):
        if getattr(section, key):
            yield (
                f"zero_optimization.offload_optimizer.{key}: has no effect; what a rank steps, {elements} elements, is "
                f"one tile of at most {zero.sub_group_size} (sub_group_size): {instead}"
            )
