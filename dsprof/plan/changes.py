"""What changes in the work of a rank beside the number of ranks: another device, or a part of the batch.

device  computation lies between the quotient of the peaks (matrix products) and that of the memories (everything else);
        the optimizer goes by the memories, communication inside a node by the links: all by the data sheets
share   of the batch of a rank: its forwards and backwards shrink with it, what is done once a step does not
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof.analyzer.study import Study
from dsprof.analyzer.text import clean
from dsprof.analyzer.work.micro_batches import micro_batch_counts
from dsprof.data_sheets import Device, find_device

from .hardware import UNCHECKED

REACHES: Final = 0.2
"""Standard deviation of the logarithm of a device's share of its data sheet, by another's."""
SMALLER: Final = 0.1
"""Relative error of computing with half as large a micro-batch, whose kernels use a device less well."""


class CannotPlan(Exception):
    """A run does not tell what it would do on other ranks; the message says why, and what to capture."""


@dataclass(frozen=True)
class DeviceChange:
    """How many times as long things take on another device. uncertain: standard deviation of the logarithm of each of
    these. said: in words."""

    compute: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    uncertain: tuple[float, float, float] = (0.0, 0.0, 0.0)
    said: tuple[str, ...] = ()


def device_change(study: Study, other: Device | None) -> DeviceChange:
    """From the run's device to another; None: the same. Raises CannotPlan."""
    if other is None:
        return DeviceChange()
    names = {str(fact.get("name", "")) for fact in study.facts.get("device", []) if fact.get("type") == "cuda"}
    if not names:
        raise CannotPlan(
            "which GPUs the run computed on is not recorded (perhaps on none), so --gpu cannot be compared with them; "
            "leave out --gpu"
        )
    found = {name: find_device(name) for name in sorted(names)}
    unknown = [name for name, device in found.items() if device is None]
    if unknown:
        raise CannotPlan(f"no data sheet is known of {clean(unknown[0]) or 'its devices'}; leave out --gpu")
    devices = [device for device in found.values() if device is not None]
    if len({device.name for device in devices}) > 1:
        raise CannotPlan("its ranks computed on devices of different kinds; leave out --gpu")
    own, counted = devices[0], _dtype(study)
    dtype = counted or "float16"
    now, then = own.flops(dtype, tf32=True), other.flops(dtype, tf32=True)
    if now is None or then is None or own.tb_a_second is None or other.tb_a_second is None:
        lacking = own if now is None or own.tb_a_second is None else other
        raise CannotPlan(f"the data sheet of {lacking.name} does not say what it does in {dtype}; leave out --gpu")
    peak, memory = now / then, own.tb_a_second / other.tb_a_second
    compute = math.sqrt(peak * memory)
    link = own.link_gb_s / other.link_gb_s if own.link_gb_s and other.link_gb_s else 1.0
    if other == own:
        return DeviceChange(compute, memory, link, said=(f"the run's own device, {own.name}",))
    of_type = 0.0 if counted else _by_type(own, other)
    of_memory, of_link = (_unsure(own, other, field) for field in ("tb_a_second", "link_gb_s"))
    # Half of what the memory does, and of what products do, is in the mean of the two.
    of_compute = math.hypot(math.log(peak / memory) / 2, REACHES, of_memory / 2, of_type / 2)
    said = (
        f"{other.name} for {own.name} by their data sheets, which is a guess: computation takes {compute:.2f} times as "
        f"long (matrix products {peak:.2f}, memory {memory:.2f}), communication inside a node {link:.2f} times; where "
        "the host sets the pace, a faster device gains nothing"
    )
    return DeviceChange(
        compute, memory, link, (of_compute, math.hypot(REACHES, of_memory), math.hypot(REACHES, of_link)),
        (said, *_unknown(own, other), *(() if counted else (UNCOUNTED,))),
    )  # fmt: skip


UNCOUNTED: Final = (
    "in which type the run makes its matrix products was not counted, and is taken to be half precision; the interval "
    "has the others: capture it with --level full"
)
_SAID: Final = {"link_gb_s": "link inside a node", "tb_a_second": "memory's rate"}
"""Field of a data sheet -> in words."""


def _unsure(own: Device, other: Device, field: str) -> float:
    """Standard deviation of the logarithm of the quotient of a field, where data sheets do not tell it."""
    unsure = [one for one in (own, other) if field in one.unchecked or not getattr(one, field)]
    return UNCHECKED * math.sqrt(len(unsure))


def _unknown(own: Device, other: Device) -> Iterator[str]:
    """What no data sheet tells of the two, in words."""
    for field, named in _SAID.items():
        for one in (own, other):
            if not getattr(one, field):
                yield f"the {named} of {one.name} is not known: as fast as the other's is a guess with a wide interval"
            elif field in one.unchecked:
                yield f"the {named} of {one.name} was compared with no data sheet, so the interval is wider"


def _by_type(own: Device, other: Device) -> float:
    """Half of the most by which two devices' quotients differ among types that a model is trained in, of the
    logarithm."""
    both = set(own.tflops) & set(other.tflops) & {"float16", "tf32", "float32"}
    quotients = [math.log(own.tflops[name] / other.tflops[name]) for name in both]
    return (max(quotients) - min(quotients)) / 2 if quotients else 0.0


def _dtype(study: Study) -> str | None:
    """In which most of the operations were made; None where they were not counted."""
    counted: dict[str, float] = {}
    for summary in study.summaries.values():
        flops: Mapping[tuple[str, str], float] = (summary.work.flops if summary.work is not None else None) or {}
        for (_, dtype), operations in flops.items():
            counted[dtype] = counted.get(dtype, 0.0) + operations
    return max(counted, key=lambda dtype: counted[dtype]) if counted else None


@dataclass(frozen=True)
class Batch:
    """of_run: sequences or samples of the run's step, all ranks together; None: not recorded. wanted: the same of the
    plan; None: as many a rank as in the run. keep: that of the run, whatever it is. accumulated: micro-batches of a
    rank's step, 1 where that was not seen."""

    of_run: float | None = None
    wanted: int | None = None
    keep: bool = False
    accumulated: float = 1.0

    @property
    def strong(self) -> bool:
        return self.keep or self.wanted is not None

    def share(self, replicas: int, now: int) -> float:
        """Of a rank's batch, by the run's, on `replicas` replicas instead of `now`."""
        if not self.strong:
            return 1.0
        times = 1.0 if self.wanted is None or self.of_run is None else self.wanted / self.of_run
        return times * now / replicas

    def smaller(self, share: float) -> bool:
        """Whether the micro-batches themselves have another size: where whole ones cannot be left out or added."""
        count = self.accumulated * share
        return share != 1 and not (self.accumulated > 1 and abs(count - round(count)) < 1e-6 and round(count) >= 1)

    def uncertain(self, share: float) -> float:
        """Standard deviation of the logarithm of how long a rank computes."""
        return SMALLER * abs(math.log2(share)) if self.smaller(share) else 0.0

    def check(self, replicas: int) -> None:
        """Raises CannotPlan where the batch cannot be divided among them."""
        whole = self.wanted if self.wanted is not None else self.of_run if self.keep else None
        if whole is not None and whole / replicas < 1:
            raise CannotPlan(f"a global batch of {whole:.0f} is less than one sample for each of {replicas} replicas")
        if self.wanted is not None and self.wanted % replicas:
            raise CannotPlan(f"--global-batch {self.wanted} does not divide among {replicas} replicas")

    def said(self, ranks: int, world: int, replicas: int, now: int) -> str:
        share = self.share(replicas, now)
        if not self.strong:
            return f"weak scaling: each rank keeps its batch, so the global batch is {ranks / world:g} times the run's"
        which = "the run's" if self.wanted is None else f"{self.wanted:,} ({self.of_run:,.0f} in the run)"
        if not self.smaller(share):
            few = f"{self.accumulated:.0f} become {self.accumulated * share:.0f}" if share != 1 else "stay as they are"
            return f"strong scaling: the global batch is {which}; the micro-batches of a rank {few}"
        return (
            f"strong scaling: the global batch is {which}; a rank's micro-batch is {share:.3g} times as large, and its "
            "computation takes as much of the time"
        )


def batch_of(study: Study, of_run: float | None, wanted: int | None, keep: bool) -> Batch:
    """Raises CannotPlan where a batch is wanted and the run's is not recorded."""
    if wanted is not None and of_run is None:
        raise CannotPlan(
            "how many samples its step has is not recorded, so --global-batch cannot be compared with it; write "
            "--global-batch same to keep the run's, or capture it with --level full"
        )
    counts = micro_batch_counts(study)
    return Batch(of_run, wanted, keep, 1.0 if counts is None else float(np.min(counts)))
