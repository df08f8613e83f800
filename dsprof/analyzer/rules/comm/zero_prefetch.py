"""ZeRO's stage 3 by its own keys: which stage3_prefetch_bucket_size hides most of what modules wait for, or gathers
more at a time, as the engine would gather with it."""

from __future__ import annotations

from typing import Final

from ...finding import NOTHING, Finding, Fix, Gain
from ...price.gains import sure_up_to
from ...study import Study
from ..base import LEAST_SHARE, NotJudged, gain_of_all
from .deepspeed_config import elements, told, zero_fix
from .dimensions import Domain, waited_ms
from .fetched_parameters import PREFETCH, REDUCE, limits, with_prefetch_bucket, with_scatter_bucket
from .prefetch import exposed_gathers, waiting_for_gathers
from .shards import shards_of

AHEAD: Final = (1, 2, 4)
"""So many of the largest gathers ahead are tried."""
WITH: Final = {PREFETCH: with_prefetch_bucket, REDUCE: with_scatter_bucket}
"""Key -> (study, value) -> what that changes."""
NEXT: Final = "what comes next is gathered while a module computes"


def larger_buckets(study: Study, domain: Domain, together: int, merged: Gain) -> Fix:
    """Of stage 3: as many parameters are gathered, and gradients reduced, at a time as a bucket holds: `together` of
    the present ones. Its gain is what the engine would save with these keys.

    merged: what merging neighbours saves; where it is not seen what the engine would gather, or reduce, with other
    buckets, that is what may be saved, or nothing
    """
    largest = shards_of(domain).table.groupby("name", observed=True)["bytes"].max()
    keys = {"all_gather": (PREFETCH, "prefetch_bucket_size"), "reduce_scatter": (REDUCE, REDUCE)}
    wanted = {keys[str(name)]: elements(study, together * float(size)) for name, size in largest.items()}
    settings = {key: value for (key, setting), value in wanted.items() if value > told(study, setting)}
    note = f"{together} of the present ones at a time; it holds more memory"
    if not settings:
        return Fix("code", f"gather {note}", gain=merged)
    try:
        gain = gain_of_all(study, [WITH[key](study, value) for key, value in settings.items()])
    except NotJudged:
        gain = sure_up_to(merged, 0.0)
    return zero_fix(settings, note, gain)


def exposed_fetches(study: Study, domain: Domain) -> list[Finding]:
    """Ranks stand still for parameters: comm.exposed. The smallest value is offered of those that hide as much.

    Where it is not seen what the engine would gather with another one, the saving is that of gathers that are issued
    earlier, and may be nothing.
    """
    if waited_ms(study, domain) < LEAST_SHARE * study.step_ms:
        return []
    sizes = domain.of("parameter").table["bytes"]
    if not (sizes > 0).any():  # they were not told, so no value is known to hold what comes next
        return exposed_gathers(study, domain)
    largest = float(sizes.max())

    def unseen(study: Study, ahead: int, gain: Gain) -> Fix:
        value = elements(study, (1 + ahead) * largest)
        if value <= told(study, "prefetch_bucket_size"):
            return Fix("code", NEXT, gain=gain)
        return zero_fix({PREFETCH: value}, NEXT, sure_up_to(gain, 0.0))

    try:
        present = limits(study)[0]
        values = [value for ahead in AHEAD if (value := elements(study, ahead * largest)) > present]
        tried = [(value, gain_of_all(study, [with_prefetch_bucket(study, value)])) for value in values]
    except NotJudged:
        return exposed_gathers(study, domain, unseen)
    best, chosen = NOTHING, 0
    for value, gain in tried:
        if gain.ms > best.ms + LEAST_SHARE * study.step_ms:
            best, chosen = gain, value
    if not chosen:
        return [waiting_for_gathers(study, domain, best, None)]
    return [waiting_for_gathers(study, domain, best, zero_fix({PREFETCH: chosen}, NEXT, best))]
