"""Ask every rule, price what they find, and rank it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np

from . import signals
from .budget.irregular import ENOUGH_STEPS, FEWEST_JUDGED
from .candidate import Candidate
from .finding import (
    ALLOCATOR_TWIN,
    FROM_SHAPES,
    MEASURED_MEMORY,
    MEASURED_ON_DEVICE,
    REPLAYED_ON_DEVICE,
    SEVERITIES,
    Evidence,
    Finding,
    Fix,
    Gain,
    severity_of,
)
from .freed_memory import give_back
from .price.certainty import with_all_errors
from .price.gains import noise_floor_ms
from .price.pricing import Priced, price_by_itself, price_together
from .rules import missing_collectors
from .rules.base import NotConcerned, NotJudged, PartlyJudged
from .rules.registry import all_rules
from .rules.rule import Found, Look, Rule
from .signals import Absent, Missing
from .study import Study
from .text import count
from .whatif import WhatIf

Answer = TypeVar("Answer")

ABOUT_AS_MUCH: Final = 0.9
"""Findings whose weights are within a tenth of one another weigh about as much: predictions are no more precise."""


@dataclass(frozen=True)
class Judged:
    """findings:   worst first.
    passed:     codes of the rules that ran and found nothing above `info`.
    not_judged: code -> why a rule could not be judged on this capture.
    noise_ms:   the run's noise floor; NaN where it is not known. It is that of the steps with every fault mended: one
                that strikes now and then must not hide in the noise that it makes.
    """

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_judged: Mapping[str, str]
    noise_ms: float


@dataclass(frozen=True)
class Looked:
    """What the rule of one code found: candidates, findings that are priced already, and why it could not be judged
    (empty: it was)."""

    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    not_judged: str


def judge(study: Study, rules: Sequence[Rule] | None = None) -> Judged:
    """Ask every rule, price what they find, and rank it. rules: all there are, by default."""
    return _Judging(study, all_rules() if rules is None else rules).run()


def look_for(study: Study, code: str) -> Looked:
    """What the rule of a code finds, not priced. Raises KeyError where no rule has the code."""
    judging = _Judging(study, [rule for rule in all_rules() if rule.code == code])
    if not judging.rules:
        raise KeyError(code)
    graph = signals.replay.look(study)
    judging._looks(graph.reason if isinstance(graph, Absent) else None)
    mine = tuple(one for one in judging.candidates if one.code == code)
    return Looked(mine, tuple(judging.found.get(code, ())), judging.not_judged.get(code, ""))


class _Judging:
    """What is found while rules are asked.

    absent: code -> why it cannot be judged, before it is asked
    lost:   the share that was taken off gains by replay, of the codes `on_busy_cores`, since cores are busy
    """

    def __init__(self, study: Study, rules: Sequence[Rule]) -> None:
        self.study = study
        self.rules = {rule.code: rule for rule in rules}
        self.candidates: list[Candidate] = []
        self.found: dict[str, list[Finding]] = {rule.code: [] for rule in rules}
        self.not_judged: dict[str, str] = {}
        self.not_concerned: set[str] = set()
        self.noise_ms, self.lost = math.nan, 0.0
        self.on_busy_cores: set[str] = set()
        self.absent = missing_collectors.reasons(study.facts, self.rules)
        self.asked = [rule for rule in rules if self._has(rule)]

    def run(self) -> Judged:
        refusal = self.absent.get(missing_collectors.EVERYTHING)
        if refusal is None:
            graph = signals.replay.look(self.study)
            refusal = graph.reason if isinstance(graph, Absent) else None
        self._looks(refusal)
        self._prices(refusal)
        self._keep_one_of_two()
        self._link_causes()
        rated = {code: self._worth_a_line(map(self._rated, of)) for code, of in self.found.items()}
        self._leave_what_few_steps_cannot_tell(rated)
        left_out = {*self.not_judged, *self.not_concerned}
        passed = [code for code, of in rated.items() if code not in left_out and all(f.severity == "info" for f in of)]
        findings = ranked([finding for of in rated.values() for finding in of], self.rules)
        return Judged(tuple(findings), tuple(passed), self.not_judged, self.noise_ms)

    def _has(self, rule: Rule) -> bool:
        """Whether the job has what a rule is about."""
        for signal in rule.needs:
            there = signal.look(self.study)
            if isinstance(there, Absent):
                self._put((rule.code,), there)
                return False
        return True

    def _put(self, codes: Sequence[str], absent: Absent) -> None:
        if absent.concerns:
            self.not_judged.update(dict.fromkeys(codes, absent.reason))
        else:
            self.not_concerned.update(codes)

    def _ask(self, codes: Sequence[str], rule: Callable[[], Answer]) -> Answer | None:
        missing = next((self.absent[code] for code in codes if code in self.absent), None)
        if missing is not None:
            self.not_judged.update(dict.fromkeys(codes, missing))
            return None
        try:
            return rule()
        except Missing as signal:
            self._put(codes, signal.absent)
        except NotConcerned:
            self.not_concerned.update(codes)
        except NotJudged as reason:
            self.not_judged.update(dict.fromkeys(codes, str(reason)))
        except Exception as error:  # one rule's mistake must not cost the others' findings
            self.not_judged.update(dict.fromkeys(codes, f"the rule failed: {type(error).__name__}: {error}"))
        return None

    def _looks(self, refusal: str | None) -> None:
        """Ask every rule. A look that several of them have is asked once, for all of them. refusal: why no gain can be
        told by replay."""
        codes_of: dict[Look, list[str]] = {}
        for rule in self.asked:
            for look in rule.looks:
                codes_of.setdefault(look, []).append(rule.code)
        for look, codes in codes_of.items():
            if refusal is not None and signals.replay in look.needs:
                self.not_judged |= {code: self.absent.get(code, refusal) for code in codes}
                continue
            give_back()  # what the one before made: of many ranks it is as much as this one needs
            said = self._ask(codes, partial(self._whole, look))
            if said is None:
                continue
            for code, reason in missing_collectors.unproved(self.study.facts, codes).items():
                if all(one.code != code for one in said):
                    self.not_judged[code] = reason
            if self.study.device is not None:
                for code in look.settles:
                    self.not_judged.pop(code, None)
            for one in said:
                if isinstance(one, Finding):
                    self.found.setdefault(one.code, []).append(one)
                else:
                    self.candidates.append(one)

    def _keep_one_of_two(self) -> None:
        """Of what is both replayed and measured of the devices' operations, the former; of a few traced steps the
        latter, which says so, with the gain of the other."""
        few = len(self.study.step_numbers) < FEWEST_JUDGED
        for code, found in self.found.items():
            replayed = [finding for finding in found if finding.gain.method == "replay"]
            traced = [finding for finding in found if finding.gain.method in (MEASURED_ON_DEVICE, REPLAYED_ON_DEVICE)]
            if not replayed or not traced:
                continue
            dropped = traced if not few else replayed
            self.found[code] = [finding for finding in found if finding not in dropped]
            if few and traced[0].gain.method == MEASURED_ON_DEVICE:
                gain = replace(replayed[0].gain, method=REPLAYED_ON_DEVICE)
                place = self.found[code].index(traced[0])
                self.found[code][place] = replace(traced[0], gain=gain)

    def _prices(self, refusal: str | None) -> None:
        """Price the candidates, and say what they are."""
        study = self.study
        replayed = [one for one in self.candidates if isinstance(one.change, WhatIf)]
        give_back()  # of many ranks, graphs that are changed need the room
        if refusal is None:
            replays = price_together(study, signals.replay(study), replayed)
            self.not_judged |= replays.refused
            self.noise_ms, self.lost = replays.noise_ms, replays.lost
            for priced in replays.priced:
                self._say(priced)
        else:
            self.not_judged |= {one.code: refusal for one in replayed}
            if study.graph is not None and not study.chains_unknown:
                self.noise_ms = noise_floor_ms(study, study.graph.measured)
        for one in self.candidates:
            if not isinstance(one.change, WhatIf):
                priced_alone = self._ask((one.code,), partial(price_by_itself, study, one))
                if priced_alone is not None:
                    self._say(priced_alone)

    def _say(self, priced: Priced) -> None:
        candidate = priced.candidate
        finding = self._ask((candidate.code,), partial(candidate.say, priced.price))
        if finding is None:
            return
        finding = replace(
            finding, together=priced.together or finding.together, by_rank=priced.by_rank,
            replayed=isinstance(candidate.change, WhatIf) and finding.code == candidate.code,
        )  # fmt: skip
        self.found.setdefault(finding.code, []).append(finding)
        if isinstance(candidate.change, WhatIf) and not candidate.counts_cores:
            self.on_busy_cores.add(finding.code)

    def _whole(self, look: Look) -> Found:
        """What was found, also where not all of the codes could be judged."""
        try:
            for signal in look.needs:
                signal(self.study)
            return look.find(self.study)
        except PartlyJudged as part:
            self.not_judged |= dict.fromkeys(part.unjudged, str(part))
            return part.findings

    def _leave_what_few_steps_cannot_tell(self, rated: Mapping[str, Sequence[Finding]]) -> None:
        """Of so few steps that no gain stands out of the noise, a rule that compares steps has neither found a fault
        nor passed, unless kernels tell."""
        steps = len(self.study.step_numbers)
        if steps >= FEWEST_JUDGED or self.study.graph is None:
            return
        by_kernels = {code for rule in self.asked for look in rule.looks for code in look.settles}
        reason = f"{count(steps, 'ordinary step')} cannot tell a gain from noise: profile at least {ENOUGH_STEPS}"
        for rule in self.asked:
            told = self.study.device is not None and rule.code in by_kernels
            if told or any(one.is_problem for one in rated[rule.code]) or rule.code in self.not_concerned:
                continue
            if any(signals.replay in look.needs for look in rule.looks):
                self.not_judged.setdefault(rule.code, reason)

    def _link_causes(self) -> None:
        """Where one finding is the reason of another one of the same ranks, each tells of the other, and what mending
        the one gains is what mending the other does."""
        for rule in self.rules.values():
            for code in rule.causes:
                self._link(rule.code, code)

    def _link(self, cause: str, effect: str) -> None:
        for late in self.found.get(effect, []):
            for place, reason in enumerate(self.found.get(cause, [])):
                if reason.where.ranks and late.where.ranks and set(late.where.ranks) <= set(reason.where.ranks):
                    self.found[cause][place] = replace(reason, gain=late.gain, share=late.share)
                    fix = Fix("code", f"see {cause}: {reason.title}")
                    self.found[effect] = [replace(one, fixes=(fix, *one.fixes)) for one in self.found[effect]]
                    return

    @staticmethod
    def _worth_a_line(rated: Iterable[Finding]) -> list[Finding]:
        """Without remarks on what mending would cost time: alone it does, and with others mended what it saves is not
        sure. Where the interval reaches above zero it may save, which is why such a job is not called healthy."""
        return [one for one in rated if one.is_problem or one.gain.ms >= 0 or one.gain.high > 0]

    def _rated(self, finding: Finding) -> Finding:
        """With the model's error in its intervals, and as severe as they allow."""
        study, rule = self.study, self.rules[finding.code]
        if rule.ends_run or finding.gain.method in (ALLOCATOR_TWIN, MEASURED_MEMORY, FROM_SHAPES):
            return finding
        measured = finding.gain.method in (MEASURED_ON_DEVICE, REPLAYED_ON_DEVICE)

        def surely(gain: Gain) -> Gain:
            contention_ms = gain.ms * self.lost / (1 - self.lost) if finding.code in self.on_busy_cores else 0.0
            return with_all_errors(study, gain, rule.error, contention_ms)

        together = finding.together
        finding = replace(
            finding,
            gain=surely(finding.gain),
            share=None if finding.share is None else surely(finding.share),
            together=None if together is None else replace(together, gain=surely(together.gain)),
            by_rank={rank: surely(gain) for rank, gain in finding.by_rank.items()},
            fixes=tuple(fix if fix.gain is None else replace(fix, gain=surely(fix.gain)) for fix in finding.fixes),
            confidence=None if measured or finding.of_this_run else rule.confidence,
        )
        if len(study.step_numbers) < FEWEST_JUDGED and not measured:  # that is of the traced steps, and says so
            return replace(finding, severity="info")
        # What was measured of a device's operations is no difference of steps.
        noise_ms = 0.0 if measured or math.isnan(self.noise_ms) else self.noise_ms
        return replace(finding, severity=severity_of(finding.weight, noise_ms))


def ranked(findings: list[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """Worst first: by severity, and then by what each weighs; of two that weigh about as much the one that is surer
    stands first. One that another outranks is no more severe than that, and stands after it, if that may well weigh as
    much: at least what this one surely gains."""
    weight = {id(finding): finding.weight.ms for finding in findings}
    surest = {id(finding): finding.weight.low for finding in findings}
    for place, finding in enumerate(findings):
        above = rules[finding.code].outranked_by if finding.code in rules else ()
        surely = finding.weight.low
        first = [one for one in findings if one.code in above and one.is_problem and one.weight.ms >= surely]
        if first and finding.is_problem:
            other = min(first, key=lambda one: (-SEVERITIES.index(one.severity), one.weight.ms))
            worst = max(SEVERITIES.index(finding.severity), SEVERITIES.index(other.severity))
            capped = replace(
                finding,
                severity=SEVERITIES[worst],
                evidence=(*finding.evidence, Evidence("counts only once this is fixed", other.code, "")),
            )
            weight[id(capped)] = min(finding.weight.ms, float(np.nextafter(other.weight.ms, -math.inf)))
            surest[id(capped)] = -math.inf
            findings[place] = capped

    def place_of(finding: Finding) -> tuple[bool, int, float]:
        ends_run = finding.code in rules and rules[finding.code].ends_run
        return not ends_run, SEVERITIES.index(finding.severity), -weight[id(finding)]

    found, left = [], sorted(findings, key=place_of)
    while left:
        heaviest = left[0]
        alike = [heaviest]
        if heaviest.is_problem:
            least = ABOUT_AS_MUCH * weight[id(heaviest)]
            alike = [one for one in left if place_of(one)[:2] == place_of(heaviest)[:2] and weight[id(one)] >= least]
        found.append(max(alike, key=lambda one: surest[id(one)]))
        left = [one for one in left if one is not found[-1]]
    return found
