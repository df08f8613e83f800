"""comm.blocking: barriers and small collectives of the loop itself that all ranks wait for in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from ... import signals
from ...arrays import Int
from ...budget.activity import BARRIER, OF_THE_LOOP, OTHER
from ...candidate import Candidate, Price
from ...columns import codes_of, is_one_of
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...price.gains import sure_up_to
from ...study import Study, once
from ...text import count, ms
from ...whatif.communications import WithoutCommunications
from ...whatif.select import Communications
from ..base import LEAST_SHARE, NotConcerned, at, code_fix, installed
from ..rule import Found, Look, Rule
from .dimensions import GRADIENT, Domain, domains, need_every_rank, waited_ms

PHASES: Final = ("data", "forward", "backward", "optimizer")
SURELY: Final = (("optimizer", "data"),)
"""Between which phases a collective can be for nothing that the next batch is made of: what was trained is over, and
it is not there yet. It may decide whether to go on, or a learning rate: that can be waited for later, too."""
PERHAPS: Final = (("optimizer", "forward"), ("forward", "backward"))
"""Between which it may be for what is logged, or for what is computed next: how many words a batch has on all ranks."""
SMALL: Final = 4096
"""Bytes that numbers for a log have at most."""
OF_GRADIENTS: Final = 0.1
"""Of what is moved for gradients, that they are together at most: parameters that a script itself sends are more."""
MOSTLY: Final = 0.9
"""Of the steps: so many have it."""
EVERY: Final = 50
"""In which of the steps numbers for a log are enough."""


@dataclass(frozen=True)
class Calls:
    """Alike collectives of one process group. sizes: bytes that they have, empty: all of the group that are of their
    name; lines: of the script, that issue them; sure: whether these are known, and nothing that is computed can need
    it."""

    group: str
    name: str
    purpose: str
    a_step: float
    sizes: frozenset[int]
    lines: tuple[str, ...]
    sure: bool

    @property
    def change(self) -> WithoutCommunications:
        kind = f"{self.name} {self.purpose}"
        return WithoutCommunications(Communications(kinds=(kind,), groups=(self.group,)), self.sizes)


def blocking(study: Study) -> Found:
    """Barriers, and numbers that ranks add up or gather, in each step, gone."""
    need_every_rank(study)
    parts = [part for part in (one.of(OTHER, BARRIER) for one in domains(study)) if len(part.table)]
    if not parts:
        raise NotConcerned
    return [_candidate(study, calls) for part in parts for calls in _needless(study, part)]


def _needless(study: Study, part: Domain) -> Iterator[Calls]:
    if waited_ms(study, part) < LEAST_SHARE * study.step_ms and not (part.table["purpose"] == BARRIER).any():
        return
    gradients = sum(float(one.of(GRADIENT).table["bytes"].sum()) for one in domains(study))
    for group in part.groups:
        for calls in _calls_of(study, group):
            mine = part.table[(part.table["group"] == group) & (part.table["name"] == calls.name)]
            if calls.name == BARRIER or float(mine["bytes"].sum()) <= OF_GRADIENTS * gradients:
                yield calls


def _calls_of(study: Study, group: str) -> list[Calls]:
    """Those of a group that lie outside of what is computed, as one of its ranks issues them."""
    mine = _loop_calls(study).get(group)
    if mine is None:
        return []
    rank = int(mine["rank"].iloc[0])
    before, after, inside = _around(mine["issue_ns"].to_numpy(np.int64), _phases(study, rank))
    mine = mine.assign(before=before, after=after, inside=inside, bytes=mine["bytes"].fillna(0).astype("int64"))
    found = []
    for (name, purpose), alike in mine.groupby(["name", "purpose"], observed=True):
        between = pd.Series(list(zip(alike["before"], alike["after"], strict=True)), alike.index)
        outside = ~alike["inside"]
        small = alike["bytes"] <= SMALL
        if purpose == BARRIER:
            places = {True: outside, False: outside & False}
        else:
            places = {sure: outside & small & between.isin(of) for sure, of in ((True, SURELY), (False, PERHAPS))}
        for sure, chosen in places.items():
            some = alike[chosen]
            if some["step"].nunique() < MOSTLY * len(study.step_numbers):
                continue
            sizes = frozenset(some["bytes"].tolist())
            if sizes & set(alike["bytes"][~chosen].tolist()):
                continue  # such are communicated elsewhere, too
            lines = {
                line
                for operation, size, line in study.summaries[rank].activity.lines
                if operation == name and (size in sizes or name == BARRIER)
            }
            own = tuple(sorted(line for line in lines if not installed(line)))
            if lines and not own:
                continue  # a framework's own
            found.append(
                Calls(
                    group, str(name), str(purpose), len(some) / len(study.step_numbers),
                    frozenset() if chosen.all() else sizes, own, sure and bool(own),
                )
            )  # fmt: skip
    return found


@once
def _loop_calls(study: Study) -> dict[str, pd.DataFrame]:
    """Process group -> what the first rank that communicates there did so in ordinary steps, of no known purpose."""
    table = study.issued(*OF_THE_LOOP)
    table = table[table["step"].isin(study.step_numbers)]
    group, names = codes_of(table["group"])
    rank = table["rank"].to_numpy(np.int64)
    first = np.full(len(names) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, group, rank)
    table = table[(rank == first[group]) & (group >= 0)]
    text = table[["group", "purpose", "name"]].astype(object)
    table = table.assign(**{column: text[column] for column in text})
    return {str(group): of for group, of in table.groupby("group")}


@once
def _phases_by_rank(study: Study) -> dict[int, pd.DataFrame]:
    table = study.training_phases
    return {int(rank): of for rank, of in table[is_one_of(table["name"], *PHASES)].groupby("rank")}


def _phases(study: Study, rank: int) -> pd.DataFrame:
    """Those of a step that a collective may lie between, by start."""
    return _phases_by_rank(study).get(rank, study.training_phases[:0])


def _around(when: Int, phases: pd.DataFrame) -> tuple[Sequence[str], Sequence[str], Sequence[bool]]:
    """The phase that began last before each moment, the one that begins next, and whether it is inside of the former;
    empty names where there is none."""
    start = phases["start_ns"].to_numpy(np.int64)
    reach = np.maximum.accumulate(start + phases["dur_ns"].to_numpy(np.int64))
    names = ["", *phases["name"].astype(str), ""]
    place = np.searchsorted(start, when, side="right")
    inside = (place > 0) & (when < np.append(0, reach)[place])
    return [names[i] for i in place.tolist()], [names[i + 1] for i in place.tolist()], inside.tolist()


def _candidate(study: Study, calls: Calls) -> Candidate:
    def say(price: Price) -> Finding:
        many = count(round(calls.a_step), calls.name)
        lines = f" ({', '.join(line.rpartition('/')[2] for line in calls.lines)})" if calls.lines else ""
        title = f"{many} in each step{lines} {'is' if round(calls.a_step) == 1 else 'are'} waited for at once: "
        title += f"{ms(price.gain.ms)} of the step"
        title += "" if calls.sure else "; needless if what it tells is only logged"
        evidence = (
            Evidence("collectives of the loop itself a step", round(calls.a_step, 2), "count", 0),
            *(Evidence("line", line, "") for line in calls.lines),
        )
        where = Where(group=calls.group, op=calls.name, steps=study.step_range)
        gain = price.gain if calls.sure else _perhaps(price.gain)
        share = price.share if price.share is None or calls.sure else _perhaps(price.share)
        return Finding("comm.blocking", title, "info", where, evidence, gain, (_fix(calls, gain),), share=share)

    return Candidate("comm.blocking", calls.change, say, a_trade=not calls.sure)


def _perhaps(gain: Gain) -> Gain:
    return sure_up_to(gain, 0.0)


def _fix(calls: Calls, gain: Gain) -> Fix:
    site = calls.lines[0] if len(calls.lines) == 1 else None
    if calls.name == BARRIER:
        title = f"leave out the barrier{at(site)}: the collectives of the next step wait for late ranks all the same "
        title += "(but where ranks hand one another something that is not communicated, such as a file)"
        return code_fix(title, "barrier", "", site, gain)
    packed = "packed in one tensor, " if round(calls.a_step) > 1 else ""
    title = (
        f"{calls.name}{at(site)}: {packed}every {EVERY} steps if it is only logged, or with async_op=True and waited "
        "for where the number is read"
    )
    return code_fix(title, "async_op", True, site, gain)


RULES = (
    Rule(
        "comm.blocking",
        "barriers, or numbers that the loop itself communicates, are waited for in each step",
        explains=("comm_exposed",),
        looks=(Look(blocking, needs=(signals.replay,)),),
        needs=(signals.communications,),
        error=ModelError(of_gain=0.175, of_step=0.014, busy=0.014),
        place=106,
    ),
)
