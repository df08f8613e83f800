"""Causes of a late rank that are its machine's: clocks held down, memory on another node, a slow network.

What these make a rank lose is not measured by itself, only that they are there and the peers have none of it, and that
the rank's lateness is of the kind that they make: so none of them is certain.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dsprof import gauges

from ...arrays import Float
from ...finding import Evidence, Fix
from ...text import ms, number, percent
from ..compute.throttle import held_down, lag
from .cause import Cause, Late

LOWER: Final = 0.1
"""By which a core's clock must be lower than that of the others, a share."""
AGAIN: Final = 0.002
"""Of the TCP segments, sent again: so many more than the others' have to be."""
FEWEST_SEGMENTS: Final = 10
"""Sent again in the judged steps: fewer are no reason."""


def gpu_clock(late: Late) -> Cause | None:
    """Its device's clock is held down."""
    held = held_down(late.study)
    mine = [held[rank] for rank in late.study.ranks_where(late.slow) if rank in held]
    if not mine:
        return None
    worst = max(mine, key=lambda clock: lag(late.study, clock))
    behind = lag(late.study, worst)
    could_be = late.study.step_ms * behind
    if not late.mostly(could_be):
        return None
    why = gauges.CLOCK_REASON[max(worst.reasons, key=lambda bit: worst.reasons[bit])]
    words = f"its GPU runs {percent(100 * behind)} below the clock of its peers, held down by {why}"
    evidence = Evidence("SM clock at work, below its peers", round(100 * behind, 1), "%", 0.0)
    return Cause("gpu-clock", words, (evidence,), (), sure=False)  # compute.throttle says what to do, and is linked


def core_clock(late: Late) -> Cause | None:
    """It computes longer, on cores whose clock is lower than those of the others by as much."""
    level = mean_level(late, gauges.CORE_CLOCK)
    if not late.known_on_both(level):
        return None
    mine, others = late.mine_and_others(level)
    beyond = late.beyond("training_thread_cpu_seconds")
    computes = late.gauge("training_thread_cpu_seconds")[0]
    if mine > (1 - LOWER) * others or not late.mostly(beyond) or not late.mostly(computes * (1 - mine / others)):
        return None
    evidence = [Evidence("clock of its core", round(mine), "MHz", round(others))]
    facts = _facts(late, "core_clock")
    governor = next((str(fact["governor"]) for fact in facts if fact.get("governor")), "of its cores")
    how = (
        f"the governor {governor} (`cpupower frequency-set -g performance`), heat, a power limit, a neighbour on the "
        "same socket"
    )
    for fact in facts:
        may, could = float(fact.get("may_mhz", np.inf)), float(fact["could_mhz"])
        if may < (1 - LOWER) * could:
            evidence.append(Evidence("its highest clock allowed", round(may), "MHz", round(could)))
            how = (
                f"its clock is limited to {number(may)} MHz: `cpupower frequency-set -u {could:.0f}MHz`, or the BIOS's "
                "power profile"
            )
            break
    words = f"its cores run at {number(mine)} MHz, and those of the others at {number(others)}"
    fix = Fix("code", f"look at the clocks of {late.who}: {how}")
    return Cause("core-clock", words, tuple(evidence), (fix,), sure=False)


def numa(late: Late) -> Cause | None:
    """It computes longer, and its memory may only be on other nodes than its cores."""
    apart = {int(fact["rank"]): fact for fact in late.study.facts.get("numa", []) if not _near(fact)}
    slow, others = late.study.ranks_where(late.slow), late.study.ranks_where(~late.slow)
    if not all(rank in apart for rank in slow) or any(rank in apart for rank in others):
        return None
    beyond = late.beyond("training_thread_cpu_seconds")
    if not late.mostly(beyond):
        return None
    fact = apart[slow[0]]
    cores, memory = (", ".join(map(str, fact[name])) for name in ("of_cores", "of_memory"))
    words = f"its cores are on NUMA node {cores} and its memory on node {memory}, and it computes {ms(beyond)} longer"
    evidence = (
        Evidence("CPU time of the training thread, more than peers", round(beyond, 3), "ms", 0.0),
        Evidence("NUMA node of its cores", cores, "", None),
        Evidence("NUMA node of its memory", memory, "", None),
    )
    fix = (
        f"bind {late.who} to the memory of its own cores: numactl --cpunodebind={fact['of_cores'][0]} "
        f"--membind={fact['of_cores'][0]}, or torchrun's --numa-binding=node"
    )
    return Cause("numa", words, evidence, (Fix("code", fix),), sure=False)


def network(late: Late) -> Cause | None:
    """It neither computes nor lacks a core meanwhile, and its network is slower than the others', or loses packets."""
    if late.mostly(late.beyond("training_thread_cpu_seconds")) or late.mostly(late.beyond("core_wait_seconds")):
        return None
    look = "cable, switch port, driver (`ethtool`, `ip -s link`), and who else uses it"
    fix = Fix("code", f"look at the network of {late.who}: {look}")
    sent, again = (late.study.gauges.spent(name).sum(axis=1) for name in (gauges.SEGMENTS_SENT, gauges.SEGMENTS_AGAIN))
    if late.known_on_both(again):
        share: Float = again / np.maximum(sent, 1.0)
        mine, others = late.mine_and_others(share)
        count = late.mine_and_others(again)[0] / 1e3
        if mine > others + AGAIN and mine > 2 * others and count >= FEWEST_SEGMENTS:
            shares = percent(100 * mine), percent(100 * others)
            words = f"its host sends {shares[0]} of its TCP segments again, and the others {shares[1]}"
            evidence = Evidence("TCP segments sent again", round(100 * mine, 2), "%", round(100 * others, 2))
            return Cause("network", words, (evidence,), (fix,), sure=False)
    speeds = {int(fact["rank"]): max(fact["mbit_per_s"].values()) for fact in late.study.facts.get("network", [])}
    level = np.array([float(speeds.get(rank, np.nan)) for rank in late.study.ranks])
    if late.known_on_both(level):
        mine, others = late.mine_and_others(level)
        if mine <= others / 2:
            words = f"its fastest network interface does {number(mine)} Mbit/s, and that of the others {number(others)}"
            evidence = Evidence("fastest network interface", mine, "Mbit/s", others)
            return Cause("network", words, (evidence,), (fix,), sure=False)
    return None


def _near(fact: dict[str, Any]) -> bool:
    return bool(set(fact.get("of_cores", ())) & set(fact.get("of_memory", ())))


def _facts(late: Late, name: str) -> list[dict[str, Any]]:
    """Of the slow ranks."""
    return [fact for fact in late.study.facts.get(name, []) if fact.get("rank") in late.study.ranks_where(late.slow)]


def mean_level(late: Late, gauge: str) -> Float:
    """What a gauge that is no count says in the judged steps, mean of each rank, [R]; NaN where it says nothing."""
    rows, ordinary = late.study.of_kind("gauge"), late.study.ordinary
    rows = rows[rows["name"] == gauge]
    within = rows["start_ns"].between(ordinary["start_ns"].min(), (ordinary["start_ns"] + ordinary["dur_ns"]).max())
    mean = rows[within].groupby("rank")["value"].mean()
    found: Float = mean.reindex(late.study.ranks).to_numpy(np.float64)
    return found
