"""Devices that run slower than they could: clocks held down by power or heat, links and memory that are failing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof import gauges

from ... import signals
from ...device.device_gauges import WatchedDevice, devices_of
from ...finding import NOT_PRICED, Evidence, Finding, Fix, Where
from ...study import Study, once
from ...text import number, percent
from ...text import ranks as ranks_in_words
from ..base import NotJudged
from ..rule import Look, Rule

CODE: Final = "compute.throttle"

FEWEST: Final = 5
"""Readings at work, one a second, before anything is said of a clock."""
LEAST_HELD: Final = 0.05
"""Share of the readings at work in which the clock must be held down: now and then each is."""
LEAST_LOWER: Final = 0.03
"""By which it must be lower then than it could be, or than that of its peers."""

REMEDIES: Final = {
    0x4: "it reaches its power limit: raise that (nvidia-smi -i {index} -pl WATTS) if the card allows more; else that "
    "is its speed for this work",
    0x8: "the hardware slows it down: look at its power cables and cooling, and at `nvidia-smi -q -d PERFORMANCE`",
    0x20: "it is too hot: look at the air flow, the fans and its neighbours",
    0x40: "it is too hot: look at the air flow, the fans and its neighbours",
    0x80: "the machine's power supply signals overload: look at it, and at what else it feeds",
    0x200: "the board is at its limit: look at `nvidia-smi -q -d PERFORMANCE`",
    0x400: "its voltage is held down for reliability: look at `nvidia-smi -q -d PERFORMANCE`",
}
"""Bit of `dsprof.gauges.CLOCK_REASONS` -> what to do."""


@dataclass(frozen=True)
class Clock:
    """A device's clock while it was at work.

    mean, could: MHz, what it was and the most that it can be.
    held: share of the readings in which something held it down; reasons: bit -> the same of each.
    """

    device: WatchedDevice
    mean: float
    could: float
    held: float
    reasons: dict[int, float]

    @property
    def lower(self) -> float:
        """By how much it was lower than it could be, a share."""
        return 1 - self.mean / self.could if self.could > 0 else 0.0


@once
def _devices(study: Study) -> list[WatchedDevice]:
    ordinary = study.ordinary
    begin = int(ordinary["start_ns"].min())
    end = int((ordinary["start_ns"] + ordinary["dur_ns"]).max())
    hosts = {item.rank: item.host for item in study.run.ranks}
    return devices_of(study.of_kind("gauge"), (begin, end), study.facts.get("gpu", []), hosts)


@once
def _clocks(study: Study) -> list[Clock]:
    """Of the devices that were at work often enough to tell."""
    found = []
    for device in _devices(study):
        moments = device.moments
        could = device.of(gauges.SM_CLOCK_MAX).highest
        if len(moments) < FEWEST or not could > 0:
            continue
        speed = device.of(gauges.SM_CLOCK).at(moments)
        bits = np.nan_to_num(device.of(gauges.CLOCK_REASONS).at(moments)).astype(np.int64)
        reasons = {bit: float((bits & bit > 0).mean()) for bit in gauges.CLOCK_REASON}
        held = float((bits & sum(gauges.CLOCK_REASON) > 0).mean())
        found.append(Clock(device, float(speed.mean()), could, held, {bit: at for bit, at in reasons.items() if at}))
    return found


def throttle(study: Study) -> list[Finding]:
    """Clocks that are held down, PCIe and NVLink connections that are worse than they were made, memory errors."""
    if not len(study.ordinary):
        raise NotJudged("no step was completed on all captured ranks")
    devices = _devices(study)
    if not devices:
        raise NotJudged("what the devices' clocks and links did was not captured")
    findings = [*_slow_clocks(study), *_links(study, devices), *_errors(study, devices)]
    if not findings and not _clocks(study):
        raise NotJudged(f"the judged steps are too short for {FEWEST} looks, one a second, at a device at work")
    return findings


# --- clocks ---------------------------------------------------------------------------------------


def held_down(study: Study) -> dict[int, Clock]:
    """Rank -> the clock of its device, where that was held down."""
    return {
        clock.device.rank: clock for clock in _clocks(study) if clock.held >= LEAST_HELD and clock.lower >= LEAST_LOWER
    }


def _slow_clocks(study: Study) -> list[Finding]:
    """One finding of the devices that are slower than others of their kind; else one of all that are held down."""
    held = held_down(study)
    behind = {rank: clock for rank, clock in held.items() if lag(study, clock) >= LEAST_LOWER}
    chosen = behind or held
    if not chosen:
        return []
    worst = max(chosen.values(), key=lambda clock: lag(study, clock) if behind else clock.lower)
    peers = _peers_mean(study, worst)
    why = " and ".join(gauges.CLOCK_REASON[bit] for bit in _main_reasons(worst))
    evidence = [
        Evidence("SM clock at work, mean", round(worst.mean), "MHz", round(peers) if behind else round(worst.could)),
        Evidence("its maximum", round(worst.could), "MHz"),
        *(
            Evidence(f"held down by {gauges.CLOCK_REASON[bit]}", round(100 * share, 1), "%", 0.0)
            for bit, share in worst.reasons.items()
        ),
    ]
    for gauge, unit in ((gauges.TEMPERATURE, "C"), (gauges.POWER, "W")):
        readings = worst.device.of(gauge)
        if len(readings.value):
            name = "temperature" if gauge == gauges.TEMPERATURE else "power"
            limit = worst.device.of(gauges.POWER_LIMIT).highest if gauge == gauges.POWER else float("nan")
            expected = round(limit, 1) if np.isfinite(limit) else None
            evidence.append(Evidence(f"{name}, highest", round(readings.highest, 1), unit, expected))
    ranks = tuple(sorted(chosen))
    if behind:
        title = (
            f"{worst.device} (rank {worst.device.rank}) runs at {number(worst.mean)} MHz, "
            f"{percent(100 * lag(study, worst))} below its peers: held down by {why}"
        )
    else:
        title = f"{worst.device} runs at {number(worst.mean)} of {number(worst.could)} MHz: held down by {why}"
        if len(ranks) > 1:
            title += f"; so are the devices of all {ranks_in_words(ranks)}"
    remedies = [REMEDIES[bit].format(index=worst.device.index) for bit in _main_reasons(worst)]
    fixes = tuple(Fix("code", f"{worst.device}: {remedy}") for remedy in dict.fromkeys(remedies))
    return [
        Finding(CODE, title, "info", Where(ranks=ranks, steps=study.step_range), tuple(evidence), NOT_PRICED, fixes)
    ]


def _main_reasons(clock: Clock) -> list[int]:
    """What held it down for half as long as what did so longest."""
    most = max(clock.reasons.values())
    return [bit for bit, share in clock.reasons.items() if share >= most / 2]


def _peers_mean(study: Study, clock: Clock) -> float:
    """What the clocks of other devices of this kind were, median; NaN without any."""
    others = [
        other.mean
        for other in _clocks(study)
        if other.device.model == clock.device.model and other.device.rank != clock.device.rank
    ]
    return float(np.median(others)) if others else float("nan")


def lag(study: Study, clock: Clock) -> float:
    """By how much the device is slower than others of its kind, a share; nothing where there are none."""
    peers = _peers_mean(study, clock)
    return 1 - clock.mean / peers if peers > 0 else 0.0


# --- links and memory -----------------------------------------------------------------------------


def _links(study: Study, devices: Sequence[WatchedDevice]) -> list[Finding]:
    """PCIe that came up with fewer lanes, or slower, than card and slot have; NVLinks that are down."""
    found = []
    for device in devices:
        if not len(device.moments):  # a link that nobody uses saves power
            continue
        evidence, words = [], []
        for now, most, what in (
            (gauges.PCIE_GENERATION, gauges.PCIE_GENERATION_MAX, "generation"),
            (gauges.PCIE_WIDTH, gauges.PCIE_WIDTH_MAX, "lanes"),
        ):
            value, could = device.of(now).highest, device.of(most).highest
            if value < could:
                evidence.append(Evidence(f"PCIe {what}", value, "count", could))
                words.append(f"PCIe {what} {value:.0f} of {could:.0f}")
        links = device.of(gauges.NVLINKS).highest
        most_links = max(
            (other.of(gauges.NVLINKS).highest for other in devices if other.model == device.model), default=links
        )
        if links < most_links:
            evidence.append(Evidence("NVLinks up", links, "count", most_links))
            words.append(f"{links:.0f} NVLinks of {most_links:.0f}")
        if words:
            fix = Fix(
                "code", f"{device}: run on another machine; reseat the card, look at the slot, the riser, `dmesg`"
            )
            found.append(_finding(study, device, f"is connected by {' and '.join(words)}", evidence, fix))
    return found


ERRORS: Final = {
    gauges.ECC_UNCORRECTED: "memory errors that could not be corrected",
    gauges.ECC_CORRECTED: "corrected memory errors",
    gauges.PCIE_REPLAYS: "PCIe transfers repeated",
    gauges.NVLINK_ERRORS: "NVLink errors",
}


def _errors(study: Study, devices: Sequence[WatchedDevice]) -> list[Finding]:
    found = []
    for device in devices:
        risen = {words: device.of(gauge).rise for gauge, words in ERRORS.items() if device.of(gauge).rise > 0}
        if risen:
            evidence = [Evidence(f"{words} in the judged steps", rise, "count", 0.0) for words, rise in risen.items()]
            words = " and ".join(f"{rise:,.0f} {words}" for words, rise in risen.items())
            remedy = f"{device}: run on another machine, and have it checked (`nvidia-smi -q -d ECC,PAGE_RETIREMENT`)"
            found.append(_finding(study, device, f"counts {words}", evidence, Fix("code", remedy)))
    return found


def _finding(study: Study, device: WatchedDevice, what: str, evidence: list[Evidence], fix: Fix) -> Finding:
    where = Where(ranks=(device.rank,), steps=study.step_range)
    title = f"{device} (rank {device.rank}) {what}"
    return Finding(CODE, title, "info", where, tuple(evidence), NOT_PRICED, (fix,))


RULES = (
    Rule(
        CODE,
        "a device's clock is held down, or its links or memory are failing",
        explains=("compute",),
        looks=(Look(throttle),),
        causes=("rank.straggler",),
        needs=(signals.gpus,),
        place=200,
    ),
)
