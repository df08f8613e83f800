"""What the devices' own kernels show, where they were traced: what devices stood idle for in the traced steps, which
`price.device` prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import MOST_UNSEEN

from ... import signals
from ...arrays import Float
from ...budget.irregular import FEWEST_JUDGED
from ...budget.parts import OWN_WORK
from ...candidate import Candidate, DeviceCost, Price
from ...device import Devices
from ...finding import Evidence, Finding, Fix, Where
from ...graph.chain_work import chain_groups, chain_work
from ...price.device import measured_gain, replayed_ms
from ...signals import Absent
from ...study import Study
from ...text import count, ms, percent
from ...whatif.faster_hosts import FasterHosts
from ...whatif.without_flows import TransfersAtOnce
from ...whatif.work import Change, LessWork
from ...work.device_idle import unseen_idle_ms
from ..base import NotJudged, code_fix, script_of
from ..rule import Found, Look, Rule

MOST_CLOCK_ERROR: Final = 0.2
"""Of what is waited."""
IN_OPTIMIZER: Final = 0.1
"""Of the launches, for which devices wait, from which on those of the optimizer are worth a fix."""
FUSES: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch's that have `fused=True`."""
LEAST_LATE: Final = 0.5
"""Of the collectives that make others wait, those to which a straggler is the last to come."""


def launch_bound(study: Study) -> Found:
    """The device does nothing, and what it does next has not been launched, while its host is busy launching."""
    _refuse_phases(study)
    devices = signals.kernels(study)
    if all(one.delay_us is None for one in devices.ranks.values()):
        raise NotJudged("the trace does not tell when kernels were launched")
    steps = judged_steps(study, devices)
    if not len(steps):
        raise NotJudged("no step is there on all traced ranks")
    host = spent_ms(devices, "launching_ms", steps)
    cost = replace(device_cost(devices, steps, host), less=(FasterHosts(0.5), FasterHosts(0.0)))

    def say(price: Price) -> Finding:
        return _launching(study, devices, steps, host, cost, price)

    return [Candidate("compute.launch-bound", cost, say)]


def _launching(
    study: Study, devices: Devices, steps: npt.NDArray[np.int64], host: Float, cost: DeviceCost, price: Price
) -> Finding:
    """host: [R, S] ms that the devices stood idle while their hosts launched."""
    measured = measured_gain(study, cost)
    worst = int(host.mean(axis=1).argmax())
    rank = list(devices.ranks)[worst]
    idle = sum(one.idle_ns for one in devices.ranks.values()) / sum(
        one.kernel_time_ns for one in devices.ranks.values()
    )
    part = float(spent_ms(devices, "in_optimizer_ms", steps).mean()) / max(float(host.mean()), 1e-9)
    longer = f", of {ms(cost.took_ms)} that they took" if cost.took_ms > 1.01 * study.step_ms else ""
    delays = [one.delay_us for one in devices.ranks.values() if one.delay_us is not None]
    evidence = (
        Evidence("the device does nothing", round(100 * idle, 1), "%"),
        Evidence(
            f"of it, the host was busy launching what comes next, a traced step{longer}",
            round(float(host.mean()), 3),
            "ms",
        ),
        Evidence(f"most on rank {rank}", round(float(host[worst].mean()), 3), "ms"),
        Evidence("of it, in the optimizer", round(100 * part, 1), "%"),
        Evidence("from a launch to its kernel, median", round(float(np.median(delays)), 1), "us"),
        *(
            Evidence(f"the step would be shorter if {words}", round(gain.ms, 3), "ms")
            for words, gain in zip(("launching took half as long", "it took no time"), price.tried, strict=False)
        ),
    )
    title = (
        f"the device waits for its host between kernels for {percent(measured.percent)} of the step"
        f"{in_steps(len(steps))}: launches come too slowly to keep it busy"
    )
    fewer = [
        Fix("code", "torch.compile(model), or mode='reduce-overhead' for CUDA graphs: fewer launches a step"),
        Fix("code", "a larger micro-batch: the same launches for more work"),
    ]
    optimizer = _fewer_launches_of_the_optimizer(study)
    if optimizer is not None and part > IN_OPTIMIZER:
        fewer.insert(0 if part > 0.5 else 2, optimizer)
    where = Where(steps=(int(steps[0]), int(steps[-1])))
    return Finding("compute.launch-bound", title, "info", where, evidence, price.gain, tuple(fewer))


def _fewer_launches_of_the_optimizer(study: Study) -> Fix | None:
    """One launch for many parameters; None where that is so."""
    told = study.facts.get("optimizer", [])
    if not told:
        return Fix("code", "a fused optimizer (fused=True, or foreach=True): one launch for many parameters")
    most = max(told, key=lambda fact: int(fact.get("parameters") or 0))
    if most.get("implementation") == "fused" or most.get("class") not in FUSES:
        return None
    title = f"{most['class']}(..., fused=True): one launch for many of its {most.get('parameters')} parameters"
    return code_fix(title, "fused", True, script_of(study), None, {"optimizer.fused": True})


def _refuse_phases(study: Study) -> None:
    """Raises NotJudged where only whole phases were timed, in which the device may stand idle."""
    if study.device is not None or not study.led_by_devices:
        return
    share = unseen_idle_ms(study) / study.step_ms if study.step_ms else 0.0
    if share > MOST_UNSEEN:
        raise NotJudged(
            f"for {percent(100 * share)} of the step the device is in phases that its host is still launching, and how "
            "long it stands idle inside a phase is not seen where only whole phases are timed: run again with "
            "`dsprof run --deep 10:13`, which traces the kernels of three steps"
        )


def collectives(study: Study) -> Found:
    """The rank that the others' devices wait for in collectives; and, as a remark, transfers beside no computation."""
    if study.device is None:
        return []
    return [*_late_rank(study, study.device), *_exposed(study, study.device)]


def _late_rank(study: Study, devices: Devices) -> list[Candidate]:
    if len(devices.ranks) < 2:
        raise NotJudged("the device of only one rank was traced")
    if not devices.matched:
        raise NotJudged("no collective was matched on several ranks")
    steps = judged_steps(study, devices)
    waits = devices.waits[devices.waits["step"].isin(steps.tolist())]
    by_rank = devices.delays_by_step(steps).mean(axis=1)
    if waits.empty or not float(by_rank.max()) > 0:
        return []
    waited = float(waits["peer_ms"].sum()) / len(waits)
    if study.clock_error_ms > MOST_CLOCK_ERROR * waited:
        raise NotJudged(f"the clocks of the ranks may be {ms(study.clock_error_ms)} apart, and waits are as short")
    rank = int(by_rank.idxmax())
    others = [one for one in devices.ranks if one != rank]
    saved = np.zeros((len(others), len(steps)))
    mine = devices.delays[(devices.delays["late_rank"] == rank) & devices.delays["step"].isin(steps.tolist())]
    saved[np.searchsorted(others, mine["rank"]), np.searchsorted(steps, mine["step"])] = mine["ms"]
    each = waits.drop_duplicates("row")
    times, every = int((each["late_rank"] == rank).sum()), len(each)
    alone = waits[(waits["late_rank"] == rank) & (waits["rank"] != rank)].groupby("row")["saved_ms"].mean()
    worst = int(alone.idxmax())
    name = str(study.collectives["name"].iloc[worst])
    evidence = (
        Evidence(f"rank {rank} comes last", f"{times} of {every}", "matched collectives"),
        Evidence("the others stand still for it alone, mean a step", round(float(saved.mean()), 3), "ms"),
        *_began_late(devices, rank, steps),
        Evidence(f"most in one {name}", round(float(alone[worst]), 3), "ms"),
    )
    often = times > LEAST_LATE * every
    title = (
        f"rank {rank} comes late to {'most' if often else 'some'} collectives ({times} of {every}), and the devices of "
        f"the others stand still for it{in_steps(len(steps))}"
    )
    where = Where(ranks=(rank,), steps=(int(steps[0]), int(steps[-1])))
    fix = Fix("code", f"look at what rank {rank} does before it, beside another rank's timeline")

    def say(price: Price) -> Finding:
        shown = (*evidence, *_rank_as_others(study, rank))
        return Finding("rank.straggler", title, "info", where, shown, price.gain, (fix,))

    return [Candidate("rank.straggler", device_cost(devices, steps, saved, idle=False), say)]


def _began_late(devices: Devices, rank: int, steps: npt.NDArray[np.int64]) -> list[Evidence]:
    table = devices.began_late
    found = table[(table["rank"] == rank) & table["step"].isin(steps.tolist()) & (table["ms"] > 0)]
    return [
        Evidence(
            f"not counted: its step {step}, the first traced, began later than any other's by", round(late, 3), "ms"
        )
        for step, late in zip(found["step"], found["ms"], strict=True)
    ]


def _exposed(study: Study, devices: Devices) -> list[Candidate]:
    """What of them could be hidden is not judged."""
    steps = judged_steps(study, devices)
    waits = devices.waits[devices.waits["step"].isin(steps.tolist())]
    if waits.empty:
        return []
    spent = np.zeros((len(devices.ranks), len(steps)))
    at = np.searchsorted(list(devices.ranks), waits["rank"]), np.searchsorted(steps, waits["step"])
    np.add.at(spent, at, waits["transfer_ms"].to_numpy(np.float64))
    mean = float(spent.mean())
    share = 100 * mean / study.step_ms if study.step_ms else 0.0
    evidence = tuple(
        Evidence(f"{one.name} of {one.bytes:,} bytes on {one.ranks} ranks, bus bandwidth", round(one.busbw_gbps, 2),
                 "GB/s or more" if one.at_least else "GB/s")
        for one in devices.bandwidths[:4]
    )  # fmt: skip
    title = (
        f"transfers take {ms(mean)} of the step ({percent(share)}) during which the device computes nothing"
        f"{in_steps(len(steps))}; how much of it could be hidden is not judged"
    )
    where = Where(steps=(int(steps[0]), int(steps[-1])))

    def say(price: Price) -> Finding:
        return Finding("comm.exposed", title, "info", where, evidence, price.gain)

    cost = DeviceCost(spent, 0.0, at_most=TransfersAtOnce())
    return [Candidate("comm.exposed", cost, say)]


def _rank_as_others(study: Study, rank: int) -> tuple[Evidence, ...]:
    """What the step would be shorter by if the chains of `rank` took as long as is typical of the others', by replay;
    nothing where the chains are not known."""
    if isinstance(signals.replay.look(study), Absent) or not study.led_by_devices:
        return ()
    graph = study.need_graph()
    of_rank = np.array(graph.ranks) == rank
    groups = [group for group in chain_groups(graph, study.peer_groups) if (group & ~of_rank).any()]
    removed = {}
    for part in OWN_WORK:
        own = chain_work(graph, part)
        removed[part] = np.zeros_like(own)
        for group in groups:
            typical = np.median(own[group & ~of_rank], axis=0)
            removed[part][group & of_rank] = np.clip(own[group & of_rank] - typical, 0.0, None)
    saved = replayed_ms(study, LessWork("rank.straggler", Change(removed), groups))
    if saved is None:
        return ()
    words = f"the step would be shorter if rank {rank} worked as long as the others, replayed"
    return (Evidence(words, round(saved[0], 3), "ms"),)


def judged_steps(study: Study, devices: Devices) -> npt.NDArray[np.int64]:
    """Those that are judged: the ordinary ones among the traced, or, where --deep traced a few, those."""
    ordinary = devices.steps[np.isin(devices.steps, study.step_numbers)]
    return ordinary if len(ordinary) else devices.steps


def spent_ms(devices: Devices, column: str, steps: npt.NDArray[np.int64]) -> Float:
    """A column of `DeviceTime.steps` of these steps, [R, S]."""
    tables = [one.steps.set_index("step")[column].reindex(steps) for one in devices.ranks.values()]
    return np.stack([table.to_numpy(np.float64) for table in tables])


def device_cost(devices: Devices, steps: npt.NDArray[np.int64], spent: Float, *, idle: bool = True) -> DeviceCost:
    """Of `spent`, [R, S] ms of these steps; idle: for which the devices stood idle, rather than in a kernel."""
    table = pd.concat([one.steps[one.steps["step"].isin(steps.tolist())] for one in devices.ranks.values()])
    took = float((table["end_ns"] - table["start_ns"]).mean()) / 1e6
    idle_ms = float(table["idle_ms"].mean()) if idle else None
    return DeviceCost(spent, took, idle_ms, float(table["busy_ms"].mean()))


def in_steps(steps: int) -> str:
    which = "one step" if steps == 1 else count(steps, "step")
    return f", in the {which} traced" if steps < FEWEST_JUDGED else ""


COLLECTIVES = Look(collectives, settles=("rank.straggler",))
"""Of the rule for slow ranks."""
RULES = (
    Rule(
        "compute.launch-bound",
        "the device waits for its host between kernels",
        explains=("compute",),
        looks=(Look(launch_bound),),
        place=210,
    ),
)
