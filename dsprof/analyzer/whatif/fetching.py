"""Parameters of ZeRO's stage 3 fetched by another policy: when each gather is issued, which become one, which are not
needed as what they gather is still there.

The order in which parameters are needed is that in which the steps waited for their gathers; `Fetching` says what an
engine does at each of these places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, Final

import numpy as np

from ..arrays import Bool, Float, Int
from ..graph.link import Link
from ..graph.step_graph import StepGraph, Steps
from .apply import Turn, WhatIf
from .communications import without
from .edit import Recut, followed_by
from .issue_order import issue_edges
from .merge import merged
from .rebucket import Division, NotRebucketed
from .select import Communications

ALIKE: Final = 0.1
"""Of the bytes of a gather: those of one module in forward and in backward differ by no more (a bias is not needed
again)."""
ALONE: Final = 1 << 22
"""Elements from which on dsprof's engine gathers a parameter by itself (`engine/zero/gather.py`)."""


@dataclass(frozen=True)
class Need:
    """A place at which parameters are needed. task: the gather that brought them; unit: which parameters they are, the
    same number wherever these are needed; elements: how many; first: whether a module begins with them, whose other
    parameters follow (DeepSpeed gathers weight and bias apart where it prefetched the one and not the other)."""

    task: int
    unit: int
    elements: float
    first: bool = True


Starts = list[tuple[int, list[int]]]
"""(place, the needs whose parameters are gathered together from there on) by the numbers of needs, in order. What is in
none of them is still there when it is needed, and not gathered."""


class Fetching(ABC):
    """A policy of fetching. stays: what was gathered in the first pass of a step is there in the others."""

    stays: ClassVar[bool] = False

    @abstractmethod
    def starts(self, needs: Sequence[Need]) -> Starts:
        """What it gathers in a pass, forward and backward, and when."""


@dataclass(frozen=True)
class OwnFetching(Fetching):
    """That of dsprof's engine (`engine/zero/fetch.py`): what comes next is started before the present module's
    parameters are waited for, up to `prefetch` elements on their way beside those, and `live` whole at once. What is
    needed again after at most `reuse` elements is kept, as long as there is room for what is fetched."""

    prefetch: float
    live: float
    reuse: float

    def starts(self, needs: Sequence[Need]) -> Starts:
        found, there, coming = Starts(), dict[int, float](), dict[int, int]()

        def start(place: int, batch: list[int]) -> None:
            small = [number for number in batch if needs[number].elements < ALONE]
            for part in [*([small] if small else []), *([one] for one in batch if one not in small)]:
                found.append((place, part))
                for number in part:
                    there[needs[number].unit] = needs[number].elements
                    coming[needs[number].unit] = len(found)

        uses = _Uses(needs)
        for which, module in enumerate(uses.modules):
            place, units = module[0], [needs[number].unit for number in module]
            missing = [number for number in module if needs[number].unit not in there]
            if missing:
                excess = sum(there.values()) + sum(needs[number].elements for number in missing) - self.live
                for unit in [unit for unit in there if unit not in (*coming, *units)]:  # what came first goes first
                    if excess > 0:
                        excess -= there.pop(unit)
                start(place, missing)
            of_module = {coming.get(unit) for unit in units}
            beside = sum(there[unit] for unit in coming if unit not in units)
            batch, size = list[int](), 0.0
            for number in range(module[-1] + 1, len(needs)):
                after = needs[number]
                if after.unit in there or after.unit in (needs[one].unit for one in batch):
                    continue
                if beside + size + after.elements > self.prefetch:
                    break
                if sum(there.values()) + size + after.elements > self.live:
                    break
                batch.append(number)
                size += after.elements
            if batch:
                start(place, batch)
            coming = {unit: of for unit, of in coming.items() if of not in of_module}
            for unit in units:
                if not uses.again_within(which, unit, self.reuse):
                    there.pop(unit, None)
        return found


@dataclass(frozen=True)
class DeepSpeedFetching(Fetching):
    """That of DeepSpeed's PartitionedParameterCoordinator: once a module's parameters are there, at least `prefetch`
    elements more of what comes next are started, whatever is on its way already, as long as less than `live` are there.
    Kept is what is needed again before `reuse` elements, and what prefetching came to a second time."""

    prefetch: float
    live: float
    reuse: float

    def starts(self, needs: Sequence[Need]) -> Starts:
        found, there, upcoming = Starts(), dict[int, float](), 0
        passed: dict[int, int] = {}  # unit -> the last place that prefetching, or its own module, has gone beyond

        def start(place: int, batch: list[int]) -> None:
            found.append((place, batch))
            there.update((needs[number].unit, needs[number].elements) for number in batch)

        uses = _Uses(needs)
        for which, module in enumerate(uses.modules):
            missing = [number for number in module if needs[number].unit not in there]
            if missing:
                start(module[0], missing)
            upcoming = max(upcoming, module[-1] + 1)
            for number in module:
                passed[needs[number].unit] = max(passed.get(needs[number].unit, number), number)
            most, batch, size = min(self.live - sum(there.values()), self.prefetch), list[int](), 0.0
            while upcoming < len(needs) and size < most:
                after = needs[upcoming]
                passed[after.unit] = upcoming
                if after.unit not in there and after.unit not in (needs[one].unit for one in batch):
                    batch.append(upcoming)
                    size += after.elements
                upcoming += 1
            if batch:
                start(module[-1], batch)
            for number in module:
                unit = needs[number].unit
                if passed[unit] <= number and not uses.again_within(which, unit, self.reuse - 1):
                    there.pop(unit, None)
        return found


@dataclass(frozen=True)
class GatheredWhole(Fetching):
    """All parameters gathered together before the first module of the step, as stages 1 and 2 do when the optimizer has
    updated them."""

    stays: ClassVar[bool] = True

    def starts(self, needs: Sequence[Need]) -> Starts:
        units = {need.unit: place for place, need in reversed(list(enumerate(needs)))}
        return [(0, sorted(units.values()))] if units else []


def modules(needs: Sequence[Need]) -> list[range]:
    """The places of each module's parameters, in order."""
    begins = [place for place, need in enumerate(needs) if need.first or not place]
    return [range(begin, end) for begin, end in pairwise([*begins, len(needs)])]


class _Uses:
    """Which modules use what, in order. modules: the places of each one's parameters."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.modules = modules(needs)
        sizes = [sum(needs[place].elements for place in module) for module in self.modules]
        self._elements_before = list(accumulate(sizes, initial=0.0))
        self._of_unit: dict[int, list[int]] = {}
        for which, module in enumerate(self.modules):
            for place in module:
                self._of_unit.setdefault(needs[place].unit, []).append(which)

    def again_within(self, which: int, unit: int, distance: float) -> bool:
        """Whether a unit is needed again behind this module, after others of at most so many elements."""
        of_unit = self._of_unit[unit]
        at = bisect_right(of_unit, which)
        if at == len(of_unit):
            return False
        return self._elements_before[of_unit[at]] - self._elements_before[which + 1] <= distance


@dataclass(frozen=True)
class FetchedBy(WhatIf):
    """These gathers as a policy issues them, over `link`. What was gathered together in the measured steps stays
    together. element_bytes: of a parameter on its way."""

    of: Communications
    link: Link
    policy: Fetching
    element_bytes: int
    turn = Turn.DIVISION

    @property
    def name(self) -> str:
        return f"{self.of} by {self.policy}"

    def against(self, other: WhatIf) -> str | None:
        mine = getattr(other, "of", None)
        same = other.turn is Turn.DIVISION and isinstance(mine, Communications) and self.of.meets(mine)
        return "both say how the same communications are divided" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._division(graph)

    @cached_property
    def _division(self) -> Division:
        return Division(self.name, self._fetched)

    def _fetched(self, steps: Steps) -> Recut | None:
        structure = steps.structure
        at_of, waits = issue_edges(structure), structure.first_waits
        source, packs, kept = structure.edges.source.copy(), list[list[int]](), list[int]()
        for number, needs in enumerate(passes(steps, self.of, self.element_bytes)):
            starts = [] if number and self.policy.stays else self.policy.starts(needs)
            gathered = {number for _, batch in starts for number in batch}
            kept += [need.task for place, need in enumerate(needs) if place not in gathered]
            for place, batch in starts:
                packs.append([needs[number].task for number in batch])
                for thread in range(structure.threads):
                    here, first = (thread, needs[place].task), (thread, needs[batch[0]].task)
                    if here not in waits or first not in at_of:
                        continue
                    edge, last = at_of[first], waits[here] - 1
                    earlier = waits.get((thread, needs[place - 1].task), 0) if place else 0
                    if batch[0] != place or not earlier <= source[edge] <= last:  # else it is issued there now
                        source[edge] = last
        if not packs:
            return None
        divided = merged(steps, packs, self.link, issued=source)
        if not kept:
            return divided
        gone = divided.operations[structure.segments + np.array(sorted(kept))] - structure.segments
        return followed_by(steps, divided, lambda changed: without(changed, gone))


def passes(steps: Steps, of: Communications, element_bytes: int = 1) -> list[list[Need]]:
    """What each pass through the model, a forward and its backward, needs in order.

    Backward needs modules in reverse, each with its parameters in the order of forward; of its first ones, which are
    the last of forward, nothing may be gathered again. Raises NotRebucketed where what is gathered in a backward is not
    what was gathered in its forward.
    """
    elements, found = np.mean(steps.size, axis=1) / element_bytes, []
    waits = steps.structure.first_waits
    for forward, backward in forwards_and_backwards(steps, of):
        sizes = elements[forward]
        # Those of one module are waited for one after the other.
        thread = next((thread for thread, c in waits if c == forward[0]), 0)
        at = [np.array([waits.get((thread, c), -1) for c in order]) for order in (forward[: len(backward)], backward)]
        parts = _reversed_parts(sizes[: len(backward)], elements[backward], *(np.diff(one) == 1 for one in at))
        begins = {part.start for part in parts} | {*range(len(backward), len(forward))}
        needs = [Need(c, unit, float(sizes[unit]), unit in begins) for unit, c in enumerate(forward)]
        again = zip((unit for part in parts for unit in part), backward, strict=True)
        needs += [Need(c, unit, float(sizes[unit]), unit in begins) for unit, c in again]
        found.append(needs)
    return found


def _reversed_parts(forward: Float, backward: Float, follows: Bool, follows_again: Bool) -> list[range]:
    """The modules of a backward, in its order, as ranges of what forward gathered: the shortest that have the same
    sizes. follows, follows_again: whether nothing is issued or waited for between the waits for each and the next one,
    [n - 1]; what is computed there is not looked at. Raises NotRebucketed where there are none."""
    parts: list[range] = []
    end = len(forward)
    while end:
        done = len(forward) - end
        for begin in range(end - 1, -1, -1):
            mine, again = forward[begin:end], backward[done : done + end - begin]
            together = np.all(follows[begin : end - 1]) and np.all(follows_again[done : done + end - begin - 1])
            if together and np.all(np.abs(again - mine) <= ALIKE * mine):
                break
        else:
            raise NotRebucketed("backward does not gather what forward did, module by module in reverse")
        parts.append(range(begin, end))
        end = begin
    return parts


def forwards_and_backwards(steps: Steps, of: Communications) -> list[tuple[list[int], list[int]]]:
    """Of each pass, the gathers that its forward needs and those that its backward does, in the order in which the
    first rank of their group waits for them, or issues those that it is not seen to wait for.

    What is gathered of what the optimizer has updated (`of_update`) is of no pass. Raises NotRebucketed where forwards
    are not alike.
    """
    structure, after = steps.structure, set(of_update(steps, of).tolist())
    chosen = set(of.of(structure).tolist()) - after
    issued = [(segment, c) for segment, c in structure.issues.tolist() if c in chosen]
    if not issued:
        return []
    thread = int(structure.thread[min(issued)[0]])
    whole = structure.of_thread(thread)
    mine = {c: segment + 1 for segment, c in issued if structure.thread[segment] == thread}
    needed = {c: structure.first_waits.get((thread, c), begun) for c, begun in mine.items()}
    begun = np.cumsum(structure.backward[whole])
    order: dict[int, list[int]] = {}
    for c in sorted(needed, key=lambda c: (needed[c], mine[c])):
        order.setdefault(int(begun[min(needed[c] - whole.start, len(begun) - 1)]), []).append(c)
    forward, backwards = order.get(0, []), int(begun[-1])
    if not forward or not backwards:
        raise NotRebucketed("not all of a pass, a forward and its backward, is in the step")
    found, width = [], len(forward)
    for number in range(1, backwards + 1):
        tasks = order.get(number, [])
        again = len(tasks) - (width if number < backwards else 0)
        if not 0 <= again <= width:
            raise NotRebucketed("parameters are not gathered alike in each forward")
        found.append((forward, tasks[:again]))
        forward = tasks[again:]
    return found


def of_update(steps: Steps, of: Communications) -> Int:
    """Those of these gathers that a thread issues after all its reductions of gradients: what they bring was updated,
    and stays whole. None where no gradients are reduced."""
    structure = steps.structure
    issued: dict[int, int] = {}  # task -> the last segment after which a thread issues it
    for segment, c in structure.issues.tolist():
        issued[c] = max(issued.get(c, -1), segment)
    last = np.full(structure.threads, structure.segments)
    for c, task in enumerate(structure.tasks):
        if task.gradient and c in issued:
            thread = structure.thread[issued[c]]
            last[thread] = issued[c] if last[thread] == structure.segments else max(last[thread], issued[c])
    found = [c for c in of.of(structure).tolist() if c in issued and issued[c] > last[structure.thread[issued[c]]]]
    return np.array(found, np.int64)
