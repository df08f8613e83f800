"""What a forward or a backward takes whatever the size of its micro-batch: calls and launches take their time, and
weights and their gradients move through memory.

A run in which all micro-batches are of one size does not tell it. Nor do their smallest actions: those of a stage with
fewer layers have fewer calls. So it is taken from what models of many shapes take (benchmarks/constants.py, `fixed`):
most of it goes with how many tensors the parameters of a stage are, and with their bytes. Where a run does not tell
these, and on devices, it is taken to be a few ms, for actions of 3 ms as for those of 100. No forward and no backward
of the 28 took more than what it may be at most; at least it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..align.groups import TP
from ..study import Study
from ..text import count, size


@dataclass(frozen=True)
class FixedPart:
    """`ms` of an action, or this part of it if that is more, and no more than `most` of it."""

    ms: float
    part: float = 0.0
    most: float = 1.0

    def of(self, ms: float) -> float:
        """The part of an action that takes so long."""
        return min(max(self.ms / max(ms, 1e-9), self.part), self.most)

    def times(self, ms: float, size: float) -> float:
        """How many times as long it takes with a micro-batch that is so many times as large."""
        part = self.of(ms)
        return part + (1 - part) * size


@dataclass(frozen=True)
class OfActions:
    """Of a forward (`F`), and of a whole backward (`B`)."""

    forward: FixedPart
    backward: FixedPart

    def of(self, op: str) -> FixedPart:
        return self.forward if op == "F" else self.backward


@dataclass(frozen=True)
class FixedWork:
    """What is taken for it, and between which ends it may be; and that in words."""

    typical: OfActions
    least: OfActions
    most: OfActions
    says: str


@dataclass(frozen=True)
class StageParameters:
    """Of a stage, mean over stages: how many tensors its parameters are, and their bytes."""

    tensors: float
    bytes: float


@dataclass(frozen=True)
class Takes:
    """ms of each action: of the call, of each tensor of the stage's parameters, and of each MB of them."""

    call: float
    tensor: float
    megabyte: float

    def ms(self, parameters: StageParameters) -> float:
        return self.call + self.tensor * parameters.tensors + self.megabyte * parameters.bytes / 1e6


FORWARD: Final = Takes(0.1, 0.04, 0.25)
BACKWARD: Final = Takes(0.15, 0.035, 0.75)
AT_MOST: Final = 2.3
"""Times what these give: the layers of one model make more calls for a tensor than those of another. At least it is
nothing: of an embedding a micro-batch reads a few rows."""
LARGEST: Final = 30e6
"""Bytes of a stage's parameters, twice what the largest model that was measured has: what more of them take is not
known, beyond what so many do."""
IN_A_JOB: Final = 0.25
IN_A_JOB_AT_MOST: Final = 1.5
"""ms of an action beside that where ranks wake each other up: of pipelines of two and three ranks on two cores, whose
stages have two small layers, what more micro-batches saved is what 0 to 0.7 ms explain (p1 to p3 of
benchmarks/fix_pairs.py, twice each); in another one forwards took 0.9 ms and backwards 1.4 ms whatever their size."""
CAPPED: Final = 0.9
"""Of an action, that is taken for it at most."""
ELEMENT_BYTES: Final = 4
"""Of a parameter of dsprof's engine, whatever its type is: the models that were measured had float32."""
SAID: Final = "what a forward or a backward takes whatever the size of its micro-batch was not measured"
UNKNOWN: Final = FixedPart(2.0, most=0.5)
UNKNOWN_AT_MOST: Final = FixedPart(6.0, 0.3)
"""What is taken of any model, and what it may be at most, by the same measurements."""
NOTHING: Final = FixedPart(0.0)
UNTOLD: Final = FixedWork(
    OfActions(UNKNOWN, UNKNOWN),
    OfActions(NOTHING, NOTHING),
    OfActions(UNKNOWN_AT_MOST, UNKNOWN_AT_MOST),
    f"{SAID}: {UNKNOWN.ms:g} ms are taken for it, where it may be nothing, {UNKNOWN_AT_MOST.ms:g} ms, or "
    f"{100 * UNKNOWN_AT_MOST.part:.0f} %",
)
"""Where nothing is known of the model."""


def fixed_work(parameters: StageParameters | None) -> FixedWork:
    """By the parameters of a stage; None: they are not known, or a device computes."""
    if parameters is None:
        return UNTOLD
    larger = parameters.bytes > LARGEST
    told = replace(parameters, bytes=LARGEST) if larger else parameters

    def taken(times: float, beside: float, part: float, most: float) -> OfActions:
        forward, backward = (FixedPart(times * of.ms(told) + beside, part, most) for of in (FORWARD, BACKWARD))
        return OfActions(forward, backward)

    typical = taken(1.0, IN_A_JOB, 0.0, CAPPED)
    most = taken(AT_MOST, IN_A_JOB_AT_MOST, UNKNOWN_AT_MOST.part if larger else 0.0, 1.0)
    says = (
        f"{SAID}: by the {count(round(parameters.tensors), 'tensor')} and {size(parameters.bytes)} of a stage's "
        f"parameters, {typical.forward.ms:.1f} ms (0 to {most.forward.ms:.1f}) are taken for it of a forward, and "
        f"{typical.backward.ms:.1f} ms (0 to {most.backward.ms:.1f}) of a backward"
    )
    if larger:
        says += f", or {100 * UNKNOWN_AT_MOST.part:.0f} %: so large ones were not measured"
    return FixedWork(typical, OfActions(NOTHING, NOTHING), most, says)


def stage_parameters(study: Study, stages_a_rank: float) -> StageParameters | None:
    """Of stages of which each rank has so many, mean over stages; None where that is not known of every rank:
    parameters are shared, or some are frozen, or the work is a device's, of which nothing was measured."""
    shared = any(study.facts.get(shares) for shares in ("fsdp", "deepspeed", "tensor_parallel"))
    if study.on_gpu or shared or any(one.role == TP for one in study.mesh.dimensions):
        return None
    told = _of_engine(study.facts.get("trained", ())) or _of_pipelining(study.facts.get("pipeline", ()))
    if not told or not set(study.ranks) <= told.keys():
        return None
    tensors, of_bytes = (sum(of) / len(told) / stages_a_rank for of in zip(*told.values(), strict=True))
    return StageParameters(tensors, of_bytes)


Told = dict[int, tuple[float, float]]
"""Rank -> tensors and bytes of all parameters that it has, where all are trained."""


def _of_engine(facts: Iterable[Mapping[str, Any]]) -> Told:
    return {
        int(fact["rank"]): (float(len(fact["of_parameters"])), ELEMENT_BYTES * float(fact["elements"]))
        for fact in facts
        if isinstance(fact.get("of_parameters"), list)
        and not fact.get("frozen")
        and _are_whole(fact, "rank", "elements")
    }


def _of_pipelining(facts: Iterable[Mapping[str, Any]]) -> Told:
    """Of torch's pipelines. Several schedules of a rank have the same stages."""
    return {
        int(fact["rank"]): (float(fact["tensors"]), float(fact["bytes"]))
        for fact in facts
        if fact.get("tensors") and not fact.get("frozen") and _are_whole(fact, "rank", "tensors", "bytes")
    }


def _are_whole(fact: Mapping[str, Any], *names: str) -> bool:
    """Whether these are whole numbers: a file that somebody else wrote may say anything."""
    return all(isinstance(fact.get(name), int) for name in names)
