"""Batch sizes of a configuration, that belong together.

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsprof.engine.config import ACCUMULATION, MICRO, TRAIN, Batch, remedies

from .edit_json import CannotEdit


def with_the_third(knobs: Mapping[str, Any], ran: Any) -> dict[str, Any]:
    """`knobs`, with another value for a batch size that they leave as it is where all three are written and would
    contradict each other. Of two that may change, the batch of a step stays. ran: the configuration that ran.

    Raises CannotEdit where there is no such value.
    """
    sizes: dict[str, Any] = (
        {key: ran.get(key) for key in (ACCUMULATION, MICRO, TRAIN)} if isinstance(ran, Mapping) else {}
    )
    left = [key for key in sizes if key not in knobs]
    if not left or len(left) == len(sizes) or not all(type(size) is int and size > 0 for size in sizes.values()):
        return dict(knobs)
    ranks = sizes[TRAIN] // (sizes[MICRO] * sizes[ACCUMULATION])
    then = {**sizes, **{key: knobs[key] for key in sizes if key in knobs}}
    if not all(type(size) is int and size > 0 for size in then.values()):
        return dict(knobs)
    batch, free = Batch(then[TRAIN], then[MICRO], then[ACCUMULATION], ranks), left[0]
    value = remedies(batch, then).get(free)
    if value is None:
        rest = ranks * (batch.micro if free == ACCUMULATION else batch.accumulation)
        raise CannotEdit(
            f"no {free} makes {TRAIN} {batch.train} of {rest} x {free}, with {ranks} data-parallel ranks; change "
            f"{TRAIN}, too"
        )
    return dict(knobs) if value == sizes[free] else {**knobs, free: value}
