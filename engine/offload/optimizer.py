"""Masters and the optimizer's states in a file between steps, and how they come to the step, tile by tile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.lane import LaneTicket
from ..config.zero import OffloadOptimizerConfig
from ..hooks import Attributes
from ..optim.build import bytes_per_element
from ..zero.shard import ShardedParam
from ..zero.storage import placeholder
from .disk import Buffer, Disk, File, OffloadError, Pool, round_up

Tiles = Sequence[Sequence[ShardedParam]]

MASTER: Final = ""
"""The master's place among the names of its states."""


@dataclass(frozen=True, slots=True)
class _FilePlace:
    """Where a tensor is in its tile's image: the same in the file and in a buffer."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, buffer: Buffer) -> Tensor:
        return buffer.view(self.start, self.dtype, self.shape)


@dataclass(eq=False, slots=True)
class _Tile:
    """Parameters that are stepped together, and the image of their masters and states. Sizes and offsets in bytes."""

    number: int
    params: Sequence[ShardedParam]
    places: dict[tuple[ShardedParam, str], _FilePlace] = field(default_factory=dict)
    placeholders: dict[tuple[ShardedParam, str], Tensor] = field(default_factory=dict)
    """What stands in the places of states that are in the file alone."""
    size: int = 0
    room: int = 0
    """What the image is expected to grow to."""
    offset: int = 0
    allocated: int = 0
    """In the file, from `offset`."""
    written: bool = False
    """Whether the file has it, or a buffer that is being written: if not, masters are as the parameters have them."""
    buffer: Buffer | None = None
    reading: LaneTicket | None = None
    writing: LaneTicket | None = None

    def add(self, param: ShardedParam, key: str, tensor: Tensor) -> _FilePlace:
        place = self.places[param, key] = _FilePlace(self.size, tensor.dtype, tensor.shape)
        self.size += _spaced(tensor.nbytes)
        self.room = max(self.room, self.size)
        return place

    @property
    def about(self) -> Attributes:
        return {"purpose": "optimizer", "value": float(self.number)}


class OnDisk:
    """Masters and states in a file; only the tiles in flight are in memory, at most `buffer_count`.

    States are what an optimizer keeps in tensors of the master's shape; the rest (step counts) stays in memory. So does
    a master that is the parameter's own shard: fp32 on a CPU.
    """

    def __init__(self, disk: Disk, device: torch.device, section: OffloadOptimizerConfig) -> None:
        self._file: File = disk.open("what the optimizer keeps")
        self._pool = Pool("optimizer_states", section.buffer_count, device, section.pin_memory)
        self._section = section
        self._tiles: list[_Tile] = []
        self._optimizer: Optimizer | None = None

    def make_master(self, param: ShardedParam) -> nn.Parameter:
        host = torch.device("cpu")
        if param.can_share_master(host):
            return param.make_master(host)
        param.master = nn.Parameter(placeholder(param.master_shape, param.master_dtype))
        param.reload_master = self._reload
        return param.master

    def attach(self, optimizer: Optimizer, tiles: Tiles) -> None:
        """Raises OffloadError if the disk has no room for everything, unless `fast_init` leaves that to the steps."""
        self._optimizer = optimizer
        per_element = bytes_per_element(optimizer)
        for number, params in enumerate(tiles):
            tile = _Tile(number, params)
            states = 0
            for param in params:
                master = param.master
                if not param.master_is_shard:
                    tile.add(param, MASTER, master)
                states += _spaced(per_element.get(master, 0) * master.numel())
            tile.room = tile.size + states
            self._tiles.append(tile)
        if self._section.fast_init:
            return
        offset = self._file.allocate(sum(round_up(tile.room) for tile in self._tiles))
        for tile in self._tiles:
            tile.offset, tile.allocated = offset, round_up(tile.room)
            offset += tile.allocated
        for tile in self._tiles:
            if tile.size:
                self._ready(tile)
                self._write(tile)
        self._settle()

    def through(self) -> Iterator[Sequence[ShardedParam]]:
        """Raises OffloadError if a disk fails or is full."""
        try:
            for tile in self._tiles:
                self._ready(tile)
                if self._section.pipeline_read:
                    self._read_ahead(self._tiles[tile.number + 1 :])
                self._forget_replaced(tile)
                if tile.buffer is not None:
                    self._install(tile, tile.buffer)
                yield tile.params
                self._forget_removed(tile)
                for param, key, tensor in self._tensors(tile):
                    self._keep(tile, param, key, tensor)
                self._leave_placeholders(tile)
                if tile.size:
                    self._write(tile)
                    if not self._section.pipeline_write:
                        self._settle(tile)
                self._drop(tile)
        finally:
            for tile in self._tiles:  # none has a buffer, unless a step failed
                if tile.buffer is not None:
                    self._leave_placeholders(tile)
                    self._drop(tile)

    @contextlib.contextmanager
    def at_once(self, *, changed: bool = True) -> Iterator[None]:
        self._settle()
        for tile in self._tiles:
            if tile.size and not tile.written:
                self._ready(tile)
                self._write(tile)
        self._settle()
        memory = self._file.mapped()
        replaced = False
        for tile in self._tiles:
            replaced = self._forget_replaced(tile) or replaced
            self._install(tile, Buffer(memory[tile.offset : tile.offset + round_up(tile.size)]))
        try:
            yield
            if changed or replaced:
                self._file.sync()
                for tile in self._tiles:
                    self._forget_removed(tile)
                    self._replace(tile, memory)
                self._settle()
        finally:
            for tile in self._tiles:
                self._leave_placeholders(tile)

    def recover(self) -> None:
        self._pool.settle()
        for tile in self._tiles:
            if tile.writing is not None:
                with contextlib.suppress(OffloadError):
                    tile.writing.wait()
                tile.writing = None

    # --- into memory

    def _start_reading(self, tile: _Tile, wait: bool) -> bool:
        """Whether the tile is in a buffer, or on its way to one."""
        if tile.buffer is None:
            if tile.writing is not None:
                if wait:
                    tile.writing.wait()
                elif tile.writing.done:
                    tile.writing.check()
                else:
                    return False
                tile.writing = None
            tile.buffer = self._pool.take(round_up(tile.room), wait)
            if tile.buffer is not None and tile.written:
                memory = tile.buffer.memory[: round_up(tile.size)]
                tile.reading = self._file.read(tile.offset, memory, tile.about)
        return tile.buffer is not None

    def _read_ahead(self, tiles: Sequence[_Tile]) -> None:
        for tile in tiles:
            if tile.room and not self._start_reading(tile, wait=False):
                return

    def _ready(self, tile: _Tile) -> None:
        """Have the tile in a buffer."""
        if not tile.room:
            return
        self._start_reading(tile, wait=True)
        assert tile.buffer is not None  # one tile at a time is in use, so a buffer is free, or is going to be
        if tile.reading is not None:
            tile.reading.wait()
            tile.reading = None
        if not tile.written:
            for (param, key), place in tile.places.items():
                if key == MASTER:
                    param.read_shard(place.view(tile.buffer).view(-1))

    def _install(self, tile: _Tile, buffer: Buffer) -> None:
        """Give masters and states the memory of a buffer that has the tile's image."""
        for (param, key), place in tile.places.items():
            self._put(param, key, place.view(buffer))

    def _forget_replaced(self, tile: _Tile) -> bool:
        """Forget the places of states that were removed or replaced while the file had them; whether there are any.

        What is there instead is kept like a state that was added.
        """
        assert self._optimizer is not None
        gone = [
            (param, key)
            for param, key in tile.places
            if key != MASTER
            and self._optimizer.state.get(param.master, {}).get(key) is not tile.placeholders.get((param, key))
        ]
        for place in gone:
            del tile.places[place]
        return bool(gone)

    def _forget_removed(self, tile: _Tile) -> None:
        """Forget the places of states that were removed while they were in memory."""
        kept = {(param, key) for param, key, _ in self._tensors(tile)}
        tile.places = {place: where for place, where in tile.places.items() if place in kept or place[1] == MASTER}

    # --- out of memory

    def _drop(self, tile: _Tile) -> None:
        """Give back the tile's buffer, if it has one, with what is in it."""
        if tile.buffer is None:
            return
        if tile.reading is not None:
            with contextlib.suppress(OffloadError):
                tile.reading.wait()
            tile.reading = None
        self._pool.give(tile.buffer)
        tile.buffer = None

    def _reload(self, param: ShardedParam) -> None:
        """Take a master from the parameter's shard anew."""
        for tile in self._tiles:
            place = tile.places.get((param, MASTER))
            if place is not None and tile.written:
                self._ready(tile)
                assert tile.buffer is not None
                param.read_shard(place.view(tile.buffer).view(-1))
                self._write(tile)

    def _replace(self, tile: _Tile, memory: Tensor) -> None:
        """Write a tile whose image is not any more what is mapped: states were added or replaced."""
        tensors = self._tensors(tile)
        first = memory.data_ptr() + tile.offset
        if all(
            (place := tile.places.get((param, key))) is not None and tensor.data_ptr() == first + place.start
            for param, key, tensor in tensors
        ):
            return
        for param, key, tensor in tensors:
            self._keep(tile, param, key, tensor)
        self._write(tile)

    def _leave_placeholders(self, tile: _Tile) -> None:
        """Free masters and states, which the file has."""
        for (param, key), place in tile.places.items():
            tile.placeholders[param, key] = placeholder(place.shape, place.dtype)
            self._put(param, key, tile.placeholders[param, key])

    def _tensors(self, tile: _Tile) -> list[tuple[ShardedParam, str, Tensor]]:
        """What the tile's image is to have."""
        assert self._optimizer is not None
        found = []
        for param in tile.params:
            master = param.master
            if not master.numel():
                continue
            if (param, MASTER) in tile.places:
                found.append((param, MASTER, master.detach()))
            for key, value in self._optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape == master.shape and value.is_cpu:
                    found.append((param, key, value))
        return found

    def _keep(self, tile: _Tile, param: ShardedParam, key: str, tensor: Tensor) -> None:
        """Have `tensor` in the tile's buffer, where it is already if it was there before and was changed in place."""
        place = tile.places.get((param, key))
        if place is None or place.dtype != tensor.dtype:
            place = tile.add(param, key, tensor)
        if tile.buffer is None:
            tile.buffer = self._pool.take(round_up(tile.room))
            assert tile.buffer is not None
        self._pool.enlarge(tile.buffer, round_up(tile.size))
        view = place.view(tile.buffer)
        if view.data_ptr() != tensor.data_ptr():
            view.copy_(tensor)

    def _write(self, tile: _Tile) -> None:
        assert tile.buffer is not None
        if tile.size > tile.allocated:
            tile.offset, tile.allocated = self._file.allocate(tile.room), round_up(tile.room)
        tile.writing = self._file.write(tile.offset, tile.buffer.memory[: round_up(tile.size)], tile.about)
        tile.written = True
        self._pool.give(tile.buffer, after=tile.writing)
        tile.buffer = None

    def _settle(self, *tiles: _Tile) -> None:
        """Wait until these tiles, or all, are in the file."""
        for tile in tiles or self._tiles:
            if tile.writing is not None:
                tile.writing.wait()
                tile.writing = None

    def _put(self, param: ShardedParam, key: str, tensor: Tensor) -> None:
        assert self._optimizer is not None
        if key == MASTER:
            param.master.data = tensor
        else:
            self._optimizer.state[param.master][key] = tensor


def _spaced(nbytes: int) -> int:
    """Tensors begin on cache lines."""
    return round_up(nbytes, 64)
