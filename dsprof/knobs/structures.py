"""Knobs that change the structure of a pipeline: which plan a value of each means. Several of them are one plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dsprof.analyzer.structure import CONFIG, TORCH, PipelineStructure

from .knob import KnobError
from .registry import typed


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KnobError(f"{key}={typed(key, value)}: write a whole number of 1 or more")
    return value


def _boundaries(key: str, value: Any) -> PipelineStructure:
    numbers = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    if not numbers:
        raise KnobError(
            f"{key}={typed(key, value)}: what a method divides is only known when it has; write boundaries, such as "
            "[0,4,8], or ask with --boundaries auto"
        )
    return PipelineStructure(boundaries=tuple(value), knob_of=CONFIG)


STRUCTURES: Final[Mapping[str, Callable[[str, Any], PipelineStructure]]] = {
    "gradient_accumulation_steps": lambda key, value: PipelineStructure(microbatches=_whole(key, value)),
    "pipeline.partition_method": _boundaries,
    "pipeline.schedule": lambda key, value: PipelineStructure(schedule=str(value), knob_of=CONFIG),
    "pipeline.virtual_stages": lambda key, value: PipelineStructure(chunks=_whole(key, value), knob_of=CONFIG),
    "pipelining.microbatches": lambda key, value: PipelineStructure(
        microbatches=_whole(key, value), same_batch=True, knob_of=TORCH
    ),
    "pipelining.schedule": lambda key, value: PipelineStructure(schedule=str(value), knob_of=TORCH),
}
"""Key -> (key, value) -> the structure it asks for. torch cuts a batch into micro-batches; where gradients are
accumulated, each micro-batch keeps its size."""
