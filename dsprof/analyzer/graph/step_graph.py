"""The step graph: what every rank did in every step, as operations with costs, and edges that say what waited for what.

An operation is a *segment*, a thread's own work between two events of its program, or a *task*, which a thread issues
and something else runs: a collective, a message, a kernel. Events are where a thread issues a task, waits for one,
begins a backward, or begins or ends an action of a pipeline's schedule. Edges are typed: program order (segments of a
thread, by their order), issue (segment to task), wait (task to segment), the order of tasks in a lane, and edges across
steps. Like-shaped steps share one structure and are columns of its arrays. A what-if is a function from graph to graph;
`replay` says how long the steps of one take.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..align.backends import BACKENDS, DEFAULT
from ..arrays import Bool, Float, Int
from ..budget.step_budget import WORK
from .evaluation_order import make_plan
from .longest_path import Plan
from .segment_work import Taken, part_without, work_without

PARTS: Final = (*WORK, "sharding", "wake_up_delay")
"""What a segment consists of: a rank's own work by its parts, with what FSDP does for its units apart from the rest of
compute, and at the beginning of a segment that waited for a task how much later it went on than that task had ended (a
thread that is woken, a kernel that is launched)."""

SHARDING_PART: Final = PARTS.index("sharding")
WAKE_UP_DELAY: Final = PARTS.index("wake_up_delay")


@dataclass(frozen=True)
class Task:
    """What steps of one template have in common of a task.

    lane:     what runs it: its process group, or of a device the stream
    kind:     its name and purpose: `all_gather parameter`
    gradient: whether it carries gradients
    workers:  how many tasks its lane runs at once, 1 or 2; None: it needs no worker
    linked:   whether, at its end, it has the link of its lane to itself
    owner:    index of the thread whose own lane it is, -1: ranks share it. It copies: a wait for it is `offload`
    """

    lane: str
    kind: str = ""
    gradient: bool = False
    workers: int | None = BACKENDS[DEFAULT].workers
    linked: bool = False
    owner: int = -1

    @property
    def purpose(self) -> str:
        """What it is for: gradient, parameter, tensor-parallel, ...; empty: not known."""
        return self.kind.partition(" ")[2]


@dataclass(frozen=True)
class Edges:
    """From `source` to `target`. Operations are numbered segments first, then tasks, then what other steps supply."""

    source: Int
    target: Int

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, eq=False)
class Structure:
    """What steps of one template have in common.

    thread:   [W] of each segment, the index of its rank, ascending; the segments of a thread follow one another
    backward: [W] whether a backward begins with the segment
    action:   [W] name of the pipeline's action that it is of: F, B, W; empty: of none
    tasks:    [C]; those of a lane in the order in which it takes them
    outside:  how many ends of operations of other steps these steps wait for
    edges:    issue (segment or outside to task) and wait (task or outside to segment)
    threads:  how many there are
    ids:      [W + C] a number of each segment and then of each task, which it keeps whatever a what-if does to those
              around it; of those that were measured: 0, 1, 2 ...
    ids_used: numbers below it were given, here or in what this was made of: the next operation that a what-if makes
              has this one
    place:    [W, 2] stage and micro-batch of that action; -1: of none, or it does not say. Steps that differ in the
              numbers of micro-batches only have one template, whose first step's they are
    """

    thread: Int
    backward: Bool
    action: npt.NDArray[np.object_]
    tasks: tuple[Task, ...]
    outside: int
    edges: Edges
    threads: int
    ids: Int = field(default_factory=lambda: np.empty(0, np.int64))
    ids_used: int = 0
    place: Int = field(default_factory=lambda: np.empty((0, 2), np.int64))

    def __post_init__(self) -> None:
        operations = len(self.thread) + len(self.tasks)
        if not self.ids_used:
            object.__setattr__(self, "ids", np.arange(operations))
            object.__setattr__(self, "ids_used", operations)
        if not len(self.place):
            object.__setattr__(self, "place", np.broadcast_to(-1, (len(self.thread), 2)))
        if len(self.ids) != operations:
            raise ValueError(f"{operations} operations, {len(self.ids)} ids")

    @property
    def segments(self) -> int:
        return len(self.thread)

    def of_thread(self, thread: int) -> slice:
        """Its segments."""
        low, high = np.searchsorted(self.thread, [thread, thread + 1])
        return slice(int(low), int(high))

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that have a limited number of workers."""
        return tuple(dict.fromkeys(task.lane for task in self.tasks if task.workers is not None))

    @cached_property
    def issues(self) -> Int:
        """Edges from segments to tasks, [:, 2]: segment, task (from 0)."""
        source, target = self.edges.source, self.edges.target
        chosen = (source < self.segments) & (target >= self.segments)
        return np.stack([source[chosen], target[chosen] - self.segments], axis=1)

    @cached_property
    def waits(self) -> Int:
        """Edges from tasks to segments, [:, 2]: task (from 0), segment."""
        source, target = self.edges.source, self.edges.target
        chosen = (source >= self.segments) & (source < self.segments + len(self.tasks)) & (target < self.segments)
        return np.stack([source[chosen] - self.segments, target[chosen]], axis=1)

    @cached_property
    def first_waits(self) -> dict[tuple[int, int], int]:
        """(thread, task) -> the first segment of that thread that waits for that task."""
        found: dict[tuple[int, int], int] = {}
        for task, segment in self.waits.tolist():
            key = int(self.thread[segment]), task
            found[key] = min(found.get(key, segment), segment)
        return found

    @cached_property
    def programs(self) -> tuple[bytes, ...]:
        """What each thread does at its events: the same of threads that do the same. Of waits for what other steps
        supply nothing is said."""
        issued, waited = np.zeros(self.segments, bool), np.zeros(self.segments, bool)
        issued[self.issues[:, 0]], waited[self.waits[:, 1]] = True, True
        events = np.stack([self.backward, issued, waited], axis=1)
        return tuple(events[self.of_thread(thread)].tobytes() for thread in range(self.threads))

    def with_shared_link(self, tasks: tuple[int, ...]) -> Structure:
        """The structure in which these tasks have the link of their lane one after the other; the same one each time,
        so that graphs of it are replayed together."""
        if tasks not in self._with_shared_links:
            every = list(self.tasks)
            for c in tasks:
                every[c] = replace(every[c], linked=True)
            self._with_shared_links[tasks] = replace(self, tasks=tuple(every))
        return self._with_shared_links[tasks]

    @cached_property
    def _with_shared_links(self) -> dict[tuple[int, ...], Structure]:
        return {}

    @cached_property
    def plan(self) -> Plan:
        """Raises `evaluation_order.Cyclic`."""
        index = {lane: i for i, lane in enumerate(self.lanes)}
        workers = {task.lane: task.workers for task in self.tasks if task.workers is not None}
        return make_plan(
            self.threads,
            self.thread,
            np.array([-1 if t.workers is None else index[t.lane] for t in self.tasks], np.int64),
            tuple(min(workers[lane] or 1, 2) for lane in self.lanes),
            np.array([task.linked for task in self.tasks], bool),
            self.outside,
            self.edges.source,
            self.edges.target,
        )


@dataclass(frozen=True)
class Costs:
    """What operations take: what a what-if changes. Times are in ms.

    given:    [W, S, PARTS] what each segment takes, but for what is `taken`
    transfer: [C, S] what each task takes once it has all it needs; tasks under way at once do not hinder each other
    wire:     [C, S] for how long it then has the link of its lane to itself, if it is linked
    size:     [C, S] bytes
    taken:    of `given`, what goes: of many ranks there is not room for all of their work once more
    """

    given: Float
    transfer: Float
    wire: Float
    size: Float
    taken: tuple[Taken, ...] = ()

    @cached_property
    def work(self) -> Float:
        """[W, S, PARTS] what each segment takes."""
        return work_without(self.given, self.taken)

    def of_part(self, part: int) -> Float:
        """[W, S] of one of PARTS, whether or not all of `work` was made."""
        return part_without(self.given, part, self.taken)


@dataclass(frozen=True)
class Measured:
    """When operations were seen to begin and end: no what-if changes it. Moments in ms, from the earliest rank's start
    of the step; NaN of operations that a what-if has made.

    outside: [O, S] when what other steps supply had ended
    began:   [W, S] when each segment began
    ended:   [C, S] when the first rank saw that each task had ended
    last:    [C, S] when the last rank did, of what all of its ranks wait for all in; else as `ended`
    """

    outside: Float
    began: Float
    ended: Float
    last: Float


@dataclass(frozen=True)
class Steps:
    """Like-shaped steps, S of them. numbers: [S] of the steps, ascending."""

    structure: Structure
    numbers: Int
    costs: Costs
    measured: Measured

    @property
    def work(self) -> Float:
        return self.costs.work

    @property
    def transfer(self) -> Float:
        return self.costs.transfer

    @property
    def wire(self) -> Float:
        return self.costs.wire

    @property
    def size(self) -> Float:
        return self.costs.size

    @property
    def outside(self) -> Float:
        return self.measured.outside

    @property
    def began(self) -> Float:
        return self.measured.began

    @property
    def ended(self) -> Float:
        return self.measured.ended

    @property
    def last(self) -> Float:
        return self.measured.last

    def with_costs(
        self, *, work: Float | None = None, transfer: Float | None = None, wire: Float | None = None
    ) -> Steps:
        """The same operations, some of whose costs are others."""
        costs = self.costs if work is None else replace(self.costs, given=work, taken=())
        transfer = costs.transfer if transfer is None else transfer
        return replace(self, costs=replace(costs, transfer=transfer, wire=costs.wire if wire is None else wire))

    def without(self, taken: Taken, transfer: Float) -> Steps:
        """The same operations, of whose work this goes, and whose tasks take so long."""
        costs = self.costs
        return replace(self, costs=replace(costs, taken=(*costs.taken, taken), transfer=transfer))


@dataclass(frozen=True)
class CrossStepEdges:
    """Edges across steps. Of each: the template, the operation (a segment or a task) and the column that it comes from;
    the template, the number of the outside operation there and the column that it goes to."""

    source_template: Int
    source: Int
    source_column: Int
    target_template: Int
    target: Int
    target_column: Int

    @staticmethod
    def none() -> CrossStepEdges:
        return CrossStepEdges(*(np.empty(0, np.int64) for _ in range(6)))

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A job's steps, N of them in T threads, or chains: a rank's training thread, and where it was seen the stream of
    its device that computes.

    ranks:    [T] whose each is
    leads:    how many ranks there are: the first so many threads lead one each, and their steps are the ranks'
    templates:   the steps, those alike together
    numbers:  [N] ascending; `judged`: [N] whether a step is one of those whose time counts
    template, column: [N] where each is
    start:    [T, N] when each thread began the step, measured, ms from the earliest of them
    duration: [T, N] how long it took, measured
    follows:  [N] whether the step before is in the graph too: it then begins where that one ends
    gap:      [T, N] between the two, ms: nothing, unless records were lost
    chain_names: [T] `host`, or the stream; empty: all are hosts
    origin:   of a graph that what-ifs were applied to, the one that was measured; `applied`: which they were
              (`whatif.apply`)
    """

    ranks: tuple[int, ...]
    leads: int
    templates: tuple[Steps, ...]
    numbers: Int
    judged: Bool
    template: Int
    column: Int
    start: Float
    duration: Float
    follows: Bool
    gap: Float
    cross_step_edges: CrossStepEdges = field(default_factory=CrossStepEdges.none)
    chain_names: tuple[str, ...] = ()
    origin: StepGraph | None = field(default=None, repr=False)
    applied: tuple[Any, ...] = ()
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What is worked out once of a graph."""

    @staticmethod
    def of_one_template(
        steps: Steps, *, follow: bool = False, cross_step_edges: CrossStepEdges | None = None
    ) -> StepGraph:
        """A graph of steps of one template that were not measured, all judged: each begins anew, or with `follow`
        where the one before ends."""
        threads, count = steps.structure.threads, len(steps.numbers)
        nothing = np.zeros((threads, count))
        return StepGraph(
            ranks=tuple(range(threads)),
            leads=threads,
            templates=(steps,),
            numbers=steps.numbers,
            judged=np.ones(count, bool),
            template=np.zeros(count, np.int64),
            column=np.arange(count),
            start=nothing,
            duration=nothing,
            follows=follow & (np.arange(count) > 0),
            gap=nothing,
            cross_step_edges=cross_step_edges or CrossStepEdges.none(),
        )

    def columns_of(self, template: int) -> Int:
        """Which steps have this template, in the order of its columns."""
        columns = np.flatnonzero(self.template == template)
        ordered: Int = columns[np.argsort(self.column[columns])]
        return ordered

    @property
    def judged_steps(self) -> Int:
        return self.numbers[self.judged]

    @property
    def operations(self) -> int:
        return sum((s.structure.segments + len(s.structure.tasks)) * len(s.numbers) for s in self.templates)

    def with_templates(self, templates: tuple[Steps, ...]) -> StepGraph:
        return replace(self, templates=templates)

    @cached_property
    def measured(self) -> Float:
        """Duration of each judged step, ms, mean over ranks."""
        mean: Float = self.duration[: self.leads, self.judged].mean(axis=0)
        return mean
