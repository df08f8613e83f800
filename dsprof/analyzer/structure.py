"""Another structure of a pipeline, as a user asks for it: another schedule, other micro-batches, more parts of the
model on each rank, other boundaries between the stages.

    ask(study(trace), [[PipelineStructure(schedule="zero-bubble", microbatches=16, boundaries=AUTO)]])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dsprof.engine.partition import partition
from dsprof.engine.schedule import DUAL_PIPE_V, Plan, dual_pipe_v, make_plan, peak_activations
from dsprof.words import did_you_mean

from .effect import Effect
from .graph.replay import replay
from .rules.base import NotJudged
from .stage_costs import Taken, begins, best_boundaries, divided_alike, of_layers, stage_ms, weight_share
from .study import Study, once
from .text import number
from .whatif import apply
from .whatif.lowering import Lower, NotLowered, Stages, measured_plan
from .whatif.lowering.recipe import source_stage
from .work.fixed_part import OfActions, fixed_work, stage_parameters
from .work.stage_layers import StageLayer, stage_layers

AUTO: Final = "auto"
NAMES: Final = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved", "interleaved-1f1b": "interleaved",
    "vpp": "interleaved", "zero-bubble": "zero-bubble", "zb-h1": "zero-bubble", "zbh1": "zero-bubble",
    DUAL_PIPE_V: DUAL_PIPE_V, "dualpipev": DUAL_PIPE_V,
}  # fmt: skip
"""What a schedule is called -> its name in `dsprof.engine.schedule`. A plan that is of several has the first one's: of
one micro-batch, 1F1B and GPipe are the same."""
CONFIG: Final = "dsprof's engine or DeepSpeed"
TORCH: Final = "torch.distributed.pipelining"
"""What a pipeline's knobs may be of."""


@dataclass(frozen=True)
class PipelineStructure:
    """schedule: one of NAMES; microbatches: of the same size as now, unless `same_batch`: then what is one batch now is
    cut into so many; chunks: parts of the model on each rank; boundaries: 0, ..., layers, or AUTO: the best there are;
    written: as the user typed all this. What is None is as it ran. knob_of: CONFIG or TORCH, where it is a knob that
    only jobs of one have; otherwise: what to say of it where a job has no pipeline.
    """

    schedule: str | None = None
    microbatches: int | None = None
    chunks: int | None = None
    boundaries: tuple[int, ...] | str | None = None
    same_batch: bool = False
    written: str = ""
    knob_of: str = ""
    otherwise: str = ""

    @property
    def says(self) -> str:
        if self.written:
            return self.written
        parts = {
            "schedule": self.schedule, "micro-batches": self.microbatches, "chunks": self.chunks,
            "boundaries": self.boundaries if isinstance(self.boundaries, str) or self.boundaries is None
            else ",".join(map(str, self.boundaries)),
        }  # fmt: skip
        return " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)

    def beside(self, other: PipelineStructure) -> PipelineStructure:
        """Both in one. Raises ValueError where they ask for different things."""
        found: dict[str, Any] = {}
        for name in ("schedule", "microbatches", "chunks", "boundaries"):
            values = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            if len(set(values)) > 1:
                raise ValueError(f"{self.says} and {other.says} do not go together: write one of them")
            found[name] = values[0] if values else None
        written = " ".join(dict.fromkeys((self.says, other.says)))
        return PipelineStructure(
            **found,
            same_batch=self.same_batch or other.same_batch,
            written=written,
            knob_of=self.knob_of or other.knob_of,
            otherwise=self.otherwise or other.otherwise,
        )

    def effect(self, study: Study) -> Effect:
        """Raises NotJudged with what the run does not tell, and Refused."""
        if self.otherwise and not study.topology.stage_of:
            raise NotJudged(self.otherwise)
        facts, configured = study.facts.get("pipeline", []), study.facts.get("config", [])
        ran = TORCH if any(fact.get("framework") != "deepspeed" for fact in facts) else CONFIG
        if self.knob_of and self.knob_of != ran and (facts or configured):
            raise NotJudged(
                f"{self.says} is of {self.knob_of}, and this pipeline is of {ran}: ask with --schedule, "
                "--micro-batches, --chunks or --boundaries"
            )
        return restructured(study, self).effect


@dataclass(frozen=True)
class Restructured:
    """What a `PipelineStructure` is for one run.

    plan:       what the ranks would do
    boundaries: layers at which stages begin, and the number of all; None: they stay
    in_flight:  of each rank of a pipeline, the activations (of as much of the model as it holds, and one micro-batch of
                the size that it has now) that it holds at once: now, and then
    """

    plan: Plan
    boundaries: tuple[int, ...] | None
    in_flight: tuple[tuple[float, ...], tuple[float, ...]]
    effect: Effect


@once
def pipeline_that_ran(study: Study) -> Plan:
    """The plan that most judged steps ran, by its name where it is a known one. Raises NotJudged."""
    if study.graph is None:
        raise NotJudged("no step was completed on all captured ranks")
    if not study.topology.stage_of:
        raise NotJudged("the job has no pipeline, as far as was captured")
    if study.ranks_missing:
        held = sorted({stage for stages in study.topology.stage_of.values() for stage in stages})
        raise NotJudged(
            f"only stage{'s' * (len(held) > 1)} {', '.join(map(str, held))} of the pipeline "
            f"{'were' if len(held) > 1 else 'was'} captured: what the others take is needed; capture all ranks"
        )
    graph = study.graph
    steps = max(graph.templates, key=lambda one: int(np.isin(one.numbers, graph.judged_steps).sum()))
    try:
        plan = measured_plan(steps.structure).plan
    except NotLowered as why:
        raise NotJudged(str(why)) from None
    for name in dict.fromkeys(NAMES.values()):
        try:
            known = named_plan(name, plan.ranks, plan.microbatches, plan.virtual_stages)
        except ValueError:  # not with so many parts or micro-batches
            continue
        if known.actions == plan.actions:
            return replace(plan, schedule=name)
    return plan


def named_plan(name: str, ranks: int, microbatches: int, chunks: int) -> Plan:
    """Of any schedule that can be predicted, whether the engine runs it or not. Raises ValueError where there is no
    such plan."""
    if name != DUAL_PIPE_V:
        return make_plan(name, ranks, microbatches, chunks)
    if chunks != 2:
        raise ValueError(f"{chunks} parts of the model on each rank, and {DUAL_PIPE_V} has two")
    return dual_pipe_v(ranks, microbatches)


def restructured(study: Study, wanted: PipelineStructure, least_weight: float = 0.0) -> Restructured:
    """Raises NotJudged with what the run does not tell.

    least_weight: of a backward that was not measured in two parts, what W is taken to be at least
    """
    ran = pipeline_that_ran(study)
    plan = _plan(study, ran, wanted)
    if ran.ranks == 1 and (wanted.schedule, wanted.chunks, wanted.boundaries) != (None, None, None):
        raise NotJudged(
            "the pipeline has one rank, so no stage waits for another: neither a schedule nor boundaries save anything"
        )
    try:
        taken, layers = stage_ms(study.need_graph()), stage_layers(study)
    except NotLowered as why:
        raise NotJudged(f"not all steps ran the same plan: {why}") from None
    bounds = None
    if wanted.boundaries is None and (layers is None or plan.stages == ran.stages):
        stages = divided_alike(ran, plan, taken)
    else:
        bounds = _boundaries(study, wanted, ran, plan, taken)
        stages = (of_layers(ran, plan, taken, _need_layers(study), bounds),)
    notes = [_of_boundaries(study, bounds)] if bounds is not None else []
    if len(stages) > 1:
        notes.append("layers were not timed: parts of a stage are taken to be as long as each other, give or take 15 %")
    if plan.microbatches != ran.microbatches:
        if wanted.same_batch:
            size = ran.microbatches / plan.microbatches
            work = fixed_work(stage_parameters(study, plan.stages / ran.ranks))
            pairs = [(one, work.typical) for one in stages] + [(stages[0], end) for end in (work.least, work.most)]
            stages = tuple(_of_size(one, ran, plan, taken, size, fixed) for one, fixed in pairs)
            notes.append(work.says)
        else:
            notes.append(
                f"{plan.microbatches} micro-batches of the size that they have: the batch is "
                f"{number(plan.microbatches / ran.microbatches)} times as large, and what is said is of a "
                f"batch of {ran.microbatches}"
            )
    if plan.splits and plan.actions != ran.actions and len(ran.split) < ran.stages * ran.microbatches:
        weight = weight_share(study.need_graph())
        least = weight.least if weight.measured else max(weight.least, least_weight)
        notes.append(weight.says)
        stages = tuple(replace(one, weight_share=weight.typical) for one in stages)
        stages = (*stages, *(replace(stages[0], weight_share=share) for share in (least, weight.most)))
    size = ran.microbatches / plan.microbatches if wanted.same_batch else 1.0
    in_flight = _in_flight(ran), tuple(size * held for held in _in_flight(plan))
    notes.append(_held(*in_flight))
    lowered = [(Lower(plan, one, wanted.says),) for one in stages]
    now = (Lower(),)
    effect = Effect(
        "pipeline.bubble",
        then=lowered[0],
        now=now,
        others=tuple((now, one) for one in lowered[1:]),
        per_batch=1.0 if wanted.same_batch else plan.microbatches / ran.microbatches,
        notes=tuple(notes),
    )
    return Restructured(plan, bounds, in_flight, effect)


def _plan(study: Study, ran: Plan, wanted: PipelineStructure) -> Plan:
    microbatches = wanted.microbatches or ran.microbatches
    if wanted.schedule is not None and wanted.schedule.lower() not in NAMES:
        names = sorted(set(NAMES.values()))
        hint = did_you_mean(wanted.schedule, NAMES, otherwise=f"; there are {', '.join(names)}", show=str)
        raise NotJudged(f"{wanted.schedule}: no schedule of this name can be predicted{hint}")
    name = ran.schedule if wanted.schedule is None else NAMES[wanted.schedule.lower()]
    several = name in ("interleaved", DUAL_PIPE_V) or (name not in NAMES and ran.virtual_stages > 1)
    chunks = wanted.chunks or (max(ran.virtual_stages, 2) if several and wanted.schedule else ran.virtual_stages)
    if not several and wanted.chunks is None:
        chunks = 1
    if not several and chunks > 1 and name in NAMES.values():
        raise NotJudged(
            f"{chunks} parts of the model on each rank need the schedule interleaved, and this is of {name}, which has "
            "one; ask for --schedule interleaved, too"
        )
    if name not in NAMES.values():
        if (microbatches, chunks) == (ran.microbatches, ran.virtual_stages):
            return ran
        raise NotJudged(
            "the order in which this run's ranks did their actions is none of a schedule that is known, so what it is "
            "with other micro-batches or parts is not known either; say which schedule"
        )
    rounds = max(microbatches // ran.ranks, 1)
    if name == "interleaved" and chunks > 1 and microbatches % rounds and study.facts.get("pipeline"):
        raise NotJudged(
            f"torch's interleaved schedule takes {microbatches} micro-batches on {ran.ranks} ranks only if they are a "
            f"multiple of the rounds, {rounds}; write {microbatches - microbatches % rounds}"
        )
    try:
        return named_plan(name, ran.ranks, microbatches, chunks)
    except ValueError as wrong:
        raise NotJudged(str(wrong)) from None


def _need_layers(study: Study) -> tuple[StageLayer, ...]:
    layers = stage_layers(study)
    if layers is None:
        raise NotJudged(
            "what each layer of the stages takes was not timed, so no other boundary can be told: run again with "
            "--level full (dsprof's engine times its layers in every run)"
        )
    return layers


def _boundaries(study: Study, wanted: PipelineStructure, ran: Plan, plan: Plan, taken: Taken) -> tuple[int, ...]:
    layers, graph = _need_layers(study), study.need_graph()
    if wanted.boundaries is not None and not isinstance(wanted.boundaries, str):
        try:
            return tuple(partition(wanted.boundaries, plan.stages, [layer.name for layer in layers]))
        except ValueError as wrong:
            raise NotJudged(str(wrong)) from None

    def step_ms(bounds: tuple[int, ...]) -> float:
        stages = of_layers(ran, plan, taken, layers, bounds)
        return float(replay(apply(graph, [Lower(plan, stages)])).durations.mean())

    return best_boundaries(layers, plan.stages, step_ms)


def _of_size(stages: Stages, ran: Plan, plan: Plan, taken: Taken, size: float, fixed: OfActions) -> Stages:
    """The same stages, of micro-batches that are so many times as large."""
    factors = {}
    for stage in range(plan.stages):
        source = source_stage(ran, plan, stage)
        for op in "FB":
            of = stages.factors.get((stage, op), 1.0)
            factors[stage, op] = of * fixed.of(op).times(of * taken[source, op], size)
    return replace(stages, factors=factors)


def _of_boundaries(study: Study, bounds: tuple[int, ...]) -> str:
    layers = _need_layers(study)
    return f"stages begin at {begins(layers, bounds)} of {len(layers)}: boundaries {','.join(map(str, bounds))}"


def _in_flight(plan: Plan) -> tuple[float, ...]:
    return tuple(held / plan.virtual_stages for held in peak_activations(plan, "B"))


def _held(now: tuple[float, ...], then: tuple[float, ...]) -> str:
    before, after = (", ".join(number(held) for held in ranks) for ranks in (now, then))
    same = f"as now ({before})" if now == then else f"{after}, and now {before}"
    return f"activations that the ranks hold at once, in micro-batches of now: {same}"
