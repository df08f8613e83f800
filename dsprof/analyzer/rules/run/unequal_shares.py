"""Samples by speed: what `heterogeneous.speeds` of the engine's configuration would save where a rank is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...arrays import Float
from ...effect import Effect
from ...finding import Fix
from ...price.effects import effect_gains
from ...study import Study
from ...whatif.work import ScaleWork
from ..base import LEAST_SHARE, NotJudged, engine_config

KEY: Final = "heterogeneous.speeds"
OF_SAMPLES: Final = 0.9
"""At least this part of a rank's compute is taken to follow its samples: calls that cost the same whatever they are
given take the rest. It widens the interval."""
ALIKE: Final = 0.95
"""A rank that reaches this part of the fastest's speed counts as equally fast, as in the engine's own measurement."""
ALWAYS: Final = 0.9
"""Of the steps, those in which a rank is late whose device is slow for good."""
THROUGHOUT: Final = 0.5
"""So much of the lateness of one phase there is in the other: a slow device is slow at everything."""


def with_speeds(study: Study, speeds: Any) -> Effect:
    """Other shares of a micro-batch: each rank's compute follows its samples. Raises NotJudged where that is not known,
    and where `speeds` cannot be, with what the configuration says of them."""
    return _of_shares(_factors(study, speeds))


def _of_shares(factors: Mapping[int, float]) -> Effect:
    """Each rank's compute takes so many times as long."""
    return Effect("rank.straggler", _scaled(factors, 1.0), others=(((), _scaled(factors, OF_SAMPLES)),))


def shares_fix(study: Study, late: Float, phases: Mapping[str, tuple[float, float]]) -> Fix | None:
    """Samples by speed, where a rank is always late and in forward and backward alike; None where that is not so, where
    the engine does not divide the batch, and where nothing would surely be saved.

    late: [S] ms, of the late ranks; phases: name -> ms a step on the late ranks, and on the others
    """
    always = float((late > 0.5 * late.mean()).mean()) >= ALWAYS
    if not always or not loads_by_engine(study) or not _throughout(phases):
        return None
    try:
        now, _ = _shares(study, None)
        speeds = _measured(study, now)
        _, then = _shares(study, speeds)
        factors = _factors(study, speeds)
    except NotJudged:
        return None
    (gain,) = effect_gains(study, [_of_shares(factors)])
    if now == then or gain.low <= 0 or gain.ms < LEAST_SHARE * study.step_ms:
        return None
    there = "heterogeneous" in _need_config(study)
    patch = (
        {"op": "add", "path": "/heterogeneous/speeds", "value": speeds}
        if there
        else {"op": "add", "path": "/heterogeneous", "value": {"speeds": speeds}}
    )
    title = f"if the device is slow for good, {KEY}: {speeds}: of a micro-batch the ranks get {then} samples, not {now}"
    return Fix("config", title, (patch,), gain, ((KEY, speeds),))


def _throughout(phases: Mapping[str, tuple[float, float]]) -> bool:
    """Whether forward and backward both take longer, by about as much."""
    both = [phases.get(name, (0.0, 0.0)) for name in ("forward", "backward")]
    if not all(others > 0 for _, others in both):
        return False
    longer = [mine / others - 1 for mine, others in both]
    return min(longer) > 0 and min(longer) >= THROUGHOUT * max(longer)


def _measured(study: Study, shares: Sequence[int]) -> list[float]:
    """The speed of each rank beside the fastest, from what its samples take it now."""
    taken: Float = study.work("compute").mean(axis=1)
    if not (taken > 0).all() or len(shares) != len(taken):
        raise NotJudged("not every rank computes samples of its own")
    speed = np.array([max(share, 1) for share in shares]) / taken
    relative = speed / speed.max()
    return [1.0 if each >= ALIKE else round(each, 2) for each in relative.tolist()]


def _factors(study: Study, speeds: Any) -> dict[int, float]:
    """Rank -> how many times as long its compute would be."""
    now, then = _shares(study, speeds)
    ranks_each = len(study.ranks) // len(now)  # ranks that share layers have the same samples
    return {rank: max(then[at // ranks_each], 1) / max(now[at // ranks_each], 1) for at, rank in enumerate(study.ranks)}


def _scaled(factors: Mapping[int, float], part: float) -> tuple[ScaleWork, ...]:
    """`part` of the compute follows the samples."""
    ranks: dict[float, list[int]] = {}
    for rank, factor in factors.items():
        ranks.setdefault(1 - part * (1 - factor), []).append(rank)
    return tuple(ScaleWork({"compute": factor}, tuple(of)) for factor, of in ranks.items() if factor != 1)


def _shares(study: Study, speeds: Any) -> tuple[list[int], list[int]]:
    """Samples of each replica in a micro-batch, now and with these speeds. Raises NotJudged where that is not known."""
    from dsprof.engine.config import ConfigError, load

    if study.in_stages:
        raise NotJudged("in a pipeline it moves layers too, which is not predicted")
    if study.ranks_missing:
        raise NotJudged("not every rank of the job was captured")
    if speeds == "measure":
        raise NotJudged("what the ranks measure at the start is not known; give the speeds as a list")
    content, ranks = _need_config(study), len(study.ranks)
    if isinstance(content.get("heterogeneous"), Mapping) and content["heterogeneous"].get("speeds") == "measure":
        raise NotJudged("the speeds that the ranks have measured are not known")
    try:
        before = load(content, world_size=ranks)
        after = load({**content, "heterogeneous": {"speeds": speeds}}, world_size=ranks)
    except ConfigError as error:
        raise NotJudged("; ".join(error.problems)) from None
    return before.shares(ranks), after.shares(ranks)


def _need_config(study: Study) -> Mapping[str, Any]:
    """The configuration of dsprof's engine. Raises NotJudged where the job has none."""
    content = engine_config(study)
    if content is None:
        raise NotJudged("the job has no configuration of dsprof's engine, which divides a batch by speed")
    return content


def loads_by_engine(study: Study) -> bool:
    """Whether the engine, or DeepSpeed, makes the micro-batches: what a script makes itself follows no setting."""
    return any(fact.get("by_engine") for fact in study.facts.get("dataloader", []))
