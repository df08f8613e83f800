"""One step of a pipeline: what its stages waited for, and what it would be ideally."""

from __future__ import annotations

from dataclasses import replace

import factories
import pandas as pd

from dsprof.analyzer.work.pipeline_step import has_pipeline, pipeline_step
from dsprof.engine import schedule
from dsprof.reports import gantt, html
from dsprof.reports.sections import report_of
from dsprof.run import RunInfo
from dsprof.trace import Trace

MS = 1_000_000

GPIPE = {
    0: [("F", 0, 0, 10), ("F", 1, 10, 10), ("B", 0, 75, 10), ("B", 1, 95, 10)],
    1: [("F", 0, 15, 20), ("F", 1, 35, 20), ("B", 0, 55, 10), ("B", 1, 80, 10)],
}
"""Rank -> action, micro-batch, start and duration in ms. Stage 1 begins 5 ms after stage 0's first forward has ended,
takes twice as long, and its second backward waits 15 ms for nothing that is known."""


def trace_of(actions: dict[int, list[tuple[str, int, int, int]]], step: int = 3) -> Trace:
    rows = [
        {
            "rank": rank, "restart": 0, "step": step, "kind": "pipe", "name": op, "lane": "main",
            "stage": rank, "microbatch": micro, "start_ns": (1000 + start) * MS, "dur_ns": length * MS,
            "ended": True, "source": "measured",
        }
        for rank, mine in actions.items()
        for op, micro, start, length in mine
    ]  # fmt: skip
    return Trace.of(RunInfo(id="p", name="p", command=[]), pd.DataFrame(rows))


def test_what_each_stage_stood_still_for() -> None:
    found = pipeline_step(trace_of(GPIPE), 3)
    assert found is not None
    assert found.measured_ms == 105
    idle = [tuple(row) for row in found.idle.itertuples(index=False)]
    assert idle == [
        (0, 20.0, 45.0, "stage", 1),  # stage 1's first backward ends at 65,
        (0, 65.0, 10.0, "arriving", 1),  # and what it gives is used 10 ms later
        (0, 85.0, 5.0, "stage", 1),
        (0, 90.0, 5.0, "arriving", 1),
        (1, 0.0, 10.0, "stage", 0),
        (1, 10.0, 5.0, "arriving", 0),
        (1, 65.0, 15.0, "arriving", -1),
        (1, 90.0, 15.0, "nothing left", -1),
    ]


def test_the_ideal_has_the_same_order_equal_stages_and_no_transfers() -> None:
    found = pipeline_step(trace_of(GPIPE), 3)
    assert found is not None
    assert found.ideal is not None
    # A forward takes 15 ms and a backward 10 on every stage: 3 forwards and 3 backwards one behind the other.
    assert found.ideal_ms == 75
    last = found.ideal.sort_values("start_ms").iloc[-1]
    assert (last["rank"], last["action"], last["microbatch"], last["start_ms"]) == (0, "B", 1, 65.0)


def test_a_step_whose_actions_are_not_all_there_has_no_ideal() -> None:
    found = pipeline_step(trace_of({**GPIPE, 1: GPIPE[1][1:]}), 3)
    assert found is not None
    assert (found.ideal, found.why) == (None, "not every action of each micro-batch was recorded once")
    found = pipeline_step(trace_of({0: GPIPE[0], 3: GPIPE[1]}), 3)
    assert found is not None
    assert found.why == "not every stage was captured, or they are not dealt out in turns"
    assert "no ideal: not every stage was captured" in gantt.pipeline(found).layout.meta["note"]


def test_stages_in_a_v_and_backwards_in_two_parts_beside_whole_ones() -> None:
    """Each action took as long as others of its kind, so the ideal is what was measured: its order, without a wait."""
    plan = schedule.dual_pipe_v(2, 4)

    def cost(action: schedule.Action) -> float:
        return 10 if action.op != "B" else 12 if action[1:] in plan.split else 22

    times = schedule.simulate(plan, cost).times
    made = [
        {
            "rank": plan.owner(action.stage), "restart": 0, "step": 3, "kind": "pipe", "name": action.op,
            "lane": "main", "stage": action.stage, "microbatch": action.microbatch,
            "start_ns": round((1000 + start) * MS), "dur_ns": round((end - start) * MS), "ended": True,
            "source": "measured",
        }
        for action, (start, end) in times.items()
    ]  # fmt: skip
    found = pipeline_step(Trace.of(RunInfo(id="p", name="p", command=[]), pd.DataFrame(made)), 3)
    assert found is not None
    assert found.why == ""
    assert found.ideal_ms == found.measured_ms
    gone = [row for row in made if (row["name"], row["stage"], row["microbatch"]) != ("B", 3, 0)]
    found = pipeline_step(Trace.of(RunInfo(id="p", name="p", command=[]), pd.DataFrame(gone)), 3)
    assert found is not None
    assert found.why == "not every action of each micro-batch was recorded once"


def test_replicas_are_one_pipeline_of_the_lowest_ranks() -> None:
    trace = trace_of({0: GPIPE[0], 1: GPIPE[1]})
    other = trace.rows.assign(rank=trace.rows["rank"] + 2)
    both = Trace.of(trace.run, pd.concat([trace.rows, other], ignore_index=True))
    found = pipeline_step(both, 3)
    assert found is not None
    assert sorted(set(found.measured["rank"])) == [0, 1]


def test_a_run_without_a_pipeline_has_none() -> None:
    analysis = factories.straggler()
    assert not has_pipeline(analysis.trace)
    assert pipeline_step(analysis.trace, 5) is None
    assert "pipeline" not in [section.id for section in report_of(analysis).sections]


def test_the_figure_and_the_section() -> None:
    found = pipeline_step(trace_of(GPIPE), 3)
    assert found is not None
    figure = gantt.pipeline(found)
    named = {trace.name: trace for trace in figure.data}
    assert list(named) == [
        "waits for a stage that still computes", "what it needs is on its way, or it does something else",
        "has nothing left to do", "F, forward", "B, backward",
    ]  # fmt: skip
    assert list(named["F, forward"].text[:4]) == ["0", "1", "0", "1"]
    assert list(figure.layout.yaxis.ticktext) == ["stage 0", "stage 1", "ideal 0", "ideal 1"]

    analysis = factories.straggler()
    step = analysis.step_to_show[0]
    assert step is not None
    pipe = trace_of(GPIPE, step).rows
    rows = pd.concat([analysis.rows.astype({"kind": object}), pipe.astype({"kind": object})], ignore_index=True)
    page = html.render(replace(analysis, trace=Trace.of(analysis.run, rows)))
    assert "From the first action to the last it took 105\N{NO-BREAK SPACE}ms." in page
    assert 'id="plot-pipeline"' in page
    assert "40.0 ms (38 %)" in page
