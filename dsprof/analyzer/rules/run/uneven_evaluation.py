"""Evaluation that some ranks do while the others wait."""

from __future__ import annotations

import numpy as np

from ... import signals
from ...candidate import Candidate, Excess, Price
from ...finding import Evidence, Finding, Fix, Where
from ...study import Study
from ...text import ms, ranks
from ..base import often
from ..rule import Found, Look, Rule

KIND = "evaluation"
MOST_OF_LONGEST = 0.9
"""Of the longest evaluation: a rank that evaluates for less waits for those that do not."""
LEAST_UNEVEN = 0.2
"""Of the longest evaluation of an occasion: ranks that differ by less evaluate alike."""


def uneven(study: Study) -> Found:
    """Ranks evaluate unequally. What is lost is the longest share less the mean, which equal shares would take."""
    signals.steps(study)
    signals.peers(study)
    irregular = study.irregular
    own = irregular.own_ms.get(KIND)
    if own is None or not own.any():
        return []
    longest, mean = own.max(axis=0), own.mean(axis=0)
    unequal = longest - mean > LEAST_UNEVEN * np.maximum(longest, 1e-9)
    if not unequal.any():
        return []
    lost = np.minimum(longest - mean, irregular.excess_ms[KIND])[unequal]
    of_rank = own[:, unequal].mean(axis=1)
    who = study.ranks_where(of_rank > MOST_OF_LONGEST * of_rank.max())
    numbers = irregular.steps[unequal]
    times = often(unequal)
    evidence = (
        Evidence("one evaluation", round(float(longest[unequal].mean()), 3), "ms"),
        Evidence("evaluated", times, ""),
        Evidence("the same, shared among all ranks", round(float(mean[unequal].mean()), 3), "ms"),
    )
    if (of_rank > 0).sum() > len(who):
        title = f"ranks evaluate unequally, {times}: {ranks(who)} for up to {ms(longest[unequal].mean())}, "
        title += f"{ms(mean[unequal].mean())} on average, and the others wait"
    else:
        title = f"{ranks(who)} {'evaluates' if len(who) == 1 else 'evaluate'} for {ms(longest[unequal].mean())}, "
        title += f"{times}, while the others wait"
    where = Where(ranks=who, op="evaluation", steps=(int(numbers[0]), int(numbers[-1])))

    def say(price: Price) -> Finding:
        share = "evaluate on every rank a part of the data (DistributedSampler) and all_reduce the metric"
        less = "or evaluate less often, or in another process on a saved checkpoint"
        fixes = Fix("code", share, gain=price.gain), Fix("code", less)
        return Finding("eval.uneven", title, "info", where, evidence, price.gain, fixes)

    return [Candidate("eval.uneven", Excess(lost, "occasion"), say)]


RULES = (
    Rule(
        "eval.uneven",
        "some ranks evaluate while the others wait",
        explains=("evaluation",),
        looks=(Look(uneven),),
        came_true=(22, 25),
        place=120,
    ),
)
