"""When ranks are late: always, for a while, in turn, or now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ...arrays import Bool, Float, Int
from ...text import count, ms

LEAST_OF_LATE: Final = 0.4
"""A step in which a rank is less late than this share of what is typical where it is late is not one in which it was
struck. Typical is what the steps that carry half of the lateness reach, so that one stall is not the measure."""
CHRONIC: Final = 0.75
"""Who is late in more than this share of the steps always is."""
FEWEST_STRUCK: Final = 4
"""Steps that make a spell: fewer lie close together by chance."""
MOST_OF_RUN: Final = 0.6
"""A spell is at most this share of the steps."""
WITHIN: Final = 0.9
"""Of the steps in which a rank is late, so many at least lie in its spell."""
DENSE: Final = 0.7
"""Of the steps of its spell, it is late in so many at least."""
COVERED: Final = 0.5
"""Ranks that are late in turn are so in more than this share of the steps, one or another of them."""
LONG_SPELLS: Final = ((8, 300.0), (6, 1000.0))
"""Steps of a long spell at least, and by how many ms the rank is late in all of them together: what other work takes of
a host for a moment is less. Either will do."""
LEAST_LONG: Final = 0.1
"""Share of the run's steps that a long spell has at least."""
GAP: Final = 3.0
"""In each step of a long spell a rank is late by more than so many times what it is at most otherwise: what drifts, as
the noise of a host does, has no such gap."""
TOGETHER: Final = 0.1
"""Of those steps, in this share at most two of them are late at once. Three ranks that are each late in a third of the
steps by chance would be so in a third of those."""


@dataclass(frozen=True)
class Pattern:
    """late: by how much and how often, for a title. when: for the evidence. steps: the first and the last of a spell;
    None: it is all of the run. long: whether the spell is a long one, that stands out."""

    kind: Literal["chronic", "transient", "rotating", "intermittent"]
    late: str
    when: str
    steps: tuple[int, int] | None = None
    long: bool = False


def find_pattern(late: Float, ranks: Sequence[int], steps: Int) -> Pattern:
    """By what pattern ranks are late.

    late: [R, S] ms, by how much each of `ranks` is late in each of `steps`, which are their numbers
    """
    each = np.array([struck_steps(of_rank) for of_rank in late])
    someone: Bool = np.any(each, axis=0)
    if len(ranks) > 1 and each.any(axis=1).all() and in_turn(each):
        by = ms(float(late[each].mean()))
        counts = [f"rank {rank} in {often}" for rank, often in zip(ranks, each.sum(axis=1).tolist(), strict=True)]
        of = f"of {count(len(steps), 'step')}"
        return Pattern(
            "rotating", f"{by} late in turn, in {someone.sum()} {of},", f"rotating: {', '.join(counts)} {of}"
        )
    mean = late.mean(axis=0)
    struck = struck_steps(mean)
    often = f"{struck.sum()} of {count(len(steps), 'step')}"
    if struck.mean() > CHRONIC:
        told = "in every step" if struck.all() else f"in {often}"
        return Pattern("chronic", f"{ms(float(mean.mean()))} late in every step", f"chronic: {told}")
    by = f"{ms(float(mean[struck].mean()))} late in {often}"
    spell = spell_of(struck)
    if spell is None:
        return Pattern("intermittent", by, f"now and then: in {often}, all over the run")
    first, last = spell
    if last == len(steps) - 1:
        said = f"since step {steps[first]}"
    elif first == 0:
        said = f"until step {steps[last]}"
    else:
        said = f"from step {steps[first]} to {steps[last]}"
    long = stands_out(mean, struck)
    when = f"transient: {said}" + ("; how often such a time comes, one does not tell" if long else "")
    return Pattern("transient", f"{by}, {said},", when, (int(steps[first]), int(steps[last])), long)


def struck_steps(late: Float) -> Bool:
    """The steps in which a rank that is late by so much, ms, [S], was struck."""
    falling = -np.sort(-np.clip(late, 0, None))
    carried = np.cumsum(falling)
    struck: Bool = late > LEAST_OF_LATE * falling[np.searchsorted(carried, carried[-1] / 2)]
    return struck


def stands_out(late: Float, struck: Bool) -> bool:
    """Whether the spell of the struck steps is a long one, far above all others. late: ms, [S]."""
    spell = spell_of(struck)
    if spell is None or struck.mean() < LEAST_LONG:
        return False
    inside = within(spell, len(struck))
    otherwise = late[~inside]
    usual = float(np.median(otherwise))
    then = late[inside & struck] - usual
    long = any(struck.sum() >= steps and then.sum() >= ms_ for steps, ms_ in LONG_SPELLS)
    return bool(long and then.min() > GAP * (otherwise.max() - usual))


def within(spell: tuple[int, int], count: int) -> Bool:
    """Which of so many steps lie in a spell, its first and last included."""
    inside = np.zeros(count, bool)
    inside[spell[0] : spell[1] + 1] = True
    return inside


def in_turn(each: Bool) -> bool:
    """Whether one after another is struck, [R, S], and two at once seldom."""
    someone: Bool = np.any(each, axis=0)
    together = (each.sum(axis=0) > 1).sum()
    return bool(
        someone.mean() > COVERED and together <= TOGETHER * someone.sum() and each.mean(axis=1).max() <= CHRONIC
    )


def spell_of(struck: Bool) -> tuple[int, int] | None:
    """The shortest part of the run that has nearly all the struck steps, if it is a part and dense; first and last."""
    at = np.flatnonzero(struck)
    wanted = int(np.ceil(WITHIN * len(at)))
    if len(at) < FEWEST_STRUCK:
        return None
    length = at[wanted - 1 :] - at[: len(at) - wanted + 1] + 1
    best = int(length.argmin())
    first, last = int(at[best]), int(at[best + wanted - 1])
    # What is left out may belong to it, too: as far as it stays dense.
    for one in at[at > last]:
        if struck[first : one + 1].mean() >= DENSE:
            last = int(one)
    for one in at[at < first][::-1]:
        if struck[one : last + 1].mean() >= DENSE:
            first = int(one)
    span = last - first + 1
    return (first, last) if span <= MOST_OF_RUN * len(struck) and struck[first : last + 1].mean() >= DENSE else None
