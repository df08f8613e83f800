"""Parameters that are gathered when they are needed: what gathering them earlier would hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...effect import Effect, WhatIfs
from ...finding import NOTHING, Evidence, Finding, Fix, Gain
from ...price.gains import sure_up_to
from ...study import Study
from ...text import ms
from ...whatif import WhatIf
from ...whatif.merge import Merge
from ...whatif.prefetched import Prefetched
from ...whatif.select import Communications
from ..base import LEAST_SHARE, at, code_fix, gains_tried
from .dimensions import Domain, waited_ms
from .possible_links import links_of_kinds
from .shards import GATHER, shards_of

AHEAD: Final = (1, 2)
"""So many gathers ahead are tried."""
OF_ITSELF: Final = 1
"""Units that FSDP2 gathers ahead on a device where nobody asks for more."""


def exposed_gathers(
    study: Study, domain: Domain, say: Callable[[Study, int, Gain], Fix] | None = None
) -> list[Finding]:
    """Ranks stand still for parameters that could be gathered while they compute: comm.exposed. say: the fix that
    gathers so many of them ahead."""
    waited = waited_ms(study, domain)
    if waited < LEAST_SHARE * study.step_ms:
        return []
    now = _gathered(domain, 0)
    tried = [Effect("comm.exposed", _gathered(domain, each), now, overlaps="more", counts_cores=True) for each in AHEAD]
    best, ahead = NOTHING, 0
    for each, gain in zip(AHEAD, gains_tried(study, tried, "gathering earlier was not tried"), strict=True):
        if gain.ms > best.ms + LEAST_SHARE * study.step_ms:
            best, ahead = gain, each
    # No public setting of torch's does it where collectives run on the CPU: a remark.
    if study.facts.get("fsdp") and not study.on_gpu:
        best = sure_up_to(best, 0.0)
    fix = (say or _fix)(study, ahead, best) if ahead else None
    return [waiting_for_gathers(study, domain, best, fix)]


def waiting_for_gathers(study: Study, domain: Domain, gain: Gain, fix: Fix | None) -> Finding:
    """comm.exposed of parameters. fix: what hides some of it, with its `gain`; None: nothing does."""
    waited = waited_ms(study, domain)
    gathers = len(domain.of("parameter").table) / len(study.step_numbers) / max(len(domain.groups), 1)
    evidence = (
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
        Evidence("all-gathers of parameters a step", round(gathers), "count"),
    )
    title = f"{ms(waited)} of each step wait for parameters and their gradients{domain.inside}"
    title += "" if fix else "; gathering earlier would hide none of it"
    fixes = () if fix is None else (fix,)
    return Finding("comm.exposed", title, "info", domain.where(study, "all_gather"), evidence, gain, fixes)


def _gathered(domain: Domain, ahead: int) -> WhatIfs:
    """Gathers issued so many ahead. Transfers are modelled, even where nothing is moved: what is under way at once
    shares the link."""
    changes: list[WhatIf] = [Merge(of, link, together=1) for of, link in links_of_kinds(shards_of(domain)).items()]
    if ahead:
        changes.append(Prefetched(Communications(kinds=(GATHER,), groups=domain.groups), ahead))
    return tuple(changes)


def _fix(study: Study, ahead: int, gain: Gain) -> Fix:
    what = "the next unit's parameters" if ahead == 1 else f"the parameters of the next {ahead} units"
    fact = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if fact is not None and fact.get("version") == 2 and study.on_gpu:
        site = fact.get("site")
        calls = "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch"
        title = (
            f"gather the next {OF_ITSELF + ahead} units while one computes{at(site)}, not the next alone: {calls} of "
        )
        title += "each unit, with the units that come next in forward and in backward; it holds more memory"
        knobs = dict.fromkeys(("fsdp2.forward_prefetch", "fsdp2.backward_prefetch"), OF_ITSELF + ahead)
        return code_fix(title, "set_modules_to_forward_prefetch", OF_ITSELF + ahead, site, gain, knobs)
    if fact is not None and fact.get("version") == 2:
        site = fact.get("site")
        title = f"gather {what} while one computes{at(site)}: set_modules_to_forward_prefetch([...]) of each unit, and "
        title += "where collectives run on the CPU _set_unshard_async_op(True) of the model, which is no public setting"
        return code_fix(title, "set_modules_to_forward_prefetch", ahead, site, gain)
    if fact is not None:
        title = f"FullyShardedDataParallel(forward_prefetch=True, backward_prefetch=BACKWARD_PRE){at(fact.get('site'))}"
        return code_fix(title, "forward_prefetch", True, fact.get("site"), gain)
    return Fix("code", f"gather {what} while one computes", gain=gain)
