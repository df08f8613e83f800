"""How a live run uses its memory: it climbs step after step, or much of it lies idle while time is paid to save it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.schema import MEMORY_PARTS
from dsprof.trace import Memory

from ... import signals
from ...arrays import Float
from ...budget.irregular import warm_up
from ...candidate import Candidate, Price
from ...finding import SAVES_MEMORY, Evidence, Finding, Fix, Severity, Where
from ...memory.allocator_state import UNKNOWN, sites_of
from ...memory.slope import FEWEST, Slope, climb
from ...memory.use_by_step import HELD, MemoryUse, main_place
from ...study import Study
from ...text import count, percent, size
from ...whatif.work import Change, LessWork
from ...work.recomputed import recomputed_ms
from ..base import LEAST_SHARE, NotConcerned, NotJudged, sharded_stage
from ..compute.recompute import kept_in_memory
from ..rule import Found, Look, Rule
from .offload_exposed import offloaded

MiB: Final = 1 << 20
LEAST_RISE: Final = {False: (8 * MiB, 0.01), True: (48 * MiB, 0.05)}
"""On the host: by how much memory must have climbed while it was watched, bytes and share of what there was: there the
interpreter, libraries and the allocator's arenas settle for a while."""
STEADILY: Final = 0.6
"""On the host: what leaks in each step climbs by at least this share of all that memory comes and goes by. What climbs
in fits and starts, as the allocator's arenas do that never find the gap they need, must be watched for LONG."""
LONG: Final = 100
"""Steps."""
SOON: Final = 10.0
"""In so many times the steps that were watched."""
SPREAD: Final = 0.5
"""What leaks is allocated over and over: of a line's blocks that are still in use the first and the last are so much of
the history apart."""
FEWEST_BLOCKS: Final = 4
MUCH_UNUSED: Final = 0.4
"""Share of the capacity that must lie idle, on every rank that has it."""


# --- growth ---------------------------------------------------------------------------------------


def growth(study: Study) -> list[Finding]:
    """Memory that climbs from step to step, on the rank where it does so fastest."""
    signals.memory_by_step(study)
    climbing: list[tuple[MemoryUse, Slope]] = []
    longest = 0
    for rank in study.ranks:
        use = main_place(study.memory_uses, rank)
        if use is None:
            continue
        series = _series(study, use)
        longest = max(longest, len(series))
        found = climb(series["step"].to_numpy(np.float64), series["held"].to_numpy(np.float64))
        if found is not None and _matters(use, found, series["held"].to_numpy(np.float64)):
            climbing.append((use, found))
    if not climbing:
        if longest < FEWEST:
            raise NotJudged(
                f"too short a run: memory was looked at {count(longest, 'time')} after warm-up, of {FEWEST}"
            )
        return []
    return [_climbing(study, climbing)]


def _series(study: Study, use: MemoryUse) -> pd.DataFrame:
    """step, held: what was in use when each step after warm-up had ended."""
    table = study.memory
    mine = table[(table["rank"] == use.rank) & (table["place"] == use.place)]
    held = mine[HELD[use.on_host][0]]
    steps = int(mine["step"].max()) + 1 if len(mine) else 0
    chosen = held.notna() & (mine["step"] >= warm_up(steps))
    return pd.DataFrame({"step": mine["step"], "held": held})[chosen].sort_values("step")


def _matters(use: MemoryUse, slope: Slope, held: Float) -> bool:
    least, share = LEAST_RISE[use.on_host]
    if slope.rise < max(least, share * float(held[0])):
        return False
    steady = float(held[-1] - held[0]) >= STEADILY * float(np.abs(np.diff(held)).sum())
    return not use.on_host or steady or len(held) >= LONG


def _climbing(study: Study, climbing: list[tuple[MemoryUse, Slope]]) -> Finding:
    use, slope = max(climbing, key=lambda item: item[1].mean)
    series = _series(study, use)
    steps = int(np.ptp(series["step"].to_numpy(np.float64)))
    last = float(series["held"].iloc[-1])
    what = "resident memory" if use.on_host else f"memory of {use.place}"
    title = f"{what} climbs by {size(slope.mean)} with every step"
    evidence = [
        Evidence("climbs by, every step", round(slope.mean), "bytes", 0),
        Evidence("95 % interval, low end", round(slope.low), "bytes"),
        Evidence("95 % interval, high end", round(slope.high), "bytes"),
        Evidence(f"over {count(steps, 'step')} after warm-up", round(slope.rise), "bytes", 0),
    ]
    severity: Severity = "low"
    free = _left(study, use, last)
    if free is not None:
        left = free / slope.mean
        title += f"; {size(free)} are left, enough for about {round(left):,} more"
        evidence.append(Evidence("steps until nothing is left", round(left), "count"))
        severity = "high" if left < 2 * steps else "medium" if left < SOON * steps else "low"
    grown = _part_that_grows(study, use)
    if grown is not None:
        part, by = grown
        evidence.append(Evidence(f"of which {part.replace('_', ' ')}", round(by), "bytes"))
    sites = growing_sites(study.trace.memory[use.rank]) if use.rank in study.trace.memory else []
    evidence += [Evidence(f"allocated again and again, and kept, at {site}", held, "bytes") for site, held in sites[:3]]
    place = Where(ranks=tuple(sorted(one.rank for one, _ in climbing)), steps=_step_range(series))
    return Finding(
        "memory.growth", title, severity, place, tuple(evidence), SAVES_MEMORY, _growth_fixes(use, sites, grown)
    )


def _left(study: Study, use: MemoryUse, last: float) -> float | None:
    """What the ranks that have it in common have left for each of them; None: not known."""
    if use.capacity is None or use.share is None:
        return None
    if not use.on_host:
        return max(use.capacity - last, 0.0)
    sharing = sum(one.on_host and one.capacity == use.capacity for one in study.memory_uses)
    return max(use.capacity * (1 - use.share), 0.0) / max(sharing, 1)


def _part_that_grows(study: Study, use: MemoryUse) -> tuple[str, float] | None:
    """Which of schema.MEMORY_PARTS became larger most, of those that were looked at twice after warm-up."""
    table = study.memory
    mine = table[(table["rank"] == use.rank) & (table["place"] == use.place)]
    best: tuple[str, float] | None = None
    for part in MEMORY_PARTS:
        seen = mine[part].dropna()
        by = float(seen.iloc[-1] - seen.iloc[len(seen) // 2]) if len(seen) > 2 else 0.0
        if by > MiB and (best is None or by > best[1]):
            best = part, by
    return best


def growing_sites(memory: Memory) -> list[tuple[str, int]]:
    """Lines whose allocations are still in use although they were made all through the history, and bytes, largest
    first."""
    history = memory.history
    if history.empty:
        return []
    places = sites_of(memory.stacks)
    alive: dict[tuple[int, int], tuple[int, int, int]] = {}
    """(device, address) -> stack, bytes, number of the event."""
    columns = (history[name].tolist() for name in ("device", "action", "address", "bytes", "stack"))
    for number, (device, action, address, bytes_, stack) in enumerate(zip(*columns, strict=True)):
        if action == "alloc":
            alive[device, address] = stack, bytes_, number
        elif action == "free_requested":
            alive.pop((device, address), None)
    by_site: dict[str, list[tuple[int, int]]] = {}
    for stack, bytes_, number in alive.values():
        by_site.setdefault(places.get(stack, (UNKNOWN, ""))[0], []).append((number, bytes_))
    found = [
        (site, sum(bytes_ for _, bytes_ in kept))
        for site, kept in by_site.items()
        if len(kept) >= FEWEST_BLOCKS and max(kept)[0] - min(kept)[0] >= SPREAD * len(history)
    ]
    return sorted(found, key=lambda item: -item[1])


def _growth_fixes(use: MemoryUse, sites: list[tuple[str, int]], grown: tuple[str, float] | None) -> tuple[Fix, ...]:
    if sites:
        file, _, line = sites[0][0].rpartition(":")
        title = "what is allocated here is kept from step to step: drop it, or detach() it if only its value is wanted"
        patch: tuple[dict[str, Any], ...] = ()
        if line.isdigit():
            patch = ({"file": file, "line": int(line), "argument": "", "value": ""},)
        return (Fix("code", title, patch),)
    if grown is not None:
        return (Fix("code", f"look for what adds {grown[0].replace('_', ' ')} as it trains"),)
    usual = "a loss or an output that is appended or summed up with its graph: .item() or .detach() it"
    deeper = "" if use.on_host else "; run with --level full to have the line named"
    return (Fix("code", f"none of the model's own tensors: look for what the loop keeps, most often {usual}{deeper}"),)


def _step_range(series: pd.DataFrame) -> tuple[int, int]:
    return int(series["step"].iloc[0]), int(series["step"].iloc[-1])


# --- headroom -------------------------------------------------------------------------------------


def headroom(study: Study) -> Found:
    """Much memory that nobody uses, while time is paid to save it; what it gains not to is replayed."""
    uses = [use for rank in study.ranks if (use := main_place(study.memory_uses, rank)) is not None]
    if not uses:
        raise NotConcerned
    signals.steps(study)
    paid = _paid(study)
    unpriced = _unpriced(study)
    if not paid and not unpriced:
        return []
    if any(use.share is None for use in uses):
        raise NotJudged("it is not known how much memory there is")
    used = max(use.share or 0.0 for use in uses)
    if 1 - used < MUCH_UNUSED:
        return []
    worst = max(uses, key=lambda use: use.share or 0.0)
    unused = size((worst.capacity or 0) * (1 - used))
    if not paid:
        raise NotJudged(
            f"{unused} of {size(worst.capacity or 0)} are unused while {unpriced}; what doing without would gain this "
            "capture does not tell"
        )
    signals.replay(study)
    return [_unused(study, worst, unused, what, change) for what, change in paid]


def _unused(study: Study, use: MemoryUse, unused: str, what: str, change: Change) -> Candidate:
    spent = float(sum(of.mean() for of in change.removed.values()))
    words, advice = PAID[what]
    title = f"{unused} of {size(use.capacity or 0)} are unused while {words}"
    evidence = (
        Evidence("used at the peak, of what there is", round(100 * (use.share or 0.0), 1), "%"),
        Evidence(f"{what} a step", round(spent, 3), "ms", 0.0),
        *(Evidence(part.replace("_", " "), number, "bytes") for part, number in use.parts.items() if number),
    )

    def say(price: Price) -> Finding:
        gain, where = price.gain, Where(steps=study.step_range)
        note = f"{advice}; {percent(gain.percent)} is what doing without all of it would save, if all of it fits"
        return Finding("memory.headroom", title, "info", where, evidence, gain, (Fix("code", note),))

    less = LessWork(what, change, study.peer_groups)
    return Candidate("memory.headroom", less, say, counts_cores=True, a_trade=True)


PAID: Final = {
    "recomputation": (
        "activations are computed again in backward",
        "checkpoint fewer blocks, or only some operators (selective checkpointing), as far as memory allows",
    ),
    "offloading": (
        "states or parameters are brought from elsewhere",
        "keep on the device what fits (offload_optimizer or offload_param with a smaller ratio, or none)",
    ),
}
"""What time is paid for -> in words; what to do."""


def _paid(study: Study) -> list[tuple[str, Change]]:
    """What replay can take away. Where memory tells how much of what is computed again it would hold, that is
    compute.recompute's, and where copies were seen what is offloaded is offload.exposed's."""
    found = []
    again = recomputed_ms(study)
    if again is not None and isinstance(kept_in_memory(study), str) and again.mean() >= LEAST_SHARE * study.step_ms:
        found.append(("recomputation", Change({"compute": np.minimum(again, study.work("compute"))})))
    offload = study.work("offload")
    if offloaded(study) is None and offload.mean() >= LEAST_SHARE * study.step_ms:
        found.append(("offloading", Change({"offload": offload})))
    return found


def _unpriced(study: Study) -> str:
    """What else is paid, in words; empty: nothing."""
    phases = study.training_phases
    backward = phases[(phases["name"] == "backward") & phases["step"].isin(study.step_numbers)]
    each = len(backward) / max(len(study.ranks) * len(study.step_numbers), 1)
    if each >= 2 and not study.in_stages:
        return f"gradients are accumulated over {count(round(each), 'micro-batch', 'es')}"
    if sharded_stage(study) >= 3:
        return "parameters are gathered for every use (ZeRO stage 3, FSDP)"
    return ""


RULES = (
    Rule("memory.growth", "memory climbs step after step", looks=(Look(growth),), place=170),
    Rule("memory.headroom", "much memory is unused while time is paid to save it", looks=(Look(headroom),), place=180),
)
