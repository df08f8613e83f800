"""A job whose ranks waited for one that did not come, and one whose ranks disagreed about a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import pandas as pd

from dsprof.live.frames import in_words, short
from dsprof.live.kernel_waits import in_the_kernel
from dsprof.live.waiting import Communication, Stall, described, ranks_in_words
from dsprof.run import RankExit, failures, from_known, last_processes
from dsprof.schema import DEADLOCK, LOCKED, STANDSTILL, WENT_ON

from ...finding import NOT_PRICED, Evidence, Finding, Fix, Where
from ...hang.issuing_lines import CallSite, call_sites
from ...hang.open_operations import stall_at_end
from ...hang.transient_hang import AT_WORK, has_passed, step_of
from ...study import Study, once
from ..base import NotConcerned, NotJudged
from ..rule import Look, Rule

STOOD_S: Final = 5.0
"""For how long a rank whose job failed must have stood still for a collective to have waited in it."""
RECORDER: Final = "flight_recorder"
"""The importer of what there is to be judged here."""
MOST_ASKED: Final = 64
"""Ranks that are asked whether the engine told of a deadlock: each that is in it does."""
MOST_CHILDREN: Final = 4
"""Kinds of child processes that are told."""


def hang_or_desync(study: Study) -> list[Finding]:
    """The rank that the others waited for in the end, or the collective that they disagreed about."""
    run = study.run
    imported = {str(fact.get("format")) for fact in study.facts.get("import", [])}
    alone = (run.world_size or len(run.ranks)) < 2
    if alone or imported - {RECORDER}:  # of others' traces each rank has its own window
        raise NotConcerned
    if len({item.rank for item in run.ranks}) < 2:
        raise NotJudged("fewer than two of the job's ranks were captured")
    proved = _proved(study)
    if proved is not None:
        return [proved]
    disagreement = study.communicated.disagreement
    if disagreement is not None:
        return [_finding(study, disagreement, {})]
    told = next((hang for hang in run.hangs[-1:] if not has_passed(study, hang)), None)
    if told is not None and run.status != 0:
        return [_finding(study, _as_told(told), told)]
    stall = stall_at_end(study.communicated.progress, study.phases, study.trace, run)
    if stall is None or stall.kind == "stuck":
        return []
    if imported or _all_stand(study, stall):
        return [_finding(study, stall, {})]
    failed = _failed_in_it(study, stall)
    return [] if failed is None else [_finding(study, failed, {})]


def _proved(study: Study) -> Finding | None:
    """What dsprof's engine has proved itself, and ended the job for."""
    if not failures(study.run.exits):
        return None
    said: dict[int, str] = {}
    for rank in sorted({item.rank for item in study.run.ranks})[:MOST_ASKED]:
        marks = study.trace.read(rank, ("kind", "name"))
        names = marks.loc[marks["kind"] == "mark", "name"].astype(str)
        told = names[names.str.startswith(DEADLOCK)]
        if len(told):
            said[rank] = told.iloc[0].removeprefix(DEADLOCK)
    if not said:
        return None
    text = next(iter(said.values()))
    title, _, advice = text.partition(". ")
    where = Where(ranks=tuple(said))
    return Finding("run.desync", title, "high", where, (), NOT_PRICED, (Fix("code", advice or title),))


def _as_told(hang: Mapping[str, Any]) -> Stall:
    """What the launcher saw while the job ran."""
    operation = from_known(Communication, hang["operation"])
    return Stall(hang["kind"], operation, tuple(hang["waiters"]), tuple(hang["culprits"]))


@once
def _standing(study: Study) -> Mapping[int, Mapping[str, Any]]:
    """Rank -> what it said of a standstill that it did not leave."""
    left = {(fact.get("rank"), fact.get("since_ns")) for fact in study.facts.get(WENT_ON, [])}
    facts = study.facts.get(STANDSTILL, [])
    said = {int(fact["rank"]): fact for fact in facts if (fact.get("rank"), fact.get("since_ns")) not in left}
    at_once = not any(fact.get("format") for fact in study.facts.get("import", []))
    one_clock = len({item.clock_name for item in study.run.ranks}) == 1
    if at_once and one_clock:  # else times were corrected, and those of facts not
        begun = {rank: summary.activity.begun_ns for rank, summary in study.summaries.items()}
        said = {rank: fact for rank, fact in said.items() if begun.get(rank, 0) <= int(fact["at_ns"])}
    return said


@once
def _locked(study: Study) -> Mapping[int, Mapping[str, Any]]:
    """Rank -> its stacks, where a thread held the interpreter's lock."""
    return {int(fact["rank"]): fact for fact in study.facts.get(LOCKED, [])}


def _all_stand(study: Study, stall: Stall) -> bool:
    """Whether the ranks themselves say so, without a launcher of ours: those that wait stood still for the time-out,
    and those that they wait for did too, without working, or had ended, or did not answer."""
    standing, locked = _standing(study), _locked(study)
    if not stall.waiters or not all(rank in standing for rank in stall.waiters):
        return False
    for rank in stall.culprits:
        said = standing.get(rank)
        if said is None and not (rank in locked or _ended(study, rank)):
            return False
        if said is not None and (said.get("works") or set(AT_WORK) & set(said.get("phases") or ())):
            return False
    return True


def _failed_in_it(study: Study, stall: Stall) -> Stall | None:
    """The stall, where the rank that failed first had stood still in it, as where a time-out of torch ended the job, or
    was told that another had gone: that one alone is the culprit then. None where another that it waited for failed."""
    failed = [item.rank for item in failures(study.run.exits)]
    if not failed or failed[0] not in stall.waiters or set(failed) & set(stall.culprits):
        return None
    # One that ended in order without having come: that is why the others failed, however soon.
    gone = tuple(rank for rank in stall.culprits if _left_before(study, rank, failed[0]))
    if gone:
        return replace(stall, culprits=gone)
    ended_ns = next((item.closed_ns for item in last_processes(study.run.ranks) if item.rank == failed[0]), None)
    stood = ended_ns is not None and (ended_ns - _last_begun(study, failed[0])) / 1e9 >= STOOD_S
    return stall if stood else None


def _left_before(study: Study, rank: int, failed: int) -> bool:
    """Whether a rank ended in order before another failed: by their captures, or by what the launcher saw where one of
    them was not closed, as after `os._exit(0)`."""
    closed = {item.rank: item.closed_ns for item in last_processes(study.run.ranks)}
    left_ns, failed_ns = closed.get(rank), closed.get(failed)
    if left_ns is None or failed_ns is None:
        exits = _exits(study)
        if failed not in exits or not _ended_well(study, rank):
            return False
        left_ns, failed_ns = (exits[one].ended_epoch_ns or exits[one].ended_ns for one in (rank, failed))
    return left_ns is not None and failed_ns is not None and left_ns <= failed_ns


@once
def _exits(study: Study) -> Mapping[int, RankExit]:
    """Rank -> how its last process ended, where a launcher saw that."""
    return {item.rank: item for item in last_processes(study.run.exits)}


def _ended_well(study: Study, rank: int) -> bool:
    """Whether a rank ended by itself with exit status 0."""
    end = _exits(study).get(rank)
    return end is not None and end.code == 0 and not end.stopped


def _last_begun(study: Study, rank: int) -> int:
    """When it began something last, ns."""
    rows = study.trace.read(rank, ("kind", "start_ns"))
    return int(rows.loc[rows["kind"].isin(["comm", "wait", "phase", "module", "pipe"]), "start_ns"].max())


# --- what is said


def _finding(study: Study, stall: Stall, told: Mapping[str, Any]) -> Finding:
    first, culprits = stall.operation, stall.culprits
    code, title = str(told.get("code") or stall.code), str(told.get("words") or stall.words)
    issued: dict[int, CallSite] = {}
    stands = {rank: site for rank in (*culprits, *stall.waiters) if (site := _site(study, rank))}
    for ranks, operation in stall.versions:
        issued |= call_sites(study.trace, ranks, operation, stands)
    sites = stands | {rank: line.site for rank, line in issued.items() if line.certain}
    if not told:
        places = [f"rank {rank} is at {short(stands[rank])}" for rank in culprits if rank in stands]
        ended = [rank for rank in culprits if stall.kind == "missing" and _ended(study, rank)]
        places += [f"{ranks_in_words(ended)} had ended"] if ended else []
        title += "".join(f"; {place}" for place in places)
    evidence: list[Evidence] = []
    if told.get("still_s") is not None:
        evidence.append(Evidence("nothing moved for", float(told["still_s"]), "s"))
    if told.get("aborted"):
        title += "; dsprof ended the job then (--on-hang abort)"
    for ranks, operation in stall.versions:
        where_issued = _issued_at([issued[rank] for rank in ranks if rank in issued])
        evidence.append(Evidence(f"{ranks_in_words(ranks)} issued", described(operation) + where_issued, ""))
    for rank in sorted({*culprits, *stall.waiters}):
        evidence += _stood(study, rank, culprit=rank in culprits)
        if rank in culprits and _ended_well(study, rank):
            evidence.append(Evidence(f"rank {rank} ended by", _exits(study)[rank].how, ""))
    for rank, threads in (told.get("threads") or {}).items():
        waiting = [in_the_kernel(str(item["wchan"]), str(item["state"])) for item in threads[:1]]
        evidence += [Evidence(f"rank {rank}: its main thread", said, "") for said in waiting]
        evidence += _children(rank, (told.get("children") or {}).get(rank) or [])
    complete = _last_step(study)
    versions = [rank for ranks, _ in stall.versions for rank in ranks]
    step = step_of(study, first, (*culprits, *stall.waiters, *versions))
    if step is None and complete is not None:
        step = complete + 1
    evidence.append(Evidence("last step that a rank completed", "none" if complete is None else complete, ""))
    where = Where(
        ranks=culprits or stall.waiters, group=first.group, op=first.name, steps=None if step is None else (step, step)
    )
    fixes = (_fix(code, stall, sites),)
    return Finding(code, title, "high", where, tuple(evidence), NOT_PRICED, fixes)


def _issued_at(lines: Collection[CallSite]) -> str:
    """Of the lines that issued something, behind what it is."""
    at = ", ".join(sorted({short(line.site) for line in lines if line.certain}))
    alike = ", ".join(sorted({short(line.site) for line in lines if not line.certain}))
    return (f" at {at}" if at else "") + (f" (such ones come from {alike})" if alike else "")


def _stood(study: Study, rank: int, *, culprit: bool) -> list[Evidence]:
    """Where a rank stood."""
    said = _standing(study).get(rank) or _locked(study).get(rank)
    if said is None:
        return []
    threads = said.get("threads") or []
    frames: list[list[Any]] = next((thread["frames"] for thread in threads if thread.get("trains")), [])
    if not frames:
        return []
    what = "stands in" if culprit else "waits in"
    return [Evidence(f"rank {rank} {what}", in_words(frames), "")]


def _children(rank: str, children: Iterable[Mapping[str, Any]]) -> list[Evidence]:
    """What those that do the same wait for, the rarest first: of DataLoader workers that is the one that is stuck."""
    alike = Counter((str(one["name"]), in_the_kernel(str(one["wchan"]), str(one["state"]))) for one in children)
    rarest = sorted(alike.items(), key=lambda item: item[1])[:MOST_CHILDREN]
    return [
        Evidence(f"rank {rank}: {f'{count} children' if count > 1 else 'a child'} ({name})", said, "")
        for (name, said), count in rarest
    ]


def _site(study: Study, rank: int) -> str | None:
    said = _standing(study).get(rank) or _locked(study).get(rank)
    return None if said is None else said.get("site")


def _ended(study: Study, rank: int) -> bool:
    """In order, as far as its capture or the launcher tells."""
    closed = any(item.rank == rank and item.closed for item in last_processes(study.run.ranks))
    return closed or _ended_well(study, rank)


def _last_step(study: Study) -> int | None:
    steps = study.of_kind("step")["step"]
    return None if steps.empty or pd.isna(steps.max()) else int(steps.max())


def _fix(code: str, stall: Stall, sites: Mapping[int, str]) -> Fix:
    culprits = stall.culprits
    what = stall.operation.words
    site = next((sites[rank] for rank in culprits if rank in sites), None)
    file, _, line = (site or "").rpartition(":")
    patch = ({"file": file, "line": int(line), "argument": None, "value": None},) if file and line.isdigit() else ()
    at = f": see {short(site)}" if site else ""
    if code == "run.desync":
        title = f"every rank must issue the same collectives of a group, in the same order, size and type{at}"
        return Fix("code", title, patch)
    if stall.kind == "stuck":
        return Fix("code", f"see whether the hosts reach each other, and that no rank in {what} is stopped")
    if stall.kind == "cycle":
        return Fix("code", f"have one side send while the other receives, or use batch_isend_irecv{at}", patch)
    return Fix("code", f"let {ranks_in_words(culprits)} reach {what}, or no rank wait for it{at}", patch)


_LOOK = Look(hang_or_desync)
RULES = (
    Rule(
        "run.hang",
        "ranks waited for one that did not come",
        looks=(_LOOK,),
        ends_run=True,
        place=60,
    ),
    Rule(
        "run.desync",
        "ranks disagreed about a collective: its name, order, size or type",
        looks=(_LOOK,),
        ends_run=True,
        place=70,
    ),
)
