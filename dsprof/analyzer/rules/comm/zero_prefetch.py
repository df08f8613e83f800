"""ZeRO's stage 3 whose modules wait for parameters that could be gathered while others compute: which
stage3_prefetch_bucket_size hides most of it, as the engine would gather with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...finding import Finding, Fix, Gain
from ...study import Study
from ..base import LEAST_SHARE, NotJudged, effect_gain
from .deepspeed_config import elements, told, zero_fix
from .dimensions import Domain, waited_ms
from .fetched_parameters import PREFETCH, limits, with_prefetch_bucket
from .prefetch import exposed_gathers, waiting_for_gathers

AHEAD: Final = (1, 2, 4)
"""So many of the largest gathers ahead are tried."""
NEXT: Final = "what comes next is gathered while a module computes"


def exposed_fetches(study: Study, domain: Domain) -> list[Finding]:
    """Ranks stand still for parameters: comm.exposed. The smallest value is offered of those that hide as much.

    Where it is not seen what the engine would gather with another one, the saving is that of gathers that are issued
    earlier, and may be nothing.
    """
    if waited_ms(study, domain) < LEAST_SHARE * study.step_ms:
        return []
    largest = float(domain.of("parameter").table["bytes"].max())

    def unseen(study: Study, ahead: int, gain: Gain) -> Fix:
        value = elements(study, (1 + ahead) * largest)
        if value <= told(study, "prefetch_bucket_size"):
            return Fix("code", NEXT, gain=gain)
        return zero_fix({PREFETCH: value}, NEXT, replace(gain, low=min(gain.low, 0.0)))

    try:
        present = limits(study)[0]
        values = [value for ahead in AHEAD if (value := elements(study, ahead * largest)) > present]
        tried = [(value, effect_gain(study, with_prefetch_bucket(study, value))) for value in values]
    except NotJudged:
        return exposed_gathers(study, domain, unseen)
    best, chosen = Gain(0.0, 0.0, 0.0, 0.0), 0
    for value, gain in tried:
        if gain.ms > best.ms + LEAST_SHARE * study.step_ms:
            best, chosen = gain, value
    if not chosen:
        return [waiting_for_gathers(study, domain, best, None)]
    return [waiting_for_gathers(study, domain, best, zero_fix({PREFETCH: chosen}, NEXT, best))]
