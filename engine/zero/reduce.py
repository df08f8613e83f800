"""Gradients on their way from backward to the optimizer: batched into buckets, reduced on a lane.

`process_ready` copies what has come (`ReadyGradients`) to buckets, and launches those that are complete; `collect` puts
what comes back on the masters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import compress

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..comm.consensus import any_rank
from ..config import Config
from ..hooks import BUCKET, Hooks
from .bucket import Bucket, BucketExchange, await_host_copies, divide, read_flags
from .gradients import MicrobatchSums, as_master, has_samples, scales
from .packed import Nodes
from .ready import BackwardPart, BucketLayout, ReadyGradients
from .shard import ShardedParam
from .sparse import SparseReducer
from .storage import no_torch_function


class Reducer:
    """Takes gradients as backward makes them; `collect` puts the reduced ones on the masters."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        sparse: SparseReducer,
        comm: Comm,
        config: Config,
        hooks: Hooks,
        stages: Mapping[nn.Parameter, frozenset[int]] | None = None,
        hosts: Comm | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """`sparse` takes the gradients of few rows, of other parameters. `stages` are those of a pipeline that each
        parameter belongs to, where a rank has several; each has buckets of its own then. `hosts`: the same ranks as
        `comm`, for what is in host memory, where the host would have to wait for `comm`'s device. `nodes`: of
        `BucketExchange`."""
        self._params = list(params)
        self._hooks = hooks
        self._hosts = hosts
        self._sent: set[ShardedParam] = set()
        """Those that this rank has sent a gradient of in this step, if there are `hosts`."""
        self._sparse = sparse
        self._comm = comm
        self._config = config
        self._settings = config.zero_optimization
        self._exchange = BucketExchange(comm, config, nodes)
        self._late: list[ShardedParam] = []
        self.local = comm.size == 1
        """Leave gradients as this rank has them: it is alone, or the optimizer communicates (stage 0 only)."""
        self._counts = has_samples(config)
        self._ever_used: set[ShardedParam] = set()
        self._next = 0
        """The first bucket that has not been sent in this backward."""
        self._prescale, self._postscale = scales(comm.size, config)
        self._last = self._complete = True
        self._part: BackwardPart | None = None
        """What this backward is a part of, if it is, and its gradients are reduced by itself."""
        self._came: dict[int, set[ShardedParam]] = {}
        """Micro-batch -> the parameters that have a gradient of it, where all must have one."""
        self._by_stage = stages is not None and self._settings.stage >= 2
        self._layout = BucketLayout(self._params, config, stages if self._by_stage else None)
        self._expected: Sequence[Bucket] = self._buckets
        """The buckets that this backward may have gradients for."""
        self.open = False
        """Whether a backward of this engine is under way. What comes otherwise, as from the loss of another engine's
        model, stays where autograd has put it."""
        self._ready = ReadyGradients(self._params, self.process_ready)
        self._with_grads = [tensor for p in self._params for tensor in {p.param: 0, p.master: 0}]
        """Parameters and masters; in stage 0 they may be the same."""
        self._accumulated = MicrobatchSums(self._params, config)
        self._left_whole = False
        """Whether a last backward has left its gradients where they were, on a rank that is alone."""
        if comm.size > 1:
            self._ready.watch(self._buckets)

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
        self._ready.close()

    # --- during backward

    def begin(self, *, last: bool, complete: bool = True, part: BackwardPart | None = None) -> None:
        """A backward begins: the `last` of the step; and one whose gradients are then `complete`, so that they can be
        reduced. `part`: it is a part of its micro-batch's."""
        self._last, self._complete, self.open = last, complete, True
        self._ready.begin()
        self._part = part if self._settings.stage >= 2 and not self.local else None
        self._expected = self._layout.of(self._part, last=last)
        if self._accumulated.needed and not self._ready.watched and not (last and complete):
            self._ready.watch(self._buckets)  # a rank that is alone, and a first micro-batch that more are added to
        if self._left_whole:
            self._accumulated.add(self._params)
            self._left_whole = False

    def process_ready(self) -> None:
        """Take the gradients that have come since the last call: they go to their buckets, or stay whole, in their own
        or the accumulation's dtype. Another engine's are left where they are."""
        params = self._ready.take()
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
        with self._hooks.span("module", BUCKET):
            self._bucket(params)

    def _bucket(self, params: Sequence[ShardedParam]) -> None:
        """Copy the gradients of `params` to their buckets, and launch those that are complete."""
        self._layout.saw(params)
        complete: dict[Bucket, list[int]] = {}
        places_of = self._layout.places
        for param in params:
            bucket, place = places_of[param]
            if param in bucket.waiting and (not self._by_stage or bucket in self._expected):
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
            with self._hooks.span("module", BUCKET):
                self._reduce_rest()
        self.open = False
        self._sparse.finish(self._last)  # behind all buckets, of which ranks may have launched others so far

    def _reduce_rest(self) -> None:
        """Launch the buckets that are not complete, too, with zeros for gradients that have not come; await all."""
        for bucket in self._expected[self._next :]:
            if not bucket.waiting:
                continue
            waiting = [self._layout.places[param][1] for param in bucket.params if param in bucket.waiting]
            earlier = {at for at in waiting if self._has(bucket.params[at])}  # from another micro-batch
            bucket.waiting.clear()
            bucket.absent = [at for at in waiting if at not in earlier]
            self._layout.saw(bucket.params[at] for at in sorted(earlier))
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
        reduced = param in self._layout.places and self._layout.places[param][0].holds and not self.local
        return reduced or param in self._accumulated

    def reduced_gradient(self, param: ShardedParam) -> Tensor | None:
        """This rank's shard [n] of a gradient that has been reduced, in its own memory, before `postscale`; None where
        there is none. With one rank, or where the optimizer communicates, it is what this rank has [numel]."""
        if self.local:
            grad = self._accumulated.whole(param)
            return None if grad is None else grad.view(-1)
        if param not in self._layout.places:
            return None
        bucket, place = self._layout.places[param]
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
        flags, late = self._on_devices() if self._hosts is None else self._on_hosts(self._hosts)
        if late:
            self._reduce_late(late)
        for bucket, used in zip(self._buckets, flags, strict=True):
            if not used:
                continue
            bucket.collected = [grad if flag else None for grad, flag in zip(bucket.grads, used, strict=False)]
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
        self._sent.clear()
        for bucket in self._buckets:
            bucket.holds = False
            bucket.collected = []
        self._layout.forget()

    def rebuild_buckets(self) -> None:
        """A step's gradients have all come: from the first on, their order is that of all later buckets. On all ranks,
        before `clear`."""
        if not self.local and self._layout.settle(self._comm):
            self._divided()

    @property
    def order(self) -> list[str] | None:
        """Names of the parameters as their gradients are bucketed; None while that is not settled."""
        return self._layout.order

    def set_order(self, order: Sequence[str]) -> None:
        """Go on with buckets in this `order`, if it is one of the same parameters. Between steps; every rank alike."""
        if self._layout.set_order(order):
            self._divided()

    def leave_unreduced(self, local: bool) -> None:
        """From now on leave gradients as this rank has them, for an optimizer that communicates (stage 0)."""
        self.local = local or self._comm.size == 1

    # --- inside

    @property
    def _buckets(self) -> list[Bucket]:
        return self._layout.buckets

    def _divided(self) -> None:
        """There are other buckets now."""
        self._expected = self._buckets
        self._next = 0
        self._accumulated.clear()
        self._exchange.buffers.clear()  # the next have other sizes
        self._ready.divide(self._buckets)

    def _copy_in(self, bucket: Bucket, places: Iterable[int]) -> None:
        rows = self._exchange.rows(bucket)
        for run in bucket.runs(places):
            bucket.write(rows, run, self._accumulated.take([bucket.params[at] for at in run]), self._prescale)

    def _launch_complete(self, stop: int) -> None:
        """Start every bucket before `stop` that is complete, in order: a complete one waits for those before it."""
        while self._next < stop and not self._expected[self._next].waiting:
            bucket = self._expected[self._next]
            if not self._settings.contiguous_gradients:
                self._copy_in(bucket, bucket.present)
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if not self._counts:
            bucket.absent = list(range(len(bucket.params)))
        if self._hosts is not None:
            self._sent.update(bucket.params[at] for at in bucket.present)
        bucket.flag(self._exchange.rows(bucket), bool(self._late))
        self._exchange.launch(bucket)

    @property
    def _left(self) -> set[ShardedParam]:
        """Those that this rank is left with a part of, which came after their bucket had been sent."""
        return {param for param in self._late if self._has(param)}

    def _on_devices(self) -> tuple[Sequence[Sequence[float]], list[ShardedParam]]:
        """Which gradients there are, bucket by bucket, nothing for one without; and those that any rank is left with a
        part of. On all ranks: the flags that came with the buckets say it."""
        flags = read_flags(self._buckets)
        if not any(flag[-1] for flag in flags if flag):
            return flags, []
        mine = self._left
        left = torch.tensor([param in mine for param in self._params], device=self._params[0].device).int()
        self._comm.all_reduce(left, "gradient").wait()
        return flags, list(compress(self._params, left.tolist()))

    def _on_hosts(self, hosts: Comm) -> tuple[Sequence[Sequence[float]], list[ShardedParam]]:
        """The same without the flags, which a host could not read before its device has come to the end of the
        backward: the hosts exchange what they have sent. Raises LostError if they have not sent each other the same,
        as when one rank's script has caught an error half-way and gone on alone."""
        mine, count = self._left, len(self._params)
        said = [*(param in self._sent for param in self._params), *(param in mine for param in self._params)]
        found = any_rank(said, hosts, self._comm.begun)
        used = dict(zip(self._params, found, strict=False))
        flags = [[used[param] for param in bucket.params] if bucket.holds else [] for bucket in self._buckets]
        return flags, list(compress(self._params, found[count:]))

    def _reduce_late(self, late: Sequence[ShardedParam]) -> None:
        """Add the parts of those that came after their bucket had been sent. On all ranks."""
        mine = self._left
        for bucket in divide(late, self._config):
            bucket.absent = [at for at, param in enumerate(bucket.params) if param not in mine]
            self._copy_in(bucket, bucket.present)
            self._launch(bucket)
            self._exchange.drain(0)
            await_host_copies([*self._buckets, bucket])
            for param, part in zip(bucket.params, bucket.grads, strict=True):
                whole, place = self._layout.places[param]
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
        master.grad = as_master(grad, master)
