"""What a forward or a backward takes whatever the size of its micro-batch: calls and launches take their time, and
weights and their gradients move through memory.

A run in which all micro-batches are of one size does not tell it. Nor do their smallest actions: those of a stage with
fewer layers have fewer calls. So it is taken from what models of many shapes take (benchmarks/constants.py, `fixed`):
most of it goes with how many tensors the parameters of a stage are, and with their bytes. Where a run does not tell
these, and on devices, it is a few ms, for actions of 3 ms as for those of 100; and all that it may be is in the
interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

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
BETWEEN: Final = (0.3, 2.3)
"""Times what these give: the layers of one model make more calls for a tensor than those of another."""
IN_A_JOB: Final = 0.5
IN_A_JOB_BETWEEN: Final = (0.0, 1.5)
"""ms of an action beside that where ranks wake each other up: in a pipeline of two ranks on two cores, whose stages
have two small layers, forwards took 0.9 ms and backwards 1.4 ms whatever their size."""
CAPPED: Final = 0.9
"""Of an action."""
ELEMENT_BYTES: Final = 4
UNKNOWN: Final = FixedPart(2.0, most=0.5)
UNKNOWN_BETWEEN: Final = (FixedPart(0.0), FixedPart(6.0, 0.3))
SAID: Final = "what a forward or a backward takes whatever the size of its micro-batch was not measured"
UNTOLD: Final = FixedWork(
    OfActions(UNKNOWN, UNKNOWN),
    OfActions(UNKNOWN_BETWEEN[0], UNKNOWN_BETWEEN[0]),
    OfActions(UNKNOWN_BETWEEN[1], UNKNOWN_BETWEEN[1]),
    f"{SAID}: {UNKNOWN.ms:g} ms are taken for it, where it may be nothing, {UNKNOWN_BETWEEN[1].ms:g} ms, or "
    f"{100 * UNKNOWN_BETWEEN[1].part:.0f} %",
)
"""Where nothing is known of the model."""


def fixed_work(parameters: StageParameters | None) -> FixedWork:
    """By the parameters of a stage; None: they are not known, or a device computes."""
    if parameters is None:
        return UNTOLD

    def taken(times: float, beside: float) -> OfActions:
        forward, backward = (FixedPart(times * of.ms(parameters) + beside, most=CAPPED) for of in (FORWARD, BACKWARD))
        return OfActions(forward, backward)

    typical = taken(1.0, IN_A_JOB)
    least, most = (taken(*end) for end in zip(BETWEEN, IN_A_JOB_BETWEEN, strict=True))
    ends = (f"{low.ms:.1f} to {high.ms:.1f}" for low, high in _pairs(least, most))
    of_forward, of_backward = ends
    says = (
        f"{SAID}: by the {count(round(parameters.tensors), 'tensor')} and {size(parameters.bytes)} of a stage's "
        f"parameters, {typical.forward.ms:.1f} ms ({of_forward}) are taken for it of a forward, and "
        f"{typical.backward.ms:.1f} ms ({of_backward}) of a backward"
    )
    return FixedWork(typical, least, most, says)


def _pairs(least: OfActions, most: OfActions) -> Iterable[tuple[FixedPart, FixedPart]]:
    return (least.forward, most.forward), (least.backward, most.backward)


def stage_parameters(study: Study, chunks: int) -> StageParameters | None:
    """Of the stages of a job, of which each rank has so many; None where that is not known: parameters are shared, or
    a device computes, of which nothing was measured."""
    if study.on_gpu or not chunks:
        return None
    told = _of_engine(study.facts.get("trained", ())) or _of_optimizers(study)
    if not told:
        return None
    tensors, elements = (sum(of) / len(told) / chunks for of in zip(*told.values(), strict=True))
    return StageParameters(tensors, ELEMENT_BYTES * elements)


def _of_engine(facts: Iterable[Mapping[str, Any]]) -> dict[int, tuple[float, float]]:
    """Rank -> tensors and elements of the parameters that dsprof's engine trains there."""
    return {
        int(fact["rank"]): (len(fact["of_parameters"]), float(fact["elements"]) + float(fact.get("frozen") or 0))
        for fact in facts
        if fact.get("of_parameters") and isinstance(fact.get("rank"), int)
    }


def _of_optimizers(study: Study) -> dict[int, tuple[float, float]]:
    """The same by what optimizers step, where these have the parameters themselves, and whole."""
    if any(study.facts.get(shares) for shares in ("fsdp", "deepspeed", "tensor_parallel")):
        return {}
    found: dict[int, tuple[float, float]] = {}
    for fact in study.facts.get("optimizer", ()):
        rank, tensors, elements = (fact.get(name) for name in ("rank", "parameters", "elements"))
        if isinstance(rank, int) and tensors and elements and not fact.get("of_engine"):
            before = found.get(rank, (0.0, 0.0))
            found[rank] = before[0] + float(tensors), before[1] + float(elements)
    return found
