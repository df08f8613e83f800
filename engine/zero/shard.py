"""A parameter that is sharded over the data-parallel ranks: this one's part of it, and what the optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ..comm.comm import Comm, Rows
from .shares import Partition
from .storage import REGISTRY, LiveParams, Storage, fetchable


class ShardStore(Protocol):
    """Where shards of parameters are that are not in this process' memory."""

    def read(self, param: ShardedParam, into: Tensor) -> None:
        """Copy this rank's shard to `into` [n], of any floating dtype, on any device."""

    def write(self, param: ShardedParam, shard: Tensor) -> None:
        """Take `shard` [n], of any floating dtype, in the place of the present one."""

    def expect(self, param: ShardedParam) -> bool:
        """Have the shard at hand soon, because it is going to be read; False if there is no room for more of that."""


class ParamGatherer(Protocol):
    """What brings parameters back to full size: see `gather.Gatherer`."""

    comm: Comm
    """Of the ranks that have a shard each."""

    def gather(self, params: Sequence[ShardedParam], limit: int) -> None:
        """Have all of `params` whole now, by gathers of at most `limit` elements. On all ranks."""

    def under_way(self, param: ShardedParam) -> bool:
        """Whether its gather has been started and not finished."""


class Packing(Protocol):
    """How shards travel to be used, in fewer bytes than they have: what arrives is near the weights, and not them."""

    def ready(self, param: ShardedParam) -> bool:
        """Whether it can be done of the present weights; the same on all ranks."""

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements."""

    def pack(self, param: ShardedParam, shard: Tensor, into: Tensor) -> None:
        """Write this rank's `shard` [n] to `into` [nbytes(n)], bytes."""

    def unpack(self, param: ShardedParam, rows: Tensor, columns: int) -> Tensor:
        """The ranks' shards [ranks, columns] of what they have packed, `rows` [ranks, nbytes(columns)]."""


class ParamFetcher(Protocol):
    """What brings parameters when modules need them: see `fetch.Fetcher`."""

    def fetch_used(self, param: ShardedParam) -> None:
        """`param` is used: have it whole, if a module runs, or a backward, that it can be brought for."""

    def weights_written(self) -> None:
        """A script has written weights: what autograd has saved of them before is out of date."""

    def replace_storage(self, key: int, param: ShardedParam) -> None:
        """`param` has a storage of its own instead of the one whose identity was `key`."""

    def hook_saved_tensors(self) -> AbstractContextManager[object] | None:
        """Within this, what autograd saves of parameters is brought when backward needs it; None if it is already."""


class ShardedParam:
    """One parameter of the model, this rank's shard of it, and the master that the optimizer steps.

    `shard` [n] is in the model's precision. While the whole parameter is always there (stages 1 and 2) it is
    a view of it; in stage 3 it has storage of its own, and the parameter's is emptied between uses. Meanwhile the
    parameter is `Absent`: it has its shape, and a use fetches it or is an error. `master` [n] is what
    the optimizer sees, in fp32 where the model is in a half precision, and otherwise the shard itself. In stage 0
    all three are the whole parameter. A frozen parameter has no master.

    Offloaded parameters have their shard in host memory, where `shard` is then, or in a `store`, and `shard` is an
    empty shape: `read_shard` works in either case.
    """

    def __init__(
        self, name: str, param: nn.Parameter, partition: Partition, rank: int, gatherer: ParamGatherer, *,
        persistent: bool, index: int,
    ) -> None:  # fmt: skip
        self.name = name
        self.param = param
        self.index = index
        self.shape = param.shape
        self.dtype = param.dtype
        self.device = param.device
        self.numel = param.numel()
        self.partition = partition
        self.rank = rank
        self.gatherer = gatherer
        self.place = partition.place(rank)
        """In which of the partition's blocks this rank is."""
        self.width = partition.blocks[self.place].width
        """Columns of this rank's shard in a communication buffer: its elements, and perhaps padding."""
        self.start, self.stop = partition.bounds(rank)
        self.persistent = persistent
        self.resident = True
        self.packing: Packing | None = None
        """How it travels to those that compute with it; None: as it is, as to all others."""
        self.exact = True
        """Whether what is whole is the weights, and not what a packing makes of them."""
        self.users = 0
        """Modules that need the whole of it at this moment."""
        self.saved = type(param) is not nn.Parameter
        """Whether autograd has ever saved it, so that a backward may need it. Of a class of the script's own always: a
        hook on its gradient may read it, and would not fetch it (`release`)."""
        self.secondary: Tensor | None = None
        """This rank's shard in the hierarchical partition, as long as it is of the present weights."""
        self.live_params: LiveParams[ShardedParam] = LiveParams()
        """Where this is counted while it is whole; shared by those of a model that are fetched."""
        self.fetcher: ParamFetcher | None = None
        """What brings it when a module needs it."""
        self._version = param._version
        """Of the parameter, when the master was last seen to agree with it."""
        self.storage = Storage(param)
        whole = param.data.reshape(-1)
        self.shard = whole[self.start : self.stop]
        if not persistent:
            self.shard = self.shard.clone()
        self.store: ShardStore | None = None
        self.trainable = param.requires_grad
        """Whether it was to be trained when it came here, and so has a master from `make_master` on."""
        self.master: nn.Parameter
        self.master_is_shard = False
        """Whether a step of the optimizer changes the shard."""
        self.reload_master: Callable[[ShardedParam], None] | None = None
        """Takes the master from the shard anew, where the master is not in this process' memory."""

    @property
    def flat(self) -> Tensor:
        """The whole parameter [numel], in its own storage."""
        return self.param.data.view(-1)

    @property
    def master_shape(self) -> torch.Size:
        """The parameter's, if one rank has the whole of it, else one dimension."""
        return self.shape if self.partition.num_shards == 1 else torch.Size((self.stop - self.start,))

    @property
    def master_dtype(self) -> torch.dtype:
        """The parameter's, but fp32 for half precisions."""
        return torch.float32 if self.shard.dtype in (torch.float16, torch.bfloat16) else self.shard.dtype

    def can_share_master(self, device: torch.device) -> bool:
        """Whether a master on `device` can be the shard itself."""
        return self.store is None and self.shard.dtype == self.master_dtype and self.shard.device == device

    def make_master(self, device: torch.device | None = None, *, pin: bool = False) -> nn.Parameter:
        """What the optimizer steps, on `device` (the parameter's own by default); `pin` locks its pages."""
        place = device or self.device
        if self.can_share_master(place):
            self.master = self.param if self.partition.num_shards == 1 and self.persistent else nn.Parameter(self.shard)
            self.master_is_shard = True
        else:
            value = torch.empty(self.master_shape, dtype=self.master_dtype, device=place, pin_memory=pin)
            self.read_shard(value.view(-1))
            self.master = nn.Parameter(value)
        return self.master

    def read_shard(self, into: Tensor) -> None:
        """Copy this rank's shard to `into` [n], of any floating dtype, on any device."""
        if self.store is not None:
            self.store.read(self, into)
        else:
            into.copy_(self.shard, non_blocking=into.is_cuda)

    def write_shard(self, shard: Tensor) -> None:
        """Take `shard` [n], of any floating dtype and from any device, in the place of this rank's."""
        if self.store is not None:
            self.store.write(self, shard)
        else:
            self.shard.copy_(shard, non_blocking=self.shard.is_cuda)  # the host may read its own at once
        self.secondary = None
        self.written()

    def take_from_whole(self) -> None:
        """The whole parameter was written to: take the shard from it anew, and the master from that."""
        if self.moved:
            self.moved_back("GatheredParameters")
        shard = self.flat[self.start : self.stop]
        if not self.persistent:
            self.write_shard(shard)
        if self.reload_master is not None:
            self.reload_master(self)
        elif self.trainable and not self.master_is_shard:
            self.master.data.view(-1).copy_(shard)
        self.secondary = None

    def take_edits(self) -> None:
        """Before the master is stepped or saved: what the script has written to the parameter in place goes there, as
        `load_state_dict` does between steps. What is as it was published keeps the master's precision.
        """
        if not self.edited:
            return
        self._version = self.param._version
        mine, shard = self.master.data.view(-1), self.shard.to(self.master.device)
        mine.copy_(torch.where(mine.to(shard.dtype) == shard, mine, shard.to(mine.dtype)))

    def published(self) -> None:
        """The master has come to the parameter: they agree."""
        self._version = self.param._version

    @property
    def there(self) -> bool:
        """Whether its weights are whole, as they are."""
        return self.resident and self.exact

    @property
    def moved(self) -> bool:
        """Whether the script has put the values elsewhere than ZeRO has them, or in another order, while they are
        whole."""
        return self.resident and not self.storage.holds(self.param.data)

    def moved_back(self, doing: str) -> None:
        """The script has put the values elsewhere, as `module.to` there and back or a new `.data` does: have them in
        the parameter's own storage again, as if written in place.

        Raises RuntimeError if they have another dtype, device or shape, of a parameter that is trained.
        """
        data = self.param.data
        if (data.dtype, data.device, data.shape) != (self.dtype, self.device, self.shape):
            if not self.trainable:
                return
            raise RuntimeError(
                f"{doing}: {self.name} is {data.dtype} {tuple(data.shape)} on {data.device}, and was {self.dtype} "
                f"{tuple(self.shape)} on {self.device} when the engine was made: a module's .to(), .half() or .cuda(), "
                "or a new .data, has changed that, and the engine would train what is there no more. Say it to "
                'initialize ("bf16" or "fp16" in the configuration), or convert a copy of the model'
            )
        self.take_back(data)

    def take_back(self, data: Tensor) -> None:
        """Have `data`, of the parameter's shape, in the parameter's own storage."""
        whole = self.storage.whole
        in_place = data.data_ptr() == whole.data_ptr()  # and in another order, as `.data.t()` is
        whole.copy_(data.clone() if in_place else data)
        self.param.data = whole
        self.written()

    def written(self) -> None:
        """It has been written to, in a way that torch does not count."""
        self._version = -1  # none that a parameter has

    @property
    def edited(self) -> bool:
        """Whether `take_edits` may find something."""
        return self.persistent and not self.master_is_shard and self.param._version != self._version

    def gather(self) -> None:
        """Have the whole of it now. On all ranks."""
        if not self.there:
            self.gatherer.gather([self], self.numel)

    def fetch(self) -> None:
        """Have the whole of it, if something runs that it can be fetched for."""
        if self.fetcher is not None:
            self.fetcher.fetch_used(self)

    def storage_rows(self) -> Rows:
        """The parameter's own storage, of an even partition, for a gather to write to."""
        self.storage.take()
        return Rows(self.storage.whole.view(-1), [(block.count, block.width) for block in self.partition.blocks])

    def fill(self, shards: Sequence[Tensor] | None, partition: Partition | None = None) -> None:
        """Be whole: of the gathered `shards`, [ranks, width] of each block, divided as `partition` has it, or of what a
        gather has written to `storage_rows` (None)."""
        if not self.persistent:
            self.live_params.arrive(self)
            self.storage.show(self.param)
        if shards is not None:
            # A persistent parameter's own part is already there: the shard is a view of it.
            (partition or self.partition).from_shards(shards, self.flat, self.rank if self.persistent else None)
        self.resident = self.exact = True

    def release(self) -> None:
        """Free the parameter's storage; the shard stays."""
        if self.persistent:
            return
        left = self.storage.empty(self.param)
        if left is not None and self.fetcher is not None:
            self.fetcher.replace_storage(left, self)
        self.resident = False
        self.live_params.leave(self)

    def __repr__(self) -> str:
        return f"ShardedParam({self.name}, {tuple(self.shape)}, {self.start}:{self.stop})"


def find_sharded(param: Tensor) -> ShardedParam | None:
    """What ZeRO has of a parameter of a model; None for one that it has not, or no longer."""
    return cast("ShardedParam | None", fetchable(param))


def register(sharded: ShardedParam) -> None:
    """Have `find_sharded` of its parameter return `sharded`, as long as that is alive."""
    REGISTRY[sharded.param] = weakref.ref(sharded)


def forget(param: nn.Parameter) -> None:
    """`param` is whole, and nobody's."""
    REGISTRY.pop(param, None)
