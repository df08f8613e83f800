"""One way through a model, as data: which modules needed parameters, in order, and what is read off that.

Looking something up takes the same time however long the way is, but for a logarithm; so a pass takes linear time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .shard import ShardedParam


@dataclass(eq=False, slots=True)
class ModuleParams:
    """A module whose parameters are fetched for it: its own, and others' that it was seen to use."""

    name: str
    params: list[ShardedParam]
    backward: ModuleParams | None = None
    """Of a module of torch's own, what is fetched for its backward: those that autograd has saved in a forward. The
    weight of an embedding, or a bias, is not needed there. None: all."""

    def choose_for_backward(self) -> None:
        """`params`, or which of them are saved, have changed."""
        if self.backward is not None:
            self.backward.params = [param for param in self.params if param.saved]


class Pass:
    """A recorded way: `owners` in the order in which they needed their parameters, `params` those of each."""

    def __init__(self, owners: Sequence[ModuleParams]) -> None:
        self.owners = tuple(owners)
        self.params = tuple(tuple(owner.params) for owner in owners)
        sizes = (sum(param.numel for param in params) for params in self.params)
        self._elements_before = list(accumulate(sizes, initial=0))
        self._places: dict[ShardedParam, list[int]] = {}
        for place, params in enumerate(self.params):
            for param in params:
                self._places.setdefault(param, []).append(place)

    def next_place(self, param: ShardedParam, start: int) -> int | None:
        """Where `param` is needed for the first time from place `start` on; None if it no longer is."""
        places = self._places.get(param, [])
        at = bisect_left(places, start)
        return places[at] if at < len(places) else None

    def elements(self, start: int, stop: int) -> int:
        """How many elements the places from `start` to before `stop` need."""
        return self._elements_before[stop] - self._elements_before[start]


class CurrentPass:
    """A pass under way: it is recorded, and held against the `record` of an earlier one as long as it goes the same."""

    def __init__(self, record: Pass, with_grad: bool = True) -> None:
        self.with_grad = with_grad
        self._record = record
        self._follows = True
        self._seen: list[ModuleParams] = []
        # Places of the record where something may have to be fetched, a heap.
        self._open = list(range(len(record.owners)))

    def step(self, owner: ModuleParams) -> None:
        """The next who needs parameters is `owner`."""
        if self._follows:
            place = len(self._seen)
            self._follows = place < len(self._record.owners) and self._record.owners[place] is owner
        self._seen.append(owner)

    def needed_within(self, param: ShardedParam, distance: int) -> bool:
        """Whether `param` is needed again after at most `distance` elements of parameters, as far as is known."""
        if not self._follows:
            return False
        place = self._record.next_place(param, len(self._seen))
        return place is not None and self._record.elements(len(self._seen), place) <= distance

    def released(self, param: ShardedParam) -> None:
        """`param` is no longer whole: it is among the `upcoming` again, if it is needed again."""
        if self._follows:
            place = self._record.next_place(param, len(self._seen))
            if place is not None:
                heapq.heappush(self._open, place)

    def upcoming(self) -> Iterator[ShardedParam]:
        """What is needed from here on and may not be whole, in order.

        A place that the caller has gone beyond does not come again, unless something of it is `released`. Nothing may
        be while the caller iterates.
        """
        while self._follows and self._open:
            place = self._open[0]
            if place >= len(self._seen):
                yield from self._record.params[place]
            heapq.heappop(self._open)

    def ahead(self) -> Iterator[ShardedParam]:
        """Everything that is needed from here on, in order."""
        if self._follows:
            for place in range(len(self._seen), len(self._record.params)):
                yield from self._record.params[place]

    def outcome(self) -> Pass:
        """The record to go by from now on."""
        if not self._seen or (self._follows and len(self._seen) == len(self._record.owners)):
            return self._record
        return Pass(self._seen)
