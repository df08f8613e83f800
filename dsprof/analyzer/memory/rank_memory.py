"""What a rank takes of memory, and what it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text import size


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank at the place of its tensors, `cuda.0` or `host`: the most that it took, and would take.

    capacity: what there is; None: that is not known
    """

    rank: int
    place: str
    now: float
    then: float
    capacity: int | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "rank": self.rank, "place": self.place, "now": round(self.now), "then": round(self.then),
            "capacity": self.capacity,
        }  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether it would not be more than there is, as far as that is known."""
        return self.capacity is None or self.then <= self.capacity


def most(memory: Sequence[RankMemory]) -> RankMemory | None:
    """The rank that would take most; None: of none it is known."""
    return max(memory, key=lambda one: one.then, default=None)


def in_words(one: RankMemory) -> str:
    """`5.2 GiB -> 7.1 GiB (rank 0)`, and that there is less where that is known."""
    less = "" if one.fits or one.capacity is None else f", more than the {size(one.capacity)} there are"
    return f"{size(one.now)} -> {size(one.then)} (rank {one.rank}{less})"
