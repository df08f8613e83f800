"""A rank that is late where devices lead: its host, which launches late, or its device, which takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from ...arrays import Bool, Float
from ...budget.lanes import on_stream
from ...budget.parts import OWN_WORK, TRAINING_PHASES
from ...effect import Effect
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.chain_work import chain_groups, chain_work, hosts
from ...price.effects import effect_gains
from ...price.gains import may_gain
from ...study import Study, once
from ...text import ranks as ranks_in_words
from ...whatif import Refused
from ...whatif.work import Change
from ..base import LEAST_SHARE
from ..comm.slow_link import as_its_peers, slow_links
from ..compute.recompile import compiling
from ..data.experts import explained_by_tokens
from ..data.unequal_input import explained_by_input
from .cause import Cause, Late
from .late import late_ones, typical
from .late_cause import cause_of
from .late_pattern import Pattern, find_pattern
from .slow_machine import gpu_clock
from .unequal_shares import shares_fix

MOST_READ: Final = 8
"""Ranks whose rows are read to tell in which phases some are slower than others."""
HOST: Final = "host"
DEVICE: Final = "device"


@once
def _own_work(study: Study) -> Float:
    """Work of each chain in each judged step, less what the rank's input explains of its device's, and of its host's
    what it compiles, ms, [T, S]."""
    graph = study.need_graph()
    own: Float = np.sum([chain_work(graph, part) for part in OWN_WORK], axis=0)
    own[hosts(graph)] -= compiling(study)
    explained = explained_by_data(study)
    if explained is not None:
        own[: len(explained)] -= explained
    return own


def explained_by_data(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the input explains, or the tokens that are routed to it, ms,
    [R, S]; None: nothing does."""
    explained = explained_by_tokens(study)
    return explained_by_input(study) if explained is None else explained


@once
def _groups(study: Study) -> list[Bool]:
    return [group for group in chain_groups(study.need_graph(), study.peer_groups) if group.sum() > 1]


def slow_chains(study: Study) -> Change | None:
    """The slow chains as fast as the typical one of those that do the same."""
    graph = study.need_graph()
    own = _own_work(study)
    if own.shape[1] < 2:
        return None
    late = _late(study)
    share = late_ones(own, late, _groups(study), LEAST_SHARE * study.step_ms)
    if share is None:
        return None
    return Change({part: chain_work(graph, part) * share for part in OWN_WORK}, where_beyond_peers=True)


@once
def _late(study: Study) -> Float:
    own = _own_work(study)
    late = np.zeros_like(own)
    for group in _groups(study):
        late[group] = own[group] - typical(own[group])
    return late


def slow_chain(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Which rank's host or device it is, and in which phase."""
    graph, own, late = study.need_graph(), _own_work(study), _late(study)
    removed = _removed_ms(change)
    slow = removed > 0
    worst = int(removed.argmax())
    named, group = _named(study, removed)
    on_device = worst < graph.leads and len(graph.ranks) > graph.leads
    whose = DEVICE if on_device else HOST
    ranks = tuple(int(graph.ranks[chain]) for chain in np.flatnonzero(named).tolist())
    others = group & ~slow
    mine, typically = float(own[named].mean()), float(np.median(own[others].mean(axis=1)))
    evidence = [
        Evidence(f"work of the {whose} a step", round(mine, 3), "ms", round(typically, 3)),
        Evidence("other ranks wait a step", round(_others_wait(study, ranks), 3), "ms", 0.0),
    ]
    if on_device:
        of_chain = np.array(graph.ranks)
        latest = of_chain[named][np.argsort(-removed[named], kind="stable")]
        phases = device_phases(study, latest.tolist(), of_chain[others].tolist())
    else:
        phases = _host_phases(study, ranks)
    where = max(phases, key=lambda name: phases[name][0] - phases[name][1]) if phases else None
    if where is not None:
        value, expected = phases[where]
        evidence.append(Evidence(f"{where} on the {whose} a step", round(value, 3), "ms", round(expected, 3)))
        if value - expected < 0.5 * (mine - typically):
            where = None  # most of it lies between the phases
    who = ranks_in_words(ranks)
    pattern = pattern_of_chains(study, change)
    evidence.append(Evidence("when", pattern.when, ""))
    title = f"the {whose} of {who}{study.mesh.words(ranks)} is {pattern.late} and the other ranks wait"
    fixes = _fixes(who, where, on_device)
    cause = _cause(study, ranks, float(late[named].mean()), on_device)
    if cause is not None:
        title += f": {cause.words}"
        evidence += [*cause.evidence, Evidence("cause", cause.name if cause.sure else f"{cause.name}, probably", "")]
        fixes = cause.fixes if cause.sure else (*cause.fixes, *fixes)
    by_speed = shares_fix(study, late[named].mean(axis=0), phases) if on_device else None
    fixes = fixes if by_speed is None else (*fixes, by_speed)
    transfers = slower_transfers(study, ranks) if on_device else None
    if transfers is not None:
        said = "groups with it move the same more slowly than like groups: if that is its device too, more is saved by"
        evidence.append(Evidence(said, round(transfers.ms, 3), "ms"))
        gain, share = (may_gain(one, one.ms + transfers.ms) for one in (gain, share))
    at = Where(ranks=ranks, op=where, steps=pattern.steps or study.step_range)
    return Finding(
        "rank.straggler", title, "info", at, tuple(evidence), gain, fixes, share=share, of_this_run=pattern.long
    )


def _removed_ms(change: Change) -> Float:
    """Of each chain, mean over steps, [T]."""
    removed: Float = np.sum([of_part.mean(axis=1) for of_part in change.removed.values()], axis=0)
    return removed


def _named(study: Study, removed: Float) -> tuple[Bool, Bool]:
    """The late chains that are named: of the kind of the one that costs most, where both of a rank are late; and all
    chains of that kind."""
    group = next(group for group in _groups(study) if group[int(removed.argmax())])
    return (removed > 0) & group, group


def pattern_of_chains(study: Study, change: Change) -> Pattern:
    """When those are late that are named."""
    graph = study.need_graph()
    named, _ = _named(study, _removed_ms(change))
    ranks = tuple(int(graph.ranks[chain]) for chain in np.flatnonzero(named).tolist())
    return find_pattern(_late(study)[named], ranks, graph.judged_steps)


def slower_transfers(study: Study, ranks: tuple[int, ...]) -> Gain | None:
    """What it saves if the groups of slow devices move the same as fast as like groups without them; None where they
    do, or where no group is like theirs: a device that is slow is so at what it communicates, too."""
    links = tuple(as_its_peers(one) for one in slow_links(study) if set(one.ranks) & set(ranks))
    if not links:
        return None
    try:
        (gain,) = effect_gains(study, [Effect("comm.slow-link", links, counts_cores=True)])
    except Refused:
        return None
    return gain if gain.ms > 0 else None


def _cause(study: Study, ranks: tuple[int, ...], late_ms: float, on_device: bool) -> Cause | None:
    """Why a host is late, or its device."""
    slow: Bool = np.isin(study.ranks, ranks)
    return gpu_clock(Late(study, slow, late_ms)) if on_device else cause_of(study, slow, late_ms, of_host=True)


def _others_wait(study: Study, ranks: tuple[int, ...]) -> float:
    others = ~np.isin(study.ranks, ranks)
    return float(study.work("peer_wait")[others].mean()) if others.any() else 0.0


def _fixes(who: str, where: str | None, on_device: bool) -> tuple[Fix, ...]:
    if on_device:
        look = f"look at the device of {who}: its clock and its links (nvidia-smi -q -d CLOCK,PERFORMANCE), what "
        return (Fix("code", look + "else runs on it, and whether the rank is given more work than the others"),)
    place = f"in {where}" if where else "between the phases of the loop"
    look = f"look for what only {who} does {place} before it launches: a branch on the rank, logging, files, "
    return (Fix("code", look + "another process on its cores"),)


def _mine_and_others(spent: dict[int, float], ranks: Sequence[int]) -> tuple[float, float]:
    mine = [ms for rank, ms in spent.items() if rank in ranks]
    others = [ms for rank, ms in spent.items() if rank not in ranks]
    return float(np.mean(mine)) if mine else 0.0, float(np.median(others)) if others else 0.0


def _phase_ms(table: pd.DataFrame, study: Study) -> dict[int, dict[str, float]]:
    """Rank -> phase -> ms a step, of rows of any ranks."""
    chosen = table["name"].isin(TRAINING_PHASES) & table["dur_ns"].notna() & table["step"].isin(study.step_numbers)
    mine = table.loc[chosen, ["rank", "name", "dur_ns"]].astype({"rank": "int64", "name": str, "dur_ns": "int64"})
    found: dict[int, dict[str, float]] = {}
    for (rank, name), ns in mine.groupby(["rank", "name"])["dur_ns"].sum().items():
        found.setdefault(int(rank), {})[str(name)] = float(ns) / 1e6 / len(study.step_numbers)
    return found


def _by_phase(of_rank: dict[int, dict[str, float]], ranks: Sequence[int]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(name for of in of_rank.values() for name in of)
    return {name: _mine_and_others({rank: of.get(name, 0.0) for rank, of in of_rank.items()}, ranks) for name in names}


def _host_phases(study: Study, ranks: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    of_rank = _phase_ms(study.training_phases, study)
    return _by_phase({rank: of_rank.get(rank, {}) for rank in study.ranks}, ranks)


def device_phases(study: Study, slow: Sequence[int], others: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Phase -> ms a step on the devices of the first of `slow`, mean, and of some of the others, median: MOST_READ
    ranks are read in all."""
    slow = slow[: max(MOST_READ // 2, MOST_READ - len(others))]
    apart = -(-len(others) // max(MOST_READ - len(slow), 1))
    of_rank = {}
    for rank in (*slow, *others[:: max(apart, 1)]):
        rows = study.trace.read(rank, ("rank", "kind", "name", "lane", "step", "dur_ns", "source"))
        mine = (rows["kind"] == "kernel") & (rows["source"] == "measured")
        of_rank[rank] = _phase_ms(rows[mine & on_stream(rows["lane"])], study).get(rank, {})
    return _by_phase(of_rank, slow)
