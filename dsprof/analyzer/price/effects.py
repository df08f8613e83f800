"""What effects save that rules try against each other, or a user asks about: each alone, before what predictions of its
kind are missed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..arrays import Float
from ..candidate import Between
from ..effect import Effect, Fewer, WhatIfs
from ..finding import Gain
from ..graph.replay import replay
from ..study import Study
from ..whatif import Refused, WhatIf, apply
from .calibration import ModelError
from .certainty import with_all_errors
from .contention import freed_ms, kept_of_overlap, lost_by_waiting_less
from .contention import part_of_cores as part_of_cores  # by which rules, that price nothing, scale their effects
from .excess import between
from .gains import LEAST_SHARE, beside_other_work, mean_gain


def effect_gains(study: Study, effects: Sequence[Effect]) -> list[Gain]:
    """What each of these saves alone, of those that change no latency or bandwidth of every link: so do only users.
    What several have the same is replayed once, if it is the same object. Raises Refused where a change cannot be
    replayed."""
    took: dict[int, Float] = {}
    return [_gain(study, effect, _variants(study, effect, took)) for effect in effects]


def _variants(study: Study, effect: Effect, took: dict[int, Float]) -> list[tuple[Float, Float]]:
    """The steps before it and after, [S] ms, as it is and as it may as well be. took: of what-ifs by the id of their
    tuple, what was replayed already."""

    def steps(changes: WhatIfs) -> Float:
        if id(changes) not in took:
            took[id(changes)] = replayed(study, *changes)
        return took[id(changes)]

    return [(steps(now), steps(then)) for now, then in effect.variants]


def parts_of_others(study: Study, effect: Effect) -> Between | None:
    """Between which parts of what an effect saves lies what it saves as it may as well be; None where it cannot be
    replayed."""
    try:
        saved = [float((before - after).mean()) for before, after in _variants(study, effect, {})]
    except Refused:
        return None
    parts = [each / saved[0] for each in saved] if saved[0] > 0 else [1.0]
    return Between(min(parts), max(parts), study.step_ms)


def _gain(study: Study, effect: Effect, variants: Sequence[tuple[Float, Float]]) -> Gain:
    """variants: as of `_variants`."""
    first = variants[0][0]
    saved = [corrected(study, effect, before, before - after, first) for before, after in variants]
    if effect.per_batch != 1:
        saved = [of - (of - each) / effect.per_batch for (of, _), each in zip(variants, saved, strict=True)]
    if not effect.counts_cores:
        kept = 1 - lost_by_waiting_less(study, float(saved[0].mean()))
        saved = [kept * each for each in saved]
    gain, ends = mean_gain(study, saved[0], effect.spell), [float(each.mean()) for each in saved[1:]]
    if effect.between is not None:
        gain = between(gain, effect.between)
    low, high = min([gain.low, *ends]) - effect.unsure_ms, max([gain.high, *ends]) + effect.unsure_ms
    return with_costs_between(replace(gain, low=low, high=high), effect)


def corrected(study: Study, effect: Effect, before: Float, saved: Float, first: Float | None = None) -> Float:
    """`saved` of steps that take `before` ([S] ms), with what no replay knows of the effect. first: the steps before it
    as it most likely is, by which what single collectives cost is told."""
    if effect.at_most_ms is not None:
        saved = saved * min(1.0, effect.at_most_ms / max(float(saved.mean()), 1e-9))
    if effect.overlaps == "more":
        saved = _hidden(study, before, saved)
    elif effect.overlaps == "no more":
        saved = -_hidden(study, before, -saved)
    if effect.fewer is not None:
        saved = saved + effect.fewer.share * freed_ms(study, before if first is None else first, effect.fewer)
    found: Float = effect.part * (saved - effect.costs_ms)
    return found


def with_costs_between(gain: Gain, effect: Effect) -> Gain:
    """With the ends of what the effect may cost in the interval."""
    least, most = (effect.part * effect.costs_ms * (end - 1) for end in effect.costs_between)
    return replace(gain, low=gain.low - most, high=gain.high - least)


def _hidden(study: Study, before: Float, saved: Float) -> Float:
    """Of ms that are saved in each step by moving communication beside computation: as much as there are cores for,
    since a backend needs them, too."""
    left: Float = before - beside_other_work(study, before, before - saved)
    return np.where(left > 0, kept_of_overlap(study) * left, left)


def sure_gain(study: Study, effect: Effect, error: ModelError | None) -> Gain | None:
    """What it saves alone, with all that predictions of this kind are missed by; None where that is not sure to be more
    than nothing, is not worth a line, or cannot be replayed."""
    try:
        (gain,) = effect_gains(study, [effect])
    except Refused:
        return None
    gain = with_all_errors(study, gain, error)
    return gain if gain.low > 0 and gain.ms >= LEAST_SHARE * study.step_ms else None


def unseen_ms(study: Study, now: WhatIfs, fewer: Fewer) -> float:
    """What single ones of these collectives cost a step beside what a model of them (`now`) says, ms, mean. Raises
    Refused."""
    return freed_ms(study, replayed(study, *now), fewer)


def replayed(study: Study, *changes: WhatIf) -> Float:
    """How long the judged steps take with these changes, [S] ms. Raises Refused."""
    durations: Float = replay(apply(study.need_graph(), list(changes))).durations
    return durations
