"""One rank is slower than its peers, step after step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..context import Context, interval
from ..finding import Evidence, Finding, Fix, Gain, Where
from ..lanes import innermost, spans_of
from ..load import counted_per_step
from ..whatif.work import Change
from .base import LEAST_SHARE, NotConcerned, NotJudged, confidence_of
from .data import explained_by_size

Float = npt.NDArray[np.float64]

OWN = ("compute", "optimizer", "other")
"""Work that makes a straggler: late data and collector pauses have findings of their own."""
WORKING = ("forward", "loss", "backward", "clip", "optimizer")
OUTSIDE = "time outside the phases"
LEAST_OF_LATEST = 0.4
"""A step in which a rank is less late than this share of the worst is not one in which it was struck."""
LEAST_OF_WORST = 0.1
"""A rank this much less late than the latest is not named beside it."""


def slow_ranks(context: Context) -> Change | None:
    """The slow ranks as fast as the typical one.

    Slow is a rank whose work takes longer in the mean of the steps, and by more than chance explains: the low end of
    the mean's 95 % interval is above nothing.
    """
    if len(context.ranks) < 2:
        if context.ranks_missing:
            raise NotJudged("steps of only one of the job's ranks were captured")
        raise NotConcerned
    teams = [team for team in context.teams if team.sum() > 1]
    if not teams:
        raise NotJudged("each rank is another stage of a pipeline, so their work differs; see pipeline.imbalance")
    if len(context.step_numbers) < 2:
        return None
    own = _own_work(context)
    late = _lateness_in_team(context, own)
    mean = late.mean(axis=1)
    if mean.max() < LEAST_SHARE * context.step_ms:
        return None
    surely = np.array([interval(series)[0] > 0 for series in late])
    slow = surely & (mean > LEAST_OF_WORST * mean.max())
    for team in teams:
        members = np.flatnonzero(team)
        for r in members:  # of ranks that are late in turn each is late, but none more than the others
            others = own[[other for other in members if other != r]].mean(axis=0)
            slow[r] &= interval(own[r] - others)[0] > 0
        if 2 * slow[team].sum() > len(members):  # then that is how long it takes
            slow &= ~team
    if not slow.any():
        return None
    # What makes it late in the mean, taken from the steps in which it was late: from all alike if it is always so.
    removed = np.clip(late, 0, None) * slow[:, None]
    removed *= (mean / np.maximum(removed.mean(axis=1), 1e-9))[:, None] * slow[:, None]
    share = np.clip(removed / np.maximum(own, 1e-9), 0, 0.95)
    return Change({part: context.work(part) * share for part in OWN}, where_beyond_peers=True)


def _own_work(context: Context) -> Float:
    """Work of a step less what the rank's share of the input explains, ms, [R, S]."""
    own = sum((context.work(part) for part in OWN), np.zeros((len(context.ranks), len(context.step_numbers))))
    explained = explained_by_size(context)
    return own if explained is None else own - explained[0]


def straggler(context: Context, change: Change, gain: Gain, alone: Gain) -> Finding:
    """Ranks that take longer for the same work, again and again, while the others wait."""
    own = _own_work(context)
    slow: npt.NDArray[np.bool_] = np.any([removed.any(axis=1) for removed in change.removed.values()], axis=0)
    late = _lateness_in_team(context, own)[slow].mean(axis=0)
    ranks = tuple(rank for rank, chosen in zip(context.ranks, slow, strict=True) if chosen)
    phases = _phase_excess(context, ranks)
    where_slow = max(phases, key=lambda name: phases[name][0] - phases[name][1]) if phases else None
    peers = context.ordinary[~context.ordinary["rank"].isin(ranks)]
    mine, others = float(own[slow].mean()), float(np.median(own[~slow].mean(axis=1)))
    evidence = [
        Evidence("own work a step", round(mine, 3), "ms", round(others, 3)),
        Evidence("peers wait a step", round(float(peers["peer_wait"].mean()), 3), "ms", 0.0),
    ]
    if where_slow is not None:
        value, expected = phases[where_slow]
        evidence.append(Evidence(f"{where_slow} a step", round(value, 3), "ms", round(expected, 3)))
    cpu = counted_per_step(context.rows, context.steps, "cpu_seconds")
    if cpu:
        value, expected = _mine_and_others(pd.Series(cpu, dtype=float), ranks)
        evidence.append(Evidence("CPU time a step", round(value, 3), "ms", round(expected, 3)))
    names = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    verb = "arrives" if len(ranks) == 1 else "arrive"
    title = f"rank {names} {verb} {_lateness(late)} and the others wait"
    where = Where(ranks=ranks, op=None if where_slow == OUTSIDE else where_slow, steps=context.step_range)
    waits = pd.Series(counted_per_step(context.rows, context.steps, "core_wait_seconds"), dtype=float)
    value, expected = _mine_and_others(waits, ranks)
    waited = value - expected
    crowded = waited > 0.5 * float(late.mean())
    if crowded:
        evidence.append(Evidence("ready to run without a core, more than peers", round(waited, 3), "ms", 0.0))
    fixes = _fixes(context, ranks, where_slow, crowded)
    return Finding("rank.straggler", title, "info", confidence_of(gain), where, tuple(evidence), gain, fixes)


def _lateness_in_team(context: Context, own: Float) -> Float:
    """By how much each rank's work of a step takes longer than what is typical of those that do the same, [R, S]."""
    late = np.zeros_like(own)
    for team in context.teams:
        if team.sum() > 1:
            late[team] = own[team] - _typical(own[team])
    return late


def _lateness(late: Float) -> str:
    """`50.0 ms late in every step`, or in how many steps; `late` is by how much in each, ms, [S]."""
    struck = late > LEAST_OF_LATEST * late.max()
    if struck.mean() > 0.75:
        return f"{late.mean():.1f} ms late in every step"
    return f"{late[struck].mean():.1f} ms late in {struck.sum()} of {len(late)} steps"


def _typical(own: Float) -> Float:
    """What the work of a step takes the typical rank, [S]: the median; of two ranks the faster by median."""
    if own.shape[0] == 2:
        typical: Float = own[int(np.median(own, axis=1).argmin())]
        return typical
    middle: Float = np.median(own, axis=0)
    return middle


def _mine_and_others(by_rank: pd.Series[float], ranks: tuple[int, ...]) -> tuple[float, float]:
    """Mean of the slow ranks, and median of the others: 0 where nothing is known of them."""
    mine = by_rank.index.isin(ranks)
    value, expected = by_rank[mine].mean(), by_rank[~mine].median()
    return (0.0 if np.isnan(value) else float(value), 0.0 if np.isnan(expected) else float(expected))


def _phase_excess(context: Context, ranks: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """Phase -> mean ms of own work a step on the slow ranks, and on the others: waits and pauses left out."""
    rows, numbers = context.rows, context.step_numbers
    main = rows[(rows["lane"] == "main") & rows["step"].isin(numbers) & rows["dur_ns"].notna()]
    found: dict[str, dict[int, float]] = {}
    for rank, mine in main.groupby("rank"):
        idle = spans_of(mine[mine["kind"].isin(["wait", "pause"])])
        phases = mine[(mine["kind"] == "phase") & mine["name"].isin(WORKING)]
        for name, spans in innermost(phases, {phase: phase for phase in WORKING}).items():
            left = spans - idle
            found.setdefault(name, {})[int(rank)] = float((left.end - left.start).sum()) / 1e6 / len(numbers)
    result = {name: _mine_and_others(pd.Series(of, dtype=float), ranks) for name, of in found.items()}
    result[OUTSIDE] = _mine_and_others(context.ordinary.groupby("rank")["other"].mean(), ranks)
    return result


def _fixes(context: Context, ranks: tuple[int, ...], phase: str | None, crowded: bool) -> tuple[Fix, ...]:
    host_of = {item.rank: item.host for item in context.run.ranks}
    hosts = {host_of.get(rank) for rank in ranks}
    everyone = {host_of.get(rank) for rank in context.ranks}
    who = f"rank {', '.join(map(str, ranks[:8]))}"
    fixes = []
    if len(everyone) > 1 and hosts != everyone:
        names = ", ".join(sorted(str(host) for host in hosts))
        fixes.append(Fix("code", f"take {names} out of the job and run again: if the delay goes, the host is to blame"))
    if crowded:
        fixes.append(
            Fix(
                "code",
                f"something else runs on the cores of {who} (workers, the job's own threads, another process): "
                "give each rank cores of its own",
            )
        )
        return tuple(fixes)
    where = "between the phases of the loop" if phase == OUTSIDE else f"in {phase or 'its step'}"
    look = f"look for what only {who} does {where}: a branch on the rank, a slower device, "
    fixes.append(Fix("code", look + "another process on its cores"))
    return tuple(fixes)
