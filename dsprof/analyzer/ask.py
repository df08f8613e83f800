"""What changes would save that somebody asks about: each alone, and several together.

asked = [Without("rank.straggler", (2,)), Scaled("link", 10.0)]
answers = ask(study(trace), [asked])
answers.rows[0].gain  # ms, with its 95 % interval
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Final, Protocol

import numpy as np

from dsprof.words import did_you_mean

from . import signals
from .arrays import Float, Int
from .budget.step_budget import WORK
from .candidate import DeviceCost, Excess, OneOf
from .effect import Effect
from .finding import Gain
from .graph.step_graph import StepGraph
from .graph.validate import HeldOut
from .judge import Looked, look_for
from .memory.rank_memory import RankMemory
from .price.together import gain_together
from .rules.base import NotConcerned, NotJudged
from .rules.registry import all_rules, rule_of
from .signals import Absent, Missing
from .structure import PipelineStructure
from .study import Study
from .text import ranks as ranks_in_words
from .whatif import Refused, WhatIf
from .whatif.work import LessWork, ScaleWork, Spans

LINKS: Final = ("link", "link.bandwidth", "link.latency")
SCALED: Final = (*LINKS, *WORK)
"""What can be scaled: links, which get faster, and parts of a rank's own work, which take so many times as long."""
LIKE: Final = {"data": "data.stall", "pause": "pause.gc"}
"""Part of the work -> the code whose predictions are of the same kind; of the others it is that of a slow rank."""


class Misasked(ValueError):
    """What was asked about is not there, or is no such thing; the message names what is."""


class Request(Protocol):
    """Something that a user asks about. says: as it is typed."""

    @property
    def says(self) -> str: ...

    def effect(self, study: Study) -> Effect:
        """What it changes. Raises Misasked, and Refused, NotJudged or Missing where these steps do not tell."""
        ...


OF_THIS_RUN: Final = "that is what it cost this run: how often such a time comes, one does not tell"


@dataclass(frozen=True)
class Without:
    """A finding's fault gone, from these ranks alone or from all that have it."""

    code: str
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if rule_of(self.code) is None:
            codes = [rule.code for rule in all_rules()]
            hint = did_you_mean(self.code, codes, above=0.4, otherwise=f"; there are {', '.join(codes)}", show=str)
            raise Misasked(f"{self.code}: no finding has this code{hint}")

    @property
    def says(self) -> str:
        return f"without {self.code}" + (f":{','.join(map(str, self.ranks))}" if self.ranks else "")

    def effect(self, study: Study) -> Effect:
        absent = sorted(set(self.ranks) - set(study.ranks))
        if absent:
            raise Misasked(
                f"{self.says}: {ranks_in_words(absent)} is none of the run's ({ranks_in_words(study.ranks)})"
            )
        looked = look_for(study, self.code)
        found = [one for one in looked.candidates if isinstance(one.change, WhatIf)]
        if not found:
            raise _not_replayed(self.says, looked)
        changes = [one.change for one in found if isinstance(one.change, WhatIf)]
        spell = found[0].spell if len(found) == 1 else None
        if self.ranks:
            every = set(found[0].by_rank)  # which of very many ranks are not told one by one
            spell = spell if every and every <= set(self.ranks) else None
            changes = [self._of_ranks(study, change) for change in changes]
        return Effect(
            self.code, tuple(changes), counts_cores=all(one.counts_cores for one in found), between=found[0].between,
            spell=spell, notes=() if spell is None else (OF_THIS_RUN,),
        )  # fmt: skip

    def _of_ranks(self, study: Study, change: WhatIf) -> WhatIf:
        if not isinstance(change, LessWork):
            raise Misasked(f"{self.says}: what this would change is not of single ranks; write it without :RANK")
        threads, removed = np.array(study.need_graph().ranks), change.removed

        def whose(of_part: Float) -> Int:
            return threads if len(of_part) == len(threads) else np.array(study.ranks)

        have = {int(rank) for of in removed.removed.values() for rank in whose(of)[of.any(axis=1)].tolist()}
        missing = sorted(set(self.ranks) - have)
        if missing:
            has = ranks_in_words(sorted(have))
            raise Misasked(f"{self.says}: it is not of {ranks_in_words(missing)}, but of {has}")
        parts = {part: of * np.isin(whose(of), self.ranks)[:, None] for part, of in removed.removed.items()}
        spans = removed.spans
        if spans is not None:
            mine = np.isin(threads[spans.rank], self.ranks)
            spans = Spans(*(getattr(spans, one.name)[mine] for one in fields(spans)))
        what = self.says.removeprefix("without ")
        return LessWork(what, replace(removed, removed=parts, spans=spans, waits=()), change.peer_groups)


def _not_replayed(says: str, looked: Looked) -> Exception:
    """Why there is nothing to replay."""
    if looked.not_judged:
        return NotJudged(looked.not_judged)
    if looked.findings:
        fixes = [fix for one in looked.findings for fix in one.fixes if fix.knobs]
        ways = dict.fromkeys(" ".join(f"--set {key}={value}" for key, value in fix.knobs) for fix in fixes)
        instead = f"ask with {', or with '.join(ways)}" if ways else "`dsprof analyze` says what it costs"
        return NotJudged(f"what this finding saves depends on what is done instead: {instead}")
    if any(isinstance(one.change, OneOf) for one in looked.candidates):
        return NotJudged("it may be mended in several ways, which gain differently; `dsprof analyze` says how much")
    of_steps = [one.change for one in looked.candidates if isinstance(one.change, DeviceCost | Excess)]
    if any(isinstance(cost, DeviceCost) or cost.per == "step" for cost in of_steps):
        return NotJudged("what it costs was measured, not replayed; `dsprof analyze` says how much")
    if looked.candidates:
        return NotJudged(
            "it costs time outside ordinary steps, which no replay changes; `dsprof analyze` says how much"
        )
    return Misasked(f"{says}: this run has no such finding; `dsprof analyze` lists those it has")


@dataclass(frozen=True)
class Scaled:
    """A part of the step that takes so many times as long (`compute`, `data`, ...), links that are so many times as
    fast (`link`), or whose latency or bandwidth alone is so many times what it is."""

    part: str
    factor: float

    def __post_init__(self) -> None:
        if self.part not in SCALED:
            hint = did_you_mean(self.part, SCALED, otherwise=f"; there are {', '.join(SCALED)}", show=str)
            raise Misasked(f"{self.part}: no such part of a step{hint}")
        least = 0.0 if self.part in (*WORK, "link.latency") else 1e-6
        if not least <= self.factor < 1e9:
            raise Misasked(f"{self.part}={self.factor:g}: write a factor above 0, such as 0.5 or 10")

    @property
    def says(self) -> str:
        return f"{self.part} x {self.factor:g}"

    def effect(self, study: Study) -> Effect:
        if self.part in LINKS:
            latency, bandwidth = {
                "link": (1 / self.factor, self.factor),
                "link.bandwidth": (1.0, self.factor),
                "link.latency": (self.factor, 1.0),
            }[self.part]
            return Effect("comm.exposed", latency=latency, bandwidth=bandwidth, counts_cores=True)
        parts = (self.part, "sharding") if self.part == "compute" else (self.part,)
        work = ScaleWork(dict.fromkeys(parts, self.factor))
        return Effect(LIKE.get(self.part, "rank.straggler"), (work,))


@dataclass(frozen=True)
class Turned:
    """A knob turned. says: `KEY=VALUE`; change: what that does beside other knobs; key and value: of the knob; beside:
    all that the question turns, by key."""

    says: str
    change: Callable[[Study, Mapping[str, Any]], Effect]
    key: str
    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)

    def effect(self, study: Study) -> Effect:
        return self.change(study, self.beside)


@dataclass(frozen=True)
class Answered:
    """What changes that are made together save; `gain` None: that cannot be told, for `reason`.

    notes:  what it rests on, or is of
    memory: of each rank, where it is known what the changes hold; empty: it is not, or they hold nothing
    """

    asked: tuple[str, ...]
    gain: Gain | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    memory: tuple[RankMemory, ...] = ()


@dataclass(frozen=True)
class Answers:
    """rows: an answer for each question, in order.

    step_ms: the mean ordinary step as it was measured
    steps:   how many of them were replayed
    held_out: what steps that were replayed with what others took were missed by; None: too few are alike to say
    """

    step_ms: float
    steps: int
    held_out: HeldOut | None
    rows: tuple[Answered, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `dsprof whatif --json` prints it; ms a step, the interval at 95 %."""
        held = self.held_out
        return {
            "step_ms": self.step_ms,
            "steps_replayed": self.steps,
            "held_out_error_percent": None if held is None else 100 * held.missed,
            "halves_differ_percent": None if held is None else 100 * held.differs,
            "answers": [
                {
                    "asked": list(row.asked),
                    "then_ms": None if row.gain is None else self.step_ms - row.gain.ms,
                    "saved": None if row.gain is None else row.gain.to_dict(),
                    "reason": row.reason,
                    "notes": list(row.notes),
                    "memory": [one.to_dict() for one in row.memory],
                }
                for row in self.rows
            ],
        }


def ask(study: Study, questions: Sequence[Sequence[Request]]) -> Answers:
    """What the changes of each question save if they are made together.

    Raises Missing where these steps cannot be replayed, with what a capture lacks, and Misasked where something is
    asked about that the run does not have.
    """
    graph = signals.replay.look(study)
    if isinstance(graph, Absent):
        raise Missing(graph)
    rows = tuple(_answered(study, graph, question) for question in questions)
    held_out = None if study.checked is None else study.checked.held_out
    return Answers(study.step_ms, len(study.replayed_steps), held_out, rows)


def _answered(study: Study, graph: StepGraph, question: Sequence[Request]) -> Answered:
    asked = tuple(one.says for one in question)
    try:
        effects = [one.effect(study) for one in _as_one_plan(question)]
        notes = tuple(dict.fromkeys(note for one in effects for note in one.notes))
        rules = [rule for one in effects if (rule := rule_of(one.like)) is not None]
        errors = [rule.error for rule in rules if rule.error is not None]
        return Answered(asked, gain_together(study, graph, effects, errors), notes=notes)
    except NotConcerned:
        return Answered(asked, None, "the job has nothing that this is about")
    except (NotJudged, Refused, Missing) as refused:
        return Answered(asked, None, str(refused))


def _as_one_plan(question: Sequence[Request]) -> list[Request]:
    """Several changes of a pipeline's structure are one plan, and each knob is turned beside the others."""
    turned = {one.key: one.value for one in question if isinstance(one, Turned)}
    question = [replace(one, beside=turned) if isinstance(one, Turned) else one for one in question]
    structures = [one for one in question if isinstance(one, PipelineStructure)]
    others = [one for one in question if not isinstance(one, PipelineStructure)]
    try:
        return [*others, *([reduce(PipelineStructure.beside, structures)] if structures else [])]
    except ValueError as wrong:
        raise Misasked(str(wrong)) from None
