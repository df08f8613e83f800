"""Hangs that resolved themselves: the job stood still for the time-out, and what it waited for came all the same.

The launcher told them live (`RunInfo.hangs`). Of a job without a launcher of ours the ranks' own watchdogs tell, and
the trace says for whom the others waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from dsprof.live.frames import in_words, short
from dsprof.live.waiting import Communication, ranks_in_words
from dsprof.run import from_known
from dsprof.schema import STANDSTILL, WENT_ON
from dsprof.trace import concat_rows

from ..align.match import PAIR, SEND_RECV, matched_group
from ..study import Study, once
from ..text import ms

AT_WORK: Final = ("checkpoint", "compile")
"""Phases in which a rank may take any time."""
MOST_SUSPECTS: Final = 8
"""Ranks whose rows are read: those that waited, or that the others waited for, did the same."""
ISSUED: Final = ("rank", "step", "kind", "name", "group", "seq", "peer", "tag", "start_ns")

Fact = Mapping[str, Any]


@dataclass(frozen=True)
class TransientHang:
    """ranks:  for which the others waited; none: not known
    step:   in which; None: outside of all, or not known
    what:   the communication, in words; `group` and `op` of it
    stood:  rank -> the line at which it stood, innermost of the user's own, and its frames in words
    """

    ranks: tuple[int, ...]
    seconds: float
    step: int | None
    what: str
    group: str
    op: str
    stood: Mapping[int, tuple[str, str]]

    @property
    def words(self) -> str:
        """`at step 30 the job stood still 12 s: it waited for rank 1 (train.py:33) in all_reduce 35 of group 0, then
        went on`."""
        sites = dict.fromkeys(short(self.stood[rank][0]) for rank in self.ranks if rank in self.stood)
        at = f" ({', '.join(sites)})" if sites else ""
        whom = f"it waited for {ranks_in_words(self.ranks)}{at} in {self.what}" if self.ranks else f"in {self.what}"
        when = "outside of all steps" if self.step is None else f"at step {self.step}"
        return f"{when} the job stood still {ms(1e3 * self.seconds)}: {whom}, then went on"


@once
def transient_hangs(study: Study) -> tuple[TransientHang, ...]:
    """In the order of time."""
    told = study.run.hangs
    found = [_of_launcher(study, hang) for hang in told if has_passed(study, hang)]
    if not told and study.run.started_ns is None:  # else the launcher watched, and called nothing a hang
        found += _of_ranks(study)
    return tuple(found)


def has_passed(study: Study, hang: Fact) -> bool:
    """Whether what the launcher called a hang resolved itself: it saw that, or the rank that was missing came after the
    last look."""
    if hang.get("went_on"):
        return True
    if hang.get("kind") != "missing":
        return False
    culprits = [int(rank) for rank in hang["culprits"]][:MOST_SUSPECTS]
    issued = set(_issued(study, from_known(Communication, hang["operation"]), culprits)["rank"])
    return bool(culprits) and set(culprits) <= issued


def step_of(study: Study, operation: Communication, ranks: Iterable[int]) -> int | None:
    """The step in which these ranks, of which some are asked, issued it."""
    steps = _issued(study, operation, list(dict.fromkeys(ranks))[:MOST_SUSPECTS])["step"]
    steps = steps[steps >= 0]
    return None if steps.empty else int(steps.max())


def _issued(study: Study, operation: Communication, ranks: Sequence[int]) -> pd.DataFrame:
    """rank and step of the rows of a communication on these ranks; of a message, both of its sides."""
    rows = concat_rows([study.trace.read(rank, ISSUED) for rank in ranks], ISSUED)
    numbered = (rows["kind"] == "comm") & (rows["group"] == operation.group) & (rows["seq"] == operation.seq)
    found = rows[numbered]
    if operation.peer is None:
        return found.loc[found["peer"].isna(), ["rank", "step"]]
    found = found[found["peer"].notna() & (found["tag"].fillna(-1) == operation.tag)]
    mine = found[found["name"] == operation.name]
    pairs = matched_group(found, study.run)
    started = (mine["start_ns"] - operation.start_ns).abs()
    if started.empty:
        return found.loc[[], ["rank", "step"]]
    return found.loc[pairs == pairs[started.idxmin()], ["rank", "step"]]


# --- of the launcher


def _of_launcher(study: Study, hang: Fact) -> TransientHang:
    operation = from_known(Communication, hang["operation"])
    ranks = tuple(int(rank) for rank in hang["culprits"])
    seconds = hang.get("stood_s")
    if seconds is None:  # it went on, and the job ended, before the launcher looked again
        rows = study.collectives
        same = rows[(rows["group"] == operation.group) & (rows["seq"] == operation.seq)]
        waited_s = float((same["last_ns"] - same["first_ns"]).max()) / 1e9 if len(same) else 0.0
        seconds = max(float(hang.get("still_s") or 0.0), waited_s)
    stood = {rank: said for rank in ranks if (said := _stood(study, rank, operation.start_ns)) is not None}
    step = step_of(study, operation, (*ranks, *(int(rank) for rank in hang.get("waiters") or ())))
    return TransientHang(ranks, float(seconds), step, operation.words, operation.group, operation.name, stood)


def _stood(study: Study, rank: int, begun_ns: int) -> tuple[str, str] | None:
    """Of what the rank said of the standstill in which something had begun."""
    said = [fact for fact in study.facts.get(STANDSTILL, []) if fact.get("rank") == rank]
    return _place(next((fact for fact in said if int(fact["at_ns"]) >= begun_ns), {}))


def _place(fact: Fact) -> tuple[str, str] | None:
    frames: list[list[Any]] = next(
        (thread["frames"] for thread in fact.get("threads") or () if thread.get("trains")), []
    )
    return (str(fact["site"]), in_words(frames)) if fact.get("site") else None


# --- of the ranks


def _of_ranks(study: Study) -> list[TransientHang]:
    """Where all captured ranks stood still at once, and the last to come to a communication neither worked nor was
    where it may take any time."""
    if len({item.clock_name for item in study.run.ranks}) != 1:  # times were corrected, and those of facts not
        return []
    expected = study.run.world_size or len(study.run.ranks)
    facts = [fact for fact in study.facts.get(STANDSTILL, []) if _ended(study, fact)]
    found = []
    for together in _overlapping(facts):
        of_rank = {int(fact["rank"]): fact for fact in together}
        if len(of_rank) < max(expected, 2):
            continue
        began, told = max(int(fact["since_ns"]) for fact in together), max(int(fact["at_ns"]) for fact in together)
        waited = study.collectives
        waited = waited[(waited["first_ns"] <= began) & (waited["last_ns"] >= told)].sort_values("first_ns")
        if waited.empty:
            continue
        first = waited.iloc[0]
        late = of_rank[int(first["late_rank"])]
        if late.get("works") or set(AT_WORK) & set(late.get("phases") or ()):
            continue
        group, step = str(first["group"]), int(first["step"])
        name = "message" if first["name"] == SEND_RECV else str(first["name"])
        what = f"{name} {int(first['seq'])} of group {group}"
        place = _place(late)
        rank = int(late["rank"])
        found.append(
            TransientHang(
                (rank,), (int(first["last_ns"]) - int(first["first_ns"])) / 1e9, step if step >= 0 else None, what,
                pd.Series([group]).str.replace(PAIR, "", regex=True).iloc[0], name, {rank: place} if place else {},
            )
        )  # fmt: skip
    return found


def _ended(study: Study, fact: Fact) -> bool:
    """Whether the rank said that it went on."""
    left = study.facts.get(WENT_ON, [])
    return any((one.get("rank"), one.get("since_ns")) == (fact.get("rank"), fact.get("since_ns")) for one in left)


def _overlapping(facts: Iterable[Fact]) -> list[list[Fact]]:
    """Those of one time: each was said before any other of them had begun."""
    found: list[list[Fact]] = []
    for fact in sorted(facts, key=lambda one: int(one["since_ns"])):
        if found and int(fact["since_ns"]) < min(int(one["at_ns"]) for one in found[-1]):
            found[-1].append(fact)
        else:
            found.append([fact])
    return found
