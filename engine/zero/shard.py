"""How a parameter is sharded: into equal pieces of its flattened elements, one a data-parallel rank.

That depends on the parameter and the number of ranks alone. Bucket, prefetch and persistence sizes only decide what
is communicated together, so they can change at any time and no checkpoint depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from .placeholder import Absent


@dataclass(frozen=True, slots=True)
class Partition:
    """`numel` elements in `pieces` equal pieces of `chunk`; the last ones are shorter, or empty.

    Row r of a communication buffer, that of rank r, holds piece (r + rotation) modulo `pieces`.
    """

    numel: int
    pieces: int
    rotation: int = 0
    chunk: int = field(init=False)
    even: bool = field(init=False)
    """Whether the rows one after the other are the flattened tensor."""

    def __post_init__(self) -> None:
        chunk = -(-self.numel // self.pieces)
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "even", self.rotation == 0 and self.numel == self.pieces * chunk)

    def bounds(self, row: int) -> tuple[int, int]:
        """First element of the piece in `row`, and the one after its last."""
        piece = (row + self.rotation) % self.pieces
        return min(piece * self.chunk, self.numel), min((piece + 1) * self.chunk, self.numel)

    def to_rows(self, whole: Tensor) -> Tensor:
        """A tensor of `numel` elements as rows [pieces, chunk], a view of it if they are even; padded with zeros."""
        if self.even:
            return whole.reshape(self.pieces, self.chunk)
        rows = whole.new_zeros(self.pieces, self.chunk)
        for source, target in self._pairs(whole.reshape(-1), rows, None):
            target.copy_(source)
        return rows

    def from_rows(self, rows: Tensor, flat: Tensor, but: int | None = None) -> None:
        """Write `rows` [pieces, chunk], `but` one perhaps, to a flattened tensor [numel]."""
        for target, source in self._pairs(flat, rows, but):
            target.copy_(source)

    def _pairs(self, flat: Tensor, rows: Tensor, but: int | None) -> list[tuple[Tensor, Tensor]]:
        """Parts of `flat` with the parts of `rows` that correspond to them."""
        if but is None and self.even:
            return [(flat.view(self.pieces, self.chunk), rows)]
        pairs = []
        for row in range(self.pieces):
            start, stop = self.bounds(row)
            if stop > start and row != but:
                pairs.append((flat[start:stop], rows[row, : stop - start]))
        return pairs


class Home(Protocol):
    """Where pieces of parameters are that are not in this process' memory."""

    def read(self, param: ShardedParam, into: Tensor) -> None:
        """Copy this rank's piece to `into` [n], of any floating dtype, on any device."""

    def write(self, param: ShardedParam, piece: Tensor) -> None:
        """Take `piece` [n], of any floating dtype, in the place of the present one."""

    def expect(self, param: ShardedParam) -> bool:
        """Have the piece at hand soon, because it is going to be read; False if there is no room for more of that."""


class Fetches(Protocol):
    """Who brings parameters when they are needed."""

    def used(self, param: ShardedParam) -> None:
        """`param` is used: have it whole, if a module runs, or a backward, that it can be brought for."""

    def spread_net(self) -> AbstractContextManager[object] | None:
        """Within this, what autograd saves of parameters is brought when backward needs it; None if it is already."""


class Ledger:
    """Which parameters are whole at this moment, or on their way to be. Sizes in elements."""

    def __init__(self) -> None:
        self._whole: dict[ShardedParam, bool] = {}
        """Those that count, the one that came first before the others, and whether they have come."""
        self.coming = 0
        self.live = 0
        """Whole and coming."""
        self.peak = 0

    def __contains__(self, param: ShardedParam) -> bool:
        return param in self._whole

    def __iter__(self) -> Iterator[ShardedParam]:
        """Those that are whole, first come first."""
        return (param for param, whole in self._whole.items() if whole)

    def expect(self, param: ShardedParam) -> None:
        """`param` is on its way."""
        if param not in self._whole:
            self._whole[param] = False
            self.coming += param.numel
            self.live += param.numel
            self.peak = max(self.peak, self.live)

    def arrive(self, param: ShardedParam) -> None:
        """`param` has its storage."""
        self.expect(param)
        if not self._whole[param]:
            self._whole[param] = True
            self.coming -= param.numel

    def leave(self, param: ShardedParam) -> None:
        """The storage of `param` is free."""
        whole = self._whole.pop(param, None)
        if whole is not None:
            self.live -= param.numel
            self.coming -= 0 if whole else param.numel


class ShardedParam:
    """One parameter of the model, this rank's piece of it, and the master that the optimizer steps.

    `shard` [n] is the piece in the model's precision. While the whole parameter is always there (stages 1 and 2) it is
    a view of it; in stage 3 it has storage of its own, and the parameter's is emptied between uses. Meanwhile the
    parameter is `Absent`: it has its shape, and a use fetches it or is an error. `master` [n] is what
    the optimizer sees, in fp32 where the model is in a half precision, and otherwise the shard itself. In stage 0
    all three are the whole parameter. A frozen parameter has no master.

    Offloaded parameters have their piece in host memory, where `shard` is then, or at a `home`, and `shard` is an empty
    shape: `read_piece` works in either case.
    """

    def __init__(
        self, name: str, param: nn.Parameter, partition: Partition, rank: int, *, persistent: bool, index: int
    ) -> None:
        self.name = name
        self.param = param
        self.index = index
        self.shape = param.shape
        self.dtype = param.dtype
        self.device = param.device
        self.numel = param.numel()
        self.partition = partition
        self.rank = rank
        self.start, self.stop = partition.bounds(rank)
        self.persistent = persistent
        self.resident = True
        self.users = 0
        """Modules that need the whole of it at this moment."""
        self.secondary: Tensor | None = None
        """This rank's piece in the hierarchical partition, as long as it is of the present weights."""
        self.ledger = Ledger()
        """Where this is counted while it is whole; shared by those of a model that are fetched."""
        self.fetches: Fetches | None = None
        """Who brings it when a module needs it."""
        self._version = param._version
        """Of the parameter, when the master was last seen to agree with it."""
        self._whole = param.data
        """What has the storage, full or emptied, and with it all views that autograd saved."""
        self._stand_in: Tensor | None = None
        whole = param.data.reshape(-1)
        self.shard = whole[self.start : self.stop]
        if not persistent:
            self.shard = self.shard.clone()
        self.home: Home | None = None
        self.master: nn.Parameter | None = None
        self.master_is_shard = False
        """Whether a step of the optimizer changes the shard."""
        self.reload_master: Callable[[ShardedParam], None] | None = None
        """Takes the master from the piece anew, where the master is not in this process' memory."""

    @property
    def flat(self) -> Tensor:
        """The whole parameter [numel], in its own storage."""
        return self.param.data.view(-1)

    @property
    def trainable(self) -> bool:
        return self.master is not None

    @property
    def master_shape(self) -> torch.Size:
        """The parameter's, if one rank has the whole of it, else one dimension."""
        return self.shape if self.partition.pieces == 1 else torch.Size((self.stop - self.start,))

    @property
    def master_dtype(self) -> torch.dtype:
        """The parameter's, but fp32 for half precisions."""
        return torch.float32 if self.shard.dtype in (torch.float16, torch.bfloat16) else self.shard.dtype

    def can_share_master(self, device: torch.device) -> bool:
        """Whether a master on `device` can be the shard itself."""
        return self.home is None and self.shard.dtype == self.master_dtype and self.shard.device == device

    def make_master(self, device: torch.device | None = None, *, pin: bool = False) -> nn.Parameter:
        """What the optimizer steps, on `device` (the parameter's own by default); `pin` locks its pages."""
        place = device or self.device
        if self.can_share_master(place):
            self.master = self.param if self.partition.pieces == 1 and self.persistent else nn.Parameter(self.shard)
            self.master_is_shard = True
        else:
            value = torch.empty(self.master_shape, dtype=self.master_dtype, device=place, pin_memory=pin)
            self.read_piece(value.view(-1))
            self.master = nn.Parameter(value)
        return self.master

    def read_piece(self, into: Tensor) -> None:
        """Copy this rank's piece to `into` [n], of any floating dtype, on any device."""
        if self.home is not None:
            self.home.read(self, into)
        else:
            into.copy_(self.shard, non_blocking=into.is_cuda)

    def write_piece(self, piece: Tensor) -> None:
        """Take `piece` [n], of any floating dtype and from any device, in the place of this rank's piece."""
        if self.home is not None:
            self.home.write(self, piece)
        else:
            self.shard.copy_(piece, non_blocking=self.shard.is_cuda)  # the host may read its own at once
        self.secondary = None

    def publish(self) -> None:
        """After the optimizer's step: bring the master into the model's precision."""
        if self.master is not None and not self.master_is_shard:
            self.write_piece(self.master.data.view(-1))
        self.secondary = None

    def take_from_whole(self) -> None:
        """The whole parameter was written to: take the shard from it anew, and the master from that."""
        piece = self.flat[self.start : self.stop]
        if not self.persistent:
            self.write_piece(piece)
        if self.reload_master is not None:
            self.reload_master(self)
        elif self.master is not None and not self.master_is_shard:
            self.master.data.view(-1).copy_(piece)
        self.secondary = None

    def take_edits(self) -> None:
        """Before the master is stepped or saved: what the script has written to the parameter in place goes there, as
        `load_state_dict` does between steps. What is as it was published keeps the master's precision.
        """
        if not self.edited or self.master is None:
            return
        self._version = self.param._version
        mine, piece = self.master.data.view(-1), self.shard.to(self.master.device)
        mine.copy_(torch.where(mine.to(piece.dtype) == piece, mine, piece.to(mine.dtype)))

    @property
    def edited(self) -> bool:
        """Whether `take_edits` may find something."""
        return self.persistent and not self.master_is_shard and self.param._version != self._version

    def fill(self, rows: Tensor, partition: Partition | None = None) -> None:
        """Write the gathered `rows` [pieces, chunk], divided as `partition` has it, to the parameter's own storage."""
        self.allocate()
        # A persistent parameter's own piece is already there: the shard is a view of it.
        (partition or self.partition).from_rows(rows, self.flat, self.rank if self.persistent else None)
        self.resident = True

    def allocate(self) -> None:
        """Give the parameter its storage back. Views of it that autograd saved come alive with it."""
        if self.persistent:
            return
        self.ledger.arrive(self)
        storage = self._whole.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.numel * self._whole.element_size())
        if type(self.param) is Absent:
            self.param.__class__ = nn.Parameter  # type: ignore[assignment]
        self.param.data = self._whole

    def release(self) -> None:
        """Free the parameter's storage; the shard stays."""
        if self.persistent:
            return
        if self._stand_in is None:
            # What a parameter of a class of the script's own, which cannot be made Absent, reads as: not the emptied
            # storage, since to read that is to read anything, or the end of the process.
            nothing = float("nan") if self._whole.is_floating_point() or self._whole.is_complex() else 0
            self._stand_in = torch.full((), nothing, dtype=self._whole.dtype, device=self._whole.device)
        if type(self.param) is not Absent:
            self.param.data = self._stand_in.expand(self.shape)
        if type(self.param) is nn.Parameter:
            self.param.__class__ = Absent  # as torch does with lazy ones, the other way round
        self._whole.untyped_storage().resize_(0)
        self.resident = False
        self.ledger.leave(self)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parameter's own storage at this moment."""
        return self._whole.untyped_storage().size()

    @property
    def storage_key(self) -> int:
        """The identity of the parameter's own storage, full or emptied."""
        return int(self._whole.untyped_storage()._cdata)

    def __repr__(self) -> str:
        return f"ShardedParam({self.name}, {tuple(self.shape)}, {self.start}:{self.stop})"
