"""A layout as the graph of the ranks of one replica: its pipeline's actions, the messages between stages, what replicas
gather and reduce beside the computation, the optimizer, and what is gathered after it.

Of a thread, which is a rank of the pipeline, in order

    what is done once a step | actions of the schedule, each in up to PIECES pieces | optimizer | gather (stages 1, 2)

A piece of stage 3 waits for a gather of its parameters, which was issued a piece ahead; gradients are reduced as pieces
of a backward end, on a lane of their own, and the optimizer waits for them. Ranks begin the next step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from dsprof.engine.schedule import Action, Plan

from ..arrays import Float
from ..graph.replay import replay
from ..graph.segment_work import no_work
from ..graph.step_graph import PARTS, Costs, Edges, Measured, StepGraph, Steps, Structure, Task
from ..structure import named_plan
from ..work.fixed_part import OfActions
from .job_layout import Layout
from .layout_costs import LayoutCosts
from .stage_work import StageWork, stage_work

WORK: Final = PARTS.index("compute")
PIECES: Final = 4
"""Of an action, in which its communications run beside it."""
MOST_MICROBATCHES: Final = 48
"""Of more, the steady middle of a step is not lowered: it takes as long for each more of them."""
ROUNDS_APART: Final = 2


@dataclass(frozen=True)
class Assumed:
    """What a run does not tell, as it is taken to be.

    fixed:  of a micro-batch, what it takes whatever its size; None: what is usual of the run's model
    weight: of a backward, what only makes weight gradients; None: what the run tells, or is usual
    uneven: what the first stage takes more than an even part
    links:  what communications take, times what they were fitted to
    tensor: of the computation, what tensor-parallel ranks do not share
    """

    fixed: OfActions | None = None
    weight: float | None = None
    uneven: float = 0.0
    links: float = 1.0
    tensor: float = 0.05


@dataclass(frozen=True)
class StageTimes:
    """Of each stage: ms of an action by its op, B being all of the backward and W its part; of a gather of its
    parameters, of a reduction of its gradients, and of the gather after the optimizer. optimizer: of a rank; message:
    between stages."""

    actions: tuple[dict[str, float], ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    publish: tuple[float, ...]
    message: float
    optimizer: float


def stage_times(costs: LayoutCosts, layout: Layout, plan: Plan, work: StageWork, assumed: Assumed) -> StageTimes:
    """What everything in the step of a layout takes."""
    size = {
        op: (assumed.fixed or costs.fixed.typical).of(op).times(sum(of_stages) / costs.stage_count, layout.micro_batch)
        for op, of_stages in (("F", work.forward), ("B", work.backward))
    }
    shared = _tensor_share(costs, layout, assumed)
    weight = costs.weight.typical if assumed.weight is None else assumed.weight
    replicas, handed = costs.replicas.times(assumed.links), costs.stages.times(assumed.links)
    actions, gather, reduce, publish = [], [], [], []
    every = sum(work.layers)
    for stage in range(plan.stages):
        calls = _tensor_ms(costs, layout, assumed) * work.layers[stage] / every
        forward, backward = work.forward[stage] * size["F"] * shared, work.backward[stage] * size["B"] * shared
        again = costs.computed_again * (forward + calls / 2) if layout.recompute else 0.0
        forward, backward = forward + calls / 2, backward + calls / 2 + again
        actions.append({"F": forward, "B": backward, "W": backward * weight})
        whole = work.model_bytes[stage] * costs.ran.tp / layout.tp
        part = work.layers[stage] / max(every / costs.ran.pp, 1e-9)
        units, buckets = max(costs.units * part, 1.0), max(costs.buckets * part, 1.0)
        gather.append(replicas.ms(whole, layout.dp, units) if layout.zero == 3 else 0.0)
        passed = whole * (2 if layout.zero == 0 else 1)
        reduce.append(replicas.ms(passed, layout.dp, buckets))
        publish.append(replicas.ms(whole, layout.dp, buckets) if layout.zero in (1, 2) else 0.0)
    message = handed.ms((costs.activation_bytes or 0.0) * layout.micro_batch, 2)
    of_rank = layout.share(1) / (layout.pp * layout.tp) * costs.ran.pp * costs.ran.tp / costs.ran.share(1)
    return StageTimes(
        tuple(actions), tuple(gather), tuple(reduce), tuple(publish), message, costs.optimizer_ms * of_rank
    )  # fmt: skip


def _tensor_share(costs: LayoutCosts, layout: Layout, assumed: Assumed) -> float:
    """Of the run's computation on a rank, with other tensor parallelism: what ranks do not share stays."""
    if layout.tp == costs.ran.tp:
        return 1.0
    whole = 1 / (assumed.tensor + (1 - assumed.tensor) / costs.ran.tp)
    return whole * (assumed.tensor + (1 - assumed.tensor) / layout.tp)


def _tensor_ms(costs: LayoutCosts, layout: Layout, assumed: Assumed) -> float:
    """What all layers' all-reduces take for a micro-batch: as many as in the run, or two in forward and two in backward
    of each layer."""
    if layout.tp == 1:
        return 0.0
    calls = costs.tensor_calls or 4.0 * len(costs.layers or ())
    passed = 2 * (costs.activation_bytes or 0.0) * layout.micro_batch * calls
    return costs.tensor.times(assumed.links).ms(passed, layout.tp, calls)


def plan_of(layout: Layout) -> Plan:
    """Raises ValueError for a schedule that there is not, or not with so many parts or micro-batches."""
    return named_plan(layout.schedule, layout.pp, layout.micro_batches, layout.chunks)


def short_plan(layout: Layout) -> Plan:
    """Of as few micro-batches as any schedule takes: which stages a rank has, and whether backwards are in two parts,
    does not depend on how many there are. Raises ValueError as `plan_of`."""
    return plan_of(replace(layout, micro_batches=layout.pp * layout.chunks))


def step_of(costs: LayoutCosts, layout: Layout, assumed: Assumed | None = None) -> float:
    """What a step of a layout takes by the model, ms. Raises NotJudged, and ValueError of its schedule."""
    most = max(MOST_MICROBATCHES, 4 * layout.pp * layout.chunks)
    if layout.micro_batches <= most:
        return _replayed(costs, layout, assumed)
    # The steady middle: each more round of the pipeline takes as long as the one before.
    rounds = ROUNDS_APART * layout.pp
    less = most - most % layout.pp + layout.micro_batches % layout.pp
    low, high = (_replayed(costs, replace(layout, micro_batches=count), assumed) for count in (less - rounds, less))
    return high + (layout.micro_batches - less) * (high - low) / rounds


def _replayed(costs: LayoutCosts, layout: Layout, assumed: Assumed | None) -> float:
    return float(replay(lowered(costs, layout, assumed, np.ones(1))).durations[0])


def lowered(
    costs: LayoutCosts, layout: Layout, assumed: Assumed | None = None, steps: Float | None = None
) -> StepGraph:
    """The graph of a replica's ranks. steps: [S] how long each step is, by their mean; None: those of the run.
    Raises NotJudged, and ValueError of the schedule."""
    assumed = assumed or Assumed()
    plan = plan_of(layout)
    work = stage_work(costs, plan.stages, layout.boundaries)
    if work.divided and costs.layers is None:
        work = work.uneven(assumed.uneven)
    times = stage_times(costs, layout, plan, work, assumed)
    loading = costs.data_ms * (layout.micro_batches * layout.micro_batch / costs.ran.micro_batches - 1)
    program = _Program(plan, layout, times, _rounds(costs, layout))
    copied = costs.offload_ms if costs.ran.offload and not layout.offload else 0.0
    return program.graph(costs.once_ms + loading - copied, costs.steps if steps is None else steps)


def _rounds(costs: LayoutCosts, layout: Layout) -> bool:
    """Whether gradients are reduced with each micro-batch: as they were, or from stage 2 on, which keeps no whole
    ones."""
    return costs.rounds > 1 if layout.zero == costs.ran.zero else layout.zero >= 2


@dataclass
class _Program:
    """The operations of a graph as they are laid out."""

    plan: Plan
    layout: Layout
    times: StageTimes
    each: bool
    thread: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    issues: list[tuple[int, int]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)

    def graph(self, once_ms: float, steps: Float) -> StepGraph:
        begins: dict[Action, int] = {}
        ends: dict[Action, int] = {}
        last: list[int] = []
        for rank, actions in enumerate(self.plan.actions):
            last.append(self._rank(rank, actions, once_ms, begins, ends))
        for action, segment in begins.items():
            for need in self.plan.needs(action):
                if self.plan.owner(need.stage) != self.plan.owner(action.stage):
                    self._task("pipeline", None, self.times.message, ends[need], segment)
        together = self._new_task("the next step", None, 0.0)
        for segment in last:
            self.issues.append((segment - 1, together))
            self.waits.append((together, segment))
        return self._finish(steps)

    def _rank(
        self, rank: int, actions: Sequence[Action], once_ms: float, begins: dict[Action, int], ends: dict[Action, int]
    ) -> int:
        """Lay out a rank; its last segment, which waits for all ranks."""
        reducing = self._reducing(actions)
        pieces = PIECES if self.layout.dp > 1 else 1
        self._segment(rank, once_ms)
        reductions: list[int] = []
        for action in actions:
            count = pieces if action in reducing or self.layout.zero == 3 else 1
            gather = self.times.gather[action.stage] / count if action.op != "W" else 0.0
            for piece in range(count):
                # Issued when the piece before begins; there is one, if only what is done once a step.
                issued = len(self.ms) - 2 if self.thread[-2:] == [rank, rank] else len(self.ms) - 1
                segment = self._segment(rank, self._ms(action) / count)
                if gather:
                    self._task(f"gather {rank}", 1, gather, issued, segment)
                if piece == 0:
                    begins[action] = segment
                if action in reducing:
                    reductions.append(self._new_task(f"reduce {rank}", 1, self.times.reduce[action.stage] / count))
                    self.issues.append((segment, reductions[-1]))
            ends[action] = len(self.ms) - 1
        optimizer = self._segment(rank, self.times.optimizer)
        self.waits += [(task, optimizer) for task in reductions]
        published = sum(self.times.publish[stage] for stage in {action.stage for action in actions})
        after = self._segment(rank, 0.0)
        if published:
            self._task(f"gather {rank}", 1, published, optimizer, after)
        return self._segment(rank, 0.0)

    def _reducing(self, actions: Sequence[Action]) -> set[Action]:
        """The actions after which gradients are reduced: of each micro-batch, or each stage's last."""
        if self.layout.dp == 1:
            return set()
        split = self.plan.split
        made = [action for action in actions if action.op == ("W" if action[1:] in split else "B")]
        if self.each:
            return set(made)
        last = {action.stage: action for action in made}
        return set(last.values())

    def _ms(self, action: Action) -> float:
        """What an action computes: of a backward in two parts, B is what W leaves."""
        times = self.times.actions[action.stage]
        later = times["W"] if action.op == "B" and action[1:] in self.plan.split else 0.0
        return times[action.op] - later

    def _segment(self, rank: int, ms: float) -> int:
        self.thread.append(rank)
        self.ms.append(ms)
        return len(self.ms) - 1

    def _new_task(self, lane: str, workers: int | None, ms: float) -> int:
        self.tasks.append(Task(lane, lane.partition(" ")[0], workers=workers))
        self.took.append(ms)
        return len(self.tasks) - 1

    def _task(self, lane: str, workers: int | None, ms: float, issued: int, waits: int) -> None:
        task = self._new_task(lane, workers, ms)
        self.issues.append((issued, task))
        self.waits.append((task, waits))

    def _finish(self, steps: Float) -> StepGraph:
        segments, count = len(self.ms), len(steps)
        pairs = [(source, segments + task) for source, task in self.issues]
        pairs += [(segments + task, target) for task, target in self.waits]
        edges = np.array(sorted(pairs), np.int64).reshape(-1, 2)
        structure = Structure(
            thread=np.array(self.thread, np.int64), backward=np.zeros(segments, bool),
            action=np.full(segments, "", object), tasks=tuple(self.tasks), outside=0,
            edges=Edges(edges[:, 0], edges[:, 1]), threads=self.plan.ranks,
        )  # fmt: skip
        work = no_work(segments, count, len(PARTS))
        work[..., WORK] = np.array(self.ms)[:, None] * steps
        transfer = np.array(self.took)[:, None] * steps
        nothing = np.zeros_like(transfer)
        alike = Steps(
            structure, np.arange(count), Costs(work, transfer, nothing, nothing),
            Measured(np.zeros((0, count)), np.zeros((segments, count)), nothing, nothing),
        )  # fmt: skip
        return StepGraph.of_one_template(alike)
