"""Gradients on their way from backward to the optimizer: batched into buckets, reduced on a lane.

Hooks on parameters note what has come; `process_ready` copies it to buckets, and launches those that are complete;
`collect` puts what comes back on the masters.

The buckets' composition and order are fixed before a backward begins and the same on all ranks, so ranks whose graphs
differ (a branch not taken, an unused parameter) still run the same collectives. They follow the order in which
gradients became ready in the first step, as rank 0 saw it (Li et al. 2020, arXiv 2006.15704, section 3.2.3).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, islice

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.comm import Comm
from ..config import Config
from .bucket import Bucket, BucketExchange, MicrobatchSums, adds_up_in, await_host_copies, divide, travels_in
from .placeholder import no_torch_function
from .shard import ShardedParam
from .sparse import SparseReducer


@dataclass(frozen=True, slots=True)
class BackwardPart:
    """A part of a micro-batch's backward: what an action of a pipeline's plan computes."""

    stage: int
    """The stage of the model whose parameters may get gradients."""
    microbatch: int
    ends: bool
    """Whether no other part of this micro-batch's backward follows on this rank."""


class Reducer:
    """Takes gradients as backward makes them; `collect` puts the reduced ones on the masters.

    Parameters note in a list that their gradient has come, which runs no Python; those after which something can be
    done with what has come, the last of a run and of a bucket, have the list processed.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        sparse: SparseReducer,
        comm: Comm,
        config: Config,
        stages: Mapping[nn.Parameter, frozenset[int]] | None = None,
    ) -> None:
        """`sparse` takes the gradients of few rows, of other parameters. `stages` are those of a pipeline that each
        parameter belongs to, where a rank has several; each has buckets of its own then."""
        self._params = list(params)
        self._sparse = sparse
        self._comm = comm
        self._config = config
        self._settings = config.zero_optimization
        self._exchange = BucketExchange(comm, config)
        self._late: list[ShardedParam] = []
        self.local = comm.size == 1
        """Leave gradients as this rank has them: it is alone, or the optimizer communicates (stage 0 only)."""
        self._ever_used: set[ShardedParam] = set()
        self._next = 0
        """The first bucket that has not been sent in this backward."""
        self._order: list[ShardedParam] | None = []
        """In which gradients become ready, until it is settled."""
        self._prescale, self._postscale = self._scales()
        self._last = self._complete = True
        self._part: BackwardPart | None = None
        """What this backward is a part of, if it is, and its gradients are reduced by itself."""
        self._came: dict[int, set[ShardedParam]] = {}
        """Micro-batch -> the parameters that have a gradient of it, where all must have one."""
        self._stages = stages if self._settings.stage >= 2 else None
        self._expected: Sequence[Bucket] = ()
        """The buckets that this backward may have gradients for."""
        self.open = False
        """Whether a backward of this engine is under way. What comes otherwise, as from the loss of another engine's
        model, stays where autograd has put it."""
        self._ready: list[Tensor] = []
        """Parameters whose gradients have come in this backward and have not been processed."""
        self._by_id = {id(param.param): param for param in self._params}
        self._with_grads = [tensor for p in self._params for tensor in {p.param: 0, p.master: 0}]
        """Parameters and masters; in stage 0 they may be the same."""
        self._buckets: list[Bucket] = []
        self._places: dict[ShardedParam, tuple[Bucket, int]] = {}
        self._accumulated = MicrobatchSums(self._params, config)
        self._ready_hooks: list[RemovableHandle] = []
        self._run_hooks: dict[ShardedParam, RemovableHandle] = {}
        self._left_whole = False
        """Whether a last backward has left its gradients where they were, on a rank that is alone."""
        self._divide(list(reversed(self._params)))
        if comm.size > 1:
            self._watch()

    @property
    def postscale(self) -> float:
        """What the collected gradients remain to be multiplied by, for the mean over the ranks."""
        return 1.0 if self.local else self._postscale

    @property
    def launched(self) -> int:
        """How many buckets the backward under way has sent."""
        return self._next if self.open else 0

    def close(self) -> None:
        """Take every hook out of the model."""
        for handle in (*self._ready_hooks, *self._run_hooks.values()):
            handle.remove()

    # --- during backward

    def begin(self, *, last: bool, complete: bool = True, part: BackwardPart | None = None) -> None:
        """A backward begins: the `last` of the step; and one whose gradients are then `complete`, so that they can be
        reduced. `part`: it is a part of its micro-batch's."""
        self._last, self._complete, self.open = last, complete, True
        for param, handle in self._run_hooks.items():
            hooks = param.param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:  # the script's own come before the gradient is taken
                hooks[handle.id] = hooks.pop(handle.id)
        self._part = part if self._settings.stage >= 2 and not self.local else None
        self._expected = self._buckets_of(self._part)
        self._ready.clear()
        if self._accumulated.needed and not self._ready_hooks and not (last and complete):
            self._watch()  # a rank that is alone, and a first micro-batch that more are added to
        if self._left_whole:
            self._accumulated.add(self._params)
            self._left_whole = False

    def _buckets_of(self, part: BackwardPart | None) -> Sequence[Bucket]:
        """Those of the parameters that `part` may make gradients for, by the plan: the same on all ranks."""
        stages = self._stages
        if part is None or stages is None:
            return self._buckets
        found = [bucket for bucket in self._buckets if part.stage in stages[bucket.params[0].param]]
        # The last of a step sends one bucket at least, which shows whether anything was late.
        return found or (self._buckets[-1:] if self._last else [])

    def process_ready(self) -> None:
        """Take the gradients that have come since the last call: they go to their buckets, or stay whole, in their own
        or the accumulation's dtype. Another engine's are left where they are."""
        # torch calls hooks also where a function's backward has returned None.
        params = [self._by_id[id(param)] for param in self._ready if param.grad is not None]
        self._ready.clear()
        if self.open and self._part is not None and not self._settings.ignore_unused_parameters:
            self._came.setdefault(self._part.microbatch, set()).update(params)
        if not self.open:
            return
        if not self._complete or (self._stays_whole and not self._last):
            if self._accumulated.needed:
                self._accumulated.add(params)
            return
        if self._stays_whole:
            return  # `collect` takes them
        if self._order is not None:
            self._order += params
        complete: dict[Bucket, list[int]] = {}
        for param in params:
            bucket, place = self._places[param]
            if param in bucket.waiting and (self._stages is None or bucket in self._expected):
                bucket.waiting.remove(param)
                complete.setdefault(bucket, []).append(place)
            else:
                # A second backward within the first (reentrant checkpointing) has brought another part of it. That
                # stays where it is, for the next micro-batch, or for `collect`.
                self._late.append(param)
        if self._settings.contiguous_gradients:
            for bucket, places in complete.items():
                self._copy_in(bucket, places)
        self._launch_complete(len(self._expected) - 1)  # the last one shows whether anything was late

    def finish(self) -> None:
        """Backward is over: reduce what has not been yet, if its gradients are complete, and wait for all of it.

        Raises RuntimeError if parameters got no gradient and the configuration says that this is an error.
        """
        self.process_ready()
        if self.local and self._last:
            self._refuse(p for p in self._params if p.param.grad is None and p not in self._accumulated)
        if self._part is not None and self._part.ends and not self._settings.ignore_unused_parameters:
            came = self._came.pop(self._part.microbatch, set())
            self._refuse(param for param in self._params if param not in came)
        self._left_whole = self.local and self._last and self._accumulated.needed
        if not self._stays_whole and self._complete:
            self._reduce_rest()
        self.open = False
        self._sparse.finish(self._last)  # behind all buckets, of which ranks may have launched others so far

    def _reduce_rest(self) -> None:
        """Launch the buckets that are not complete, too, with zeros for gradients that have not come; await all."""
        for bucket in self._expected[self._next :]:
            if not bucket.waiting:
                continue
            waiting = [self._places[param][1] for param in bucket.params if param in bucket.waiting]
            earlier = {at for at in waiting if self._has(bucket.params[at])}  # from another micro-batch
            bucket.waiting.clear()
            bucket.absent = [at for at in waiting if at not in earlier]
            if self._order is not None:
                self._order += [bucket.params[at] for at in sorted(earlier)]
            if self._settings.contiguous_gradients:
                self._copy_in(bucket, earlier)
        if self._part is None:
            self._refuse(bucket.params[at] for bucket in self._expected for at in bucket.absent)
        self._late = [param for param in self._late if self._has(param)]
        self._launch_complete(len(self._expected))
        self._exchange.drain(0)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The next backward begins with the first bucket, and all of them wait."""
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.params)

    @property
    def _stays_whole(self) -> bool:
        """Whether the gradients of this backward are not reduced: not ever, or not yet."""
        return self.local or (self._settings.stage <= 1 and not self._last)

    def _has(self, param: ShardedParam) -> bool:
        return param.param.grad is not None or param in self._accumulated

    def _refuse(self, absent: Iterable[ShardedParam]) -> None:
        if not self._settings.ignore_unused_parameters and (found := list(absent)):
            raise RuntimeError(
                f"{len(found)} parameters got no gradient in this backward, the first: {found[0].name}. Every "
                "parameter must contribute to the loss, or be frozen; or set "
                "zero_optimization.ignore_unused_parameters to true"
            )

    def holds(self, param: ShardedParam) -> bool:
        """Whether a gradient of it, or a part of one, is here and not in the parameter's `grad`."""
        reduced = param in self._places and self._places[param][0].holds and not self.local
        return reduced or param in self._accumulated

    def reduced_gradient(self, param: ShardedParam) -> Tensor | None:
        """This rank's shard [n] of a gradient that has been reduced, in its own memory, before `postscale`; None where
        there is none. With one rank, or where the optimizer communicates, it is what this rank has [numel]."""
        if self.local:
            if param in self._accumulated:
                self._accumulated.add([param])  # to one, which can be written to
            grad = self._accumulated.get(param, param.param.grad)
            if grad is not None and not grad.is_contiguous():
                grad = grad.contiguous()
                if param in self._accumulated:
                    self._accumulated[param] = grad
                else:
                    param.param.grad = grad
            return None if grad is None else grad.view(-1)
        if param not in self._places:
            return None
        bucket, place = self._places[param]
        if not bucket.holds or bucket.reduced is None or not bucket.reduced[bucket.width + place]:
            return None
        await_host_copies([bucket])
        return bucket.grads[place].view(-1)

    def memory(self) -> list[Tensor]:
        """All that gradients are in, but for the parameters' and the masters' own."""
        of_buckets = (tensor for bucket in self._buckets for tensor in bucket.memory)
        return [*self._accumulated.values(), *of_buckets, *self._exchange.buffers.free]

    # --- at the step

    def collect(self) -> None:
        """Put the step's reduced gradients on the masters' `grad`, to be multiplied by `postscale`; None for a
        parameter that no rank used. On all ranks."""
        self._sparse.collect(1.0 / self.postscale)
        if self.local:
            for param in self._params:
                self._collect_local(param)
            return
        await_host_copies(self._buckets)
        flags = _flags(self._buckets)
        if any(flag[-1] for flag in flags if flag):
            self._reduce_late()
        for bucket, used in zip(self._buckets, flags, strict=True):
            if not used:
                continue
            bucket.collected = [grad if flag else None for grad, flag in zip(bucket.grads, used[:-1], strict=True)]
            for param, grad in zip(bucket.params, bucket.collected, strict=True):
                master = param.master
                if grad is not None:
                    master.grad = grad if grad.dtype == master.dtype else grad.to(master.dtype)
            self._ever_used.update(compress(bucket.params, used))

    def gradients(self, masters: Set[int]) -> list[Tensor]:
        """The gradients of those `masters`, by id, as they are now: of a bucket whose they all are, as one."""
        found = self._sparse.gradients(masters)
        for bucket in self._buckets:
            owners = [param.master for param in bucket.params]
            grads = [owner.grad for owner in owners]
            as_collected = len(bucket.collected) == len(grads) and all(map(operator.is_, grads, bucket.collected))
            if as_collected and bucket.reduced is not None and masters >= set(map(id, owners)):
                found.append(bucket.reduced[: bucket.width])
            else:
                found += [
                    grad for owner, grad in zip(owners, grads, strict=True) if grad is not None and id(owner) in masters
                ]
        return found

    def clear(self) -> None:
        """Forget the gradients there are, those of a backward that an error has ended too: then on all ranks."""
        if self.open:  # a backward has not come to its end: be as before it began
            self._exchange.drain(0)
            for bucket in self._buckets:
                self._exchange.abandon(bucket)
                bucket.absent.clear()
            self._begin_anew()
            self.open = False
        with no_torch_function():
            for tensor in self._with_grads:
                tensor.grad = None
        self._accumulated.clear()
        self._left_whole = False
        self._sparse.clear()
        self._late.clear()
        self._came.clear()
        for bucket in self._buckets:
            bucket.holds = False
            bucket.collected = []
        if self._order is not None:
            self._order = []

    def rebuild_buckets(self) -> None:
        """A step's gradients have all come: the order in which they did is that of all later buckets, as rank 0 saw it.

        Once; what was not used comes last. On all ranks, before `clear`.
        """
        if self._order is None or self.local or not self._params:
            return
        seen = dict.fromkeys(self._order)
        order = [*seen, *(p for bucket in self._buckets for p in bucket.params if p not in seen)]
        places = {param: place for place, param in enumerate(self._params)}
        agreed = torch.tensor([places[p] for p in order], dtype=torch.int64, device=self._params[0].device)
        self._comm.broadcast(agreed, 0, "other").wait()
        self._order = None
        self._divide(self._params[place] for place in agreed.tolist())

    @property
    def order(self) -> list[str] | None:
        """Names of the parameters as their gradients are bucketed; None while that is not settled.

        From three ranks on, the rounding of a sum may depend on where in a bucket an element lies.
        """
        if self._order is not None:
            return None
        return [param.name for bucket in self._buckets for param in bucket.params]

    def set_order(self, order: Sequence[str]) -> None:
        """Go on with buckets in this `order`, if it is one of the same parameters. Between steps; every rank alike."""
        params = {param.name: param for param in self._params}
        if set(order) == set(params):
            self._order = None
            self._divide(params[name] for name in order)

    def leave_unreduced(self, local: bool) -> None:
        """From now on leave gradients as this rank has them, for an optimizer that communicates (stage 0)."""
        self.local = local or self._comm.size == 1

    # --- inside

    def _scales(self) -> tuple[float, float]:
        """What gradients are multiplied by before the sum over ranks, and what remains after it for the mean.

        The first costs nothing, while copying into the bucket; the second is left to the step, with the other scaling.
        Dividing by a power of two commutes with a sum in fp32, so it is done before.
        """
        size, factor = self._comm.size, self._config.gradient_predivide_factor
        wide = all(travels_in(param, self._config).itemsize >= 4 for param in self._params)
        exact = size & (size - 1) == 0 and wide and factor == 1.0
        return (1.0 / size, 1.0) if self._config.prescale_gradients or exact else (1.0 / factor, factor / size)

    def _divide(self, order: Iterable[ShardedParam]) -> None:
        self._buckets = divide(order, self._config, self._stages)
        self._expected = self._buckets
        self._places = {p: (bucket, place) for bucket in self._buckets for place, p in enumerate(bucket.params)}
        self._next = 0
        self._accumulated.clear()
        self._exchange.buffers.clear()  # the next have other sizes
        self._hook_runs()

    def _hook_runs(self) -> None:
        """Have the gradients that have come processed after the last one of each run and bucket."""
        wanted: set[ShardedParam] = set()
        for bucket in self._buckets if self._ready_hooks else ():
            for run in bucket.runs(range(len(bucket.params))):
                wanted.add(bucket.params[run[-1]])
        for param in self._run_hooks.keys() - wanted:
            self._run_hooks.pop(param).remove()
        # torch cannot collect a hook that leads back to its own parameter, so this one must not keep us alive.
        alive, ready = weakref.ref(self), self._ready

        def process(_: Tensor) -> None:
            reducer = alive()
            if reducer is None:
                ready.clear()
            else:
                reducer.process_ready()

        for param in wanted - self._run_hooks.keys():
            self._run_hooks[param] = _hook_gradient(param, process)

    def _watch(self) -> None:
        """Have gradients noted as they come, and those that have come processed."""
        self._ready_hooks = [_hook_gradient(param, self._ready.append) for param in self._params]
        self._hook_runs()

    def _take(self, params: Sequence[ShardedParam]) -> list[Tensor]:
        """Their gradients, sums of all micro-batches where they are summed here; the parameters' are freed."""
        if self._accumulated:
            self._accumulated.add(param for param in params if param in self._accumulated)
        grads = [self._accumulated.pop(param, param.param.grad) for param in params]
        for param in params:
            param.param.grad = None
        found = [grad for grad in grads if grad is not None]
        if any(grad.dtype != found[0].dtype for grad in found):  # not all have come in earlier micro-batches
            found = [grad.to(adds_up_in(param, self._config)) for param, grad in zip(params, found, strict=True)]
        return found

    def _copy_in(self, bucket: Bucket, places: Iterable[int]) -> None:
        rows = self._exchange.rows(bucket)
        for run in bucket.runs(places):
            bucket.write(rows, run, self._take([bucket.params[at] for at in run]), self._prescale)

    def _launch_complete(self, stop: int) -> None:
        """Start every bucket before `stop` that is complete, in order: a complete one waits for those before it."""
        while self._next < stop and not self._expected[self._next].waiting:
            bucket = self._expected[self._next]
            if not self._settings.contiguous_gradients:
                self._copy_in(bucket, bucket.present)
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.flag(self._exchange.rows(bucket), bool(self._late))
        self._exchange.launch(bucket)

    def _reduce_late(self) -> None:
        """Add the parts that came after their bucket had been sent. On all ranks, if any has some."""
        mine = {param for param in self._late if self._has(param)}
        flags = torch.tensor([param in mine for param in self._params], device=self._params[0].device).int()
        self._comm.all_reduce(flags, "gradient").wait()
        late = list(compress(self._params, flags.tolist()))
        for bucket in divide(late, self._config):
            bucket.absent = [at for at, param in enumerate(bucket.params) if param not in mine]
            self._copy_in(bucket, bucket.present)
            self._launch(bucket)
            self._exchange.drain(0)
            await_host_copies([*self._buckets, bucket])
            for param, part in zip(bucket.params, bucket.grads, strict=True):
                whole, place = self._places[param]
                whole.grads[place].add_(part)

    def _collect_local(self, param: ShardedParam) -> None:
        master, grad = param.master, param.param.grad
        kept = self._accumulated.pop(param, None)
        if kept is not None:
            grad = kept if grad is None else kept.add_(grad)
        if grad is None:
            # Ranks that compress momenta together must all bring one, if any has ever had a gradient.
            if self._comm.size > 1 and param in self._ever_used:
                master.grad = torch.zeros_like(master)
            return
        param.param.grad = None
        grad = grad.to(master.device).to(master.dtype).reshape(master.shape)
        if grad.stride() != master.stride():  # of another memory format, which a fused optimizer takes for the master's
            grad = torch.empty_like(master).copy_(grad)
        master.grad = grad


def _flags(buckets: Sequence[Bucket]) -> list[list[float]]:
    """Those of each bucket, none where it holds nothing. Each reading waits for the device, so of those on one device
    there is one."""
    found: list[list[float]] = [[] for _ in buckets]
    places: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for at, bucket in enumerate(buckets):
        if bucket.reduced is not None and bucket.holds:
            places.setdefault(bucket.reduced.device, []).append((at, bucket.reduced[bucket.width :]))
    for here in places.values():
        rows = [row for _, row in here]
        read = iter(torch.cat([row.float() for row in rows]).tolist() if len(rows) > 1 else rows[0].tolist())
        for at, row in here:
            found[at] = list(islice(read, len(row)))
    return found


def _hook_gradient(param: ShardedParam, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Have `call` called when a gradient of it has come, also if the script has frozen it for now."""
    tensor = param.param
    trains = tensor.requires_grad
    try:
        tensor.requires_grad_(True)  # else torch refuses the hook
        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(call)
        return handle
    finally:
        tensor.requires_grad_(trains)
