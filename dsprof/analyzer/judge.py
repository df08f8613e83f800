"""Ask every rule, and rank what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np

from .budget.irregular import FEWEST_JUDGED
from .finding import (
    ALLOCATOR_TWIN,
    MEASURED_MEMORY,
    MEASURED_ON_DEVICE,
    SEVERITIES,
    Evidence,
    Finding,
    Gain,
    Together,
    severity_of,
)
from .graph.stalled import find_stalls
from .price.attribution import attribute
from .price.calibration import confidence, with_model_error
from .price.contention import busy, lost_by_waiting_less
from .price.gains import mean_gain, noise_floor_ms
from .rules import (
    ABOUT_GPUS,
    FAULTS,
    LEAST_SHARE,
    ON_DEVICES,
    PRICED_BY_REPLAY,
    RULES,
    NotConcerned,
    NotJudged,
    PartlyJudged,
    missing_collectors,
)
from .rules.base import need_host, need_steps
from .rules.compute.throttle import with_cause
from .study import Study
from .text import ms
from .whatif.work import Change, less

MOST_CLOCK_ERROR: Final = 0.2
"""Of the step."""

Judged = TypeVar("Judged")


@dataclass(frozen=True)
class Judgement:
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


def judge(study: Study) -> Judgement:
    """Ask every rule, price what they find, and rank it."""
    found: dict[str, list[Finding]] = {}
    not_judged: dict[str, str] = {}
    not_concerned: set[str] = set()
    every = dict.fromkeys((*FAULTS, *(code for of_rule in RULES for code in of_rule)))
    off = missing_collectors.reasons(study.facts, every)
    if not (study.on_gpu or study.facts.get("gpu")):  # there is nothing to judge with any collector
        off = {code: reason for code, reason in off.items() if code not in ABOUT_GPUS}

    def ask(codes: tuple[str, ...], rule: Callable[[], Judged]) -> Judged | None:
        missing = next((off[code] for code in codes if code in off), None)
        if missing is not None:
            not_judged.update(dict.fromkeys(codes, missing))
            return None
        try:
            return rule()
        except NotConcerned:
            not_concerned.update(codes)
        except NotJudged as reason:
            not_judged.update(dict.fromkeys(codes, str(reason)))
        except Exception as error:  # one rule's mistake must not cost the others' findings
            not_judged.update(dict.fromkeys(codes, f"the rule failed: {type(error).__name__}: {error}"))
        return None

    noise_ms, lost = math.nan, 0.0
    refusal = off.get(missing_collectors.EVERYTHING) or _refusal(study)
    if refusal is not None:
        not_judged |= {code: off.get(code, refusal) for code in FAULTS}
        if study.graph is not None and not study.on_gpu:
            noise_ms = noise_floor_ms(study, study.graph.measured)
    else:
        changes: dict[str, Change] = {}
        for code, (mended, _) in FAULTS.items():
            change = ask((code,), partial(mended, study))
            if change is not None:
                changes[code] = change
        graph = study.need_graph()
        stalls = find_stalls(graph)  # once: they are the same for all faults
        whatifs = {code: less(graph, change, study.peer_groups, stalls) for code, change in changes.items()}
        found_shares = attribute(graph, whatifs)
        noise_ms = noise_floor_ms(study, found_shares.left)
        whole = found_shares.before - found_shares.left
        lost = lost_by_waiting_less(study, float(whole.mean()) if len(whole) else 0.0)
        for code, change in changes.items():
            kept = 1.0 if code in COUNTS_CORES else 1 - lost
            alone, share = (mean_gain(study, kept * of[code]) for of in (found_shares.alone, found_shares.shares))
            if share.ms < LEAST_SHARE * study.step_ms:
                continue
            finding = ask((code,), partial(FAULTS[code][1], study, change, alone, share))
            if finding is not None and code in found_shares.together:
                other, saved = found_shares.together[code]
                finding = replace(finding, together=Together(other, mean_gain(study, kept * saved)))
            found[code] = [finding] if finding is not None else []
    for codes, rule in RULES.items():
        if refusal is not None and PRICED_BY_REPLAY & set(codes):
            not_judged |= {code: off.get(code, refusal) for code in codes}
            continue
        said = ask(codes, partial(_whole, rule, study, not_judged))
        if said is not None:
            for code, reason in missing_collectors.unproved(study.facts, codes).items():
                if all(finding.code != code for finding in said):
                    not_judged[code] = reason
        if said is not None and study.device is not None:
            for code in ON_DEVICES.intersection(codes):
                not_judged.pop(code, None)
        for finding in said or []:
            found.setdefault(finding.code, []).append(finding)
    with_cause(found)
    few = len(study.step_numbers) < FEWEST_JUDGED
    rated = {code: [_rated(finding, study, noise_ms, lost, few) for finding in found.get(code, [])] for code in every}
    left_out = {*not_judged, *not_concerned}
    passed = [code for code, of in rated.items() if code not in left_out and all(f.severity == "info" for f in of)]
    findings = [finding for of in rated.values() for finding in of]
    return Judgement(tuple(ranked(findings)), tuple(passed), not_judged, noise_ms)


OUTRANKED_BY: Final = {"pipeline.bubble": "pipeline.imbalance"}
"""Code -> what its gain takes to be fixed: while that is a problem, it weighs no more than that."""


def ranked(findings: list[Finding]) -> list[Finding]:
    """Worst first: by severity, and then by what each weighs."""
    weight = {id(finding): finding.weight.ms for finding in findings}
    for place, finding in enumerate(findings):
        first = [other for other in findings if other.code == OUTRANKED_BY.get(finding.code) and other.is_problem]
        if first and finding.is_problem:
            other = min(first, key=lambda one: (-SEVERITIES.index(one.severity), one.weight.ms))
            worst = max(SEVERITIES.index(finding.severity), SEVERITIES.index(other.severity))
            capped = replace(
                finding,
                severity=SEVERITIES[worst],
                evidence=(*finding.evidence, Evidence("counts only once this is fixed", other.code, "")),
            )
            weight[id(capped)] = min(finding.weight.ms, float(np.nextafter(other.weight.ms, -math.inf)))
            findings[place] = capped
    return sorted(findings, key=lambda f: (not f.code.startswith("run."), SEVERITIES.index(f.severity), -weight[id(f)]))


def _whole(rule: Callable[[Study], list[Finding]], study: Study, not_judged: dict[str, str]) -> list[Finding]:
    """What a rule found, also where it could not judge all of its codes."""
    try:
        return rule(study)
    except PartlyJudged as part:
        not_judged |= dict.fromkeys(part.unjudged, str(part))
        return part.findings


def _refusal(study: Study) -> str | None:
    """Why no gain can be told by replay; None where it can."""
    try:
        need_steps(study)
        need_host(study)
    except NotJudged as reason:
        return str(reason)
    if study.clock_error_ms > MOST_CLOCK_ERROR * study.step_ms:
        return (
            f"the clocks of the ranks may be {ms(study.clock_error_ms)} apart, so who waited for whom in a step of "
            f"{ms(study.step_ms)} cannot be told"
        )
    return study.checked.refusal if study.checked is not None else None


COUNTS_CORES: Final = frozenset({"data.stall"})
"""Of FAULTS: those whose rule itself says what the cores that there are allow."""


def _rated(finding: Finding, study: Study, noise_ms: float, lost: float, few: bool) -> Finding:
    """With the model's error in its intervals, and as severe as they allow. `lost`: the share of the gains of FAULTS
    that was taken off since cores are busy."""
    if finding.code.startswith("run.") or finding.gain.method in (ALLOCATOR_TWIN, MEASURED_MEMORY):
        return finding

    def surely(gain: Gain) -> Gain:
        if gain.method == MEASURED_ON_DEVICE:
            return gain
        counted = finding.code in FAULTS and finding.code not in COUNTS_CORES
        contention_ms = gain.ms * lost / (1 - lost) if counted else 0.0
        return with_model_error(gain, finding.code, study.step_ms, busy(study), contention_ms)

    fixes = tuple(fix if fix.gain is None else replace(fix, gain=surely(fix.gain)) for fix in finding.fixes)
    measured = finding.gain.method == MEASURED_ON_DEVICE
    sure = None if measured else confidence(finding.code)
    share = None if finding.share is None else surely(finding.share)
    together = finding.together
    if together is not None:
        together = replace(together, gain=surely(together.gain))
    finding = replace(finding, gain=surely(finding.gain), share=share, together=together, fixes=fixes, confidence=sure)
    if few and finding.gain.method != MEASURED_ON_DEVICE:  # that is of the traced steps, and says so
        return replace(finding, severity="info")
    return replace(finding, severity=severity_of(finding.weight, 0.0 if math.isnan(noise_ms) else noise_ms))
