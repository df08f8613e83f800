"""comm.slow-link: a group of ranks over which the same collectives take longer than over its peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from ... import signals
from ...arrays import Bool, Float, Int
from ...candidate import Candidate, Price
from ...finding import Evidence, Finding, Fix, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import count, ms, size
from ...text import ranks as ranks_in_words
from ...whatif.communications import ScaleLink
from ...whatif.select import Communications
from ..base import NotConcerned, NotJudged, hosts_of
from ..rule import Found, Look, Rule
from ..run.late_pattern import CHRONIC, FEWEST_STRUCK, in_turn, spell_of, struck_steps
from .dimensions import Domain, domains, need_every_rank

SLOWER: Final = 1.5
"""So many times what the same takes its peers, in the median."""
MORE_THAN_ELSE: Final = 1.25
"""So many times what the same takes a group in its other steps, where it is slow in some of them."""
FEWEST: Final = 8
"""Collectives of one kind and size that each group must have had."""
ALIKE: Final = 0.02
"""Sizes that differ by no more than this share are the same."""
SURE: Final = 0.1
"""All but this share of what a slow group moves takes longer than all but this share of what its peers do. Cores or
switches that are busy now and then make some slow, a slow link all."""
WANTED: Final = 0.05
"""Of the step: what ranks wait longer for a core than others do, from which on that may be why their link is slow."""
UNEVEN: Final = ("all_to_all",)
"""What takes as long as the shares that ranks get of it, which sizes do not tell unless all are alike."""


@dataclass(frozen=True)
class SlowLink:
    """times: what it takes longer than its peers, spent_ms: altogether; bytes, own_ms, peers_ms: of what most of its
    time goes to; steps: in which it is slow, None: all along; in_turn: whether others of its dimension are so in the
    other steps; others: groups on the same hosts that are as slow in the same steps, over the same link."""

    domain: Domain
    group: str
    ranks: tuple[int, ...]
    times: float
    op: str
    bytes: float
    own_ms: float
    peers_ms: float
    spent_ms: float = 0.0
    steps: Int | None = None
    in_turn: bool = False
    others: tuple[SlowLink, ...] = ()

    @property
    def spell(self) -> tuple[int, int] | None:
        """The first and the last step of the only part of the run in which it is slow."""
        return None if self.steps is None or self.in_turn else (int(self.steps[0]), int(self.steps[-1]))

    def when(self, study: Study) -> str:
        """` from step 5 to 9`, or nothing."""
        if self.steps is None:
            return ""
        if self.in_turn:
            return f" in {len(self.steps)} of {count(len(study.step_numbers), 'step')}, in turn with other links"
        return f" from step {self.steps[0]} to {self.steps[-1]}"


@once
def slow_links(study: Study) -> list[SlowLink]:
    """Groups of a dimension that are slow where the same collectives are compared with those of its other groups: all
    along, for a part of the run, or in turn. Of the latter two they are compared in those steps alone."""
    found = []
    for domain in domains(study):
        if domain.dimension is None or len(domain.dimension.teams) < 2:
            continue
        comparable = ~domain.table["name"].isin(UNEVEN) | _all_exchange_alike(study, domain)
        whole = domain.table["ranks"] == domain.dimension.size
        table = domain.table[whole & (domain.table["needs"] == "all") & comparable]
        table = table.assign(group=table["group"].astype(str), ms=table["transfer_ns"].to_numpy(np.float64) / 1e6)
        rows_of, peers = table.groupby("group").indices, _Alike(table)
        now_and_then: list[SlowLink] = []
        beside = _beside(study, domain)
        for group in domain.groups:
            own = table.take(rows_of.get(group, np.empty(0, np.int64)))
            one = _compared(study, domain, own, peers, group, beside[group])
            if one is not None:
                found.append(one)
                continue
            struck = struck_steps(_longer(study, own, peers, group))
            if not FEWEST_STRUCK <= struck.sum() <= CHRONIC * len(struck):
                continue
            spell = spell_of(struck)
            chosen = study.step_numbers[struck if spell is None else slice(spell[0], spell[1] + 1)]
            then = own["step"].isin(chosen)
            # To compare it with all others takes long where there are a thousand, and few differ from themselves.
            if own["ms"][then].median() < MORE_THAN_ELSE * own["ms"][~then].median():
                continue
            all_then = _Alike(table[table["step"].isin(chosen)])
            one = _compared(study, domain, own[then], all_then, group, beside[group], chosen)
            if one is not None:
                (now_and_then if spell is None else found).append(one)
        each = [np.isin(study.step_numbers, one.steps) for one in now_and_then if one.steps is not None]
        if len(each) > 1 and in_turn(np.array(each)):
            found += [replace(one, in_turn=True) for one in now_and_then]
    return found


def _all_exchange_alike(study: Study, domain: Domain) -> bool:
    """Whether all ranks of a dimension exchange as much as each other in each step, exchange by exchange: then they
    have equal shares."""
    every = study.communicated.exchanged
    mine = every[every["group"].isin(domain.groups) & every["step"].isin(study.step_numbers)]
    whole = mine.groupby(["step", "rank"])["bytes"].sum().groupby("step").agg(["min", "max"])
    each = mine.groupby(["step", "place"])["bytes"].agg(["min", "max"])
    return bool(len(each) and all((of["min"] >= (1 - ALIKE) * of["max"]).all() for of in (whole, each)))


def _longer(study: Study, own: pd.DataFrame, every: _Alike, group: str) -> Float:
    """By how much a group's collectives take longer in each step than those of its peers usually do, [S] ms."""
    more = np.zeros(len(study.step_numbers))
    for (name, purpose), mine in own.groupby(["name", "purpose"], dropna=False, observed=True):
        for bytes_, alike in _by_size(mine):
            medians = every.of(str(name), purpose, bytes_).medians
            others = medians[medians.index != group]
            if bytes_ > 0 and len(others):
                at = np.searchsorted(study.step_numbers, alike["step"].to_numpy(np.int64))
                np.add.at(more, at, alike["ms"].to_numpy(np.float64) - float(others.median()))
    return more


@dataclass(frozen=True, eq=False)
class _Same:
    """Collectives that are the same, of all groups: the median ms and the number of each group's."""

    table: pd.DataFrame
    medians: pd.Series[float]
    counts: pd.Series[int]


class _Alike:
    """Which collectives of all groups of a dimension are the same. What groups ask for alike is looked up once: of
    1,000 groups each would look through all the others' else."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._table = table
        self._found: dict[tuple[str, str, float], _Same] = {}

    def of(self, name: str, purpose: str, bytes_: float) -> _Same:
        key = name, "" if pd.isna(purpose) else purpose, bytes_
        if key not in self._found:
            table = self._table
            # The purpose of what no module asked for is not known.
            asked = table["purpose"].isna() if pd.isna(purpose) else table["purpose"] == purpose
            same = table[(table["name"] == name) & asked & ((table["bytes"] - bytes_).abs() <= ALIKE * bytes_)]
            each = same.groupby("group")["ms"]
            self._found[key] = _Same(same, each.median(), each.size())
        return self._found[key]


def _beside(study: Study, domain: Domain) -> dict[str, list[str]]:
    """Each group -> those on the same hosts, which may have its link, and itself: with these it is not compared. Itself
    alone where there are no others."""
    of_hosts = _on_hosts(study, domain)
    if len(of_hosts) < 2:
        return {group: [group] for group in domain.groups}
    return {group: groups if hosts else [group] for hosts, groups in of_hosts.items() for group in groups}


def _compared(
    study: Study,
    domain: Domain,
    own: pd.DataFrame,
    every: _Alike,
    group: str,
    beside: list[str],
    steps: Int | None = None,
) -> SlowLink | None:
    """A group beside its peers; None where it is not sure to be slower, or where that is not the link's. own: its
    collectives; every: those of all groups; beside: groups that are no peers; steps: that these are of, None: all"""
    whole, peers_whole, most = 0.0, 0.0, None
    for (name, purpose), mine in own.groupby(["name", "purpose"], dropna=False, observed=True):
        for bytes_, alike in _by_size(mine):
            if bytes_ <= 0:  # not told, as in tables that have times alone: nobody knows whether peers move as much
                continue
            same = every.of(str(name), purpose, bytes_)
            there = (same.counts > 0).to_numpy(bool)
            others = there & ~same.medians.index.isin(beside)
            if not others.any():  # on other hosts nothing is alike: one of several ways between these may be slow
                others = there & (same.medians.index != group)
            if len(alike) < FEWEST or not others.any() or same.counts[others].min() < FEWEST:
                continue
            usual, typical = float(same.medians[others].median()), float(alike["ms"].median())
            # Both last from an arrival by one clock to an end by another.
            if typical < SLOWER * usual or typical - usual <= 2 * study.clock_error_ms:
                return None  # one that is as fast as elsewhere: it is no matter of the link
            if not _surely(alike["ms"], same.table["ms"][same.table["group"].isin(same.medians.index[others])]):
                return None
            whole, peers_whole = whole + float(alike["ms"].sum()), peers_whole + usual * len(alike)
            if most is None or alike["ms"].sum() > most[0]:
                most = float(alike["ms"].sum()), str(name), bytes_, typical, usual
    if most is None or peers_whole <= 0 or wants_cores(study, _ranks_of(study, group), steps):
        return None
    members = study.mesh.of_group(group)
    ranks = _ranks_of(study, group) if members is not None else ()
    return SlowLink(domain, group, ranks, whole / peers_whole, *most[1:], whole, steps)


def _by_size(mine: pd.DataFrame) -> list[tuple[float, pd.DataFrame]]:
    """Collectives of each size, those of nearly the same together."""
    ordered = mine.sort_values("bytes")
    sizes = ordered["bytes"].to_numpy(np.float64)
    begins = np.flatnonzero(np.append(True, sizes[1:] > (1 + ALIKE) * sizes[:-1]))
    ends = np.append(begins[1:], len(sizes))
    return [(float(sizes[begin]), ordered.iloc[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def _surely(own: pd.Series[float], peers: pd.Series[float]) -> bool:
    return bool(own.quantile(SURE) > peers.quantile(1 - SURE))


def _ranks_of(study: Study, group: str) -> tuple[int, ...]:
    known = study.run.group(group).get("ranks")
    return tuple(sorted(int(rank) for rank in known)) if known else ()


def wants_cores(study: Study, ranks: tuple[int, ...], steps: Int | None = None) -> bool:
    """Whether one of these ranks waits longer for a core than the others, by as much as matters: on CPUs its backend's
    threads do, too. steps: that count, None: all do"""
    if study.contended is None:
        return False
    wanted = study.gauges.spent("core_wait_seconds")
    if wanted.shape[0] != len(study.ranks) or not np.isfinite(wanted).any():
        return False
    if steps is not None:
        wanted = wanted[:, np.isin(study.step_numbers, steps)]
    each = np.nanmean(np.where(np.isfinite(wanted), wanted, np.nan), axis=1)
    mine: Bool = np.isin(study.ranks, ranks)
    if not mine.any() or mine.all():
        return False
    more = float(np.nanmax(each[mine]) - np.nanmedian(each[~mine]))
    return more > WANTED * study.step_ms


def slow_link(study: Study) -> Found:
    """Each slow group with the transfers of its peers."""
    need_every_rank(study)
    if not any(one.dimension is not None and len(one.dimension.teams) > 1 for one in domains(study)):
        raise NotConcerned
    if not any((one.table["bytes"] > 0).any() for one in domains(study)):
        raise NotJudged("the sizes of collectives are not known, so which of them are the same is not, either")
    return [_candidate(study, one) for one in _by_hosts(study, slow_links(study))]


def _by_hosts(study: Study, links: list[SlowLink]) -> list[SlowLink]:
    """The same with groups as one that are on the same hosts and slow in the same steps, where all groups of their
    dimension that are on these are: they have the link in common, and to mend it for one of them saves nothing as long
    as the others hold the step up."""
    hosts = {link.group: frozenset(hosts_of(study, link.ranks)) for link in links}
    on_hosts = {id(link.domain): link.domain for link in links}
    groups_on = {key: _on_hosts(study, domain) for key, domain in on_hosts.items()}
    slow = {(link.group, _when(link)) for link in links}
    found: dict[object, list[SlowLink]] = {}
    for link in links:
        mine, when = hosts[link.group], _when(link)
        groups = groups_on[id(link.domain)].get(mine, ()) if mine else ()
        elsewhere = len(groups) < len(link.domain.groups)
        alike = elsewhere and all((group, when) in slow for group in groups)
        found.setdefault((mine, when) if alike else link.group, []).append(link)
    return [_as_one(each) for each in found.values()]


def _when(link: SlowLink) -> tuple[int, ...] | None:
    """The steps in which it is slow; None: all."""
    return None if link.steps is None else tuple(link.steps.tolist())


def _on_hosts(study: Study, domain: Domain) -> dict[frozenset[str], list[str]]:
    """The groups of a dimension by the hosts that they are on."""
    found: dict[frozenset[str], list[str]] = {}
    for group in domain.groups:
        found.setdefault(frozenset(hosts_of(study, _ranks_of(study, group))), []).append(group)
    return found


def _as_one(links: list[SlowLink]) -> SlowLink:
    """Of several groups the one that spends most, with the ranks of all."""
    worst, *others = sorted(links, key=lambda link: -link.spent_ms)
    if not others:
        return worst
    spent = sum(link.spent_ms for link in links)
    return replace(
        worst,
        ranks=tuple(sorted({rank for link in links for rank in link.ranks})),
        times=spent / sum(link.spent_ms / link.times for link in links),
        spent_ms=spent,
        others=tuple(others),
    )


def as_its_peers(link: SlowLink) -> ScaleLink:
    """The transfers of a slow group, and of those that have its link, as fast as those of its peers, while it is
    slow."""
    of = Communications(groups=(link.group, *(one.group for one in link.others)))
    steps = None if link.steps is None else frozenset(link.steps.tolist())
    return ScaleLink(latency=1 / link.times, bandwidth=link.times, of=of, steps=steps)


def _candidate(study: Study, link: SlowLink) -> Candidate:
    change, when = as_its_peers(link), link.when(study)
    kind = "rotating" if link.in_turn else "transient"
    evidence = (
        Evidence(f"{link.op} of {size(link.bytes)}", round(link.own_ms, 3), "ms", round(link.peers_ms, 3)),
        Evidence("times as slow as its peers", round(link.times, 2), "", 1.0),
        Evidence("when", f"{kind}:{when}" if when else "chronic: in all of the run", ""),
    )

    def say(price: Price) -> Finding:
        who = ranks_in_words(link.ranks) if link.ranks else f"process group {link.group}"
        title = (
            f"{who}{study.mesh.words(link.ranks)}: {link.op} of {size(link.bytes)} takes {ms(link.own_ms)}{when}, "
            f"and {ms(link.peers_ms)} over the links of their peers{link.domain.inside}{_and_others(link)}"
        )
        where = Where(
            ranks=link.ranks or None, group=link.group, op=link.op, steps=link.spell or study.step_range,
            dimension=link.domain.name or None,
        )  # fmt: skip
        return Finding(
            "comm.slow-link", title, "info", where, evidence, price.gain, _fixes(study, link, price), share=price.share
        )

    return Candidate("comm.slow-link", change, say)


def _and_others(link: SlowLink) -> str:
    """What else is slow over the same link."""
    if not link.others:
        return ""
    dimensions = sorted({one.domain.name for one in link.others} - {link.domain.name, ""})
    return f"; {count(1 + len(link.others), 'group')} on these hosts are slow" + (
        f", of {' and '.join(dimensions)} too" if dimensions else ""
    )


def _fixes(study: Study, link: SlowLink, price: Price) -> tuple[Fix, ...]:
    mine = sorted(hosts_of(study, link.ranks))
    teams = link.domain.dimension.teams if link.domain.dimension is not None else ()
    others = [hosts_of(study, team) for team in teams if set(team) != set(link.ranks)]
    gain = price.gain
    if len(mine) > 1 and all(len(one) < 2 for one in others):
        title = (
            f"order the ranks so that {ranks_in_words(link.ranks)} are on one host, as their peers are: they are on "
        )
        return (Fix("code", title + " and ".join(mine), gain=gain),)
    backend = str(study.run.group(link.group).get("backend") or "")
    if len(mine) > 1:
        name = "NCCL_SOCKET_IFNAME, NCCL_IB_HCA" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
        title = (
            f"the network between {' and '.join(mine)}: which interface it goes over ({name}), its speed, lost packets"
        )
        return (Fix("code", title, gain=gain),)
    if "nccl" in backend:
        title = "the links between these GPUs (`nvidia-smi topo -m`, `nvidia-smi nvlink -s`, NCCL_DEBUG=INFO): whether "
        return (Fix("code", title + "they have the NVLink or the PCIe lanes that their peers have", gain=gain),)
    return (Fix("code", "the memory and cores that these ranks share: NUMA, affinity, other processes", gain=gain),)


RULES = (
    Rule(
        "comm.slow-link",
        "the same collectives take one group of ranks longer than its peers",
        explains=("comm_exposed",),
        looks=(Look(slow_link, needs=(signals.replay,)),),
        needs=(signals.communications,),
        outranked_by=("rank.straggler",),
        error=ModelError(of_gain=0.175, of_step=0.014, busy=0.014),
        place=104,
    ),
)
