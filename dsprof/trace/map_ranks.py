"""A function of one rank, called for all of them: in this process, or by an executor that is passed in.

    with ProcessPoolExecutor(8) as pool:
        measured = study(trace, pool)

Whatever runs it, the result is the same. A rank whose call fails costs that rank alone: it is counted, with what went
wrong. Where the executor itself fails (a process of it dies, a cluster gives a task up, it takes no more of them, a
result does not come through), its ranks are done here.

Ranks go to the executor in parts, of ranks that follow one another, and what is found of a part comes back packed
(`packing`). What can be joined to one table is joined in the task (`map_parts`): a job of ten thousand ranks comes back
as some hundred tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Generic, TypeVar

from dsprof.run import RunError

from .files import brief
from .packing import ByRank, pack, unpack

Result = TypeVar("Result")
Part = TypeVar("Part")

FEWEST_PARTS: Final = 32
"""Ranks are done in so many parts, and not each by itself, as what the function holds travels with each to the
executor, and what is found of a part is joined."""
MOST_OF_A_PART: Final = 128
"""Ranks: of more there are more parts, so that no worker holds what was found of too many at once, and one that is lost
costs little."""


RankFunction = Callable[[int], Result]
"""What is called for each rank. To run in another process it, and what it returns, can be pickled."""
PartFunction = Callable[[Sequence[int]], Part]
"""What is called for some ranks that follow one another, one or a hundred: what it finds does not depend on how many.
What is wrong with one of them it says in what it returns."""
Observer = Callable[[str, int, int], None]
"""Told of progress: what is done to ranks, for how many of them it is done, and how many there are."""


@dataclass(frozen=True)
class OfRanks(Generic[Result]):
    """found: rank -> what the function returned, in order of rank. failed: rank -> what went wrong."""

    found: dict[int, Result] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def map_ranks(
    function: RankFunction[Result],
    ranks: Sequence[int],
    executor: Executor | None = None,
    observer: Observer | None = None,
    what: str = "",
) -> OfRanks[Result]:
    """`function` of each of `ranks`. `what` is done, for the observer."""
    every = OfRanks[Result]()
    for part in map_parts(_Each(function), ranks, executor, observer, what):
        every.found.update((rank, result) for rank, result in part.found.items() if result is not None)
        every.failed.update(part.failed)
    return every


def map_parts(
    function: PartFunction[Part],
    ranks: Sequence[int],
    executor: Executor | None = None,
    observer: Observer | None = None,
    what: str = "",
) -> list[Part]:
    """`function` of all of `ranks`, part by part, in order of rank. `what` is done, for the observer."""
    ordered = sorted(ranks)
    every: dict[int, Part] = {}
    finished = 0

    def done(part: Sequence[int], found: Part) -> None:
        nonlocal finished
        every[part[0]] = found
        finished += len(part)
        if observer is not None:
            observer(what, finished, len(ordered))

    if executor is None:
        for part in _parts(ordered):
            done(part, function(part))
    else:
        futures: dict[Future[bytes], tuple[int, ...]] = {}
        for part in _parts(ordered):
            try:
                futures[executor.submit(_packed, function, part)] = part
            except RuntimeError:  # a broken one, or one that was shut down
                done(part, function(part))
        waiting = as_completed(list(futures))
        for future in waiting:
            part = futures.pop(future)
            try:
                found: Part = unpack(future.result())
            except Exception:  # what is wrong with a rank is in the result: this is the executor's
                found = function(part)
            del future  # and with it what came
            done(part, found)
    return [every[first] for first in sorted(every)]


def _parts(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    count = min(max(FEWEST_PARTS, -(-len(ranks) // MOST_OF_A_PART)), len(ranks))
    edges = [len(ranks) * number // count for number in range(count + 1)] if count else []
    return [tuple(ranks[first:end]) for first, end in pairwise(edges)]


def _packed(function: PartFunction[Part], ranks: Sequence[int]) -> bytes:
    return pack(function(ranks))


@dataclass(frozen=True)
class _Each(Generic[Result]):
    """A function of one rank, of each rank of a part."""

    function: RankFunction[Result]

    def __call__(self, ranks: Sequence[int]) -> OfRanks[Result]:
        return each(self.function, ranks)


def each(function: RankFunction[Result], ranks: Sequence[int]) -> OfRanks[Result]:
    """`function` of each of these ranks, here."""
    found: ByRank[Result] = ByRank()
    failed: dict[int, str] = {}
    for rank in ranks:
        try:
            found[rank] = function(rank)
        except Exception as error:  # whatever is wrong with one rank, the others count
            said = brief(error)
            failed[rank] = said if isinstance(error, RunError) else f"{type(error).__name__}: {said}"
    return OfRanks(found, failed)
