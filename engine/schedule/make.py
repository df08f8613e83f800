"""Schedules by the names of the configuration (`pipeline.schedule`)."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Final

from .plan import Plan
from .schedules import gpipe, interleaved, one_f_one_b, zero_bubble

SCHEDULES: Final[dict[str, Callable[..., Plan]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Name -> what makes its plan from ranks and micro-batches, and those of `VIRTUAL` from virtual stages too."""

VIRTUAL: Final = frozenset({"interleaved"})
"""Schedules in which a rank can hold several parts of the model."""

ALIASES: Final = {"zb": "zero-bubble", "zb-h1": "zero-bubble", "zbh1": "zero-bubble", "vpp": "interleaved"}
"""What papers and other frameworks call them, where that is unlike."""


def make_plan(schedule: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Plan:
    """The plan of a schedule, without transfers. Micro-batches may be fewer than stages.

    Raises ValueError for a schedule that there is not, a size below 1, and virtual stages that the schedule has not.
    """
    if schedule not in SCHEDULES:
        nearest = ALIASES.get(schedule.lower()) or max(
            SCHEDULES, key=lambda name: SequenceMatcher(None, schedule.lower(), name).ratio()
        )
        raise ValueError(
            f'there is no pipeline schedule "{schedule}"; the nearest is "{nearest}" (of {", ".join(SCHEDULES)})'
        )
    for name, size in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if size < 1:
            raise ValueError(f"{name} is {size}; a pipeline needs at least 1")
    if schedule in VIRTUAL:
        return SCHEDULES[schedule](ranks, microbatches, virtual_stages)
    if virtual_stages > 1:
        raise ValueError(
            f'virtual_stages is {virtual_stages}, and "{schedule}" knows one stage a rank; '
            f'write virtual_stages 1, or the schedule "interleaved"'
        )
    return SCHEDULES[schedule](ranks, microbatches)
