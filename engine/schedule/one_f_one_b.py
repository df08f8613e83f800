"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503): one forward, one backward.

As fast as GPipe, but a rank starts backwards as soon as it can, so it holds no more activations than there are ranks
from it to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .plan import Action, Plan


def one_f_one_b(ranks: int, microbatches: int) -> Plan:
    """The plan of 1F1B. Rank r does ranks - r - 1 forwards ahead, by which time the first backward comes back."""

    def of(rank: int) -> tuple[Action, ...]:
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        backwards = [Action("B", rank, m) for m in range(microbatches)]
        return alternating(forwards, backwards, ahead=ranks - rank - 1)

    return Plan("1f1b", ranks, microbatches, 1, tuple(of(rank) for rank in range(ranks)))


def alternating(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, or all if there are fewer; then a forward and a backward in turn; then the other backwards."""
    ahead = min(ahead, len(forwards))
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])
