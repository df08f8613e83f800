"""Replay: the step time after a change, from the measured work of each rank and the collectives that tie them.

Each rank is a program: its own work, and in between, the collectives it issues and the waits it does. Work keeps its
measured duration, part by part (so that a what-if can take away `data` or scale `compute`); a collective begins when
its last rank has issued it and a worker of its group is free, and takes its measured transfer; a wait ends when its
collective has. A message begins when it is both sent and expected; what a root sends, when the root has come.
Everything else follows. All steps with the same program replay at once: one by one from starts as far apart as they
were measured (`run`), or each rank's step from where it ended the one before (`run_in_turn`), as a change that makes a
rank early needs. What was issued in an earlier step ends when it was measured to.

Not fitted: lanes contending for cores. `HostLoad` says where that limits a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from .budget import WORK, RankTime
from .intervals import Int
from .match import GLOO_WORKERS, SEND_RECV, matched_group

Float = npt.NDArray[np.float64]

PARTS: Final = len(WORK)
MOST_SWEEPS: Final = 24
SETTLED: Final = 1e-3
"""Of the mean step: starts that move by less between two sweeps have settled."""
MOST_PROGRAMS: Final = 50


@dataclass(frozen=True)
class Event:
    """A point of a rank's program.

    `issue` and `wait` name a collective of the program; a wait for None is for all gradients issued so far. `backward`
    marks where gradients begin to be made.
    """

    what: Literal["issue", "wait", "backward"]
    collective: int | None = None


@dataclass(frozen=True)
class Program:
    """S steps in which every rank does the same things in the same order, for R ranks.

    steps:     S step numbers
    events:    per rank, its points in order
    work:      per rank [points + 1, S, PARTS]: own work in ms before each point since the one before; last: to the end
    start:     [R, S] start of the step, ms from the earliest rank's
    transfer:  per collective [S], ms; collectives under way at once do not hinder each other's
    wire:      per collective [S], ms for which it has the link of its group to itself, after its transfer; zero for a
               measured one, whose transfer holds everything
    size:      per collective [S], bytes
    group:     per collective, its process group
    gradient:  per collective, whether it carries gradients
    needs:     per collective, whose arrival its participants depend on (see `match`); by default that of all
    root:      per collective, the index of its root in `ranks`, -1: none
    ended:     per collective, when it ended, [S] ms as `start`, if it was issued in an earlier step; else None
    message:   per collective, whether it is a send and its receive, which need no worker of their group
    kind:      per collective, its name and purpose
    """

    ranks: tuple[int, ...]
    steps: Int
    events: tuple[tuple[Event, ...], ...]
    work: tuple[Float, ...]
    start: Float
    transfer: tuple[Float, ...]
    wire: tuple[Float, ...]
    size: tuple[Float, ...]
    group: tuple[str, ...]
    gradient: tuple[bool, ...]
    needs: tuple[str, ...] = ()
    root: tuple[int, ...] = ()
    ended: tuple[Float | None, ...] = ()
    message: tuple[bool, ...] = ()
    kind: tuple[str, ...] = ()


def keep_of_peers(program: Program, rank: int, peers: list[int], removed: Float) -> Float:
    """What is left of a rank's work, [points + 1, S, 1] from 0 to 1, if `removed` ms of each step, [S], go from where
    it takes longer than its peers do (indices of `ranks`), between the same points; where they do other things, from
    all of its work in proportion."""
    mine = program.work[rank].sum(axis=-1)
    alike = [p for p in peers if [e.what for e in program.events[p]] == [e.what for e in program.events[rank]]]
    share = mine / np.maximum(mine.sum(axis=0), 1e-9)
    if alike:
        usual = np.median([program.work[p].sum(axis=-1).mean(axis=1) for p in alike], axis=0)
        more = np.clip(mine.mean(axis=1) - usual, 0, None)
        if more.any():
            share = np.broadcast_to((more / more.sum())[:, None], mine.shape)
    left: Float = np.clip(1 - share * removed / np.maximum(mine, 1e-9), 0, 1)
    return left[..., None]


def run(program: Program, keep: Sequence[Float] | None = None, start: Float | None = None) -> Float:
    """Step durations in ms, [R, S], each rank's work multiplied by its `keep`, [points + 1 or 1, S, PARTS or 1], from
    `start` ([R, S], ms), or the measured one."""
    count = len(program.ranks)
    work = [w if keep is None else w * keep[r] for r, w in enumerate(program.work)]
    start = program.start if start is None else start
    now = start.copy()
    at = [0] * count
    issued: list[set[int]] = [set() for _ in range(count)]
    came: list[dict[int, Float]] = [{} for _ in program.transfer]
    ended: dict[int, Float] = {c: end for c, end in enumerate(program.ended) if end is not None}
    free: dict[str, Float] = {}
    link: dict[str, Float] = {}
    steps = np.arange(len(program.steps))
    takers = [0] * len(program.transfer)
    for events in program.events:
        for c in {event.collective for event in events if event.what == "issue" and event.collective is not None}:
            takers[c] += 1

    def needs(c: int) -> str:
        return program.needs[c] if program.needs else "all"

    def end_for(r: int, c: int) -> Float | None:
        """When rank r's wait for c may end; None: not known yet."""
        root = program.root[c] if program.root else -1
        depends_on = needs(c)
        if r in came[c]:
            if depends_on == "root" and r != root and root >= 0:
                return came[c][root] + program.transfer[c] if root in came[c] else None
            if depends_on == "none" or (depends_on == "to-root" and r != root):
                return came[c][r] + program.transfer[c]
            return ended.get(c)  # once all have come
        return ended[c] if c in ended else now[r]  # issued in an earlier step, or never by this rank

    def advance(r: int) -> bool:
        """Run rank r up to its next unfinished dependency; whether it got anywhere."""
        moved = False
        while at[r] < len(program.events[r]):
            event = program.events[r][at[r]]
            if event.what == "wait":
                gradients = sorted(c for c in issued[r] if program.gradient[c])
                needed = gradients if event.collective is None else [event.collective]
                ends = [end for c in needed if (end := end_for(r, c)) is not None]
                if len(ends) < len(needed):
                    return moved
                now[r] = np.maximum.reduce([now[r] + work[r][at[r]].sum(axis=-1), *ends])
                issued[r].difference_update(needed)
            else:
                now[r] = now[r] + work[r][at[r]].sum(axis=-1)
                if event.what == "issue" and event.collective is not None:
                    arrive(r, event.collective)
            at[r] += 1
            moved = True
        return moved

    def arrive(r: int, c: int) -> None:
        issued[r].add(c)
        came[c][r] = now[r].copy()
        if len(came[c]) < takers[c]:
            return
        last: Float = np.max(list(came[c].values()), axis=0)
        if program.message and program.message[c]:
            ended[c] = last + program.transfer[c]
            return
        if needs(c) == "root":
            ended[c] = last + program.transfer[c]  # the root's
            return
        if needs(c) == "none":
            return  # each rank's end is its own
        group = program.group[c]
        workers = free.setdefault(group, np.full((GLOO_WORKERS, len(steps)), -np.inf))
        first = workers.argmin(axis=0)
        end = np.maximum(last, workers[first, steps]) + program.transfer[c]
        if program.wire[c].any():
            end = np.maximum(end, link.get(group, 0.0)) + program.wire[c]
            link[group] = end
        workers[first, steps] = end
        ended[c] = end

    moved = [True]
    while any(moved):
        moved = [advance(r) for r in range(count)]
    for r in range(count):  # a collective someone never joined: let the step end, as it did when measured
        for point in range(at[r], len(program.events[r]) + 1):
            now[r] = now[r] + work[r][point].sum(axis=-1)
    durations: Float = now - start
    return durations


def run_in_turn(chain: Sequence[Program], keeps: Sequence[Sequence[Float]]) -> list[Float]:
    """`run` of all programs of a job, each with its `keep`, with steps that follow one another: a rank begins a step
    when it has ended the one before, so what makes it late adds up over steps in which nobody waits for it.

    Starts are swept until they settle. Steps whose predecessor is not among them begin as the others do on average.
    """
    at = {step: (p, j) for p, program in enumerate(chain) for j, step in enumerate(program.steps.tolist())}
    links = [(at[step - 1], place) for step, place in at.items() if step - 1 in at]
    loose = [place for step, place in at.items() if step - 1 not in at]
    starts = [program.start.copy() for program in chain]
    for _ in range(MOST_SWEEPS):
        durations = [run(program, keep, start) for program, keep, start in zip(chain, keeps, starts, strict=True)]
        ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
        following = [start.copy() for start in starts]
        for (p, j), (q, k) in links:
            following[q][:, k] = ends[p][:, j] - ends[p][:, j].min()
        if links:
            usual = np.mean([following[q][:, k] for _, (q, k) in links], axis=0)
            for q, k in loose:
                following[q][:, k] = usual - usual.min()
        moved = max(float(np.abs(new - old).max()) for new, old in zip(following, starts, strict=True))
        starts = following
        if moved < SETTLED * float(np.mean([duration.mean() for duration in durations])):
            break
    return durations


def programs(
    times: dict[int, RankTime],
    rows: pd.DataFrame,
    collectives: pd.DataFrame,
    steps: pd.DataFrame,
    run: RunInfo | None = None,
) -> list[Program]:
    """The ordinary steps of `steps` as programs, those alike together. `rows` are the trace's.

    Where nearly every step differs from every other, only the commonest MOST_PROGRAMS kinds are replayed.
    """
    ranks = tuple(sorted(times))
    chosen = steps[steps["ordinary"]]
    numbers = np.sort(chosen["step"].unique()).astype(np.int64)
    # A step's issues belong to it or, on a rank that runs ahead, to the one before.
    near = np.unique(np.concatenate([numbers - 1, numbers, numbers + 1]))
    chosen_rows = rows[rows["step"].isin(near) & rows["kind"].isin(["comm", "phase"])]
    index = {key: row for row, key in enumerate(zip(collectives["group"], collectives["seq"], strict=True))}
    per_rank = {rank: _rank_points(times[rank], chosen_rows[chosen_rows["rank"] == rank], index, run) for rank in ranks}
    keys = zip(chosen["rank"].tolist(), chosen["step"].tolist(), strict=True)
    ends = (chosen["start_ns"] + chosen["dur_ns"]).tolist()
    spans = dict(zip(keys, zip(chosen["start_ns"].tolist(), ends, strict=True), strict=True))
    alike: dict[tuple[object, ...], list[int]] = {}
    for step in numbers:
        shape: list[tuple[int, int, int]] = []
        local: dict[int, int] = {}
        for rank in ranks:
            for what, target, _ in _within(per_rank[rank], spans[rank, int(step)]):
                if target >= 0:
                    local.setdefault(target, len(local))
                shape.append((rank, what, local.get(target, -1)))
        groups = tuple(collectives["group"].iloc[target] for target in local)
        alike.setdefault((tuple(shape), groups), []).append(int(step))
    commonest = sorted(alike.values(), key=len, reverse=True)[:MOST_PROGRAMS]
    return [_program(ranks, np.array(same), per_rank, spans, times, collectives) for same in commonest]


Points = tuple[Int, Int, Int]
"""Of one rank, in time order: index into WHAT, which row of the collectives (-1: none or all), when."""
WHAT: Final = ("issue", "wait", "backward")


def _rank_points(time: RankTime, rows: pd.DataFrame, index: dict[tuple[str, int], int], run: RunInfo | None) -> Points:
    comm = rows[(rows["kind"] == "comm") & rows["issue_ns"].notna() & rows["seq"].notna()]
    keys = zip(matched_group(comm, run), comm["seq"].astype("int64"), strict=True)
    target = np.array([index.get(key, -2) for key in keys], np.int64)
    matched = target >= 0
    issue = comm["issue_ns"].to_numpy(np.int64)[matched]
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward") & (rows["lane"] == "main")]
    backward_at = backward["start_ns"].to_numpy(np.int64)
    waits = time.waits[(time.waits["collective"] >= 0) | time.waits["derived"]]
    wait_at = waits["end_ns"].to_numpy(np.int64)
    # DDP waits for its buckets one after the other, for as many as are still under way: that is one wait for all.
    derived = waits["derived"].to_numpy(bool)
    number = np.searchsorted(np.sort(backward_at), wait_at)
    last = np.ones(len(waits), bool)
    last[:-1] = ~(derived[:-1] & derived[1:] & (number[:-1] == number[1:]))
    wait_target = np.where(derived, -1, waits["collective"]).astype(np.int64)[last]
    wait_at = wait_at[last]
    when = np.concatenate([issue, wait_at, backward_at])
    what = np.repeat([0, 1, 2], [len(issue), len(wait_at), len(backward_at)])
    targets = np.concatenate([target[matched], wait_target, np.full(len(backward_at), -1)])
    order = np.argsort(when, kind="stable")
    return what[order], targets[order], when[order]


def _within(points: Points, span: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The points inside one step."""
    low, high = np.searchsorted(points[2], span)
    return list(zip(*(values[low:high].tolist() for values in points), strict=True))


def _program(
    ranks: tuple[int, ...],
    numbers: Int,
    per_rank: dict[int, Points],
    spans: dict[tuple[int, int], tuple[int, int]],
    times: dict[int, RankTime],
    collectives: pd.DataFrame,
) -> Program:
    events: list[tuple[Event, ...]] = []
    work: list[Float] = []
    starts = np.zeros((len(ranks), len(numbers)))
    local: list[dict[int, int]] = [{} for _ in numbers]
    for r, rank in enumerate(ranks):
        columns = []
        for s, step in enumerate(numbers):
            start, end = spans[rank, int(step)]
            inside = _within(per_rank[rank], (start, end))
            starts[r, s] = start / 1e6
            for _, target, _ in inside:
                if target >= 0:
                    local[s].setdefault(target, len(local[s]))
            if s == 0:
                events.append(
                    tuple(Event(WHAT[what], local[0][target] if target >= 0 else None) for what, target, _ in inside)
                )
            when = np.array([start, *(moment for _, _, moment in inside), end], np.int64)
            columns.append(_work_between(times[rank], when))
        work.append(np.stack(columns, axis=1))
    order = [list(found) for found in local]
    picks = [np.array([found[c] for found in order]) for c in range(len(order[0]))]
    transfer = collectives["transfer_ns"].to_numpy(np.float64) / 1e6
    size = collectives["bytes"].to_numpy(np.float64)
    first = [int(pick[0]) for pick in picks]
    here = {event.collective for of_rank in events for event in of_rank if event.what == "issue"}
    ends = collectives["end_ns"].to_numpy(np.float64) / 1e6
    place = {rank: r for r, rank in enumerate(ranks)}
    return Program(
        ranks=ranks,
        steps=numbers,
        events=tuple(events),
        work=tuple(work),
        start=starts - starts.min(axis=0),
        transfer=tuple(transfer[pick] for pick in picks),
        wire=tuple(np.zeros(len(numbers)) for _ in picks),
        size=tuple(size[pick] for pick in picks),
        group=tuple(str(collectives["group"].iloc[row]) for row in first),
        gradient=tuple(str(collectives["purpose"].iloc[row]) == "gradient" for row in first),
        needs=tuple(str(collectives["needs"].iloc[row]) for row in first),
        root=tuple(place.get(int(collectives["root_rank"].iloc[row]), -1) for row in first),
        ended=tuple(None if c in here else ends[pick] - starts.min(axis=0) for c, pick in enumerate(picks)),
        message=tuple(str(collectives["name"].iloc[row]) == SEND_RECV for row in first),
        kind=tuple(f"{collectives['name'].iloc[row]} {collectives['purpose'].iloc[row]}" for row in first),
    )


def _work_between(time: RankTime, when: Int) -> Float:
    """Own work between consecutive moments, [len(when) - 1, PARTS] in ms. Waits for something unknown keep their
    length: they count as `other`."""
    spent = {part: np.diff(value) / 1e6 for part, value in time.before(when).items()}
    explained = sum(spent.values(), np.zeros(len(when) - 1))
    unknown = np.diff(time.unbound.before(when)) / 1e6
    spent["other"] = np.diff(when) / 1e6 - explained + spent["apart"] + unknown
    return np.stack([spent[part] for part in WORK], axis=-1)
