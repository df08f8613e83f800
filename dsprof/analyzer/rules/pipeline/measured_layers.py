"""Layers divided by what each takes and how fast each rank is: what the engine's own measurement would save."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

from dsprof.engine.partition import balance

from ...finding import Fix, Gain
from ...graph.replay import replay
from ...price.contention import lost_by_waiting_less
from ...price.gains import mean_gain
from ...study import Study
from ...whatif import apply
from ...whatif.work import ScaleWork
from ...work.layer_costs import layer_costs
from ..base import LEAST_SHARE, NotJudged
from ..run.unequal_shares import KEY, engine_config, loads_by_engine

METHOD: Final = "pipeline.partition_method"


def layers_fix(study: Study, ideal: Gain) -> Fix | None:
    """Stages by measured costs of layers and measured speeds of ranks; None where the job is no pipeline of the engine
    whose data that loads, and where by this run's times no other division would surely save anything.

    ideal: what an even division saves. Where a rank is slow, and not its layers heavy, those that it gives away take
    less elsewhere than they did on it: then up to that may be saved.
    """
    try:
        content = engine_config(study)
    except NotJudged:
        return None
    stages = study.topology.stage_of
    groups = sorted(study.peer_groups, key=lambda group: stages[study.ranks_where(group)[0]])
    if not loads_by_engine(study) or any(len(held) != 1 for held in stages.values()) or study.ranks_missing:
        return None
    layers = [layer_costs(study.summaries[study.ranks_where(group)[0]].staged) for group in groups]
    taken = [layer["forward_s"] + layer["backward_s"] for stage in layers for layer in stage]
    if not all(layers) or not all(taken):
        return None
    bounds, now = balance(taken, len(groups)), [0, *accumulate(map(len, layers))]
    factors = [
        sum(taken[a:b]) / sum(taken[c:d]) for (a, b), (c, d) in zip(pairwise(bounds), pairwise(now), strict=True)
    ]
    change = [
        ScaleWork({"compute": factor}, study.ranks_where(group))
        for factor, group in zip(factors, groups, strict=True)
        if factor != 1
    ]
    graph = study.need_graph()
    saved = replay(graph).durations - replay(apply(graph, change)).durations
    gain = mean_gain(study, (1 - lost_by_waiting_less(study, float(saved.mean()))) * saved)
    if bounds == now or gain.low <= 0 or gain.ms < LEAST_SHARE * study.step_ms:
        return None
    sizes, before = ([b - a for a, b in pairwise(of)] for of in (bounds, now))
    title = (
        f'{KEY}: "measure" and {METHOD}: "measured": the ranks time every layer at the start; by the times of this run '
        f"the stages would have {sizes} layers, not {before}"
    )
    pipeline = "/pipeline/partition_method" if "pipeline" in content else "/pipeline"
    patch = (
        {"op": "add", "path": "/heterogeneous", "value": {"speeds": "measure"}},
        {
            "op": "add",
            "path": pipeline,
            "value": "measured" if pipeline.count("/") > 1 else {"partition_method": "measured"},
        },
    )
    knobs = ((KEY, "measure"), (METHOD, "measured"))
    return Fix("config", title, patch, replace(gain, high=max(gain.high, ideal.ms)), knobs)
