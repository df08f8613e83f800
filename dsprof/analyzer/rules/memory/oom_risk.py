"""A rank had no more memory, or nearly none: who held it, and the cheapest change that fits."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dsprof.run import failures
from dsprof.schema import HOST, MEMORY_PARTS

from ...finding import SAVES_MEMORY, Evidence, Finding, Fix, Severity, Where
from ...memory.allocator_state import UNKNOWN, site_of
from ...memory.use_by_step import MemoryUse
from ...study import Study
from ...text import count, percent, size
from ...text import ranks as ranks_in_words
from ..base import NotConcerned, NotJudged, PartlyJudged, engine_config, sharded_stage
from ..rule import Look, Rule
from . import fragmentation

CODE: Final = "memory.oom-risk"
CLOSE: Final = 0.92
"""Share of the capacity from which on a peak is close to it."""
VERY_CLOSE: Final = 0.97
SHOWN: Final = 4
WORDS: Final = {
    "parameters": "parameters", "gradients": "gradients", "optimizer_states": "optimizer states", "buffers": "buffers",
    "activations": "activations",
}  # fmt: skip
"""schema.MEMORY_PARTS in words."""
KEPT_BY_NUMBER: Final = 8
"""A variable with so many tensors collects them."""


def oom_risk(study: Study) -> list[Finding]:
    """Findings of ranks that ran out of memory; else of those whose peak is close to what there is."""
    told = study.facts.get("out_of_memory", [])
    if not (study.trace.memory or told or study.memory_uses):
        raise NotConcerned
    played, reasons = fragmentation.played(study)
    of_twin = {one.rank: fragmentation.out_of_memory(one) for one in played if one.recording.ooms}
    found = [_merged(study, fact, of_twin.pop(int(fact.get("rank", -1)), None)) for fact in _first_of_each(told)]
    found += [*of_twin.values(), *_killed(study)]
    if found:
        return found
    if not study.memory_uses:  # an imported snapshot
        raise NotJudged("; ".join(reasons) or "the recording does not tell how much memory the device has")
    close = _close(study)
    if all(use.capacity is None for use in study.memory_uses):
        raise PartlyJudged(close, (CODE,), "it is not known how much memory there is")
    return close


def _first_of_each(told: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each rank the first: what follows may be what comes of it."""
    seen = set()
    for fact in told:
        if fact.get("rank") not in seen:
            seen.add(fact.get("rank"))
            yield fact


# --- it happened ----------------------------------------------------------------------------------


def _merged(study: Study, fact: Mapping[str, Any], twin: Finding | None) -> Finding:
    """What the rank told, with what its history tells."""
    told = _told(study, fact)
    if twin is None:
        return told
    known = {item.metric for item in told.evidence}
    evidence = (*told.evidence, *(item for item in twin.evidence if item.metric not in known))
    return Finding(CODE, told.title, "high", told.where, evidence, SAVES_MEMORY, (*told.fixes, *twin.fixes))


def _told(study: Study, fact: Mapping[str, Any]) -> Finding:
    rank, place = int(fact.get("rank", -1)), str(fact.get("place"))
    asked, used, limit = _bytes(fact, "asked"), _used(fact), _bytes(fact, "capacity")
    parts = {part: int(number) for part, number in dict(fact.get("parts") or {}).items() if part in MEMORY_PARTS}
    site, function = site_of(fact.get("stack") or [])
    title = f"rank {rank} ran out of memory"
    title += "" if place == HOST else f" of {place}"
    title += "" if site == UNKNOWN else f" at {site.rpartition('/')[2]}"
    title += f": {size(asked)} more" if asked else ""
    title += (", with " if asked else ": ") + f"{size(used)} in use" + (f" of {size(limit)}" if limit else "")
    evidence = [Evidence("asked for", asked, "bytes")] if asked else []
    evidence.append(Evidence("in use then" if place != HOST else "address space in use then", used, "bytes", limit))
    evidence += [Evidence(f"{WORDS[part]}", number, "bytes") for part, number in _largest(parts)]
    rest = (_bytes(fact, "allocated") if place != HOST else _bytes(fact, "resident")) - sum(parts.values())
    at_step = _bytes(fact, "resident_at_step")  # on the host
    grown = max(0, min(rest, _bytes(fact, "resident") - at_step)) if at_step else 0
    if grown:
        evidence.append(Evidence("activations and what else came since the last step, resident", grown, "bytes"))
    if parts and rest > grown:
        what = "libraries, the script's own data" if grown else "activations, libraries"
        what = "activations and all else that is allocated" if place != HOST else f"{what} and all else, resident"
        evidence.append(Evidence(what, rest - grown, "bytes"))
    for one in list(fact.get("variables") or [])[:SHOWN]:
        evidence.append(Evidence(f"held by {_variable(one)}", int(one.get("bytes", 0)), "bytes"))
    if site != UNKNOWN:
        evidence.append(Evidence("asked for at", f"{site} in {function}", ""))
    if fact.get("said"):
        evidence.append(Evidence("the error said", str(fact["said"]), ""))
    steps = int(fact.get("step", 0))
    where = Where(ranks=(rank,), steps=(steps, steps))
    taken = used if place == HOST else _bytes(fact, "reserved")
    missing = asked if not limit or asked + taken <= limit else asked + taken - limit
    held = parts if not grown else {"activations": grown, **parts}
    fixes = _fixes(study, rank, place, held, max(rest, 0), missing, list(fact.get("variables") or []))
    return Finding(CODE, title, "high", where, tuple(evidence), SAVES_MEMORY, fixes)


def _used(fact: Mapping[str, Any]) -> int:
    """Of what was limited."""
    return _bytes(fact, "virtual" if fact.get("place") == HOST else "allocated")


def _bytes(fact: Mapping[str, Any], name: str) -> int:
    value = fact.get(name)
    return int(value) if isinstance(value, (int, float)) else 0


def _largest(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((part, number) for part, number in parts.items() if number), key=lambda item: -item[1])


def _variable(one: Mapping[str, Any]) -> str:
    tensors = int(one.get("tensors", 0))
    place = f"{str(one.get('file')).rpartition('/')[2]}, {one.get('function')}"
    return f"{one.get('name')!s} ({place}; {count(tensors, 'tensor')})"


def _killed(study: Study) -> list[Finding]:
    """Ranks of which the kernel said that it killed them for want of memory, or whose last sample says as much."""
    found = []
    for gone in failures(study.run.exits):
        why = killed_for_memory(study, gone.rank) if gone.signal == signal.SIGKILL else None
        use = next((use for use in study.memory_uses if use.rank == gone.rank and use.on_host), None)
        if why is None or use is None:
            continue
        title = f"rank {gone.rank} was killed for want of memory: {size(use.peak)} resident at the most"
        title += f" of {size(use.capacity)}" if use.capacity else ""
        evidence = [Evidence("told by", why, ""), *_of_use(use)]
        rest = max(use.peak - sum(use.parts.values()), 0)
        fixes = _fixes(study, gone.rank, HOST, use.parts, rest, 0, [])
        found.append(Finding(CODE, title, "high", Where(ranks=(gone.rank,)), tuple(evidence), SAVES_MEMORY, fixes))
    return found


def killed_for_memory(study: Study, rank: int) -> str | None:
    """What tells that a rank that ended by SIGKILL was killed for want of memory; None where nothing does."""
    for entry in study.run.oom_kills:
        if rank in entry.get("ranks", ()):
            return f"the kernel, which killed {int(entry['kills'])} of the processes of its cgroup for want of memory"
    use = next((use for use in study.memory_uses if use.rank == rank and use.on_host), None)
    if use is not None and use.share is not None and use.share >= CLOSE:
        return f"its last sample: {percent(100 * use.share)} of what there is were in use"
    return None


def why_out_of_memory(study: Study, rank: int) -> str | None:
    """In words, for a rank that died; None where nothing tells of memory."""
    for fact in study.facts.get("out_of_memory", []):
        if fact.get("rank") == rank:
            asked = _bytes(fact, "asked")
            more = f"{size(asked)} more were asked for" if asked else str(fact.get("error"))
            return f"out of memory: {more}, with {size(_used(fact))} in use"
    return None


# --- it may ---------------------------------------------------------------------------------------


def _close(study: Study) -> list[Finding]:
    """One finding for all ranks whose peak is close to the capacity."""
    near = [use for use in study.memory_uses if (use.share or 0.0) >= CLOSE or use.retries]
    if not near:
        return []
    worst = max(near, key=lambda use: (use.share or 0.0, use.retries))
    who = ranks_in_words(sorted({use.rank for use in near}))
    share = worst.share or 0.0
    of = f" of {size(worst.capacity)}" if worst.capacity else ""
    where = "the host's memory" if worst.on_host else worst.place
    title = f"{who}: the peak of {where} is {size(worst.peak)}{of}"
    title += f" ({percent(100 * share)})" if share else ""
    if worst.retries:
        title += f", and the cache was given back {count(worst.retries, 'time')} for want of memory"
    severity: Severity = "medium" if share >= VERY_CLOSE or worst.retries else "low"
    rest = max(worst.peak - sum(worst.parts.values()), 0)
    need = max(int(worst.peak - CLOSE * worst.capacity), 0) if worst.capacity else 0
    fixes = _fixes(study, worst.rank, worst.place, worst.parts, rest, need, [])
    place = Where(ranks=tuple(sorted({use.rank for use in near})))
    return [Finding(CODE, title, severity, place, tuple(_of_use(worst)), SAVES_MEMORY, fixes)]


def _of_use(use: MemoryUse) -> list[Evidence]:
    what = "resident at the peak" if use.on_host else "allocated at the peak"
    evidence = [Evidence(what, use.peak, "bytes", use.capacity)]
    if use.reserved > use.peak:
        evidence.append(Evidence("reserved at the peak", use.reserved, "bytes"))
    evidence += [Evidence(WORDS[part], number, "bytes") for part, number in _largest(use.parts)]
    if use.retries:
        evidence.append(Evidence("times the cache was given back for want of memory", use.retries, "count", 0))
    return evidence


# --- what to change -------------------------------------------------------------------------------


def _fixes(
    study: Study, rank: int, place: str, parts: Mapping[str, int], rest: int, missing: int,
    variables: list[dict[str, Any]],
) -> tuple[Fix, ...]:  # fmt: skip
    """The first change, in the order of what they cost in time, that makes room for `missing` bytes; where none does by
    itself, those that make most room."""
    fixes = [
        Fix("code", f"{_variable(one)} keeps {size(int(one['bytes']))}: keep what is only logged or averaged as a "
                    "number (.item(), or .detach() at least), and drop the rest when it has been used")
        for one in variables[:1]
        if int(one.get("tensors", 0)) >= KEPT_BY_NUMBER and int(one.get("bytes", 0)) >= max(missing, 1)
    ]  # fmt: skip
    levers = list(_levers(study, rank, place, parts, rest))
    fitting = [lever for lever in levers if lever[1] >= missing > 0]
    for words, frees in fitting[:1] or sorted(levers, key=lambda lever: -lever[1])[:2]:
        enough = f", of {size(missing)} that are missing" if missing else ""
        alone = "" if fitting or not missing else "; not enough by itself"
        fixes.append(Fix("code", f"{words}: frees about {size(frees)}{enough}{alone}"))
    return tuple(fixes)


def _levers(
    study: Study, rank: int, place: str, parts: Mapping[str, int], rest: int
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """(what to do, bytes that it frees on this rank), the cheapest in time first. First-order: the parts as they were
    measured, shared over the data-parallel ranks, where dsprof's engine trains as its configuration says."""
    world_size = study.run.world_size or len(study.ranks) or 1
    ranks = study.mesh.data_parallel_size(rank, world_size)
    sharded = sharded_stage(study)
    states, gradients, parameters = (parts.get(name, 0) for name in ("optimizer_states", "gradients", "parameters"))
    content, share = engine_config(study) or {}, 1 / ranks
    if "heterogeneous" in content:
        from dsprof.engine.config import as_far_as_known  # pydantic takes long to import

        stated = as_far_as_known(content).held_share(rank, world_size)
        ranks, share = (1, share) if stated is None else (ranks, stated)  # of memory that is measured it is not known
    left = 1 - share
    if ranks > 1 and sharded < 1 and states:
        yield f"ZeRO stage 1 (ZeroRedundancyOptimizer) over {ranks} ranks", int(left * states)
    if ranks > 1 and sharded < 2 and states + gradients:
        yield f"ZeRO stage 2 over {ranks} ranks", int(left * (states * (sharded < 1) + gradients))
    activations = parts.get("activations") or (rest if place != HOST else 0)
    if activations:
        yield "half the micro-batch, and twice the gradient accumulation", activations // 2
        yield "activation checkpointing (torch.utils.checkpoint) at most", activations
    if ranks > 1 and sharded < 3 and parameters:
        frees = states * (sharded < 1) + gradients * (sharded < 2) + parameters
        yield f"ZeRO stage 3 (fully_shard) over {ranks} ranks", int(left * frees)
    if place != HOST and states:
        yield "the optimizer offloaded to the host (offload_optimizer)", states


RULES = (Rule(CODE, "a rank ran out of memory, or nearly, and what held it", looks=(Look(oom_risk),), place=160),)
