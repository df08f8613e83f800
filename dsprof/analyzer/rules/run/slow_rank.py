"""One rank is slower than its peers, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ... import signals
from ...arrays import Bool, Float
from ...budget.label import innermost, spans_of
from ...budget.parts import OWN_WORK, TRAINING_PHASES
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import ms
from ...text import ranks as ranks_in_words
from ...whatif.work import Change
from ...work.stacks import Line, differing_line, told
from ..base import LEAST_SHARE, MOST_LISTED, NotJudged
from ..compute.device_kernels import COLLECTIVES
from ..compute.recompile import compiling
from ..rule import Rule, fault
from .cause import Cause
from .late import late_ones, mine_and_others, typical
from .late_cause import cause_of, unknown
from .late_pattern import Pattern, find_pattern
from .slow_chain import explained_by_data, pattern_of_chains, slow_chain, slow_chains
from .unequal_shares import shares_fix

OUTSIDE = "time outside the phases"
LONGEST_LINE_NS = 1 << 62
"""What whole numbers have room for."""


def slow_ranks(study: Study) -> Change | None:
    """The slow ranks as fast as the typical one (`late.late_ones`); where devices lead, their hosts and devices."""
    signals.peers(study)
    peer_groups = [peer_group for peer_group in study.peer_groups if peer_group.sum() > 1]
    if not peer_groups:
        raise NotJudged("each rank is another stage of a pipeline, so their work differs; see pipeline.imbalance")
    if study.led_by_devices:
        return slow_chains(study)
    if len(study.step_numbers) < 2:
        return None
    own, late = _own_work(study), _lateness_in_team(study)
    share = late_ones(own, late, peer_groups, LEAST_SHARE * study.step_ms)
    if share is None:
        return None
    return Change({part: study.work(part) * share for part in OWN_WORK}, where_beyond_peers=True)


def of_each_rank(study: Study, change: Change) -> dict[int, Change]:
    """The same with one of the slow ranks alone as fast as the typical one; of a few of them."""
    whose = np.array(study.need_graph().ranks if study.led_by_devices else study.ranks)
    slow = np.unique(whose[_slow(change)])
    if len(slow) > MOST_LISTED:
        return {}

    def alone(rank: int) -> Change:
        mine = (whose == rank)[:, None]
        return replace(change, removed={part: removed * mine for part, removed in change.removed.items()})

    return {rank: alone(rank) for rank in slow.tolist()}


@once
def _own_work(study: Study) -> Float:
    """Work of a step less what the rank's share of the input explains, or of the tokens that are routed to it, and what
    it compiles, ms, [R, S]."""
    own: Float = np.sum([study.work(part) for part in OWN_WORK], axis=0) - compiling(study)
    explained = explained_by_data(study)
    return own if explained is None else own - explained


def straggler(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Ranks that take longer for the same work, again and again, while the others wait."""
    if study.led_by_devices:
        return slow_chain(study, change, gain, share)
    own = _own_work(study)
    slow = _slow(change)
    late = _lateness_in_team(study)[slow].mean(axis=0)
    ranks = study.ranks_where(slow)
    pattern = _pattern(study, change)
    phases = _phase_excess(study, slow)
    where_slow = max(phases, key=lambda name: phases[name][0] - phases[name][1])
    mine, others = float(own[slow].mean()), float(np.median(own[~slow].mean(axis=1)))
    value, expected = phases[where_slow]
    evidence = [
        Evidence("own work a step", round(mine, 3), "ms", round(others, 3)),
        Evidence("peers wait a step", round(float(study.work("peer_wait")[~slow].mean()), 3), "ms", 0.0),
        Evidence(f"{where_slow} a step", round(value, 3), "ms", round(expected, 3)),
    ]
    evidence.append(Evidence("when", pattern.when, ""))
    cpu = study.gauges.spent("cpu_seconds").mean(axis=1)
    if np.isfinite(cpu).any():
        value, expected = mine_and_others(cpu, slow)
        evidence.append(Evidence("CPU time a step", round(value, 3), "ms", round(expected, 3)))
    verb = "arrives" if len(ranks) == 1 else "arrive"
    title = f"{ranks_in_words(ranks)}{study.mesh.words(ranks)} {verb} {pattern.late} and the others wait"
    where = Where(
        ranks=ranks, op=None if where_slow == OUTSIDE else where_slow, steps=pattern.steps or study.step_range
    )
    cause = cause_of(study, slow, float(late.mean()))
    if cause is None:
        evidence.append(Evidence("cause", unknown(study, slow, float(late.mean())), ""))
    else:
        evidence += [*cause.evidence, Evidence("cause", cause.name if cause.sure else f"{cause.name}, probably", "")]
        title += f": {cause.words}"
    fixes = _fixes(study, ranks, where_slow, cause)
    line = differing_line(study, slow, float(late.mean()))
    if line is not None:
        peers = [rank for rank in study.ranks if rank not in ranks]
        evidence.append(Evidence(f"in {line.words} a step", round(line.ms, 3), "ms", round(line.others_ms, 3)))
        if cause is None or not cause.sure:
            title += f": {told(line, peers)}" if cause is None else ""
            fixes = (_look_at(line, ranks), *fixes)
    by_speed = shares_fix(study, late, phases) if cause is None or not cause.sure else None
    fixes = fixes if by_speed is None else (*fixes, by_speed)
    return Finding(
        "rank.straggler", title, "info", where, tuple(evidence), gain, fixes, share=share, of_this_run=pattern.long
    )


def _slow(change: Change) -> Bool:
    """The ranks, or where devices lead the chains, of which something is removed."""
    slow: Bool = np.any([removed.any(axis=1) for removed in change.removed.values()], axis=0)
    return slow


def _pattern(study: Study, change: Change) -> Pattern:
    slow = _slow(change)
    return find_pattern(_lateness_in_team(study)[slow], study.ranks_where(slow), study.step_numbers)


def spell(study: Study, change: Change) -> tuple[int, int] | None:
    """The one time in which ranks were late, from step to step, if it was long: what it costs is told of this run."""
    pattern = pattern_of_chains(study, change) if study.led_by_devices else _pattern(study, change)
    return pattern.steps if pattern.long else None


@once
def _lateness_in_team(study: Study) -> Float:
    """By how much each rank's work of a step takes longer than what is typical of those that do the same, [R, S]."""
    own = _own_work(study)
    late = np.zeros_like(own)
    for peer_group in study.peer_groups:
        if peer_group.sum() > 1:
            late[peer_group] = own[peer_group] - typical(own[peer_group])
    return late


def _phase_excess(study: Study, slow: Bool) -> dict[str, tuple[float, float]]:
    """Phase -> mean ms of own work a step on the slow ranks and on the others, without pauses and waits for others."""
    pauses, columns = study.of_kind("pause"), ["rank", "start_ns", "dur_ns"]
    pauses = pauses[columns][(pauses["lane"] == "main") & pauses["dur_ns"].notna()].astype("int64")
    phases = study.training_phases[[*columns, "name"]][study.training_phases["step"].isin(study.step_numbers)]
    spent = {name: np.zeros(len(study.ranks)) for name in TRAINING_PHASES}
    first = 0
    for ranks, waits in study.waits.with_ranks(study.ranks):  # of many ranks there are many waits
        if not ranks:
            continue
        waits = waits[waits["arrival_ns"].notna()]  # the others are for what the rank itself does in another lane
        idle = [waits.assign(dur_ns=waits["end_ns"] - waits["start_ns"])[columns], pauses[pauses["rank"].isin(ranks)]]
        own = _own_of_phases(pd.concat(idle), phases[phases["rank"].isin(ranks)], ranks)
        for name, ns in own.items():
            spent[name][first : first + len(ranks)] = ns
        first += len(ranks)
    found = {name: mine_and_others(ns / 1e6 / len(study.step_numbers), slow) for name, ns in spent.items()}
    return {**found, OUTSIDE: mine_and_others(study.work("other").mean(axis=1), slow)}


def _own_of_phases(idle: pd.DataFrame, phases: pd.DataFrame, ranks: Sequence[int]) -> dict[str, Float]:
    """Name of a phase -> what each rank does itself in those of it, [R] ns. idle: when training threads stood still."""
    if phases.empty:
        return {}
    within = (phases["start_ns"].min(), (phases["start_ns"] + phases["dur_ns"]).max())
    idle = idle[idle["start_ns"].between(*within) & idle["rank"].isin(ranks)]
    # All ranks at once, one behind the other on one line of time.
    every = [table for table in (idle, phases) if len(table)]
    first = min(int(table["start_ns"].min()) for table in every)
    length = max(int((table["start_ns"] + table["dur_ns"]).max()) for table in every) - first + 1
    at_once = max(LONGEST_LINE_NS // length, 1)
    found: dict[str, Float] = {name: np.zeros(len(ranks)) for name in TRAINING_PHASES}

    def in_line(table: pd.DataFrame, begin: int) -> pd.DataFrame:
        place = np.searchsorted(ranks, table["rank"].to_numpy(np.int64)) - begin
        here = (place >= 0) & (place < at_once)
        start = table["start_ns"].to_numpy(np.int64)[here] - first + place[here] * length
        return table[here].assign(start_ns=start)

    for begin in range(0, len(ranks), at_once):
        waited = spans_of(in_line(idle, begin))
        for name, spans in innermost(in_line(phases, begin), {phase: phase for phase in TRAINING_PHASES}).items():
            own = spans.end - spans.start - (waited.before(spans.end) - waited.before(spans.start))
            found[name] += np.bincount(begin + spans.start // length, own, len(ranks))
    return found


def _look_at(line: Line, ranks: tuple[int, ...]) -> Fix:
    """To look at the line in which a rank differs from the others."""
    file, _, number = (line.site or "").rpartition(":")
    place = ({"file": file, "line": int(number), "argument": None, "value": None},) if number.isdigit() else ()
    more = ms(line.ms - line.others_ms)
    who = f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'}"
    return Fix("code", f"look at {line.words}, in which {who} {more} a step longer than the others", place)


def _fixes(study: Study, ranks: tuple[int, ...], phase: str, cause: Cause | None) -> tuple[Fix, ...]:
    host_of = {item.rank: item.host for item in study.run.ranks}
    hosts = {host_of.get(rank) for rank in ranks}
    everyone = {host_of.get(rank) for rank in study.ranks}
    who = ranks_in_words(ranks)
    if cause is not None and cause.sure:
        return cause.fixes
    fixes = [*cause.fixes] if cause is not None else []
    if len(everyone) > 1 and hosts != everyone:
        names = ", ".join(sorted(str(host) for host in hosts))
        fixes.append(Fix("code", f"take {names} out of the job and run again: if the delay goes, the host is to blame"))
    if cause is not None:
        return tuple(fixes)
    where = "between the phases of the loop" if phase == OUTSIDE else f"in {phase}"
    look = f"look for what only {who} does {where}: a branch on the rank, a slower device, "
    fixes.append(Fix("code", look + "another process on its cores"))
    return tuple(fixes)


RULES = (
    Rule(
        "rank.straggler",
        "one rank is late in every step and the others wait",
        explains=("peer_wait",),
        looks=(fault("rank.straggler", slow_ranks, straggler, by_rank=of_each_rank, spell=spell), COLLECTIVES),
        error=ModelError(of_gain=0.084, of_step=0.024, busy=0.024),
        came_true=(119, 125),
        place=10,
    ),
)
