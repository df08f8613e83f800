"""Share the lost time between the faults that cost it, so that the shares sum to what mending all of them saves.

Two faults on different ranks hide each other: mending either alone gains nothing, both together a lot. Each fault's
share is its Shapley value: what it adds to those mended before it, averaged over the orders of mending. Of more than a
few faults orders are sampled, each with its reverse; every order's contributions sum to the whole, so the shares do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np

from ..arrays import Float
from ..graph.replay import replay_all
from ..graph.step_graph import StepGraph
from ..whatif import WhatIf, apply

MOST_EXACT: Final = 5
"""Of more faults, orders are sampled: of five there are 32 sets to replay and 120 orders."""
SAMPLED: Final = 24
"""Orders, and as many reversed ones."""
HIDDEN: Final = 0.5
"""A fault that alone saves less than this part of its share is hidden by another."""


@dataclass(frozen=True)
class Attribution:
    """before: [S] ms, the judged steps as they are; `left`: with all faults mended
    shares:  fault -> [S] ms saved in each step that are its share; they sum to before - left
    alone:   fault -> [S] ms saved if it were the only one mended
    error:   fault -> standard error of the mean share, ms, that sampling orders leaves; 0 where all were tried
    together: of a fault that another one hides -> the other, and [S] ms saved if both were mended
    """

    before: Float
    left: Float
    shares: dict[str, Float]
    alone: dict[str, Float]
    error: dict[str, float]
    together: dict[str, tuple[str, Float]]


def attribute(graph: StepGraph, faults: Mapping[str, WhatIf], sampled: int = SAMPLED) -> Attribution:
    """What mending each of `faults` saves. Raises `evaluation_order.Cyclic`, and
    `whatif.Refused` where some of them do not go together."""
    names = tuple(faults)
    orders = list(_orders(names, sampled))
    exact = len(names) <= MOST_EXACT
    wanted = dict.fromkeys(frozenset(order[:upto]) for order in orders for upto in range(len(order) + 1))
    wanted |= dict.fromkeys(frozenset((name,)) for name in names)
    wanted.setdefault(frozenset())
    chosen = list(wanted)

    def mended(some: frozenset[str]) -> StepGraph:
        return apply(graph, [faults[name] for name in names if name in some])

    duration: dict[frozenset[str], Float] = {}

    def replay_these(some: Iterable[frozenset[str]]) -> None:
        new = [names for names in dict.fromkeys(some) if names not in duration]
        duration.update(zip(new, (of.durations for of in replay_all(map(mended, new))), strict=True))

    replay_these(chosen)
    before = duration[frozenset()]
    shares: dict[str, Float] = {}
    error: dict[str, float] = {}
    for name in names:
        added = np.stack([_added(order, name, duration) for order in orders])
        shares[name] = added.mean(axis=0)
        # An order and its reverse are one draw.
        draws = (added[::2] + added[1::2]).mean(axis=1) / 2 if not exact else np.zeros(1)
        error[name] = float(draws.std(ddof=1) / np.sqrt(len(draws))) if len(draws) > 1 else 0.0
    alone: dict[str, Float] = {name: before - duration[frozenset((name,))] for name in names}
    hidden = [name for name in names if len(names) > 1 and alone[name].mean() < HIDDEN * max(0.0, shares[name].mean())]
    pairs = {name: [frozenset((name, other)) for other in names if other != name] for name in hidden}
    replay_these(pair for of_name in pairs.values() for pair in of_name)
    together: dict[str, tuple[str, Float]] = {}
    for name, of_name in pairs.items():
        best = min(of_name, key=lambda pair: float(duration[pair].mean()))
        (other,) = best - {name}
        together[name] = other, before - duration[best]
    return Attribution(before, duration[frozenset(names)], shares, alone, error, together)


def _orders(names: Sequence[str], sampled: int) -> Iterator[tuple[str, ...]]:
    if len(names) <= MOST_EXACT:
        yield from permutations(names)
        return
    draw = random.Random(0)
    for _ in range(sampled):
        order = tuple(draw.sample(list(names), len(names)))
        yield order
        yield order[::-1]


def _added(order: tuple[str, ...], name: str, duration: Mapping[frozenset[str], Float]) -> Float:
    """What mending `name` saves after those before it in `order`."""
    at = order.index(name)
    return duration[frozenset(order[:at])] - duration[frozenset(order[: at + 1])]
