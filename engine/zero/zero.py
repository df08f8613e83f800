"""ZeRO 0 to 3 over one model (Rajbhandari et al. 2020, arXiv 1910.02054).

Stage 0 replicates everything, 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too. One design for
all: every trainable parameter has a master that the optimizer steps, the whole of it in stage 0, otherwise this rank's
shard; the stages differ in when gradients are reduced and in how long parameters stay whole.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.comm import Comm
from ..comm.deadlock import DeadlockWatch
from ..config import Config
from ..hooks import Hooks, MemoryPart, holds_memory
from ..tree import batches
from .fetch import Fetcher
from .gather import Agreement, Gatherer
from .init import EarlyParam
from .packed import Int8Shards, Nodes
from .ready import BackwardPart
from .reduce import Reducer
from .shard import Packing, ParamGatherer, ShardedParam, find_sharded, forget, register
from .shares import Partition, Shares, equal
from .sparse import SparseReducer, sparse_params
from .validate import UNCOMPILED, compiled_module

GRADIENTS: Final = ("gradients", "gradients.near", "gradients.far")
"""What brings gradients, as a deadlock's report names it."""


@dataclass(frozen=True, slots=True)
class Comms:
    """Who communicates what: each with a group and a lane of its own, so they run side by side."""

    gradients: Comm
    parameters: Comm
    near: Comm | None = None
    """Ranks that share a second partition of the parameters (hierarchical partition)."""
    nodes: Nodes | None = None
    """Of gradients that are quantized, where there are several machines."""
    hosts: Comm | None = None
    """The ranks of `gradients` for what is in host memory, where that communicates on a device. It is another's to
    close."""

    def all(self) -> list[Comm]:
        """Those that there are."""
        nodes = () if self.nodes is None else (self.nodes.near, self.nodes.far)
        return [comm for comm in (self.gradients, self.parameters, self.near, *nodes) if comm is not None]


class Zero:
    """The parameters of `model`, sharded for the ranks of `comms.gradients`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        comms: Comms,
        hooks: Hooks,
        *,
        make_master: Callable[[ShardedParam], nn.Parameter] = ShardedParam.make_master,
        offload_shard: Callable[[ShardedParam], None] | None = None,
        names: Mapping[nn.Parameter, str] | None = None,
        stages: Mapping[nn.Parameter, frozenset[int]] | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """`make_master` decides where masters are. `offload_shard` moves shards of stage 3 away, of a single rank too.
        `names` are those of the parameters in the whole model, where this is a part of it; `stages` the stages of a
        pipeline that each belongs to, where there are several here. `agreement`: how weights travel that it `takes`, if
        they are sharded."""
        self.settings = settings = config.zero_optimization
        self.comms = comms.all()
        self._comm = comms.gradients
        self.gatherer = Gatherer(comms.parameters, settings, comms.near)
        size = self._comm.size
        shares, rank = equal(1), 0
        if settings.stage:
            shares, rank = Shares(config.memory_of_ranks(size)), self._comm.rank
        self.params: list[ShardedParam] = []
        self._early: dict[ShardedParam, ParamGatherer] = {}
        """What `zero.Init` had sharded, and what gathers it there; empty once there is an engine."""
        self._closed = False
        self.lost = False
        """Whether the connections between the ranks are closed, and what is sharded can be gathered no more."""
        sharded_size = 0
        rewritten = _rewritten_in_forward(model)
        compiled = compiled_module(model) if settings.stage == 3 else None
        for index, (name, param) in enumerate(model.named_parameters()):
            early = find_sharded(param)  # by zero.Init
            if early is not None:
                early.gather()
            name = name if names is None else names[param]
            param.data = param.data.contiguous()
            may = settings.stage == 3 and (size > 1 or offload_shard is not None)
            sharded = may and param.numel() > settings.stage3_param_persistence_threshold
            sharded_size += 0 if sharded else param.numel()
            if may and sharded_size > settings.stage3_model_persistence_threshold:
                sharded = True
            sharded = sharded and param not in rewritten
            if sharded and compiled is not None:
                raise ValueError(f"initialize: {compiled} is compiled, and {UNCOMPILED}")
            if sharded and early is None:
                param.data = param.data.clone()  # storage of its own, which can be emptied
            partition = Partition(param.numel(), shares, index if settings.round_robin_gradients else 0)
            self.params.append(
                ShardedParam(name, param, partition, rank, self.gatherer, persistent=not sharded, index=index)
            )
            if isinstance(early, EarlyParam):
                self._early[self.params[-1]] = early.gatherer
            if sharded:
                self.params[-1].release()  # one at a time: the model need not fit whole
            if sharded and offload_shard is not None:
                offload_shard(self.params[-1])
            if sharded and size > 1:
                self.params[-1].packing = self._packing(self.params[-1], agreement)
        self.gatherer.agreement = agreement
        self.by_param = {p.param: p for p in self.params}
        self.trainable = [p for p in self.params if p.trainable]
        rows = sparse_params(model, dense_too=config.sparse_gradients) if settings.stage <= 1 else set()
        sparse = SparseReducer([p for p in self.trainable if p.param in rows], comms.gradients, config)
        self.masters = {param.param: make_master(param) for param in self.trainable}
        dense = [p for p in self.trainable if p.param not in rows]
        self.reducer = Reducer(dense, sparse, comms.gradients, config, hooks, stages, comms.hosts, comms.nodes)
        # Ranks of a pipeline have a consensus of their own.
        self.deadlocks = _watch(comms, hooks) if size > 1 and (settings.stage == 3 or names is None) else None
        self.fetcher: Fetcher | None = None
        self._handles: list[RemovableHandle] = []
        for sharded_param in self.params:
            register(sharded_param)
        for sharded_param in self.trainable:
            if not sharded_param.persistent:
                hook = self._release_hook(sharded_param.index)
                self._handles.append(sharded_param.param.register_post_accumulate_grad_hook(hook))
        if any(not p.persistent for p in self.params):
            self.fetcher = Fetcher(model, self.by_param, self.gatherer, settings, hooks)
            if self.deadlocks is not None:
                self.deadlocks.replaced = self.fetcher.functions.replaced
        holds_memory(self)

    def _packing(self, param: ShardedParam, agreement: Agreement | None) -> Packing | None:
        """How it is gathered to be used."""
        if agreement is not None and agreement.takes(param):
            return agreement
        quantized = self.settings.zero_quantized_weights and param.dtype.is_floating_point
        return Int8Shards() if quantized else None

    def memory(self) -> Iterator[tuple[MemoryPart, torch.Tensor]]:
        """What sharded parameters, their masters and the buffers take, for `hooks.memory_held`."""
        for param in self.params:
            yield "parameters", param.shard
            if param.secondary is not None:
                yield "parameters", param.secondary
            if param.trainable and not param.master_is_shard:
                yield "optimizer_states", param.master
        for tensor in self.gatherer.buffers.free:
            yield "parameters", tensor
        for tensor in self.reducer.memory():
            yield "gradients", tensor

    def sizes(self) -> Iterator[tuple[int, bool]]:
        """Elements of each parameter, and whether it is trained, for `hooks.sizes`."""
        return ((param.numel, param.trainable) for param in self.params)

    def _release_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # torch cannot collect a hook that leads back to its own parameter, so this one must not keep us alive.
        alive = weakref.ref(self)

        def release(_: torch.Tensor) -> None:
            zero = alive()
            if zero is not None and zero.fetcher is not None:
                zero.fetcher.gradient_taken(zero.params[index])

        return release

    def begin_backward(self, *, last: bool, complete: bool = True, part: BackwardPart | None = None) -> None:
        """Before each backward. `last`: it is the step's last. `complete`: no gradients of the micro-batches under way
        are to come later, so that they can be reduced. `part`: it is a part of its micro-batch's."""
        self.reducer.begin(last=last, complete=complete, part=part)

    def finish_backward(self) -> None:
        """After each backward: gradients reduced as far as the stage has it, if they are complete; parameters
        released."""
        self.reducer.finish()
        if self.fetcher is not None:
            self.fetcher.finish_backward()

    def forget_gradients(self) -> None:
        """Forget the gradients there are. Those of a backward that failed half-way, of which something was sent
        already, on all ranks: they wait for each other, and fail together if one does not come."""
        if self.deadlocks is not None and self.reducer.launched:
            self.deadlocks.recover(self.reducer.launched)
        self.reducer.clear()

    def begin_update(self) -> None:
        """Before a step or a load changes the weights."""
        if self.fetcher is not None:
            self.fetcher.weights_change()

    def check_order(self, hosts: Comm) -> None:
        """Before the step: raise RuntimeError on all ranks of the job if ranks were seen to run different modules."""
        if self.gatherer.order_check is not None:
            self.gatherer.order_check.check(hosts)

    def settle(self) -> None:
        """The engine is made: `close` leaves what `zero.Init` had sharded whole, too."""
        self._early.clear()

    def close(self, *, whole: bool = True) -> None:
        """Leave the model whole and without hooks; end the lanes, and destroy their groups. On all ranks; again is of
        no effect. Not `whole`: this rank may be alone in it, so what is sharded is lost.

        What `zero.Init` had sharded is so again if there never was an engine: it need not fit whole. Where ranks
        have lost each other a warning says which parameters are lost with them."""
        if self._closed:
            return
        self._closed = True
        again, self._early = self._early, {}
        try:
            absent = [p for p in self.params if not p.there and p not in again]
            if self.lost:
                whole = False
                _warn_of_lost(absent)
            if whole:
                self.gatherer.gather(absent, self.settings.allgather_bucket_size)
        finally:
            for handle in self._handles:
                handle.remove()
            self.reducer.close()
            if self.fetcher is not None:
                self.fetcher.remove()
            for param in self.params:
                if whole and param in again:
                    param.gather()
                    EarlyParam(param.name, param.param, again[param]).release()
                else:
                    forget(param.param)
            for comm in self.comms:
                comm.close()

    @property
    def size(self) -> int:
        """Ranks that the parameters are sharded for."""
        return self._comm.size


def _rewritten_in_forward(model: nn.Module) -> set[torch.Tensor]:
    """Weights that a forward writes to, which would be lost where the weight is freed behind it."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {table.weight for table in tables if table.max_norm is not None}


def _warn_of_lost(params: Sequence[ShardedParam]) -> None:
    if params:
        warnings.warn(
            f"{len(params)} parameters that ZeRO stage 3 has sharded, the first: {params[0].name}, are lost, since the "
            "ranks have lost each other: build the model anew, and load a checkpoint",
            stacklevel=7,  # the line that has called `destroy`
        )


def _watch(comms: Comms, hooks: Hooks) -> DeadlockWatch | None:
    """Where the lanes are threads: a GPU's streams do not show the host what they wait for."""
    if not comms.parameters.separates_contents:
        return None
    named = {"parameters": comms.parameters, GRADIENTS[0]: comms.gradients}
    if comms.near is not None:
        named["near"] = comms.near
    if comms.nodes is not None:
        named |= {GRADIENTS[1]: comms.nodes.near, GRADIENTS[2]: comms.nodes.far}
    return DeadlockWatch(named, hooks)


def tiles_of(params: Sequence[ShardedParam], size: int) -> list[list[ShardedParam]]:
    """Divide `params` into tiles of at most `size` elements of masters, one parameter at least; the same on every
    rank."""
    return batches(params, size, lambda param: param.partition.largest) or [[]]
