"""Pipelines: a stage that is slower than the others, and a bubble that costs more than it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.engine import schedule as schedules

from ... import signals
from ...arrays import Bool, Float
from ...candidate import Candidate, Excess, OneOf, Price
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.bubble_shares import bubble_shares
from ...price.calibration import ModelError
from ...study import Study
from ...text import count, number, percent
from ...whatif.schedule import makespan, schedule_graph
from ...whatif.work import Change
from ...work.core_wait import core_wait, work_with_cores
from ..base import LEAST_SHARE, NotJudged, at, code_fix
from ..rule import Found, Look, Rule, fault
from .bubble_causes import first_of, mostly, parts_of
from .structure_fixes import boundaries_fix, measured_fix, schedule_fixes

MULTIPLES: Final = (2, 4)
"""Of the micro-batches there are, that are tried."""
ACCEPTED: Final = 0.1
"""A bubble that takes less of the step is what pipelines are run with: then a larger batch is not worth asking for."""
DEEPSPEED: Final = "deepspeed"
"""Its pipelines are set up by its configuration, and no line of the script would change their schedule."""
KERNELS: Final = "run again with `dsprof run --deep 10:13`, which traces the kernels of three steps"
IMBALANCE_ERROR: Final = ModelError(of_gain=0.08, of_step=0.015, busy=0.06)
BUBBLE_ERROR: Final = ModelError(of_gain=0.072, of_step=0.0225, busy=0.036)
VIRTUAL: Final = 2
"""Parts of the model on each rank, that are tried."""


def unbalanced(study: Study) -> Change | None:
    """Every stage computes as long as the mean of them: what an ideal division of the layers would give."""
    signals.stages(study)
    need_every_stage(study)
    compute, of_team = _compute_of_stages(study)
    need_two_of(study, int(of_team.argmax()))
    target = float(of_team.mean())
    removed = np.zeros_like(compute)
    for peer_group, mean in zip(study.peer_groups, of_team.tolist(), strict=True):
        # Of a rank that is slower than the others of its stage, the rest is a straggler's.
        removed[peer_group] = np.minimum(compute[peer_group], mean) * (1 - target / max(mean, 1e-9))
    return Change({"compute": removed}) if of_team.max() > target else None


def _compute_of_stages(study: Study) -> tuple[Float, Float]:
    """Compute of each rank and step, [R, S] ms, without what it waited for a core, which other layers would not change;
    and of each stage a step, of the typical one of its ranks, [stages]."""
    compute = work_with_cores(study, "compute")
    means = compute.mean(axis=1)
    # Of two, the faster: one of them may be a straggler.
    typical = [np.sort(means[peer_group])[(int(peer_group.sum()) - 1) // 2] for peer_group in study.peer_groups]
    return compute, np.array(typical)


def imbalance(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """One stage computes longer than the rest, so that all go at its pace."""
    of_team = _compute_of_stages(study)[1]
    slowest = int(of_team.argmax())
    others = float(np.delete(of_team, slowest).mean())
    target = float(of_team.mean())
    ranks = tuple(rank for rank, chosen in zip(study.ranks, study.peer_groups[slowest], strict=True) if chosen)
    stages = study.topology.stage_of.get(ranks[0], ())
    evidence = (
        Evidence("compute of this stage a step", round(float(of_team[slowest]), 3), "ms", round(target, 3)),
        Evidence("compute of the other stages, mean", round(others, 3), "ms"),
        Evidence("waiting for another stage, mean", round(float(study.ordinary["bubble"].mean()), 3), "ms"),
        *_waited_for_cores(study, study.peer_groups[slowest]),
    )
    fact = _schedule_fact(study)
    site = fact.get("site")
    times = float(of_team[slowest]) / max(others, 1e-9)
    move = f"move {percent(100 * (1 - float(of_team.mean()) / float(of_team[slowest])))} of the layers' time of stage "
    exact = boundaries_fix(study, site, IMBALANCE_ERROR)
    fixes = (
        *([] if exact is None else [exact]),
        *measured_fix(study, exact, gain),
        Fix("code", f"{move}{_names(stages)} to other stages{at(site)}", gain=gain),
    )
    waiting = "the other, which waits" if len(of_team) == 2 else "the others, which wait"
    title = f"stage {_names(stages)} computes {number(times)} times as long as {waiting} for it"
    where = Where(ranks=ranks, stage=stages[0] if len(stages) == 1 else None, steps=study.step_range)
    return Finding("pipeline.imbalance", title, "info", where, evidence, gain, fixes, share=share)


def _waited_for_cores(study: Study, of_stage: Bool) -> list[Evidence]:
    """What the ranks of a stage waited for a core beside what they computed, where that is worth a line."""
    waited = core_wait(study)
    spent = 0.0 if waited is None else float(waited.within("compute")[of_stage].mean())
    if spent < LEAST_SHARE * study.step_ms:
        return []
    return [Evidence("beside that, this stage waits for a core", round(spent, 3), "ms")]


def _names(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))


def _schedule_facts(study: Study) -> list[dict[str, Any]]:
    """Of the schedules that train."""
    return [fact for fact in study.facts.get("pipeline", []) if fact.get("trains", True)]


def _schedule_fact(study: Study) -> dict[str, Any]:
    return next(iter(_schedule_facts(study)), {})


@dataclass(frozen=True)
class _Shape:
    """A pipeline as it ran: its schedule, ranks (of one replica), micro-batches, stages a rank; and what an F, a B and
    a W take in each ordinary step, ms, mean over stages, [S]."""

    schedule: str
    ranks: int
    microbatches: int
    virtual: int
    forward: Float
    backward: Float
    weight: Float
    of_stage: dict[tuple[int, str], float]
    """(stage, name) -> what such an action takes, ms, mean over the steps."""

    @property
    def stages_in_words(self) -> str:
        """`4 stages`, `8 stages on 4 ranks`: a rank may have several."""
        stages = count(self.ranks * self.virtual, "stage")
        return stages if self.virtual == 1 else f"{stages} on {count(self.ranks, 'rank')}"

    def uneven_ms(self) -> float:
        """The step with what each stage takes, ms."""
        plan = schedules.make_plan(self.schedule, self.ranks, self.microbatches, self.virtual)
        graph = schedule_graph(plan, lambda action: self.of_stage.get((action.stage, action.op), 0.0))
        return float(makespan(graph)[0])

    def step_ms(self, microbatches: int, schedule: str | None = None, virtual: int | None = None) -> Float:
        """Each step with stages that take the same, ms, [S]. Raises ValueError for a schedule that cannot be so."""
        split = self.virtual / (virtual or self.virtual)
        taken = {"F": self.forward * split, "B": self.backward * split, "W": self.weight * split}
        plan = schedules.make_plan(schedule or self.schedule, self.ranks, microbatches, virtual or self.virtual)
        return makespan(schedule_graph(plan, lambda action: taken[action.op], steps=len(self.forward)))


def bubble(study: Study) -> Found:
    """Warm-up and drain of the pipeline cost more than they need: with more micro-batches, or parts of stages."""
    signals.steps(study)
    signals.stages(study)
    shape = _shape(study)
    waited = float(study.work("bubble").mean())
    if waited < LEAST_SHARE * study.step_ms:
        return []
    now = shape.step_ms(shape.microbatches)
    tried = {times: now - shape.step_ms(shape.microbatches * times) / times for times in MULTIPLES}
    taken = shape.forward + shape.backward + shape.weight
    # What a micro-batch costs beside its actions: the schedule's own work, messages. Of more micro-batches of the same
    # size each has it too; of smaller ones, from the same batch, there are more to bear it.
    ordinary = study.ordinary
    busy = float((ordinary["dur_ns"] / 1e6 - ordinary[["data", "optimizer", "pause"]].sum(axis=1)).mean())
    fixed = max(busy - shape.uneven_ms(), 0.0) / shape.microbatches
    ideal = 1 - shape.microbatches * shape.virtual * float(taken.mean()) / float(now.mean())
    larger = tuple(
        Excess(
            np.minimum(saved, waited), "step", "simulation", less_ms=fixed * shape.microbatches * (times - 1),
            least_part=0.5 if ideal > ACCEPTED else None,
        )
        for times, saved in tried.items()
    )  # fmt: skip
    fact = _schedule_fact(study)
    acted = bool(len(study.of_kind("pipe")))
    by_config = acted and (not fact or fact.get("framework") == DEEPSPEED)
    argument = "gradient_accumulation_steps" if by_config else "n_microbatches" if fact else "micro-batches"
    site = fact.get("site")

    def batch_fix(times: int, gain: Gain) -> Fix:
        title = (
            f"{argument}={shape.microbatches * times}{at(site)} with {times} times the batch: micro-batches of the "
            "same size, and the gain is per sample; smaller ones from the same batch gain less"
        )
        return code_fix(title, argument, shape.microbatches * times, site, gain)

    interleaved = _interleaved(shape, now, waited) if fact.get("framework") != DEEPSPEED else None

    def say(price: Price) -> Finding:
        best_first = sorted(zip(MULTIPLES, price.tried, strict=False), key=lambda one: -one[1].low)
        fixes = [batch_fix(times, gain) for times, gain in best_first]
        own, causes = schedule_fixes(study, BUBBLE_ERROR), bubble_shares(study)
        if own is None and interleaved is not None and price.tried[-1].ms >= LEAST_SHARE * study.step_ms:
            other = f"or an interleaved schedule, with {VIRTUAL} parts of the model on each rank{at(site)}"
            fixes.append(code_fix(other, "ScheduleInterleaved1F1B", "", site, price.tried[-1]))
        fixes = [*first_of(causes), *fixes, *(own or [])]
        evidence = (*_evidence(study, shape, waited, ideal, MULTIPLES[price.chosen]), *parts_of(causes))
        title = f"the pipeline fills and drains for {percent(100 * ideal)} of the step: "
        title += f"{count(shape.microbatches, 'micro-batch', 'es')} for {shape.stages_in_words}{mostly(causes)}"
        return Finding("pipeline.bubble", title, "info", where, evidence, price.gain, tuple(fixes))

    where = Where(ranks=study.ranks, steps=study.step_range)
    choice = OneOf(larger, () if interleaved is None else (interleaved,))
    return [Candidate("pipeline.bubble", choice, say)]


def _evidence(study: Study, shape: _Shape, waited: float, ideal: float, best: int) -> tuple[Evidence, ...]:
    return (
        Evidence("waiting for another stage, mean of the ranks", round(waited, 3), "ms"),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
        Evidence("bubble of this schedule with equal stages", round(100 * ideal, 1), "%"),
        Evidence("micro-batches a step", shape.microbatches, "count", shape.microbatches * best),
        Evidence("stages of the pipeline", shape.ranks * shape.virtual, "count"),
        Evidence("schedule", _schedule_fact(study).get("schedule") or shape.schedule, ""),
    )


def _interleaved(shape: _Shape, now: Float, waited: float) -> Excess | None:
    """What an interleaved schedule would save; None where it is none for this pipeline."""
    if shape.virtual > 1 or shape.schedule not in ("gpipe", "1f1b") or shape.microbatches % shape.ranks:
        return None
    saved = np.minimum(now - shape.step_ms(shape.microbatches, "interleaved", VIRTUAL), waited)
    # Each part's messages and fixed costs are its own: they may take all of it.
    return Excess(saved, "step", "simulation", less_ms=max(float(saved.mean()), 0.0), least_part=0.0)


def _shape(study: Study) -> _Shape:
    """The pipeline's schedule, from what its ranks did in a step. Raises NotJudged where it is none that is known."""
    need_every_stage(study)
    names = sorted({str(fact.get("schedule")) for fact in _schedule_facts(study)})
    if len(names) > 1:
        raise NotJudged(f"the job has several schedules ({', '.join(names)}), and which one runs a step is not known")
    actions = _actions(study)
    # Of each rank by itself: of some replicas ranks may not have been captured.
    forwards = actions[actions["name"] == "F"].groupby(["rank", "stage", "step"]).size()
    microbatches = int(forwards.mode().iloc[0]) if len(forwards) else 0
    if microbatches < 1 or (forwards != microbatches).any():
        raise NotJudged("the stages of the pipeline do not all run the same number of micro-batches in every step")
    per_step = actions.groupby(["stage", "step", "name"])["ms"].mean()
    mean = per_step.groupby(level=["step", "name"]).mean().unstack(fill_value=0.0)
    mean = mean.reindex(index=study.step_numbers).ffill().bfill()
    empty = np.zeros(len(mean))
    forward, backward, weight = (mean[name].to_numpy(np.float64) if name in mean else empty for name in "FBW")
    held = [len(stages) for stages in study.topology.stage_of.values()]
    virtual = max(held)
    ranks = len(study.peer_groups)
    schedule = _schedule_of(actions, virtual, "W" in mean)
    if virtual > 1 and schedule != "interleaved":
        raise NotJudged(f"no other number of micro-batches was tried: what {_schedule_fact(study).get('schedule')} "
                        "would do with it cannot be simulated")  # fmt: skip
    of_stage = {
        (int(stage), str(name)): float(ms)
        for (stage, name), ms in per_step.groupby(level=["stage", "name"]).mean().items()
    }
    return _Shape(schedule, ranks, microbatches, virtual, forward, backward, weight, of_stage)


def need_every_stage(study: Study) -> None:
    """Raises NotJudged where ranks of a stage were not captured, by what is said of the schedule and by the numbers of
    the stages that were."""
    held = {stage for stages in study.topology.stage_of.values() for stage in stages}
    told = [int(fact["stages"]) for fact in _schedule_facts(study) if isinstance(fact.get("stages"), int)]
    whole = max([*told, *(stage + 1 for stage in held)], default=0)
    if study.ranks_missing and len(held) < whole:
        raise NotJudged(f"only {len(held)} of the {whole} stages of the pipeline were captured")


def need_two_of(study: Study, slowest: int) -> None:
    """Raises NotJudged where only one of the ranks of that stage was captured: it may be a straggler."""
    seen, stages = int(study.peer_groups[slowest].sum()), len(study.peer_groups)
    if study.ranks_missing and seen == 1 and (study.run.world_size or 0) >= 2 * stages:
        raise NotJudged("of the slowest stage one rank was captured, which may be slower than the others of its stage")


def _actions(study: Study) -> pd.DataFrame:
    """stage, step, rank, name (F, B, W), start_ns, ms: of the ordinary steps. Where no schedule was seen, forwards and
    backwards are taken for F and B."""
    if study.on_gpu:
        return _on_devices(study)
    acted = study.of_kind("pipe")
    acted = acted[acted["step"].isin(study.step_numbers) & acted["dur_ns"].notna() & acted["stage"].notna()]
    if acted.empty:
        acted = study.training_phases
        acted = acted[
            acted["step"].isin(study.step_numbers) & (acted["source"] == "measured")
            & acted["name"].isin(["forward", "backward"])
        ]  # fmt: skip
        stage = acted["rank"].map({rank: held[0] for rank, held in study.topology.stage_of.items()})
        name = acted["name"].astype(str).map({"forward": "F", "backward": "B"})
    else:
        stage, name = acted["stage"], acted["name"].astype(str)
    table = pd.DataFrame(
        {
            "stage": stage.astype("Int64"),
            "step": acted["step"],
            "rank": acted["rank"],
            "name": name,
            "start_ns": acted["start_ns"],
            "ms": acted["dur_ns"].astype("int64") / 1e6,
        }
    )
    table = table[table["stage"].notna() & table["name"].isin(["F", "B", "W"])]
    if not {"F", "B"} <= set(table["name"]):
        raise NotJudged("the forwards and backwards of the pipeline's micro-batches were not captured")
    return table


def _on_devices(study: Study) -> pd.DataFrame:
    """The same, with what devices took. Raises NotJudged where not every forward and backward was timed there."""
    launched, every = study.of_kind("phase"), study.stream_phases
    table = every.assign(
        name=every["name"].replace({"forward": "F", "backward": "B"}),
        stage=every["stage"].fillna(
            every["rank"].map({rank: held[0] for rank, held in study.topology.stage_of.items()})
        ),
    )
    acted = table[table["name"].isin(["F", "B", "W"]) & every["stage"].notna()]
    of_phases = table[every["name"].isin(["forward", "backward"])]
    if acted.empty and any(len(held) > 1 for held in study.topology.stage_of.values()):
        raise NotJudged(f"which part of the model the device worked for was not seen in its phases: {KERNELS}")
    table = of_phases if acted.empty else acted
    launched = launched[(launched["lane"] == "main") & (launched["source"] == "measured")]
    launched = launched[launched["step"].isin(study.step_numbers) & launched["name"].isin(["forward", "backward"])]
    untimed = acted.empty and len(launched) != len(table)
    if untimed or table.empty or not (table["ms"] > 0).any():
        raise NotJudged(f"not every forward and backward of a micro-batch was timed on the device: {KERNELS}")
    return table.astype({"stage": "Int64"})


def _schedule_of(actions: pd.DataFrame, virtual: int, splits: bool) -> str:
    if virtual > 1:
        return "interleaved" if not splits and not _waits_for_all(actions) else "unknown"
    if splits:
        return "zero-bubble"
    return "gpipe" if _waits_for_all(actions) else "1f1b"


def _waits_for_all(actions: pd.DataFrame) -> bool:
    """Whether the last stage runs all its forwards before its first backward: 1F1B's alternates there."""
    last = actions[actions["stage"] == actions["stage"].max()].sort_values("start_ns")
    step = last[last["step"] == last["step"].iloc[0]]
    names = step[step["rank"] == step["rank"].iloc[0]]["name"].to_numpy(object)
    forwards = int((names == "F").sum())
    return bool((names[:forwards] == "F").all())


RULES = (
    Rule(
        "pipeline.imbalance",
        "one stage of a pipeline is slower than the others",
        explains=("bubble",),
        exhausts=("bubble",),
        looks=(fault("pipeline.imbalance", unbalanced, imbalance),),
        error=IMBALANCE_ERROR,
        came_true=(73, 75),
        place=50,
    ),
    Rule(
        "pipeline.bubble",
        "filling and draining a pipeline costs more than it needs",
        explains=("bubble",),
        exhausts=("bubble",),
        looks=(Look(bubble, needs=(signals.replay,)),),
        outranked_by=("pipeline.imbalance", "pipeline.stall", "rank.straggler"),
        error=BUBBLE_ERROR,
        came_true=(22, 25),
        place=110,
    ),
)
