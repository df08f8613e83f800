"""The figure of a pipeline's step: what each stage did, measured above ideal."""

from __future__ import annotations

from typing import Any, Final

from dsprof.analyzer import text
from dsprof.analyzer.work.pipeline_step import ARRIVING, FOR_STAGE, NOTHING_LEFT, PipelineStep

from . import graph_objects as go
from . import palette
from .plots import styled

LOOKS: Final = {
    "F": ("F, forward", palette.PARTS["compute"].color, palette.BLACK),
    "B": ("B, backward", "#1A5DB0", palette.WHITE),
    "W": ("W, gradients of weights", "#8DBDF7", palette.BLACK),
}
IDLE: Final = {
    FOR_STAGE: ("waits for a stage that still computes", palette.PARTS["bubble"].color, 0.55),
    ARRIVING: ("what it needs is on its way, or it does something else", palette.PARTS["comm_exposed"].color, 0.55),
    NOTHING_LEFT: ("has nothing left to do", palette.NEUTRAL, 0.3),
}
HEIGHT: Final = 0.8
MOST_RANKS: Final = 32


def pipeline(found: PipelineStep) -> go.Figure:
    """A row a rank, by stage; what it did with the micro-batch's number on it, and why it stood still. Below, the same
    order of actions where every stage takes as long as the mean of them and nothing takes time to arrive."""
    ranks = list(dict.fromkeys(found.measured.sort_values(["stage", "rank"])["rank"]))
    shown = ranks[:MOST_RANKS]
    stages = {rank: sorted(set(of["stage"])) for rank, of in found.measured.groupby("rank")}
    ticks, place = [], {}
    for at, rank in enumerate(shown):
        held = ", ".join(map(str, stages[rank]))
        place["measured", rank] = float(at)
        ticks.append((float(at), f"stage {held}, rank {rank}" if stages[rank] != [rank] else f"stage {held}"))
    if found.ideal is not None:
        for at, rank in enumerate(shown):
            place["ideal", rank] = len(shown) + 0.8 + at
            ticks.append((len(shown) + 0.8 + at, f"ideal {', '.join(map(str, stages[rank]))}"))
    end = max(found.measured_ms, found.ideal_ms or 0.0)
    traces = [_idle(found, cause, place) for cause in IDLE]
    traces += [_actions(found, op, place, end) for op in LOOKS]
    notes = [f"step {found.step}"]
    if len(shown) < len(ranks):
        notes.append(f"{len(shown)} of {len(ranks)} ranks")
    if found.ideal is None:
        notes.append(f"no ideal: {found.why}")
    rows = len(ticks) + (0.8 if found.ideal is not None else 0)
    figure = styled(
        [trace for trace in traces if len(trace.x)], "One step of the pipeline", "; ".join(notes), barmode="overlay",
        height=int(130 + 28 * rows), dragmode="zoom", showlegend=True, uniformtext={"minsize": 8, "mode": "hide"},
    )  # fmt: skip
    figure.update_xaxes(title="ms since the first action", range=[0, end])
    figure.update_yaxes(
        tickvals=[y for y, _ in ticks], ticktext=[label for _, label in ticks], range=[rows - 0.4, -0.6],
        showgrid=False, zeroline=False, fixedrange=True,
    )  # fmt: skip
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def _actions(found: PipelineStep, op: str, place: dict[tuple[str, int], float], end: float) -> Any:
    label, color, ink = LOOKS[op]
    tables = [("measured", found.measured)] + ([("ideal", found.ideal)] if found.ideal is not None else [])
    bars = [
        (kind, row)
        for kind, table in tables
        for row in table[table["action"] == op].itertuples()
        if (kind, row.rank) in place
    ]
    return go.Bar(
        name=label, orientation="h", base=[round(row.start_ms, 3) for _, row in bars],
        x=[round(row.ms, 3) for _, row in bars], y=[place[kind, row.rank] for kind, row in bars], width=HEIGHT,
        text=[str(row.microbatch) if row.ms > 0.008 * end else "" for _, row in bars],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
        textfont={"color": ink, "size": 11},
        marker={"color": color, "line": {"width": 0.5, "color": "rgba(0,0,0,0.35)"}},
        hovertext=[
            f"<b>{row.action}{row.microbatch}</b>, stage {row.stage}: {text.ms(row.ms)}<br>{kind}, from "
            f"{row.start_ms:,.2f} ms"
            for kind, row in bars
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _idle(found: PipelineStep, cause: str, place: dict[tuple[str, int], float]) -> Any:
    label, color, opacity = IDLE[cause]
    chosen = found.idle[(found.idle["cause"] == cause)]
    bars = [row for row in chosen.itertuples() if ("measured", row.rank) in place]
    return go.Bar(
        name=label, orientation="h", base=[round(row.start_ms, 3) for row in bars],
        x=[round(row.ms, 3) for row in bars], y=[place["measured", row.rank] for row in bars], width=0.35 * HEIGHT,
        marker={"color": color, "opacity": opacity, "line": {"width": 0}},
        hovertext=[
            f"{label}{f': stage {row.stage}' if cause == FOR_STAGE and row.stage >= 0 else ''}<br>{text.ms(row.ms)}"
            for row in bars
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip
