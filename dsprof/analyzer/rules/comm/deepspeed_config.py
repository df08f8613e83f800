"""What rules know of DeepSpeed: its buckets, and how a fix names the keys of its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsprof.schema import FLOAT_BYTES

from ...finding import Fix, Gain
from ...study import Study


def told(study: Study, setting: str) -> int:
    """What DeepSpeed was told of a bucket's size, elements; 0: that is not known."""
    return int(_told(study, setting) or 0)


def elements(study: Study, size: float) -> int:
    """How many make `size` bytes, rounded up to two digits."""
    number = max(size / item_bytes(study), 1.0)
    unit: int = 10 ** max(math.floor(math.log10(number)) - 1, 0)
    return math.ceil(number / unit) * unit


def item_bytes(study: Study) -> int:
    """Of what is reduced. The keys count elements."""
    return FLOAT_BYTES.get(str(_told(study, "gradient_dtype")), 4)


def zero_fix(settings: Mapping[str, int], note: str, gain: Gain) -> Fix:
    """Other values for keys of the section zero_optimization, which is there."""
    patch = tuple({"op": "add", "path": f"/zero_optimization/{key}", "value": value} for key, value in settings.items())
    named = ", ".join(f"zero_optimization.{key}: {value}" for key, value in settings.items())
    knobs = tuple((f"zero_optimization.{key}", value) for key, value in settings.items())
    return Fix("config", f"{named}: {note}", patch, gain, knobs)


def _told(study: Study, setting: str) -> Any:
    facts = study.facts.get("deepspeed", [])
    return next((fact[setting] for fact in facts if fact.get(setting) is not None), None)
