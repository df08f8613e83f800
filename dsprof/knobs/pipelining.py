"""Knobs of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Final

from dsprof.collectors.overrides.pipelining import MULTI, SINGLE

from .knob import ROUNDING, Choice, Facts, Knob, Number, Stated, of_fact

_SCHEDULE: Final = "a schedule of torch.distributed.pipelining"
_KEYS: Final = {name: key for key, name in (SINGLE | MULTI).items()}


def _schedule(facts: Facts) -> list[Stated]:
    found = of_fact("pipeline", "schedule")(facts)
    return [Stated(_KEYS.get(one.value, one.value), one.where) for one in found]


KNOBS: Final = (
    Knob(
        "pipelining.microbatches",
        "into how many micro-batches a batch is cut",
        Number(1, whole=True),
        ROUNDING,
        _SCHEDULE,
        unit="micro-batches",
        states=of_fact("pipeline", "microbatches"),
    ),
    Knob(
        "pipelining.schedule",
        "in which order a rank computes them: with one stage a rank gpipe or 1f1b, with several the others",
        Choice((*SINGLE, *MULTI)),
        ROUNDING,
        _SCHEDULE,
        states=_schedule,
    ),
)
