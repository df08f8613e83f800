"""A function of one rank, called for all of them: in this process, or by an executor that is passed in.

    with ProcessPoolExecutor(8) as pool:
        measured = study(trace, pool)

Whatever runs it, the result is the same. A rank whose call fails costs that rank alone: it is counted, with what went
wrong. Where the executor itself fails (a process of it dies, a cluster gives a task up, it takes no more of them, a
result does not come through), its ranks are done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from .files import brief

Result = TypeVar("Result")

FEWEST_PARTS: Final = 32
"""Ranks go to the executor in so many parts, and not each by itself, as what the function holds travels with each."""
MOST_OF_A_PART: Final = 128
"""Ranks: of more there are more parts, so that no worker holds what was found of too many at once, and one that is lost
costs little."""


RankFunction = Callable[[int], Result]
"""What is called for each rank. To run in another process it, and what it returns, can be pickled."""
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
    every: dict[int, tuple[Result | None, str]] = {}

    def done(part: dict[int, tuple[Result | None, str]]) -> None:
        every.update(part)
        if observer is not None:
            observer(what, len(every), len(ranks))

    if executor is None:
        for rank in ranks:
            done(_call(function, (rank,)))
    else:
        count = min(max(FEWEST_PARTS, -(-len(ranks) // MOST_OF_A_PART)), len(ranks))
        parts = [tuple(ranks[first::count]) for first in range(count)]
        futures: dict[Future[dict[int, tuple[Result | None, str]]], tuple[int, ...]] = {}
        for part in parts:
            try:
                futures[executor.submit(_call, function, part)] = part
            except RuntimeError:  # a broken one, or one that was shut down
                done(_call(function, part))
        for future in as_completed(futures):
            try:
                done(future.result())
            except Exception:  # what is wrong with a rank is in the result: this is the executor's
                done(_call(function, futures[future]))
    order = sorted(every)
    return OfRanks(
        {rank: result for rank in order if (result := every[rank][0]) is not None},
        {rank: every[rank][1] for rank in order if every[rank][1]},
    )


def _call(function: RankFunction[Result], ranks: Sequence[int]) -> dict[int, tuple[Result | None, str]]:
    """Rank -> the result, or what went wrong."""
    found: dict[int, tuple[Result | None, str]] = {}
    for rank in ranks:
        try:
            found[rank] = function(rank), ""
        except Exception as error:  # whatever is wrong with one rank, the others count
            found[rank] = None, f"{type(error).__name__}: {brief(error)}"
    return found
