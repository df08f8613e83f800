"""Signals: what a capture tells. Each is there, or is `Absent` with the reason; a rule that reads an absent one thereby
answers that it could not judge, with that reason. No rule looks whether something is there.

    sizes = signals.input_sizes(study)  # raises Missing
    signals.input_sizes.look(study)     # the sizes, or Absent
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import pandas as pd

from dsprof.schema import CUDA_GRAPH_FACT, SYMMETRIC_MEMORY_FACT
from dsprof.trace import Memory

from .arrays import Float
from .device import Devices
from .graph.step_graph import StepGraph
from .study import Study
from .text import ms
from .work.core_wait import CoreWait
from .work.core_wait import core_wait as of_training_threads

Value = TypeVar("Value")

MOST_CLOCK_ERROR: Final = 0.2
"""Of the step."""


@dataclass(frozen=True)
class Absent:
    """Why a signal is not there, and how to capture it. `concerns`: False where the job has nothing of the kind, so
    that a rule about it neither passes nor stays unjudged."""

    why: str
    how: str = ""
    concerns: bool = True

    @property
    def reason(self) -> str:
        return f"{self.why}: {self.how}" if self.how else self.why


class Missing(Exception):
    """A signal was read that is absent."""

    def __init__(self, absent: Absent) -> None:
        super().__init__(absent.reason)
        self.absent = absent


class Signal(Generic[Value]):
    """A function of a study, which is asked once."""

    def __init__(self, find: Callable[[Study], Value | Absent]) -> None:
        self._find = find
        self.name = find.__name__
        self.__doc__ = find.__doc__

    def __call__(self, study: Study) -> Value:
        """The value. Raises Missing."""
        found = self.look(study)
        if isinstance(found, Absent):
            raise Missing(found)
        return found

    def look(self, study: Study) -> Value | Absent:
        if self not in study.kept:
            study.kept[self] = self._find(study)
        found: Value | Absent = study.kept[self]
        return found


NOTHING_OF_IT: Final = Absent("the job has none", concerns=False)


@Signal
def steps(study: Study) -> StepGraph | Absent:
    """The graph of the ordinary steps."""
    return study.graph if study.graph is not None else Absent("no step was completed on all captured ranks")


@Signal
def peers(study: Study) -> tuple[int, ...] | Absent:
    """The ranks, of which there are several."""
    if len(study.ranks) > 1:
        return study.ranks
    if study.ranks_missing:
        return Absent("steps of only one of the job's ranks were captured")
    return NOTHING_OF_IT


@Signal
def replay(study: Study) -> StepGraph | Absent:
    """The graph, where every chain of a rank is known and a replay of it can be believed."""
    graph = steps.look(study)
    if isinstance(graph, Absent):
        return graph
    if study.chains_unknown:
        return Absent(study.chains_unknown)
    if study.clock_error_ms > MOST_CLOCK_ERROR * study.step_ms:
        return Absent(
            f"the clocks of the ranks may be {ms(study.clock_error_ms)} apart, so who waited for whom in a step of "
            f"{ms(study.step_ms)} cannot be told"
        )
    refusal = study.checked.refusal if study.checked is not None else None
    return graph if refusal is None else Absent(refusal)


@Signal
def communications(study: Study) -> bool | Absent:
    """That what ranks communicate is seen."""
    if any(fact.get("communications") != 0 for fact in study.facts.get(CUDA_GRAPH_FACT, [])):
        return Absent(
            "communications are in a CUDA graph that is replayed, where dsprof does not see them; profile a run "
            "without graphs"
        )
    if study.facts.get(SYMMETRIC_MEMORY_FACT):
        return Absent(
            "ranks communicate through symmetric memory (torch.distributed._symmetric_memory), where dsprof does not "
            "see it; profile a run without it"
        )
    return True


@Signal
def input_sizes(study: Study) -> Float | Absent:
    """Elements given to forward, [R, S] over the ordinary steps."""
    sizes = study.input_sizes
    return sizes if sizes is not None else Absent("the sizes of the inputs to forward were not captured")


@Signal
def core_wait(study: Study) -> CoreWait | Absent:
    """How long training threads wait for a core."""
    waited = of_training_threads(study)
    return waited if waited is not None else Absent("how long threads wait for a core was not measured")


@Signal
def device_used(study: Study) -> bool | Absent:
    """That the job computed or communicated on devices."""
    return True if study.on_gpu else NOTHING_OF_IT


@Signal
def gpus(study: Study) -> bool | Absent:
    """That the ranks had GPUs, whether or not steps used them."""
    return True if study.on_gpu or study.facts.get("gpu") else NOTHING_OF_IT


@Signal
def kernels(study: Study) -> Devices | Absent:
    """What the devices' streams did."""
    return study.device if study.device is not None else NOTHING_OF_IT


@Signal
def allocators(study: Study) -> Mapping[int, Memory] | Absent:
    """Rank -> what its allocator recorded."""
    return study.trace.memory if study.trace.memory else NOTHING_OF_IT


@Signal
def memory_by_step(study: Study) -> pd.DataFrame | Absent:
    """What the ranks had after each step (`use_by_step.COLUMNS`)."""
    return NOTHING_OF_IT if study.memory.empty else study.memory


@Signal
def stages(study: Study) -> bool | Absent:
    """That ranks are stages of a pipeline."""
    return True if study.in_stages else NOTHING_OF_IT
