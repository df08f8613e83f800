"""What candidates gain: each alone, replayed or measured by itself, and its share of what all of them gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..arrays import Float
from ..candidate import Candidate, DeviceCost, OneOf, Price
from ..finding import Gain, Together
from ..graph.replay import replay_all
from ..graph.step_graph import StepGraph
from ..study import Study
from ..whatif import Refused, WhatIf, apply, clash
from .attribution import Attribution, attribute
from .contention import lost_by_waiting_less
from .device import measured_gain, price_of_device
from .excess import between, excess_gain, surely_most, whole_ms
from .gains import LEAST_SHARE, mean_gain, noise_floor_ms
from .unseen_idle import with_unseen_idle


@dataclass(frozen=True)
class Priced:
    """A candidate, with what mending it gains.

    together: of one that another hides: which, and what mending both gains
    by_rank:  what mending it on one rank alone gains
    """

    candidate: Candidate
    price: Price
    together: Together | None = None
    by_rank: Mapping[int, Gain] = field(default_factory=dict)


@dataclass(frozen=True)
class Replays:
    """Candidates that were replayed together.

    refused:  code -> why its change could not be replayed
    noise_ms: the run's noise floor, with all of them mended: one that strikes now and then must not hide in the noise
              that it makes
    lost:     the share of the gains that is taken off since cores are busy
    """

    priced: tuple[Priced, ...]
    refused: Mapping[str, str]
    noise_ms: float
    lost: float


def price_by_itself(study: Study, candidate: Candidate) -> Priced | None:
    """A candidate whose cost was measured by itself; None where that is next to nothing."""
    change = candidate.change
    if isinstance(change, WhatIf):
        raise TypeError(f"{candidate.code} is priced by replay")
    if isinstance(change, DeviceCost):
        measured = measured_gain(study, change)
        worth = measured.ms > 0 and measured.ms >= LEAST_SHARE * study.step_ms
        return Priced(candidate, price_of_device(study, change)) if worth else None
    choice = change if isinstance(change, OneOf) else OneOf((change,))
    gains = tuple(excess_gain(study, cost) for cost in choice.of)
    chosen = surely_most(gains)
    if gains[chosen].ms < LEAST_SHARE * whole_ms(study, choice.of[chosen]):
        return None
    also = tuple(excess_gain(study, cost) for cost in choice.also)
    return Priced(candidate, Price(gains[chosen], None, (*gains, *also), chosen))


def price_together(study: Study, graph: StepGraph, candidates: Sequence[Candidate]) -> Replays:
    """Replay each of these candidates alone, and all of them together; those that do not go together, alone only."""
    whatifs = {_key(candidates, at): one.change for at, one in enumerate(candidates) if isinstance(one.change, WhatIf)}
    trades = {_key(candidates, at) for at, one in enumerate(candidates) if one.a_trade}
    refused: dict[str, str] = {}
    while True:
        joint: dict[str, WhatIf] = {}
        for key, whatif in whatifs.items():
            if key not in trades and clash(whatif, list(joint.values())) is None:
                joint[key] = whatif
        try:
            found = attribute(graph, joint)
            break
        except Refused as refusal:
            culprit = next((key for key, whatif in whatifs.items() if whatif.name == refusal.name), None)
            if culprit is None:
                raise
            refused[culprit] = refusal.why
            del whatifs[culprit]
    whole = found.before - found.left
    lost = lost_by_waiting_less(study, float(whole.mean()) if len(whole) else 0.0)
    priced = []
    for at, candidate in enumerate(candidates):
        key = _key(candidates, at)
        if key in refused:
            continue
        try:
            one = _priced(study, graph, candidate, key, found, 1.0 if candidate.counts_cores else 1 - lost)
        except Refused as refusal:  # of one that is not among those replayed together
            refused[key] = refusal.why
            continue
        if one is not None:
            priced.append(one)
    reasons = {key.partition(" ")[0]: why for key, why in refused.items()}
    return Replays(tuple(priced), reasons, noise_floor_ms(study, found.left), lost)


def _key(candidates: Sequence[Candidate], at: int) -> str:
    """The code of a candidate; with a number, of the second of a code and those after it."""
    code = candidates[at].code
    before = sum(one.code == code for one in candidates[:at])
    return code if not before else f"{code} {before + 1}"


def _priced(
    study: Study, graph: StepGraph, candidate: Candidate, key: str, found: Attribution, kept: float
) -> Priced | None:
    """kept: the share of gains that busy cores leave."""

    def gain_of(saved: Float, spell: tuple[int, int] | None = None) -> Gain:
        gain = mean_gain(study, kept * saved, spell)
        return gain if candidate.between is None else between(gain, candidate.between)

    if key not in found.alone:
        (alone,) = _saved(graph, found.before, [candidate.change])
        share = None
        weight = gain = gain_of(alone, candidate.spell)
    else:
        gain, share = (gain_of(saved[key], candidate.spell) for saved in (found.alone, found.shares))
        weight = share
    if weight.ms < LEAST_SHARE * study.step_ms:
        return None
    if isinstance(candidate.change, WhatIf):
        gain = with_unseen_idle(study, graph, found.before, candidate.change, gain)
        share = None if share is None else replace(share, unseen=gain.unseen)
    together = None
    if key in found.together:
        other, saved = found.together[key]
        together = Together(other.partition(" ")[0], mean_gain(study, kept * saved))
    several = candidate.by_rank if len(candidate.by_rank) > 1 else {}
    by_rank = dict(zip(several, map(gain_of, _saved(graph, found.before, list(several.values()))), strict=True))
    return Priced(candidate, Price(gain, share), together, by_rank)


def _saved(graph: StepGraph, before: Float, changes: Sequence[object]) -> list[Float]:
    """What each change saves alone, [S] ms."""
    graphs = (apply(graph, [change]) for change in changes if isinstance(change, WhatIf))
    return [before - replayed.durations for replayed in replay_all(graphs)]
