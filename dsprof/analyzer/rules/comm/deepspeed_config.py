"""What rules know of ZeRO, of DeepSpeed or of dsprof's engine: what it was told, and how a fix names the keys of its
configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsprof.schema import FLOAT_BYTES

from ...finding import Fix, Gain
from ...study import Study, once
from ..base import OWN_ENGINE, NotJudged, configurations, engine_config, zero_stage

if TYPE_CHECKING:
    from dsprof.engine.config import Config


@once
def zero_config(study: Study) -> Config | None:
    """The configuration of the engine that trained, with what it does not say filled in; what "auto" became is not
    known. None where no engine did, or where there are several."""
    contents = configurations(study)
    own = engine_config(study) is not None
    different = [one for place, one in enumerate(contents) if one not in contents[:place]]
    if (not own and zero_stage(study) is None) or len(different) != 1:
        return None
    from dsprof.engine.config import as_far_as_known  # pydantic takes long to import

    return as_far_as_known(different[0])


def is_own_engine(study: Study) -> bool:
    """Whether dsprof's engine trained, and not DeepSpeed."""
    return bool(configurations(study, OWN_ENGINE))


def stage_of(study: Study) -> int | None:
    """The stage of ZeRO, of either engine; None where neither trains, or that is not known."""
    if zero_stage(study) is not None:
        return zero_stage(study)
    config = zero_config(study)
    return None if config is None else config.zero_optimization.stage


def need_configuration(study: Study) -> None:
    """Raises NotJudged where no engine was seen that a JSON configures, DeepSpeed's or dsprof's own."""
    if not study.facts.get("config"):
        raise NotJudged("no configuration of an engine was seen in this run")


def need_zero(study: Study) -> tuple[int, Config]:
    """The stage of ZeRO and the engine's configuration. Raises NotJudged where they are not known."""
    stage, config = stage_of(study), zero_config(study)
    if stage is None or config is None:
        raise NotJudged("the job has no ZeRO, or its configuration was not captured")
    return stage, config


def told(study: Study, setting: str) -> int:
    """What the engine was told of a bucket's size, elements; 0: that is not known."""
    if not is_own_engine(study):
        return int(_told(study, setting) or 0)
    config = zero_config(study)
    if config is None:
        return 0
    zero = config.zero_optimization
    return {
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "prefetch_bucket_size": zero.stage3_prefetch_bucket_size,
    }[setting]


def elements(study: Study, size: float) -> int:
    """How many make `size` bytes, rounded up to two digits."""
    number = max(size / item_bytes(study), 1.0)
    unit: int = 10 ** max(math.floor(math.log10(number)) - 1, 0)
    return math.ceil(number / unit) * unit


def item_bytes(study: Study) -> int:
    """Of what is reduced. The keys count elements."""
    return FLOAT_BYTES.get(str(_told(study, "gradient_dtype")), 4)


def zero_fix(settings: Mapping[str, int | bool], note: str, gain: Gain) -> Fix:
    """Other values for keys of the section zero_optimization, which is there."""
    patch = tuple({"op": "add", "path": f"/zero_optimization/{key}", "value": value} for key, value in settings.items())
    named = ", ".join(f"zero_optimization.{key}: {json.dumps(value)}" for key, value in settings.items())
    knobs = tuple((f"zero_optimization.{key}", value) for key, value in settings.items())
    return Fix("config", f"{named}: {note}", patch, gain, knobs)


def _told(study: Study, setting: str) -> Any:
    facts = study.facts.get("deepspeed", [])
    return next((fact[setting] for fact in facts if fact.get(setting) is not None), None)
