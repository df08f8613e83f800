"""The device has nothing to do since its host does something else than to launch: it loads data, saves a checkpoint,
computes on the CPU, or is away in what the trace does not name. Measured where the device's kernels were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from ... import signals
from ...arrays import Float
from ...budget.lanes import OWN_LANES
from ...candidate import Candidate, Price
from ...device import Devices
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...study import Study
from ...text import ms, percent
from ...work.stacks import outside_phases
from ..base import NotJudged, place_fix
from ..data.loader import loader_fix
from ..rule import Found, Look, Rule
from .device_kernels import device_cost, in_steps, judged_steps, spent_ms

MOST_OF_AWAY: Final = 0.5
"""Of what the device waits, from which on a line outside the phases is where it waits."""
MOST_NAMED: Final = 3
"""Operators that are named, of those that the host computes."""
MOST_READ: Final = 8
"""Ranks whose operators are summed: jobs have thousands, and these only say what the most is."""

Describe = Callable[[Study, Devices, Float, Gain, str], Finding]


def loads_or_saves(study: Study) -> Found:
    """Nothing where no kernels were traced: other rules judge these codes there."""
    if study.device is None:
        return []
    found = _found(study, study.device, "data.stall", ("data_ms",), _data)
    return found + _found(study, study.device, "checkpoint.stall", ("checkpoint_ms",), _checkpoint)


def elsewhere(study: Study) -> Found:
    return _found(study, signals.kernels(study), "compute.host-work", ("cpu_ms", "away_ms"), _elsewhere)


def _found(study: Study, devices: Devices, code: str, columns: tuple[str, ...], describe: Describe) -> list[Candidate]:
    """What the device waits for the host in these columns of its steps."""
    if all(one.delay_us is None for one in devices.ranks.values()):
        raise NotJudged("the trace does not tell when kernels were launched")
    steps = judged_steps(study, devices)
    if not len(steps):
        raise NotJudged("no step is there on all traced ranks")
    spent = np.sum([spent_ms(devices, column, steps) for column in columns], axis=0)

    def say(price: Price) -> Finding:
        return describe(study, devices, spent, price.gain, in_steps(len(steps)))

    return [Candidate(code, device_cost(devices, steps, spent), say)] if spent.any() else []


def _evidence(devices: Devices, spent: Float) -> tuple[Evidence, ...]:
    worst = int(spent.mean(axis=1).argmax())
    return (
        Evidence("the device does nothing since, a traced step", round(float(spent.mean()), 3), "ms"),
        Evidence(f"most on rank {list(devices.ranks)[worst]}", round(float(spent[worst].mean()), 3), "ms"),
    )


def _where(study: Study, devices: Devices) -> Where:
    steps = judged_steps(study, devices)
    return Where(steps=(int(steps[0]), int(steps[-1])))


def _data(study: Study, devices: Devices, spent: Float, gain: Gain, which: str) -> Finding:
    title = f"the device waits {ms(gain.ms)} of the step ({percent(gain.percent)}) for the host to load data{which}"
    more = {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True}
    fixes = (
        loader_fix(study, None, more),
        Fix("code", "less work a sample: decode or tokenize once, before training, and keep what comes of it"),
        Fix("code", "pin_memory=True, and copies to the device with non_blocking=True"),
    )
    return Finding("data.stall", title, "info", _where(study, devices), _evidence(devices, spent), gain, fixes)


def _checkpoint(study: Study, devices: Devices, spent: Float, gain: Gain, which: str) -> Finding:
    title = f"the device waits {ms(gain.ms)} of the step ({percent(gain.percent)}) for the host to save{which}"
    fixes = (
        Fix("code", "save while training goes on: torch.distributed.checkpoint.async_save; it waits for a copy only"),
        Fix("code", "or save less often"),
    )
    return Finding("checkpoint.stall", title, "info", _where(study, devices), _evidence(devices, spent), gain, fixes)


def _elsewhere(study: Study, devices: Devices, spent: Float, gain: Gain, which: str) -> Finding:
    """On the CPU, as far as operators tell, and else in what the trace has no name for."""
    steps = judged_steps(study, devices)
    on_cpu = float(spent_ms(devices, "cpu_ms", steps).mean())
    away = float(spent.mean()) - on_cpu
    operators = _operators(study, devices, steps)
    line = outside_phases(study)
    if line is not None and line.ms < MOST_OF_AWAY * gain.ms:
        line = None
    does = "computes on the CPU" if on_cpu > away else "does something else than to launch"
    title = f"the device waits {ms(gain.ms)} of the step ({percent(gain.percent)}) while its host {does}{which}"
    if line is not None:
        title += f", most in {line.words}"
    evidence = (
        *_evidence(devices, spent),
        *(() if line is None else (Evidence(f"in {line.words}, by samples of the stack", round(line.ms, 3), "ms"),)),
        Evidence("of it, the host was in operators on the CPU", round(on_cpu, 3), "ms"),
        Evidence("of it, in no operator and launching nothing (Python, files, the network)", round(away, 3), "ms"),
        *(Evidence(f"{name}, a step of a rank", round(each_ms, 3), "ms") for name, each_ms in operators),
    )
    beside = "compute it on the device, or in the DataLoader's workers, beside training"
    fixes = []
    if line is not None:
        fixes.append(place_fix(f"{line.words}: {beside}; or do it every so many steps", line.site))
    elif on_cpu > 0:
        fixes.append(Fix("code", beside))
    if away > 0 and line is None:
        fixes.append(
            Fix("code", "record the trace with with_stack=True: the timeline then shows which function it is; or put "
                "torch.profiler.record_function(...) around what runs between the steps")
        )  # fmt: skip
    where = _where(study, devices)
    return Finding("compute.host-work", title, "info", where, evidence, gain, tuple(fixes))


def _operators(study: Study, devices: Devices, steps: npt.NDArray[np.int64]) -> list[tuple[str, float]]:
    """Those that the hosts are in for longest and launch nothing, and how long: ms, mean over steps and ranks, of which
    MOST_READ are read."""
    tables, ranks = [], list(devices.ranks)[:: -(-len(devices.ranks) // MOST_READ)]
    for rank in ranks:
        rows = study.trace.read(rank, ("kind", "name", "lane", "step", "dur_ns"))
        chosen = (rows["kind"] == "kernel") & rows["lane"].isin(OWN_LANES) & rows["dur_ns"].notna()
        chosen &= rows["step"].isin(steps.tolist())
        tables.append(pd.DataFrame({"name": rows["name"][chosen].astype(str), "ns": rows["dur_ns"][chosen]}))
    total = pd.concat(tables).groupby("name")["ns"].sum().astype("int64").sort_values(ascending=False)
    each = len(ranks) * len(steps) * 1e6
    return [(str(name), float(ns) / each) for name, ns in total.head(MOST_NAMED).items()]


LOADS_OR_SAVES = Look(loads_or_saves, settles=("data.stall",))
"""Of the rules for loading and for checkpoints."""
RULES = (
    Rule(
        "compute.host-work",
        "the device waits while its host computes on the CPU, or does something else than to launch",
        explains=("compute",),
        looks=(Look(elsewhere),),
        place=220,
    ),
)
