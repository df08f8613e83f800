"""Parameters that are gathered when they are needed: what gathering them earlier would hide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ...arrays import Float
from ...finding import Evidence, Finding, Fix, Gain
from ...graph.replay import replay
from ...graph.step_graph import Edges, StepGraph, Steps
from ...price.contention import kept_of_overlap
from ...price.gains import beside_other_work, mean_gain
from ...study import Study
from ...text import ms
from ...whatif import Turn, WhatIf, apply
from ...whatif.edit import Recut, Restructure
from ...whatif.merge import families
from ...whatif.select import Communications
from ..base import LEAST_SHARE, at, code_fix, zero_stage
from .deepspeed_config import elements, told, zero_fix
from .dimensions import Domain, waited_ms

AHEAD: Final = (1, 2)
"""So many gathers ahead are tried."""
GATHER: Final = "all_gather parameter"
PREFETCH_KEY: Final = "stage3_prefetch_bucket_size"


@dataclass(frozen=True)
class Prefetched(WhatIf):
    """Each of these gathers is issued where the one `ahead` of it was in the same forward or backward, by every rank of
    its group. What is gathered first there is gathered where it is now."""

    of: Communications
    ahead: int
    turn = Turn.ORDER_OF_ISSUE

    @property
    def name(self) -> str:
        return f"{self.of} issued {self.ahead} ahead"

    def against(self, other: WhatIf) -> str | None:
        same = isinstance(other, Prefetched) and self.of.meets(other.of)
        return "both say when the same parameters are gathered" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._edit(graph)

    @cached_property
    def _edit(self) -> Restructure:
        return Restructure(self._earlier)

    def _earlier(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        source, target = structure.edges.source.copy(), structure.edges.target
        segments = structure.segments
        issue = (source < segments) & (target >= segments)
        at_of: dict[tuple[int, int], int] = {}  # (thread, task) -> its edge
        for edge in np.flatnonzero(issue).tolist():
            at_of[int(structure.thread[source[edge]]), int(target[edge]) - segments] = edge
        moved = False
        for family in families(steps, self.of):
            for thread in range(structure.threads):
                edges = [at_of[thread, c] for c in family if (thread, c) in at_of]
                was = [int(source[edge]) for edge in edges]
                for edge, earlier in zip(edges[self.ahead :], was, strict=False):
                    source[edge], moved = earlier, True
        if not moved:
            return None
        changed = replace(structure, edges=Edges(source, target))
        return Recut(changed, np.arange(segments + len(structure.tasks)), lambda steps: steps.costs)


def exposed_gathers(study: Study, domain: Domain) -> list[Finding]:
    """Ranks stand still for parameters that could be gathered while they compute: comm.exposed."""
    waited = waited_ms(study, domain)
    if waited < LEAST_SHARE * study.step_ms:
        return []
    best, ahead = Gain(0.0, 0.0, 0.0, 0.0), 0
    before = study.need_graph().measured
    for tried in AHEAD:
        gain = mean_gain(study, _saved(study, domain, tried, before))
        if gain.ms > best.ms + LEAST_SHARE * study.step_ms:
            best, ahead = gain, tried
    gathers = len(domain.of("parameter").table) / len(study.step_numbers) / max(len(domain.groups), 1)
    evidence = (
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
        Evidence("all-gathers of parameters a step", round(gathers), "count"),
    )
    title = f"{ms(waited)} of each step wait for parameters and their gradients{domain.inside}"
    title += "" if ahead else "; gathering earlier would hide none of it"
    fixes = (_fix(study, domain, ahead, best),) if ahead else ()
    return [Finding("comm.exposed", title, "info", domain.where(study, "all_gather"), evidence, best, fixes)]


def _saved(study: Study, domain: Domain, ahead: int, before: Float) -> Float:
    """ms saved in each step, [S]: as much as there are cores for, since a backend needs them, too."""
    earlier = Prefetched(Communications(kinds=(GATHER,), groups=domain.groups), ahead)
    saved: Float = before - replay(apply(study.need_graph(), [earlier])).durations
    saved = before - beside_other_work(study, before, before - saved)
    return np.where(saved > 0, kept_of_overlap(study) * saved, saved)


def _fix(study: Study, domain: Domain, ahead: int, gain: Gain) -> Fix:
    what = "the next unit's parameters" if ahead == 1 else f"the parameters of the next {ahead} units"
    fact = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if fact is not None and fact.get("version") == 2:
        site = fact.get("site")
        title = f"gather {what} while one computes{at(site)}: set_modules_to_forward_prefetch([...]) of each unit, and "
        title += "_set_unshard_async_op(True) of the model where its collectives run on the CPU"
        return code_fix(title, "set_modules_to_forward_prefetch", ahead, site, gain)
    if fact is not None:
        title = f"FullyShardedDataParallel(forward_prefetch=True, backward_prefetch=BACKWARD_PRE){at(fact.get('site'))}"
        return code_fix(title, "forward_prefetch", True, fact.get("site"), gain)
    if zero_stage(study) is not None:
        table = domain.of("parameter").table
        largest = elements(study, (1 + ahead) * float(table["bytes"].max()))
        if largest > told(study, "prefetch_bucket_size"):
            return zero_fix({PREFETCH_KEY: largest}, f"{what} are gathered while one computes", gain)
    return Fix("code", f"gather {what} while one computes", gain=gain)
