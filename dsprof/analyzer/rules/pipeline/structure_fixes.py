"""What a pipeline's findings advise to change of its structure: the layers at which its stages begin, its schedule;
each with what it saves, by a replay of the plan that would run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dsprof.engine.schedule import Plan

from ... import signals
from ...finding import Fix, Gain
from ...price.calibration import ModelError
from ...price.effects import effect_gains, sure_gain
from ...price.gains import may_gain, or_as_well
from ...signals import Absent
from ...stage_costs import USUAL_WEIGHT, begins
from ...structure import AUTO, PipelineStructure, pipeline_that_ran, restructured
from ...study import Study
from ...whatif import Refused
from ...work.stage_layers import stage_layers
from ..base import NotJudged, at, engine_config
from ..run.unequal_shares import KEY, loads_by_engine

SCHEDULES: Final[tuple[tuple[PipelineStructure, str], ...]] = (
    (PipelineStructure(schedule="zero-bubble"), "weight gradients are computed while the pipeline drains"),
    (
        PipelineStructure(schedule="interleaved", chunks=2),
        "it fills and drains in steps of half a rank's part of the model; more activations are held",
    ),
)
"""Those that are tried, and why they may be shorter."""


def boundaries_fix(study: Study, site: str | None, error: ModelError | None) -> Fix | None:
    """Other boundaries between the stages, by layer; None where layers were not timed or none are better."""
    found = _tried(study, PipelineStructure(boundaries=AUTO), error)
    layers = stage_layers(study)
    if found is None or layers is None:
        return None
    _, bounds, gain = found
    if bounds is None:
        return None
    says = f"stages that begin at {begins(layers, bounds)}, of {len(layers)}"
    config = engine_config(study)
    if config is None:
        if any(fact.get("framework") == "deepspeed" for fact in study.facts.get("pipeline", [])):
            how = (
                f"DeepSpeed takes no list: override PipelineModule._partition_layers, with self.parts = {list(bounds)}"
            )
        else:
            how = "as lists of layers, or split points"
        return Fix("code", f"{says}: {how}{at(site)}", gain=gain)
    settings = {"partition_method": list(bounds)}
    title = f"pipeline.partition_method: {list(bounds)}: {says}"
    return Fix("config", title, _in_section(config, settings), gain, (("pipeline.partition_method", list(bounds)),))


def measured_fix(study: Study, exact: Fix | None, ideal: Gain) -> list[Fix]:
    """Boundaries by what layers and ranks are measured to take at the start, where dsprof's engine loads the data.

    exact: other boundaries by this run's times, whose saving is that of these, too; without such there is nothing.
    ideal: what an even division saves. Where a rank is slow, and not its layers heavy, those that it gives away take
    less elsewhere than they did on it: then up to that may be saved.
    """
    config = engine_config(study)
    if exact is None or exact.gain is None or config is None or not loads_by_engine(study):
        return []
    gain = may_gain(exact.gain, ideal.ms)
    title = (
        f'or {KEY}: "measure" and pipeline.partition_method: "measured": the ranks time every layer at the start, for '
        "jobs that come to run on other devices, too"
    )
    patch = ({"op": "add", "path": "/heterogeneous", "value": {"speeds": "measure"}},)
    knobs = ((KEY, "measure"), ("pipeline.partition_method", "measured"))
    return [Fix("config", title, (*patch, *_in_section(config, {"partition_method": "measured"})), gain, knobs)]


def schedule_fixes(study: Study, error: ModelError | None) -> list[Fix] | None:
    """Other schedules where dsprof's engine runs the pipeline, the best first: those whose saving is sure. None where
    another framework does."""
    config = engine_config(study)
    if config is None:
        return None
    found = []
    for wanted, why in SCHEDULES:
        tried = _tried(study, wanted, error)
        if tried is not None:
            settings = written(pipeline_that_ran(study), *tried[:2])
            named = ", ".join(f"pipeline.{key}: {json.dumps(value)}" for key, value in settings.items())
            knobs = tuple((f"pipeline.{key}", value) for key, value in settings.items())
            found.append(Fix("config", f"{named}: {why}", _in_section(config, settings), tried[2], knobs))
    return sorted(found, key=lambda fix: -fix.gain.low if fix.gain else 0.0)


def written(ran: Plan, plan: Plan, bounds: tuple[int, ...] | None) -> dict[str, Any]:
    """What the section `pipeline` says of a plan: all that differs from the one that ran, so that what is stated now,
    such as two parts on each rank, does not contradict it."""
    settings: dict[str, Any] = {"schedule": plan.schedule}
    if plan.virtual_stages != ran.virtual_stages:
        settings["virtual_stages"] = plan.virtual_stages
    if bounds is not None:
        settings["partition_method"] = list(bounds)
    return settings


def _tried(
    study: Study, wanted: PipelineStructure, error: ModelError | None
) -> tuple[Plan, tuple[int, ...] | None, Gain] | None:
    """The plan and boundaries of a structure and what it saves; None where that cannot be told, or may be nothing.
    Where weight gradients were not timed by themselves it is offered if layers with weights would gain; what it saves
    begins at what layers without them would."""
    if isinstance(signals.replay.look(study), Absent):
        return None
    try:
        new = restructured(study, wanted, USUAL_WEIGHT)
        gain = sure_gain(study, replace(new.effect, counts_cores=True), error)
        if gain is not None and new.plan.splits:
            any_layers = replace(restructured(study, wanted).effect, counts_cores=True)
            (whatever,) = effect_gains(study, [any_layers])
            # Of backwards that make no weight gradients it is 1F1B, which loses nothing.
            gain = or_as_well(gain, whatever)
    except (NotJudged, Refused):
        return None
    return None if gain is None else (new.plan, new.boundaries, gain)


def _in_section(config: Mapping[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A JSON patch that sets keys of the section `pipeline`."""
    if isinstance(config.get("pipeline"), dict):
        return tuple({"op": "add", "path": f"/pipeline/{key}", "value": value} for key, value in settings.items())
    return ({"op": "add", "path": "/pipeline", "value": settings},)
