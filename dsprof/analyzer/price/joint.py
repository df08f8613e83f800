"""What several effects save together that rules try, or a user asks about, before what predictions of their kinds are
missed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..arrays import Float
from ..effect import Effect
from ..finding import Gain
from ..graph.replay import replay
from ..graph.step_graph import StepGraph
from ..study import Study
from ..whatif import WhatIf, apply
from ..whatif.communications import ScaleLink
from ..whatif.fetching import FetchedBy
from ..whatif.merge import Merge
from .contention import lost_by_waiting_less
from .effects import corrected, with_costs_between
from .excess import between
from .gains import mean_gain


def joint_gain(study: Study, graph: StepGraph, effects: Sequence[Effect]) -> tuple[Gain, float]:
    """What these effects save together, before what predictions of their kinds are missed by, and what was taken off
    that since cores are busy, ms. Raises Refused."""

    def took(*whatifs: Sequence[WhatIf]) -> Float:
        return replay(apply(graph, _as_one([whatif for some in whatifs for whatif in some]))).durations

    def replayed(chosen: Sequence[Effect], variant: int) -> tuple[Float, Float]:
        """The steps that it begins at, and what is saved of each, ms, [S]. What is modelled is compared with a model of
        what there is now, beside all else that is changed: so the model's own error cancels."""
        pairs = [one.variants[min(variant, len(one.others))] for one in chosen]
        plain = [whatif for now, then in pairs if not now for whatif in then]
        latency = float(np.prod([one.latency for one in chosen]))
        bandwidth = float(np.prod([one.bandwidth for one in chosen]))
        if (latency, bandwidth) != (1.0, 1.0):
            plain.append(ScaleLink(latency, bandwidth))
        now = [whatif for now, _ in pairs for whatif in now]
        then = [whatif for now, then in pairs if now for whatif in then]
        if not now:
            before = took()
            return before, before - took(plain)
        modelled = took(now)
        if not plain:
            return modelled, modelled - took(then)
        return modelled, took() - took(plain) + took(plain, now) - took(plain, then)

    alone = [replayed([one], 0) for one in effects]
    lost = _lost(study, replayed([one for one in effects if not one.counts_cores], 0)[1])
    corrections = [
        corrected(study, one, before, saved) - saved for one, (before, saved) in zip(effects, alone, strict=True)
    ]  # fmt: skip
    correction = np.sum(corrections, axis=0) - lost
    per_batch = float(np.prod([one.per_batch for one in effects]))

    def saved_of(variant: int) -> Float:
        before, saved = replayed(effects, variant)
        found: Float = before - (before - saved - correction) / per_batch
        return found

    saved = [saved_of(i) for i in range(max(len(one.variants) for one in effects))]
    spell = effects[0].spell if len(effects) == 1 else None
    gain, ends = mean_gain(study, saved[0], spell), [float(of.mean()) for of in saved[1:]]
    gain = replace(gain, low=min([gain.low, *ends]), high=max([gain.high, *ends]))
    for one in effects:
        gain = with_costs_between(gain, one)
    unsure = float(sum(one.unsure_ms for one in effects))
    gain = replace(gain, low=gain.low - unsure, high=gain.high + unsure)
    for one, (_, own) in zip(effects, alone, strict=True):
        if one.between is not None:
            certain = mean_gain(study, own)
            wide = between(certain, one.between)
            gain = replace(gain, low=gain.low - (certain.low - wide.low), high=gain.high + wide.high - certain.high)
    return gain, float(lost.mean())


def _as_one(changes: Sequence[WhatIf]) -> list[WhatIf]:
    """Changes that several effects make, without models of transfers as they are (`Merge` that divides nothing) of
    which there is one already, or where another of these divides the same communications: that models them, too."""
    modelled = [one.of for one in changes if isinstance(one, FetchedBy) or (isinstance(one, Merge) and one.divides)]
    found: list[WhatIf] = []
    for one in changes:
        if isinstance(one, Merge) and not one.divides:
            if one.of in modelled:
                continue
            modelled.append(one.of)
        found.append(one)
    return found


def _lost(study: Study, saved: Float) -> Float:
    """What is lost again of what less work saves, [S] ms, as cores are busy."""
    lost: Float = saved * lost_by_waiting_less(study, float(saved.mean()) if len(saved) else 0.0)
    return lost
