"""Stage 3: this rank's shards of the parameters, out of the device's memory between their uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm.lane import LaneTicket
from ..config.zero import OffloadParamConfig
from ..hooks import Attributes
from ..zero.shard import ShardedParam
from ..zero.storage import placeholder
from .disk import Buffer, Disk, Pool, round_up


def to_host(param: ShardedParam, pin: bool = True) -> None:
    """Move this rank's shard to host memory, page-locked for a parameter on a GPU. Nothing to do on a CPU."""
    if param.shard.is_cuda:
        host = torch.empty(param.shard.shape, dtype=param.shard.dtype, pin_memory=pin)
        param.shard = host.copy_(param.shard)


@dataclass(frozen=True, slots=True)
class _Part:
    """As much of a shard as a buffer takes: its elements, and where they are in the file."""

    start: int
    stop: int
    offset: int


@dataclass(slots=True)
class _Record:
    """A shard in the file."""

    parts: list[_Part]
    writing: list[LaneTicket] = field(default_factory=list)


class ShardFile:
    """Shards in a file, but for the first `max_in_cpu` elements, which stay in host memory.

    A shard is read when it is gathered, or before that where it is expected, and passes through `buffer_count` buffers
    of `buffer_size` elements; new weights are written behind.
    """

    def __init__(self, disk: Disk, device: torch.device, section: OffloadParamConfig) -> None:
        self._file = disk.open("what this rank has of the parameters")
        self._pool = Pool("parameters", section.buffer_count, device, section.pin_memory)
        self._section = section
        self.records: dict[ShardedParam, _Record] = {}
        """Of the shards that are on the disk."""
        self._ahead: dict[ShardedParam, deque[tuple[_Part, Buffer, LaneTicket]]] = {}
        """Parts that are being read, or have been, for shards that nobody has asked for yet; oldest first."""
        self.in_memory = 0
        """Elements that stay in host memory."""

    def take(self, param: ShardedParam) -> None:
        """Move this rank's shard of `param` to the file, or, if `max_in_cpu` allows, to host memory.

        Raises OffloadError if the disk has no room for it.
        """
        shard = param.shard
        if self.in_memory + shard.numel() <= self._section.max_in_cpu:
            self.in_memory += shard.numel()
            to_host(param, self._section.pin_memory)
            return
        each = round_up(self._section.buffer_size * shard.element_size()) // shard.element_size()
        offset = self._file.allocate(shard.nbytes)
        self.records[param] = _Record([
            _Part(start, min(start + each, shard.numel()), offset + start * shard.element_size())
            for start in range(0, shard.numel(), each)
        ])  # fmt: skip
        param.store = self
        param.shard = placeholder(shard.shape, shard.dtype)
        self.write(param, shard)

    def write(self, param: ShardedParam, shard: Tensor) -> None:
        """Begin to write `shard` [n]. Raises what an earlier write raised."""
        self._forget(param)
        record = self.records[param]
        tickets = []
        for part in record.parts:
            buffer = self._buffer(param, part)
            view = _view(buffer, param, part)
            view.copy_(shard[part.start : part.stop])
            ticket = self._file.write(part.offset, buffer.memory[: round_up(view.nbytes)], _about(param))
            self._pool.give(buffer, after=ticket)
            tickets.append(ticket)
        record.writing = tickets

    def expect(self, param: ShardedParam) -> bool:
        """Begin to read a shard; False if there is no buffer for all of it."""
        if param in self._ahead:
            return True
        record = self.records[param]
        if not all(ticket.done for ticket in record.writing):
            return True  # soon
        for part in record.parts:
            buffer = self._pool.take(_room(param, part), wait=False)
            if buffer is None:
                return False
            self._ahead.setdefault(param, deque()).append(self._start(param, part, buffer))
        return True

    def read(self, param: ShardedParam, into: Tensor) -> None:
        """Copy the shard to `into` [n], and wait for the disk where it was not expected."""
        record = self.records[param]
        for ticket in record.writing:
            ticket.wait()
        record.writing = []
        ahead = self._ahead.pop(param, deque())
        missing = iter(record.parts[len(ahead) :])
        while self._top_up(param, ahead, missing):
            part, buffer, ticket = ahead.popleft()
            ticket.wait()
            into[part.start : part.stop].copy_(_view(buffer, param, part), non_blocking=into.is_cuda)
            self._pool.give(buffer)

    def _top_up(
        self, param: ShardedParam, ahead: deque[tuple[_Part, Buffer, LaneTicket]], missing: Iterator[_Part]
    ) -> bool:
        """Have one part on its way to a buffer, and one more behind it; whether there is one."""
        while len(ahead) < min(2, self._section.buffer_count):
            part = next(missing, None)
            if part is None:
                break
            ahead.append(self._start(param, part, self._buffer(param, part)))
        return bool(ahead)

    def _start(self, param: ShardedParam, part: _Part, buffer: Buffer) -> tuple[_Part, Buffer, LaneTicket]:
        memory = buffer.memory[: _room(param, part)]
        return part, buffer, self._file.read(part.offset, memory, _about(param))

    def _buffer(self, param: ShardedParam, part: _Part) -> Buffer:
        """A buffer, if need be one that had been read to ahead of time."""
        buffer = self._pool.take(_room(param, part), wait=not self._ahead)
        while buffer is None:
            self._forget(next(iter(self._ahead)))
            buffer = self._pool.take(_room(param, part), wait=not self._ahead)
        return buffer

    def _forget(self, param: ShardedParam) -> None:
        """Give back the buffers that were read to for `param`."""
        for _, buffer, ticket in self._ahead.pop(param, ()):
            ticket.wait()
            self._pool.give(buffer)


def _room(param: ShardedParam, part: _Part) -> int:
    """Bytes of a part in a buffer and in the file."""
    return round_up((part.stop - part.start) * param.shard.element_size())


def _view(buffer: Buffer, param: ShardedParam, part: _Part) -> Tensor:
    return buffer.view(0, param.shard.dtype, (part.stop - part.start,))


def _about(param: ShardedParam) -> Attributes:
    return {"purpose": "parameter", "module": param.name}
