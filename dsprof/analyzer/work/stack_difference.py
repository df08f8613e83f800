"""The samples of the ranks that a finding is about beside those of their peers, as a tree of lines: what a flame graph
of the difference draws."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..study import Study
from .stacks import Path, by_prefix, stacks_of

SURE: Final = 2.0
"""Standard deviations of a number of samples: what differs by less may be chance."""
LEAST_SHARE: Final = 0.002
"""Of all that is shown: a line with less is left out, with what it calls."""


@dataclass(frozen=True)
class Node:
    """A line, and what it calls.

    path:      to it, from the outermost line
    ms:        in it, or below it, a step, mean of the ranks that are looked at; others_ms: median of the others
    start_ms:  where it stands in its row: after those before it that the same line calls
    chance_ms: what differs by less may be chance
    """

    path: Path
    ms: float
    others_ms: float
    start_ms: float
    chance_ms: float

    @property
    def more_ms(self) -> float:
        return self.ms - self.others_ms

    @property
    def differs(self) -> bool:
        return abs(self.more_ms) > self.chance_ms


@dataclass(frozen=True)
class StackDifference:
    """ranks: that are looked at; others: that they are held against, empty where no other one was sampled; samples: how
    many there are of the former; nodes: outermost first, in a row by where they stand."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    samples: int
    nodes: tuple[Node, ...]

    @property
    def whole_ms(self) -> float:
        return sum(node.ms for node in self.nodes if len(node.path) == 1)


def stack_difference(study: Study, ranks: Collection[int]) -> StackDifference | None:
    """What `ranks` do in a step beside what their peers do; None where none of them was sampled."""
    stacks = stacks_of(study)
    mine = [rank for rank in sorted(ranks) if rank in stacks]
    if not mine:
        return None
    place = {rank: at for at, rank in enumerate(study.ranks)}
    alike = [group for group in study.peer_groups if any(group[place[rank]] for rank in mine)]
    others = [rank for rank in stacks if rank not in ranks and any(group[place[rank]] for group in alike)]
    counts = {rank: by_prefix(stacks[rank], stacks[rank].own) for rank in (*mine, *others)}
    unit = float(np.mean([stacks[rank].a_sample_ms for rank in mine]))

    def spent(path: Path, of: list[int]) -> list[float]:
        return [counts[rank].get(path, 0) * stacks[rank].a_sample_ms for rank in of]

    here = {path: float(np.mean(spent(path, mine))) for path in {path for rank in mine for path in counts[rank]}}
    there = {path: float(np.median(spent(path, others))) if others else 0.0 for path in here}
    whole = sum(ms for path, ms in here.items() if len(path) == 1)
    nodes: list[Node] = []
    starts: dict[Path, float] = {(): 0.0}
    ends: dict[Path, float] = {}
    for path in sorted(here, key=lambda path: (len(path), path)):
        if path[:-1] not in starts or here[path] < LEAST_SHARE * whole:
            continue
        start = ends.get(path[:-1], starts[path[:-1]])
        starts[path], ends[path[:-1]] = start, start + here[path]
        chance = SURE * unit * math.sqrt((here[path] + there[path]) / unit / len(mine)) if others else math.inf
        nodes.append(Node(path, here[path], there[path], start, chance))
    samples = sum(int(stacks[rank].own.sum()) for rank in mine)
    return StackDifference(tuple(mine), tuple(others), samples, tuple(nodes)) if nodes else None
