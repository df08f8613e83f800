"""What changes would save that somebody asks about: each alone, and several together.

asked = [Without("rank.straggler", (2,)), Scaled("link", 10.0)]
answers = ask(study(trace), [asked])
answers.rows[0].gain  # ms, with its 95 % interval
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Final, Protocol

import numpy as np

from dsprof.words import did_you_mean

from . import signals
from .arrays import Float, Int
from .budget.step_budget import WORK
from .candidate import Excess, OneOf
from .effect import Effect
from .finding import Gain
from .graph.replay import replay
from .graph.step_graph import StepGraph
from .graph.validate import HeldOut
from .judge import Looked, look_for
from .memory.rank_memory import RankMemory
from .price.calibration import ModelError
from .price.certainty import negated, with_all_errors
from .price.contention import lost_by_waiting_less
from .price.gains import mean_gain
from .price.pricing import between
from .rules.base import NotConcerned, NotJudged
from .rules.registry import all_rules, rule_of
from .signals import Absent, Missing
from .structure import PipelineStructure
from .study import Study
from .text import ranks as ranks_in_words
from .whatif import Refused, WhatIf, apply
from .whatif.communications import ScaleLink
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
        if self.ranks:
            changes = [self._of_ranks(study, change) for change in changes]
        return Effect(
            self.code, tuple(changes), counts_cores=all(one.counts_cores for one in found), between=found[0].between
        )

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
        return LessWork(what, replace(removed, removed=parts, spans=spans), change.peer_groups)


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
    if any(isinstance(one.change, Excess) and one.change.per == "step" for one in looked.candidates):
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
    """A knob turned. says: `KEY=VALUE`; change: what that does; key and value: of the knob."""

    says: str
    change: Callable[[Study], Effect]
    key: str
    value: Any

    def effect(self, study: Study) -> Effect:
        return self.change(study)


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
        return Answered(asked, _priced(study, graph, effects), notes=notes)
    except NotConcerned:
        return Answered(asked, None, "the job has nothing that this is about")
    except (NotJudged, Refused, Missing) as refused:
        return Answered(asked, None, str(refused))


def _as_one_plan(question: Sequence[Request]) -> list[Request]:
    """Several changes of a pipeline's structure are one plan."""
    structures = [one for one in question if isinstance(one, PipelineStructure)]
    others = [one for one in question if not isinstance(one, PipelineStructure)]
    try:
        return [*others, *([reduce(PipelineStructure.beside, structures)] if structures else [])]
    except ValueError as wrong:
        raise Misasked(str(wrong)) from None


def _priced(study: Study, graph: StepGraph, effects: Sequence[Effect]) -> Gain:
    """What these effects save together, with all that makes a prediction miss in the interval."""

    def took(*whatifs: Sequence[WhatIf]) -> Float:
        return replay(apply(graph, [whatif for some in whatifs for whatif in some])).durations

    def replayed(chosen: Sequence[Effect], variant: int) -> tuple[Float, Float]:
        """The steps that it begins at, and what is saved of each, ms, [S]. What is modelled is compared with a model of
        what there is now, beside all else that is changed: so the model's own error cancels."""
        pairs = [one.variants[min(variant, len(one.others))] for one in chosen]
        plain = [whatif for now, then in pairs if not now for whatif in then]
        latency = float(np.prod([one.latency for one in chosen]))
        bandwidth = float(np.prod([one.bandwidth for one in chosen]))
        if (latency, bandwidth) != (1.0, 1.0):
            plain.append(ScaleLink(latency, bandwidth))
        now = [whatif for now, _ in pairs for whatif in now]
        then = [whatif for now, then in pairs if now for whatif in then]
        if not now:
            before = took()
            return before, before - took(plain)
        modelled = took(now)
        if not plain:
            return modelled, modelled - took(then)
        return modelled, took() - took(plain) + took(plain, now) - took(plain, then)

    alone = [replayed([one], 0) for one in effects]
    lost = _lost(study, replayed([one for one in effects if not one.counts_cores], 0)[1])
    corrections = [
        one.correct(before, saved) - saved for one, (before, saved) in zip(effects, alone, strict=True)
    ]  # fmt: skip
    correction = np.sum(corrections, axis=0) - lost
    per_batch = float(np.prod([one.per_batch for one in effects]))

    def saved_of(variant: int) -> Float:
        before, saved = replayed(effects, variant)
        found: Float = before - (before - saved - correction) / per_batch
        return found

    saved = [saved_of(i) for i in range(max(len(one.variants) for one in effects))]
    gain, ends = mean_gain(study, saved[0]), [float(of.mean()) for of in saved[1:]]
    gain = replace(gain, low=min([gain.low, *ends]), high=max([gain.high, *ends]))
    unsure = float(sum(one.unsure_ms for one in effects))
    gain = replace(gain, low=gain.low - unsure, high=gain.high + unsure)
    for one, (_, own) in zip(effects, alone, strict=True):
        if one.between is not None:
            certain = mean_gain(study, own)
            wide = between(certain, one.between)
            gain = replace(gain, low=gain.low - (certain.low - wide.low), high=gain.high + wide.high - certain.high)
    errors = [rule.error for one in effects if (rule := rule_of(one.like)) is not None and rule.error is not None]
    worst = _worst(errors)
    if gain.ms < 0:
        return negated(with_all_errors(study, negated(gain), worst))
    return with_all_errors(study, gain, worst, float(lost.mean()))


def _lost(study: Study, saved: Float) -> Float:
    """What is lost again of what less work saves, [S] ms, as cores are busy."""
    lost: Float = saved * lost_by_waiting_less(study, float(saved.mean()) if len(saved) else 0.0)
    return lost


def _worst(errors: Sequence[ModelError]) -> ModelError | None:
    """The largest of each."""
    if not errors:
        return None
    names = ("of_gain", "of_step", "busy", "busy_above")
    return ModelError(*(max(getattr(error, name) for error in errors) for name in names))
