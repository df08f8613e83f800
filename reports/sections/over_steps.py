"""Over the steps and ranks: who was slower and when, one step as a timeline, step by step, collectives."""

from __future__ import annotations

from typing import Any, Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.budget.irregular import profiled_steps
from dsprof.trace import concat_rows

from .. import plots, tables, transfers
from ..timeline import timeline
from .section import Block, Figure, Maker

TIMELINE_RANKS: Final = 8


def _needs_steps(analysis: Analysis) -> str:
    return "" if analysis.step_ms is not None else "no complete step was captured"


# --- who was slower -------------------------------------------------------------------------------


def _heatmap_lead(analysis: Analysis) -> str:
    if analysis.delays is not None:
        return (
            "How long the others' devices stood still in collectives for a rank alone: the last to come, from the last "
            "but one on. Not counted in the first traced step is what began before it."
        )
    own = "Each rank's own work (its step without waiting for others) beyond that of the "
    if len(analysis.ranks_captured) > 1:
        return f"{own}middle rank in the same step. A straggler is a row, a pause a single cell."
    return f"{own}rank's median step."


def _heatmap(analysis: Analysis) -> list[Block]:
    label = "heat map of who was slower, by rank and step"
    return [Figure("heatmap", label, lambda: plots.heatmap(analysis.steps, analysis.delays))]


# --- one step -------------------------------------------------------------------------------------


def _needs_rows(analysis: Analysis) -> str:
    return "" if analysis.step_to_show[0] is not None else "no step was begun"


def one_step(analysis: Analysis, step: int, why: str = "", ranks: tuple[int, ...] = ()) -> Any:
    """The timeline of a step, of the ranks that are worth a look where there are many. why: this step.
    ranks: to be shown before all others."""
    captured = sorted(analysis.ranks_captured)
    shown = tables.pick_ranks(captured, [*ranks, *analysis.named_ranks], TIMELINE_RANKS)
    rows = concat_rows([analysis.trace.read(rank) for rank in shown])
    figure = timeline(
        rows, step, waits=analysis.packed_waits.of_ranks(*shown), collectives=analysis.collectives,
        max_ranks=TIMELINE_RANKS, of_ranks=len(captured),
    )  # fmt: skip
    note = figure.layout.meta["note"]
    figure.layout.meta = {
        "note": note.replace(f"step {step}", f"step {step}, {why}", 1) if why else note, "step": step
    }  # fmt: skip
    return figure


def _timeline(analysis: Analysis) -> list[Block]:
    return [chosen_step(analysis, None)]


def chosen_step(analysis: Analysis, step: int | None, ranks: tuple[int, ...] = ()) -> Figure:
    """The timeline of a step; of None the one that is worth a look. ranks: to be shown before all others."""
    number, why = analysis.step_to_show if step is None else (step, "")
    assert number is not None
    return timeline_of(analysis, number, why, ranks)


def timeline_of(analysis: Analysis, step: int, why: str = "", ranks: tuple[int, ...] = ()) -> Figure:
    """As `one_step` has it."""
    return Figure("timeline", "timeline of one step", lambda: one_step(analysis, step, why, ranks))


# --- step by step ---------------------------------------------------------------------------------


def _needs_two_steps(analysis: Analysis) -> str:
    return _needs_steps(analysis) or ("" if analysis.steps["step"].nunique() > 1 else "there is one step only")


def _steps_lead(analysis: Analysis) -> str:
    marked = " Marked: what made a step longer than these." if len(analysis.irregular) else ""
    return (
        "The whole step, and the share of it that each rank worked itself; the distance between the two is waiting. "
        f"Shaded: the ordinary steps that the numbers are taken from.{marked}"
    )


def _steps(analysis: Analysis) -> list[Block]:
    return [Figure("steps", "step time over the steps", lambda: _step_time(analysis))]


def _step_time(analysis: Analysis) -> Any:
    return plots.step_time(
        analysis.steps, analysis.irregular, profiled_steps(analysis.run), highlight=analysis.blamed_rank
    )


# --- collectives ----------------------------------------------------------------------------------


def _collectives(analysis: Analysis) -> list[Block]:
    label = "scatter of bytes and transfer time"
    return [Figure("collectives", label, lambda: transfers.collectives(analysis.collectives))]


def _needs_collectives(analysis: Analysis) -> str:
    if not len(analysis.collectives):
        return "no collective was matched"
    return "" if len(transfers.sized_collectives(analysis.collectives)) else "no transfer was measured"


HEATMAP = Maker("heatmap", "Who was slower, and when", _needs_steps, _heatmap_lead, _heatmap)
TIMELINE = Maker(
    "timeline", "One step", _needs_rows,
    lambda _: "What each rank did, and when. Collectives and the waits for them are split where the last rank arrives. "
    "Drag to zoom, double-click to return.",
    _timeline,
)  # fmt: skip
STEPS = Maker("steps", "Step by step", _needs_two_steps, _steps_lead, _steps)
COLLECTIVES = Maker(
    "collectives", "Collectives", _needs_collectives,
    lambda _: "Bytes moved against the time from the last rank's arrival to the end.", _collectives,
)  # fmt: skip
