"""One step of a pipeline, measured above ideal, and what its stages stood still for."""

from __future__ import annotations

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.text import ms, percent
from dsprof.analyzer.work.pipeline_step import (
    ARRIVING,
    FOR_STAGE,
    NOTHING_LEFT,
    has_pipeline,
    pipeline_step,
)  # fmt: skip

from .. import gantt
from .section import Block, Column, Figure, Maker, Row, Words, table


def _needs(analysis: Analysis) -> str:
    if not has_pipeline(analysis.trace):
        return "no action of a pipeline's schedule was recorded"
    return "" if analysis.step_to_show[0] is not None else "no step was begun"


def _lead(_: Analysis) -> str:
    return (
        "What each stage did in a step: forward (F), backward (B) and, where the schedule splits it, the gradients of "
        "weights (W), with the number of the micro-batch."
    )


def _blocks(analysis: Analysis) -> list[Block]:
    step = analysis.step_to_show[0]
    found = None if step is None else pipeline_step(analysis.trace, step)
    if found is None:
        return []
    whole = found.measured_ms
    idle = found.idle.pivot_table(index="rank", columns="cause", values="ms", aggfunc="sum", fill_value=0.0)
    rows = []
    for rank, of_rank in sorted(found.measured.groupby("rank"), key=lambda item: int(item[1]["stage"].min())):
        spent = [float(of_rank["ms"].sum())]
        spent += [float(idle[cause].get(rank, 0.0)) if cause in idle else 0.0 for cause in
                  (FOR_STAGE, ARRIVING, NOTHING_LEFT)]  # fmt: skip
        cells = [f"{ms(value)} ({percent(100 * value / whole)})" for value in spent]
        rows.append(Row((", ".join(map(str, sorted(set(of_rank["stage"])))), str(rank), *cells)))
    columns = (
        Column("stage"), Column("rank"), Column("works", number=True), Column("waits for a stage", number=True),
        Column("until it arrives, or else busy", number=True), Column("has nothing left", number=True),
    )  # fmt: skip
    figure = Figure("pipeline", "what each stage of the pipeline did in one step", lambda: gantt.pipeline(found))
    words = f"From the first action to the last it took {ms(found.measured_ms)}."
    if found.ideal_ms is not None:
        words += (
            f" In the same order it would take {ms(found.ideal_ms)} if every stage took as long as the mean of them "
            "and nothing took time to arrive."
        )
    return [Words(words), figure, table(columns, rows)]


PIPELINE = Maker("pipeline", "The pipeline", _needs, _lead, _blocks)
