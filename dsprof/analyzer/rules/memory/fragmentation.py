"""Device memory: what fragmentation costs, and what held the memory when there was none left.

The number behind a setting is the allocator twin's. It is asked only where it does all that was recorded: every segment
and every block's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dsprof.live.frames import short
from dsprof.trace import Memory

from ... import signals
from ...allocator import (
    AllocatorSettings,
    Limits,
    Outcome,
    Proof,
    Recording,
    Unplayable,
    devices,
    in_use_at,
    pinned_at,
    prove,
    record,
    replay,
)
from ...allocator.alloc_conf import POWERS, MiB
from ...allocator.history import FAILED
from ...finding import (
    HIGH_PERCENT,
    SAVES_SEGMENTS,
    SEVERITIES,
    Evidence,
    Finding,
    Fix,
    Severity,
    Where,
)
from ...memory.allocator_state import UNKNOWN, Holder, holders_of, sites_of
from ...study import Study, once
from ...text import count, percent, size
from ..base import PartlyJudged
from ..rule import Look, Rule

LEAST_STRANDED: Final = 5.0
"""Percent of the peak that is free between blocks in use: what matters."""
LEAST_CACHED: Final = 25.0
"""Percent of the peak that is free, and could be given back, but is of the wrong size for what is asked for."""
LEAST_SAVED: Final = 1.0
"""Percent of the peak by which a setting must be better to be named."""
ALIKE: Final = 1.01
"""Of settings that come so near to the best, the one that is tried first is named."""
MOST_EVENTS: Final = 400_000
"""A longer history is not played under other settings."""
MOST_PLAYED: Final = 2
"""Ranks whose history is played."""
FRESH_ERROR: Final = 0.05
"""By how much, of the peak, a replay from a fresh allocator on may differ from what was recorded."""
CONF: Final = "PYTORCH_CUDA_ALLOC_CONF"
BASIS: Final = "the allocator twin's number; such numbers held on an H100"
"""Of a prediction (benchmarks/results/gpu-allocator-h100.json)."""
SHORT: Final = 0.92
"""Share of the device's memory from which on a peak of what is reserved is close to it."""
ROOMY: Final = 0.5
"""Below this share nothing is short, and what is lost costs nothing."""
SHOWN: Final = 3
"""Lines that hold memory."""


@dataclass(frozen=True)
class Played:
    """One device's recording, with the limits that it had; `told` is what the snapshot says of the settings."""

    rank: int
    recording: Recording
    proof: Proof
    limits: Limits
    told: Mapping[str, Any]
    places: Mapping[int, tuple[str, str]]


@once
def played(study: Study) -> tuple[list[Played], list[str]]:
    """The devices whose history the twin can play, and of the others why not."""
    found, reasons = [], []
    told_by = {fact.get("rank"): fact.get("settings") or {} for fact in study.facts.get("allocator", [])}
    for rank, memory in _chosen(study):
        told, places = told_by.get(rank, {}), sites_of(memory.stacks)
        for device in devices(memory):
            try:
                recording = record(memory, device, AllocatorSettings.of_snapshot(told))
                found.append(Played(rank, recording, prove(recording), _limits(recording), told, places))
            except (Unplayable, ValueError) as reason:
                reasons.append(f"device {device} of rank {rank}: {reason}")
    return found, reasons


def _chosen(study: Study) -> list[tuple[int, Memory]]:
    """MOST_PLAYED ranks, as playing takes seconds: those that ran out of memory, then those that hold most."""
    out_of_it = {fact.get("rank") for fact in study.facts.get("out_of_memory", [])}
    every = list(study.trace.memory.items())
    every.sort(key=lambda item: (item[0] not in out_of_it, -int(item[1].segments["bytes"].sum())))
    return sorted(every[:MOST_PLAYED], key=lambda item: item[0])


def fragmentation(study: Study) -> list[Finding]:
    """Memory that is reserved and of no use, where it is, and the setting under which there is least of it."""
    signals.allocators(study)
    found, reasons = played(study)
    findings = []
    for one in found:
        try:
            findings += _fragmentation(one, _capacity(study, one))
        except Unplayable as reason:
            reasons = [*reasons, f"device {one.recording.device} of rank {one.rank}: {reason}"]
    findings = _joined(findings)
    if not reasons:
        return findings
    raise PartlyJudged(findings, ("memory.fragmentation",), "; ".join(reasons))


def _capacity(study: Study, one: Played) -> int | None:
    """What the device has; None: not known."""
    place = f"cuda.{one.recording.device}"
    return next((use.capacity for use in study.memory_uses if (use.rank, use.place) == (one.rank, place)), None)


def _joined(findings: list[Finding]) -> list[Finding]:
    """Of ranks that need the same change, the finding of the one that loses most."""
    alike: dict[Any, list[Finding]] = {}
    for finding in findings:
        changes = tuple(str(change) for fix in finding.fixes for change in fix.patch)
        alike.setdefault(changes, []).append(finding)
    joined = []
    for same in alike.values():
        worst = min(same, key=lambda one: (SEVERITIES.index(one.severity), -_lost(one)))
        joined.append(
            replace(worst, where=Where(ranks=tuple(sorted({rank for one in same for rank in one.where.ranks or ()}))))
        )
    return joined


def _lost(finding: Finding) -> float:
    return sum(float(item.value) for item in finding.evidence if item.metric.startswith("free then"))


def _severity(recording: Recording, stranded: float, lost: bool, capacity: int | None) -> Severity:
    if recording.ooms or recording.retries or capacity is None or recording.peak_reserved >= SHORT * capacity:
        if recording.ooms or stranded >= HIGH_PERCENT:
            return "high"
        return "medium" if lost or recording.retries else "low"
    return "low" if lost and recording.peak_reserved >= ROOMY * capacity else "info"


def _fragmentation(one: Played, capacity: int | None) -> list[Finding]:
    recording, proof = one.recording, one.proof
    if not proof.holds:
        raise Unplayable(
            f"the allocator twin does not do what was recorded ({proof.segments_alike} of "
            f"{count(proof.segments, 'segment')}, {proof.blocks_alike} of {proof.blocks} blocks at their address)"
        )
    if len(recording.events) > MOST_EVENTS:
        raise Unplayable(f"its history of {len(recording.events):,} events is longer than {MOST_EVENTS:,}")
    now = replay(recording, recording.settings, one.limits)
    peak = recording.peak_reserved
    if abs(now.peak_reserved - peak) > FRESH_ERROR * peak:
        raise Unplayable(
            f"what was reserved came about before its history (from a fresh start the twin comes to "
            f"{size(now.peak_reserved)}, recorded were {size(peak)}); record from the job's start"
        )
    stranded, cached = (100 * part / max(now.peak_reserved, 1) for part in (now.stranded, now.cached))
    lost = stranded >= LEAST_STRANDED
    if not (lost or cached >= LEAST_CACHED or recording.retries):
        return []
    best = _best([replay(recording, settings, one.limits) for settings in _candidates(recording.settings)])
    better = _key(best) < _key(now) and (
        (best.ooms, best.retries) < (now.ooms, now.retries)
        or best.peak_reserved < (1 - LEAST_SAVED / 100) * now.peak_reserved
    )
    pinned = pinned_at(recording, recording.settings, one.limits, now.peak_at)
    holders = holders_of({stack: (bytes_, 0) for stack, bytes_ in pinned.items() if bytes_}, one.places)
    asked = recording.events[now.peak_at] if now.peak_at >= 0 else None
    evidence = [
        Evidence("reserved at the peak", now.peak_reserved, "bytes", best.peak_reserved if better else None),
        Evidence("in use then", now.active, "bytes"),
        Evidence("free then, between blocks in use", now.stranded, "bytes", best.stranded if better else None),
        Evidence("free then, in whole segments", now.cached, "bytes"),
    ]
    if capacity is not None:
        evidence.append(Evidence("the device has", capacity, "bytes"))
    if recording.retries:
        evidence.append(Evidence("times the cache was given back for want of memory", recording.retries, "count", 0))
    evidence += [Evidence(f"kept by {item.site}", item.bytes, "bytes") for item in holders[:SHOWN]]
    if asked is not None:
        evidence.append(Evidence("asked for the last of it", one.places.get(asked.stack, (UNKNOWN, ""))[0], ""))
    evidence.append(Evidence("the twin, played as recorded", _proved(proof), ""))
    cause = (
        holders[0].site if holders else one.places.get(asked.stack, (UNKNOWN, ""))[0] if asked is not None else UNKNOWN
    )
    if lost:
        title = (
            f"{size(now.stranded)} of {size(now.peak_reserved)} reserved ({percent(stranded)}) lie free between "
            f"blocks in use, most of it beside what {short(cause)} keeps"
        )
    else:
        title = (
            f"{size(now.cached)} of {size(now.peak_reserved)} reserved ({percent(cached)}) are cached segments of "
            f"sizes that no longer come, the last asked for at {short(_site(one, asked.stack if asked else -1))}"
        )
    severity = _severity(recording, stranded, lost, capacity)
    fixes = (*((_setting_fix(one, now, best),) if better else ()), *_code_fix(holders, lost))
    return [
        Finding(
            "memory.fragmentation", title, severity, Where(ranks=(one.rank,)), tuple(evidence), SAVES_SEGMENTS, fixes
        )
    ]


def out_of_memory(one: Played) -> Finding:
    """Of a history in which the device had no more memory: who held it, and the setting under which it fits."""
    recording = one.recording
    at = next(number for number, event in enumerate(recording.events) if event.act == FAILED)
    event, held = recording.events[at], in_use_at(recording, at)
    holders = holders_of(held, one.places)
    used = sum(size_ for size_, _ in held.values())
    evidence = [
        Evidence("asked for", event.size, "bytes"),
        Evidence("in use then", used, "bytes"),
        Evidence("the device had for this process", recording.oom_bytes or 0, "bytes"),
        *(
            Evidence(f"held by {item.site} ({count(item.blocks, 'block')})", item.bytes, "bytes")
            for item in holders[:SHOWN]
        ),
    ]
    largest = holders[0] if holders else None
    title = f"out of memory at {short(_site(one, event.stack))}: {size(event.size)} more, with {size(used)} in use"
    fixes = []
    if one.proof.holds and len(recording.events) <= MOST_EVENTS:
        tried = [replay(recording, settings, one.limits) for settings in _candidates(recording.settings)]
        best = _best(tried)
        if not best.ooms:
            fixes.append(_setting_fix(one, replay(recording, recording.settings, one.limits), best))
    if largest is not None and largest.site.rpartition(":")[2].isdigit():
        fixes.append(
            Fix("code", f"{short(largest.site)} holds {size(largest.bytes)}, {percent(100 * largest.bytes / used)} of "
                        "all: a smaller micro-batch, activation checkpointing or sharding makes it less")
        )  # fmt: skip
    return Finding(
        "memory.oom-risk", title, "high", Where(ranks=(one.rank,)), tuple(evidence), SAVES_SEGMENTS, tuple(fixes)
    )


# --- settings -----------------------------------------------------------------------------------


def _limits(recording: Recording) -> Limits:
    """What the device had, as far as it is known: it refused more than it ever gave."""
    if recording.oom_bytes is not None:
        return Limits(max(recording.oom_bytes, recording.peak_reserved))
    return Limits(recording.peak_reserved if recording.retries else None)


def _candidates(recorded: AllocatorSettings) -> list[AllocatorSettings]:
    """What to try, each a change of what was set; that which changes least about the program's speed first.

    `garbage_collection_threshold` is not among them: without a memory fraction torch does not heed it.
    """
    found = [replace(recorded, expandable=True)]
    found += [replace(recorded, divisions=(parts,) * POWERS) for parts in (16, 8, 4, 2)]
    found += [replace(recorded, max_split_bytes=most * MiB) for most in (1024, 512, 256, 128, 64, 32, 20)]
    return [one for one in found if one != recorded]


def _key(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.ooms, outcome.retries, outcome.peak_reserved


def _best(outcomes: list[Outcome]) -> Outcome:
    least = min(outcomes, key=_key)
    near = (least.ooms, least.retries, int(ALIKE * least.peak_reserved))
    return next(outcome for outcome in outcomes if _key(outcome) <= near)


def _setting_fix(one: Played, now: Outcome, best: Outcome) -> Fix:
    value = ",".join(filter(None, [*_other_options(one.told), str(best.settings)]))
    gained = f"{size(best.peak_reserved)} reserved at the peak instead of {size(now.peak_reserved)}"
    if best.retries != now.retries:
        gained += f", the cache given back for want of memory {count(best.retries, 'time')} instead of {now.retries}"
    if best.ooms != now.ooms:
        gained += f", out of memory {count(best.ooms, 'time')} instead of {now.ooms} as far as the recording goes"
    calls = f"{count(best.device_calls, 'call')} of cudaMalloc and cudaFree (or to map and unmap)"
    calls += f" instead of {now.device_calls:,}"
    return Fix("env", f"{CONF}={value}: {gained}, {calls} ({BASIS})", ({"name": CONF, "value": value},),
               knobs=((f"env.{CONF}", value),))  # fmt: skip


KNOWN: Final = (
    "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions",
    "garbage_collection_threshold",
)  # fmt: skip


def _other_options(told: Mapping[str, Any]) -> list[str]:
    """What the recorded job had set beside what the twin knows."""
    words, depth, word = [], 0, ""
    for char in f"{told.get(CONF, '')},":
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            words.append(word.strip())
            word = ""
        else:
            word += char
    return [word for word in words if word and word.partition(":")[0] not in KNOWN]


# --- words --------------------------------------------------------------------------------------


def _code_fix(holders: list[Holder], lost: bool) -> tuple[Fix, ...]:
    file, _, line = holders[0].site.rpartition(":") if holders else ("", "", "")
    if not lost or not line.isdigit():
        return ()
    title = "what is kept for long is best allocated before, or in one piece: there it lies between what comes and goes"
    return (Fix("code", title, ({"file": file, "line": int(line), "argument": "", "value": ""},)),)


def _proved(proof: Proof) -> str:
    return (
        f"made all {proof.segments:,} segment allocations, all {proof.blocks:,} block addresses and the "
        f"{size(proof.reserved)} reserved in the end"
    )


def _site(one: Played, stack: int) -> str:
    return one.places.get(stack, (UNKNOWN, ""))[0]


RULES = (
    Rule(
        "memory.fragmentation",
        "device memory is reserved and of no use",
        looks=(Look(fragmentation),),
        of_snapshot=True,
        place=150,
    ),
)
