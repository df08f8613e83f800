"""The most that a rank of FSDP2 takes in a step, by the moments at which it can: from the sizes of its units.

In backward, from the last unit to the first, there are beside what lasts from step to step

    the parameters of the unit that computes, or of all that are not through where they are not freed after forward
    what the next unit is gathered into, unless it is there
    what the unit before was reduced from, until this unit's gradients are reduced
    activations, which go; reduced gradients, which come
    and what computing takes beyond that: gradients of activations, and what is computed again

While a unit is gathered there is besides what goes into that (in mixed precision a copy of the rank's part), and on
gloo a second buffer of its size, which `ProcessGroupGloo` gathers into. When a unit is through, its parameters go, and
its gradients are copied into the buffer that they are reduced from. In forward, what a unit was gathered into stays
until the next one is there; what forward takes beyond activations is not counted.
The unit that is made last is the model itself (`fully_shard(model)`), and whole all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Blocks = tuple[tuple[float, float], ...]
"""The modules of a unit: bytes as they compute, and of those what is trained."""


@dataclass(frozen=True)
class ShardedUnit:
    blocks: Blocks

    @property
    def size(self) -> float:
        return sum(size for size, _ in self.blocks)

    @property
    def trained(self) -> float:
        return sum(trained for _, trained in self.blocks)


@dataclass(frozen=True)
class ShardedUnits:
    """root: the model's own; inner: the others, as they were made, which is the order of forward.

    cast:  what goes into a gather beside the parameters themselves, times what it gives
    times: what a gather takes while it is under way, times what it gives
    """

    root: ShardedUnit | None
    inner: tuple[ShardedUnit, ...]
    cast: float
    times: int

    def merged(self, count: float) -> ShardedUnits | None:
        """With so many neighbours in one. None: they would have to be divided, of which nothing is known."""
        if count < 1 or count != int(count):
            return None
        step = int(count)
        together = [self.inner[at : at + step] for at in range(0, len(self.inner), step)]
        merged = tuple(ShardedUnit(tuple(block for unit in units for block in unit.blocks)) for units in together)
        return ShardedUnits(self.root, merged, self.cast, self.times)


def units_of(fact: Mapping[str, Any], modules: int, share: float, on_host: bool) -> ShardedUnits | None:
    """From a run's fact, which lists the units where they are few; else they are taken to be equal. modules: in each of
    them; share: a rank's part."""
    listed = [(float(size), float(trained)) for size, trained in fact.get("of_units") or ()]
    if not listed:
        count, every = fact.get("units"), float(fact.get("gathered") or fact.get("bytes") or 0)
        if not count or not every:
            return None
        # The model's own unit may be small: as many as the largest goes into all.
        count = max(round(every / float(fact["largest"])), 1) if fact.get("largest") else int(count)
        listed = [(every / count, every / count)] * count + [(0.0, 0.0)]
    units = [ShardedUnit(((size / modules, trained / modules),) * modules) for size, trained in listed]
    mixed = fact.get("param_dtype") is not None and fact.get("gathered") != fact.get("bytes")
    # The unit that is made last is the model's own, unless the model has no parameters beside those of the others.
    root, inner = (units[-1], units[:-1]) if len(units) > 1 and fact.get("root", True) else (None, units)
    return ShardedUnits(root, tuple(inner), share if mixed else 0.0, 2 if on_host else 1)


@dataclass(frozen=True)
class UnitPeaks:
    """The most of what is known, while a unit computes and at other moments; bytes."""

    computing: float
    others: float

    def peak(self, work: float) -> float:
        """With what computing takes beyond what is known."""
        return max(self.computing + work, self.others)


def moments(units: ShardedUnits, reshard: bool | int, ranks: int, activations: float, gradients: float) -> UnitPeaks:
    """reshard: whether parameters are freed after forward, or on how many ranks they stay; activations: without any
    parameters; gradients: reduced, of all units."""
    computing, others = zip(*_moments(units, reshard, ranks, activations, gradients), strict=True)
    root = units.root.size if units.root is not None else 0.0
    return UnitPeaks(root + max(computing), root + max(others))


def _moments(
    units: ShardedUnits, reshard: bool | int, ranks: int, activations: float, gradients: float
) -> Iterator[tuple[float, float]]:
    """Of each module, from the last one to the first: computing, and the most of the other moments."""
    sizes = [unit.size for unit in units.inner]
    trained = [unit.trained for unit in units.inner]
    saves = _saving(units.inner)
    saved = [sum(of_blocks) for of_blocks in saves]
    kept = _kept(reshard, ranks)
    gather = units.times + units.cast
    for at in range(len(sizes) - 1, -1, -1):
        following = sizes[at - 1] if at and kept < 1 else 0.0
        there = sum(sizes[: at + 1]) * kept + (sizes[at] if kept < 1 else 0.0)
        before = trained[at + 1] if at + 1 < len(trained) else 0.0
        left, reduced = _part(saved[: at + 1], saved), gradients * _part(trained[at + 1 :], trained)
        gathering = there + following * gather + before
        others = gathering + activations * left + reduced
        if at + 1 == len(sizes):  # nothing computes while the first is gathered
            first = sizes[at] * gather + sum(sizes) * kept + activations if kept < 1 else 0.0
            others = max(others, first, _forward(sizes, saved, kept, gather, activations))
        own, made = 0.0, 0.0
        for (_, of_it), of_block in zip(reversed(units.inner[at].blocks), reversed(saves[at]), strict=True):
            still = activations * (left - _part([own], saved))
            yield there + following + before + made + still + reduced, others
            own, made = own + of_block, made + of_it
        after = activations * _part(saved[:at], saved)
        yield 0.0, there - sizes[at] + following + 2 * made + after + reduced


def _saving(units: Sequence[ShardedUnit]) -> list[list[float]]:
    """What parts of all activations modules save for backward, taken to be as their sizes: those from the first on of
    which something is trained, since there is no backward of those before it."""
    found, begun = list[list[float]](), not any(unit.trained for unit in units)
    for unit in units:
        of_blocks = []
        for size, trained in unit.blocks:
            begun = begun or trained > 0
            of_blocks.append(size if begun else 0.0)
        found.append(of_blocks)
    return found


def _forward(sizes: Sequence[float], saved: Sequence[float], kept: float, gather: float, activations: float) -> float:
    """At the end of forward: while the last unit computes, and while it is gathered."""
    last, rest = sizes[-1], sum(sizes[:-1]) * kept
    before = sizes[-2] if len(sizes) > 1 else 0.0
    while_gathered = rest + before + last * gather + activations * _part(saved[:-1], saved)
    return max(rest + 2 * last + activations, while_gathered)


def _kept(reshard: bool | int, ranks: int) -> float:
    """What part of a unit stays after its forward, beside the rank's own part of it."""
    if reshard is False:
        return 1.0
    return 0.0 if reshard is True or reshard >= ranks else 1 / reshard


def _part(some: Sequence[float], every: Sequence[float]) -> float:
    return sum(some) / sum(every) if sum(every) else 0.0


def whole_after_forward(units: ShardedUnits, reshard: bool | int, ranks: int) -> float:
    """Parameters that are there when backward begins, and count as activations where those were measured."""
    every = sum(unit.size for unit in units.inner) + (units.root.size if units.root is not None else 0.0)
    return every * _kept(reshard, ranks)
