"""How the gradients of a dimension are reduced now: the buckets of each process group, and of which models they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ...graph.link import Link
from ...study import Study
from ...whatif.rebucket import reduced_in_backwards
from ..base import NotJudged
from .dimensions import GRADIENT, Domain
from .possible_links import links_of
from .redundant_reduce import repeated_reductions

Reduced = tuple[str, int | None]
"""The gradients of a process group; of one that reduces some in several backwards of a step those of one backward."""
Sizes = Mapping[Reduced, list[int]]
"""Into which buckets they are cut, bytes of each."""


@dataclass(frozen=True)
class ReducedGroup:
    """How a group of a dimension reduces its gradients now, all or those of one backward. sizes: bytes of a typical
    step, in order of issue. ddps: the models that they are of; empty: not known."""

    sizes: tuple[int, ...]
    link: Link
    total_bytes: float
    ddps: tuple[Mapping[str, Any], ...]

    @property
    def ddp(self) -> Mapping[str, Any] | None:
        """The largest model."""
        return max(self.ddps, key=lambda fact: sum(fact["gradient_bytes"]), default=None)

    def packed(self, cap_bytes: int) -> list[int]:
        """Bucket sizes with that cap; where DDP did not tell which tensors there are, of pieces of 64 KiB."""
        if self.ddps:
            return [size for fact in self.ddps for size in pack(list(map(int, fact["gradient_bytes"])), cap_bytes)]
        piece = max(min(1 << 16, cap_bytes // 8), 1 << 12)
        return pack([piece] * max(int(self.total_bytes // piece), 1), cap_bytes)


@dataclass(frozen=True)
class GradientDivision:
    """How the gradients of a dimension are reduced now: `count`, `total_bytes` of a group in a step, mean over groups;
    in_all: collectives of all groups in a step."""

    domain: Domain
    op: str
    count: int
    in_all: int
    total_bytes: float
    median_bytes: float
    host_ms: float
    link: Link
    """Of the group that moves most."""
    groups: Mapping[Reduced, ReducedGroup]
    ddp: Mapping[str, Any] | None
    """What the DistributedDataParallel that makes them said of itself."""

    def over(self, link_of: Callable[[ReducedGroup], Link]) -> GradientDivision:
        """The same over other links, of each group that which this gives."""
        groups = {name: replace(now, link=link_of(now)) for name, now in self.groups.items()}
        return replace(self, groups=groups)


def division_of(study: Study, domain: Domain) -> GradientDivision:
    whole, domain = domain, domain.of(GRADIENT)
    links, in_all = links_of(whole, domain), 0
    groups: dict[Reduced, ReducedGroup] = {}
    for group in domain.groups:
        table = domain.of_group(group)
        in_all += round(len(table) / table["step"].nunique())
        groups |= _several_backwards(study, group, links[group]) or {
            (group, None): _group(study, group, table, links[group])
        }
    largest = max(groups.values(), key=lambda one: one.total_bytes)
    named = len(domain.groups)
    return GradientDivision(
        domain=domain,
        op=str(domain.table["name"].mode().iloc[0]),
        count=round(in_all / named),
        in_all=in_all,
        total_bytes=sum(one.total_bytes for one in groups.values()) / named,
        median_bytes=float(domain.table["bytes"].median()),
        host_ms=study.host_ms(GRADIENT),
        link=largest.link,
        groups=groups,
        ddp=largest.ddp,
    )


def _group(study: Study, group: str, table: pd.DataFrame, link: Link) -> ReducedGroup:
    """Of the gradient collectives of one process group, all in one backward."""
    total = float(table["bytes"].sum() / table["step"].nunique())
    one_step = table[table["step"] == table["step"].iloc[len(table) // 2]]
    sizes = tuple(int(size) for size in one_step.sort_values("first_ns")["bytes"])
    return ReducedGroup(sizes, link, total, _ddps_of(study, group, total))


def _several_backwards(study: Study, group: str, link: Link) -> dict[Reduced, ReducedGroup]:
    """Of a process group that reduces gradients of several models, each in a backward of its own; empty: of one that
    does not. One that reduces the same ones again and again is judged by comm.redundant-reduce."""
    if repeated_reductions(study) is not None:
        return {}
    steps = max(study.need_graph().templates, key=lambda of: len(of.numbers))
    reduced = reduced_in_backwards(steps, group)
    if len(reduced) < 2:
        return {}
    found: dict[Reduced, ReducedGroup] = {}
    for backward, tasks in reduced.items():
        sizes = tuple(round(float(np.mean(steps.size[task]))) for task in tasks)
        ddps = _ddps_of(study, group, sum(sizes))
        if not ddps and study.facts.get("ddp"):
            raise NotJudged("no other bucket size was tried: it is not known of which model the gradients of each of "
                            f"{len(reduced)} backwards of a step are")  # fmt: skip
        found[group, backward] = ReducedGroup(sizes, link, float(sum(sizes)), ddps)
    return found


def _ddps_of(study: Study, group: str, total_bytes: float) -> tuple[Mapping[str, Any], ...]:
    """The DDP of a rank of the process group whose gradients are as large as what is reduced, or the two that are
    together; empty: none is."""
    every = [fact for fact in study.facts.get("ddp", []) if fact.get("gradient_bytes")]
    members = study.run.group(group).get("ranks", ())
    some = next((fact for fact in every if fact.get("rank") in members), every[0] if every else {})
    mine = [fact for fact in every if fact.get("rank") == some.get("rank")]
    # Of two models in one backward, the one that was made last is in front: it is the other's judge, head, critic.
    of_them = [(fact,) for fact in mine] + [(b, a) for a, b in combinations(mine, 2)]

    def apart(facts: tuple[Mapping[str, Any], ...]) -> float:
        return abs(math.log(sum(sum(fact["gradient_bytes"]) for fact in facts) / max(total_bytes, 1)))

    best = min(of_them, key=apart, default=())
    return best if best and apart(best) < math.log(2) else ()


def pack(tensors: list[int], cap_bytes: int) -> list[int]:
    """Bucket sizes as DDP makes them for an explicit bucket_cap_mb: a bucket closes when it has reached its size."""
    sizes, current = [], 0
    for tensor in tensors:
        current += tensor
        if current >= cap_bytes:
            sizes.append(current)
            current = 0
    return [*sizes, current] if current else sizes
