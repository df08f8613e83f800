"""One step of a pipeline: what each stage did and what it waited for; and the same order of actions as it would be if
no stage were slower than the others and nothing took time to arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pandas as pd

from dsprof.engine import schedule as schedules
from dsprof.engine.schedule import COMPUTE, Action, Plan, ScheduleError
from dsprof.trace import Trace, concat_rows

COLUMNS: Final = ("rank", "stage", "microbatch", "action", "start_ms", "ms")
IDLE_COLUMNS: Final = ("rank", "start_ms", "ms", "cause", "stage")
FOR_STAGE: Final = "stage"
ARRIVING: Final = "arriving"
NOTHING_LEFT: Final = "nothing left"


@dataclass(frozen=True)
class PipelineStep:
    """measured: COLUMNS, ms since the first action.
    idle:  IDLE_COLUMNS, of each rank between its actions. cause: FOR_STAGE (what it needs next is still being computed
           by `stage`), ARRIVING (that is done: it is on its way, or the rank has something else to do), NOTHING_LEFT
           (until the last action of the pipeline)
    ideal: as `measured`, where every action takes what the mean one of its kind does and nothing takes time to arrive;
           None where the actions are not all there, for the reason `why`
    """

    step: int
    measured: pd.DataFrame
    idle: pd.DataFrame
    ideal: pd.DataFrame | None
    why: str = ""

    @property
    def measured_ms(self) -> float:
        """From the first action to the end of the last."""
        return _end(self.measured)

    @property
    def ideal_ms(self) -> float | None:
        return None if self.ideal is None else _end(self.ideal)


def pipeline_step(trace: Trace, step: int) -> PipelineStep | None:
    """The step of one pipeline: of replicas, and of ranks that share a stage, those of the lowest ranks. None where no
    action of a schedule was recorded in it."""
    acted = _actions(trace, step)
    if acted.empty:
        return None
    stages = {int(rank): tuple(sorted(set(of_rank["stage"]))) for rank, of_rank in acted.groupby("rank")}
    first: dict[tuple[int, ...], int] = {}
    for rank in sorted(stages):
        first.setdefault(stages[rank], rank)
    measured = acted[acted["rank"].isin(list(first.values()))].reset_index(drop=True)
    measured["start_ms"] -= measured["start_ms"].min()
    idle = _idle(measured, _needs_of(measured))
    order = [rank for _, rank in sorted(first.items())]
    try:
        plan = _plan(measured, order)
        in_two = [action.op == "B" and action[1:] in plan.split for action in map(_action, measured.itertuples())]
        costs = measured.groupby(["action", in_two])["ms"].mean().to_dict()
        times = schedules.simulate(
            plan, lambda action: costs[action.op, action.op == "B" and action[1:] in plan.split]
        ).times
    except (ScheduleError, ValueError, KeyError) as error:
        why = "its actions were not all recorded" if isinstance(error, KeyError) else str(error).splitlines()[0]
        return PipelineStep(step, measured, idle, None, why)
    ideal = pd.DataFrame(
        [
            (order[plan.owner(action.stage)], action.stage, action.microbatch, action.op, start, end - start)
            for action, (start, end) in times.items()
        ],
        columns=list(COLUMNS),
    )
    return PipelineStep(step, measured, idle, ideal)


def has_pipeline(trace: Trace) -> bool:
    """Whether actions of a pipeline's schedule were recorded, on a few of the ranks: every rank has a stage."""
    ranks = trace.ranks
    some = dict.fromkeys((*ranks[:1], *ranks[len(ranks) // 2 :][:1], *ranks[-1:]))
    return any(bool((trace.read(rank, ("kind",))["kind"] == "pipe").any()) for rank in some)


def _actions(trace: Trace, step: int) -> pd.DataFrame:
    columns = ("rank", "step", "kind", "stage", "microbatch", "name", "start_ns", "dur_ns")
    tables = []
    for rank in trace.ranks:
        rows = trace.read(rank, columns)
        chosen = (rows["kind"] == "pipe") & (rows["step"] == step) & rows["dur_ns"].notna()
        chosen &= rows["stage"].notna() & rows["microbatch"].notna() & rows["name"].isin(COMPUTE)
        tables.append(rows[chosen])
    found = concat_rows(tables, columns)
    return pd.DataFrame(
        {
            "rank": found["rank"].astype("int64"),
            "stage": found["stage"].astype("int64"),
            "microbatch": found["microbatch"].astype("int64"),
            "action": found["name"].astype(str),
            "start_ms": found["start_ns"].astype("float64") / 1e6,
            "ms": found["dur_ns"].astype("float64") / 1e6,
        }
    ).sort_values(["rank", "start_ms"], kind="stable", ignore_index=True)


def _plan(measured: pd.DataFrame, order: list[int]) -> Plan:
    """What the ranks did, in their own order. Raises ValueError where stages lie otherwise than a Plan has them, or an
    action is not there once."""
    by_rank = {int(rank): of_rank for rank, of_rank in measured.groupby("rank")}
    actions = tuple(tuple(map(_action, by_rank[rank].itertuples())) for rank in order)
    stages = sorted({int(stage) for stage in measured["stage"]})
    microbatches = int(measured["microbatch"].nunique())
    each = max(len(stages) // len(order), 1)
    dealt = (Plan("as measured", len(order), microbatches, each, actions, v) for v in (False, True))
    plan = next((one for one in dealt if one.places_its_actions and stages == list(range(one.stages))), None)
    if plan is None:
        raise ValueError("not every stage was captured, or they are not dealt out in turns")
    every = {Action(op, stage, micro) for op in "FB" for stage in stages for micro in set(measured["microbatch"])}
    done = [action for mine in actions for action in mine if action.op != "W"]
    weights = [action for mine in actions for action in mine if action.op == "W"]
    if len(done) != len(every) or set(done) != every or len(weights) != len(plan.split):
        raise ValueError("not every action of each micro-batch was recorded once")
    return plan


def _action(row: object) -> Action:
    return Action(str(row.action), int(row.stage), int(row.microbatch))  # type: ignore[attr-defined]


def _needs_of(measured: pd.DataFrame) -> Mapping[Action, tuple[Action, ...]]:
    """Action -> those of other stages that have to be done before."""
    found = {}
    for action in map(_action, measured.itertuples()):
        if action.op == "F":
            found[action] = (Action("F", action.stage - 1, action.microbatch),)
        elif action.op == "B":
            found[action] = (Action("B", action.stage + 1, action.microbatch),)
    return found


def _idle(measured: pd.DataFrame, needs: Mapping[Action, tuple[Action, ...]]) -> pd.DataFrame:
    ends = {_action(row): float(row.start_ms + row.ms) for row in measured.itertuples()}
    last = max(ends.values())
    rows: list[tuple[int, float, float, str, int]] = []
    for rank, of_rank in measured.groupby("rank"):
        clock = 0.0
        for row in of_rank.itertuples():
            action, start = _action(row), float(row.start_ms)
            there, stage = max(((ends[need], need.stage) for need in needs.get(action, ()) if need in ends),
                               default=(0.0, -1))  # fmt: skip
            computed = min(max(there, clock), start)
            rows.append((int(rank), clock, computed - clock, FOR_STAGE, stage))
            rows.append((int(rank), computed, start - computed, ARRIVING, stage))
            clock = max(clock, ends[action])
        rows.append((int(rank), clock, last - clock, NOTHING_LEFT, -1))
    return pd.DataFrame([row for row in rows if row[2] > 0], columns=list(IDLE_COLUMNS))


def _end(table: pd.DataFrame) -> float:
    return float((table["start_ms"] + table["ms"]).max())
