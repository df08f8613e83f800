"""Which gradients travel in which bucket, and in which order.

That is fixed before a backward begins, and the same on all ranks, so ranks whose graphs differ (a branch not taken, an
unused parameter) still run the same collectives. It is the order in which gradients became ready in the first step, as
rank 0 saw it (Li et al. 2020, arXiv 2006.15704, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.comm import Comm
from ..config import Config
from .bucket import Bucket, divide
from .shard import ShardedParam


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
