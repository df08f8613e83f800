"""The host waits for the device: `.item()`, printing, copies and `synchronize` keep it from giving the device more.

That it stands is no loss by itself: a host that has nothing to do but to wait is ahead of its device. Lost is what the
device then stands, from when it has done all that it was given until the next kernel: at most that where kernels were
recorded; where phases were, a replay in which no host waits says what the step would be shorter by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from ... import signals
from ...candidate import Candidate, Price
from ...device.host_waits import UNKNOWN
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.chains import SYNC
from ...price.calibration import BETWEEN_RUNS
from ...price.device import gain_of_waits, idle_at_most, replayed_gain
from ...study import Study, once
from ...text import ms, number
from ...whatif.without_flows import WithoutFlows
from ..base import LEAST_SHARE, NotJudged, PartlyJudged, at, code_fix, engine_config
from ..rule import Found, Look, Rule

CODE: Final = "compute.host-sync"
SHOWN: Final = 5
"""Lines that are listed."""
MENDED: Final = 3
"""Lines for which there is a fix."""
LEAST_DRY: Final = 1.0
"""Percent of the step, from which on it is said that the device runs dry."""

REMEDIES: Final = {
    "item": "read it every so many steps, or once at the end: keep it on the device until then (detach())",
    "nonzero": "a mask whose size the host must know: torch.where, or a size that is fixed",
    "copy to host": "copy into pinned memory with non_blocking=True, and read it a step later",
    "copy to device": "pin_memory=True in the DataLoader, and .to(device, non_blocking=True)",
}
"""`purpose` of a row -> what to do instead; of what waits by its own name, to leave it out."""
CHECK_KEY: Final = "bf16.check_grad_overflow"
"""Key of dsprof's engine by which its step waits for the norm of the gradients."""


def stops(study: Study) -> Found:
    """Where the training thread waits for the device, and what the device stood idle after it, at most."""
    signals.device_used(study)
    signals.steps(study)
    watched, found = study.facts.get("host_sync", []), _stops(study)
    if not watched and not len(found):
        raise NotJudged("what the host waits for the device in was not captured")
    operators = all(fact.get("operators") for fact in watched)
    ordinary = found[found["ordinary"]]
    by_rank = ordinary.groupby("rank")["ms"].sum().reindex(study.ranks, fill_value=0.0) / len(study.step_numbers)
    findings = []
    if len(ordinary) and float(by_rank.max()) >= LEAST_SHARE * study.step_ms:
        findings.append(_finding(study, found, by_rank))
    if not operators:
        reason = "without the native helper only synchronize is seen, not .item() and copies"
        raise PartlyJudged(findings, (CODE,), reason)
    gain = replayed_gain(study, WithoutFlows(SYNC)) if findings else None
    if gain is not None:
        if gain.ms < LEAST_SHARE * study.step_ms:  # it is told all the same
            return [_priced(study, finding, gain) for finding in findings]
        return [_candidate(study, finding) for finding in findings]
    if findings and found["idle_ms"].isna().all():
        reason = (
            f"the host waits {ms(float(by_rank.max()))} of each step for the device, and kernels were not recorded: "
            "whether the device then stands idle is not known"
        )
        raise PartlyJudged(findings, (CODE,), reason)
    return findings


def _candidate(study: Study, finding: Finding) -> Candidate:
    """That no host waits for its device is replayed like other changes, and shares what it gains with them."""

    def say(price: Price) -> Finding:
        priced = _priced(study, finding, price.gain)
        return replace(priced, share=price.share if priced.gain.method == price.gain.method else None)

    return Candidate(CODE, WithoutFlows(SYNC), say)


def _priced(study: Study, finding: Finding, gain: Gain) -> Finding:
    """The finding with what it gains to wait for the device no more, by replay."""
    gain = gain_of_waits(study, gain)
    title = f"{finding.title}; the device runs dry meanwhile" if gain.percent >= LEAST_DRY else finding.title
    evidence = (*finding.evidence, Evidence("the step would be shorter without them by", round(gain.ms, 3), "ms", 0.0))
    fixes = tuple(replace(fix, gain=gain) if place == 0 else fix for place, fix in enumerate(finding.fixes))
    return replace(finding, title=title, evidence=evidence, gain=gain, fixes=fixes)


@once
def _stops(study: Study) -> pd.DataFrame:
    """Waits for the device on training threads: rank, step, call, site, ms; whether in an `ordinary` step, and when it
    was `updating` its weights; idle_ms, for how long the device stood idle after it, NaN in steps whose kernels were
    not recorded; traced_steps, of how many they were: ordinary ones, or else those that `--deep` looked at."""
    waits = study.tables.host_waits
    rank, step = waits["rank"].to_numpy(np.int64), waits["step"].to_numpy(np.int64)
    ordinary = np.isin(step, study.step_numbers)
    watched, told = waits["watched"].to_numpy(bool), np.zeros(len(waits), bool)
    traced, count = np.zeros(len(waits), bool), np.zeros(len(waits), np.int64)
    ranks, begin = np.unique(rank, return_index=True)  # whose waits are one rank's behind the other's
    ends = np.append(begin, len(rank))[1:]
    for one, first, end in zip(ranks.tolist(), begin.tolist(), ends.tolist(), strict=True):
        known = study.summaries[one].kernel_steps
        known = np.intersect1d(known, study.step_numbers) if np.isin(known, study.step_numbers).any() else known
        mine = slice(first, end)
        traced[mine], count[mine] = np.isin(step[mine], known), len(known)
        here = ordinary[mine] | traced[mine]
        told[mine] = here & (watched[mine] == bool((here & watched[mine]).any()))  # both tell of the same waits
    found = waits.assign(ordinary=ordinary, traced_steps=count, idle_ms=waits["idle_ms"].where(traced))
    return found[told].reset_index(drop=True)


def _finding(study: Study, found: pd.DataFrame, by_rank: pd.Series[float]) -> Finding:
    steps = len(study.step_numbers)
    a_rank = steps * len(study.ranks)
    ordinary = found[found["ordinary"]]
    by_line = ordinary.groupby(["site", "call"])["ms"]
    lines = pd.DataFrame({
        "ms": by_line.sum(), "times": by_line.size(), "idle_ms": found.groupby(["site", "call"])["idle_ms"].sum(),
        "updating": found.groupby(["site", "call"])["updating"].mean(),
    }).fillna(0.0)  # fmt: skip
    known = bool(found["idle_ms"].notna().any())
    lines = lines.sort_values("idle_ms" if known else "ms", ascending=False, kind="stable")
    listed = [(str(site), str(call), line) for (site, call), line in lines.head(SHOWN).iterrows()]
    site, call, _ = listed[0]
    idle_ms = found.groupby("rank")["idle_ms"].sum() / found.groupby("rank")["traced_steps"].first().clip(lower=1)
    times = len(ordinary) / a_rank
    evidence = [
        Evidence("waiting for the device a step, the rank that does most", round(float(by_rank.max()), 3), "ms"),
        Evidence("such waits a step", round(times, 2), "count"),
    ]
    if known:
        evidence.append(Evidence("device idle after them a step, at most", round(float(idle_ms.max()), 3), "ms", 0.0))
    for place, what, line in listed:
        said = f"{what} at {_short(place)}, {number(line['times'] / a_rank)} a step"
        evidence.append(Evidence(said, round(float(line["ms"]) / a_rank, 3), "ms"))
    title = (
        f"the host waits for the device {number(times)} times a step, {ms(float(by_rank.max()))} in all, "
        f"most of it in {call} at {_short(site)}"
    )
    if known:
        title += f"; the device then stands idle for {ms(float(idle_ms.max()))} at most"
        if not found["idle_ms"][found["ordinary"]].notna().any():
            title += ", in the steps that were traced"
    # What is waited for may be needed, so that nothing is gained; more than the idle time cannot be.
    most = float(idle_ms.max()) if known else 0.0
    gain = idle_at_most(study, most)
    ranks = study.ranks_where(by_rank.to_numpy(np.float64) > 0.5 * float(by_rank.max()))
    where = Where(ranks=ranks, op=call, steps=study.step_range)
    own = _sites_of_engine(lines)
    every = [
        _fix(study, site, call, of_engine=site in own and line["updating"] > 0.5)
        for site, call, line in listed[:MENDED]
    ]
    # What the finding gains is told of the first: without one for the line that waits longest there is none.
    fixes = () if every[0] is None else tuple({fix.title: fix for fix in every if fix is not None}.values())
    return Finding(CODE, title, "info", where, tuple(evidence), gain, fixes)


def _sites_of_engine(lines: pd.DataFrame) -> set[str]:
    """Where dsprof's engine waits in its step: in half precision at its own line, also for whether a script has written
    to weights. lines: by site and call, whether it was `updating`."""
    return {
        str(site) for (site, call), line in lines.iterrows() if call == "Event.synchronize" and line["updating"] > 0.5
    }


def waits_of_engine(study: Study) -> tuple[list[str], list[str]]:
    """The lines at which, in ordinary steps, hosts wait for the norm in the step of dsprof's engine, and those at which
    they wait for their devices otherwise, but for what else the engine waits for there. Raises Missing."""
    signals.device_used(study)
    found = _stops(study)
    lines = found[found["ordinary"]].groupby(["site", "call"])[["updating"]].mean()
    own = _sites_of_engine(lines)
    in_step = {
        (str(site), str(call)): str(site) in own and of["updating"] > 0.5 for (site, call), of in lines.iterrows()
    }
    norm = [_short(site) for (site, call), inside in in_step.items() if inside and call == "item"]
    return norm, [f"{call} at {_short(site)}" for (site, call), inside in in_step.items() if not inside]


def _fix(study: Study, site: str, call: str, *, of_engine: bool) -> Fix | None:
    """of_engine: whether it is the engine that waits there, in its step, which is not the script's to change."""
    configured = engine_config(study)
    if of_engine and configured is not None:
        return _without_waiting_for_norm(configured) if call == "item" else None
    remedy = REMEDIES.get(call, f"leave {call}() out of the loop; it is for measuring")
    return code_fix(f"{call} at {_short(site)}: {remedy}", "", "", None if site == UNKNOWN else site)


def _without_waiting_for_norm(configured: Mapping[str, Any]) -> Fix | None:
    """In bf16 the engine can take a step whatever its norm is, for which it need not wait then; in fp16 it cannot, nor
    where the optimizer is on the host, which reads the norm itself."""
    offload = configured.get("zero_optimization")
    offload = offload.get("offload_optimizer") if isinstance(offload, Mapping) else None
    if isinstance(offload, Mapping) and offload.get("device") not in (None, "none"):
        return None
    no_wait = "the engine does not wait for the norm then, and takes steps that are not finite, too"
    fp16, bf16 = (
        section if isinstance(section := configured.get(name), Mapping) and section.get("enabled") is True else None
        for name in ("fp16", "bf16")
    )
    if fp16 is not None:
        patch: tuple[dict[str, Any], ...] = (
            {"op": "replace", "path": "/fp16/enabled", "value": False},
            {"op": "add", "path": "/bf16", "value": {"enabled": True, "check_grad_overflow": False}},
        )
        knobs = (("fp16.enabled", False), ("bf16.enabled", True), (CHECK_KEY, False))
        return Fix(
            "config",
            f"bf16 in the place of fp16 (GPUs from Ampere on), and {CHECK_KEY}: false: {no_wait}",
            patch,
            knobs=knobs,
        )
    if bf16 is None or bf16.get("check_grad_overflow") is False:
        return None
    op = "replace" if "check_grad_overflow" in bf16 else "add"
    patch = ({"op": op, "path": f"/{CHECK_KEY.replace('.', '/')}", "value": False},)
    return Fix("config", f"{CHECK_KEY}: false: {no_wait}", patch, knobs=((CHECK_KEY, False),))


def _short(site: str) -> str:
    """`train.py:12`."""
    return UNKNOWN if site == UNKNOWN else at(site).strip(" ()")


RULES = (
    Rule(
        CODE,
        "the host waits for the device, at which line of the script",
        explains=("compute",),
        looks=(Look(stops),),
        needs=(signals.gpus,),
        error=BETWEEN_RUNS,
        # A host that is held up is not ahead of its device: it is the collections that gain.
        outranked_by=("pause.gc",),
        place=190,
    ),
)
