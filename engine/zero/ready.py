"""Gradients as they come in a backward: noted without running Python, and processed where something can be done with
them.

At the end: which gradients travel together, and in which order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.comm import Comm
from ..config import Config
from .bucket import Bucket, divide
from .shard import ShardedParam


class ReadyGradients:
    """The parameters whose gradients have come since they were last taken.

    Parameters note in a list that their gradient has come, which runs no Python; those after which something can be
    done with what has come, the last of a run and of a bucket, have the list processed.
    """

    def __init__(self, params: Sequence[ShardedParam], process: Callable[[], None]) -> None:
        """`process` is a method; its object is not kept alive, and nothing is noted before `watch`."""
        self._params = params
        self._by_id = {id(param.param): param for param in params}
        self._process = weakref.WeakMethod(process)
        self._came: list[Tensor] = []
        self._notes: list[RemovableHandle] = []
        self._processing: dict[ShardedParam, RemovableHandle] = {}

    @property
    def watched(self) -> bool:
        """Whether gradients are noted."""
        return bool(self._notes)

    def watch(self, buckets: Iterable[Bucket]) -> None:
        """From now on note gradients as they come, and process them as `divide` says."""
        self._notes = [_hook_gradient(param, self._came.append) for param in self._params]
        self.divide(buckets)

    def divide(self, buckets: Iterable[Bucket]) -> None:
        """Have the gradients that have come processed after the last one of each run and bucket, if they are
        noted."""
        wanted: set[ShardedParam] = set()
        for bucket in buckets if self._notes else ():
            for run in bucket.runs(range(len(bucket.params))):
                wanted.add(bucket.params[run[-1]])
        for param in self._processing.keys() - wanted:
            self._processing.pop(param).remove()
        # torch cannot collect a hook that leads back to its own parameter, so this one must not keep us alive.
        method, came = self._process, self._came

        def process(_: Tensor) -> None:
            call = method()
            if call is None:
                came.clear()
            else:
                call()

        for param in wanted - self._processing.keys():
            self._processing[param] = _hook_gradient(param, process)

    def begin(self) -> None:
        """A backward begins: nothing has come, and the script's own hooks come before the gradient is taken."""
        for param, handle in self._processing.items():
            hooks = param.param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)
        self._came.clear()

    def take(self) -> list[ShardedParam]:
        """Those that have come since. torch calls hooks also where a function's backward has returned None."""
        params = [self._by_id[id(param)] for param in self._came if param.grad is not None]
        self._came.clear()
        return params

    def close(self) -> None:
        """Take every hook out of the model."""
        for handle in (*self._notes, *self._processing.values()):
            handle.remove()


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


# --- Which gradients travel in which bucket, and in which order

# That is fixed before a backward begins, and the same on all ranks, so ranks whose graphs differ (a branch not taken,
# an unused parameter) still run the same collectives. It is the order in which gradients became ready in the first
# step, as rank 0 saw it (Li et al. 2020, arXiv 2006.15704, section 3.2.3).


@dataclass(frozen=True, slots=True)
class BackwardPart:
    """A part of a micro-batch's backward: what an action of a pipeline's plan computes."""

    stage: int
    """The stage of the model whose parameters may get gradients."""
    microbatch: int
    ends: bool
    """Whether no other part of this micro-batch's backward follows on this rank."""


class BucketLayout:
    """The buckets of some parameters, in the order in which they are sent."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        config: Config,
        stages: Mapping[nn.Parameter, frozenset[int]] | None = None,
    ) -> None:
        """`stages` are those of a pipeline that each parameter belongs to, where they are reduced stage by stage; each
        has buckets of its own then."""
        self._params = params
        self._config = config
        self._stages = stages
        self._seen: list[ShardedParam] | None = []
        """In which order gradients have become ready, until it is settled."""
        self.buckets: list[Bucket] = []
        self.places: dict[ShardedParam, tuple[Bucket, int]] = {}
        """Each parameter's bucket, and its place in there."""
        self._divide(reversed(params))

    def of(self, part: BackwardPart | None, *, last: bool) -> Sequence[Bucket]:
        """Those of the parameters that `part` may make gradients for, by the plan: the same on all ranks."""
        if part is None or self._stages is None:
            return self.buckets
        found = [bucket for bucket in self.buckets if part.stage in self._stages[bucket.params[0].param]]
        # The last of a step sends one bucket at least, which shows whether anything was late.
        return found or (self.buckets[-1:] if last else [])

    def saw(self, params: Iterable[ShardedParam]) -> None:
        """The gradients of these have become ready, in this order."""
        if self._seen is not None:
            self._seen += params

    def forget(self) -> None:
        """What was seen was not all of a step."""
        if self._seen is not None:
            self._seen = []

    def settle(self, comm: Comm) -> bool:
        """A step's gradients have all come: the order in which they did is that of all later buckets, as rank 0 saw it.

        Once; what was not used comes last. On all ranks. False if it is settled already."""
        if self._seen is None or not self._params:
            return False
        seen = dict.fromkeys(self._seen)
        order = [*seen, *(p for bucket in self.buckets for p in bucket.params if p not in seen)]
        places = {param: place for place, param in enumerate(self._params)}
        agreed = torch.tensor([places[p] for p in order], dtype=torch.int64, device=self._params[0].device)
        comm.broadcast(agreed, 0, "other").wait()
        self._seen = None
        self._divide(self._params[place] for place in agreed.tolist())
        return True

    @property
    def order(self) -> list[str] | None:
        """Names of the parameters as their gradients are bucketed; None while that is not settled.

        From three ranks on, the rounding of a sum may depend on where in a bucket an element lies.
        """
        return None if self._seen is not None else [param.name for bucket in self.buckets for param in bucket.params]

    def set_order(self, order: Sequence[str]) -> bool:
        """Go on with buckets in this `order`, if it is one of the same parameters. Every rank alike."""
        params = {param.name: param for param in self._params}
        if set(order) != set(params):
            return False
        self._seen = None
        self._divide(params[name] for name in order)
        return True

    def _divide(self, order: Iterable[ShardedParam]) -> None:
        self.buckets = divide(order, self._config, self._stages)
        self.places = {p: (bucket, place) for bucket in self.buckets for place, p in enumerate(bucket.params)}
