"""Figures: pure functions from a table to a plotly Figure, shared by the HTML report and the notebooks.

Every figure carries in `layout.meta` its `note`: which part of the data it shows, when that is not all of it.
The note is also the subtitle. Names from the run are escaped, since plotly reads tags in text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof import gauges
from dsprof.analyzer import text
from dsprof.analyzer.analysis import own_work_of_budget

from . import graph_objects as go
from . import palette, tables, wording

MAX_STRETCHES = 200
"""Of ordinary steps, shaded apart."""

FEW_STEPS = 3
"""Each of which has its own tick."""

LEAST_SEEN: Final = 0.001
"""A part of less of the bar is narrower than a pixel, and so has no place in the legend."""
GRID = "rgba(138,144,153,0.25)"
AXIS: dict[str, Any] = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}


def styled(traces: Sequence[Any], title: str, note: str, **layout: Any) -> go.Figure:
    """A figure in the house's style: no paper of its own, so that it sits on a light page and on a dark one."""
    figure = go.Figure(data=list(traces))
    figure.update_layout(
        template="none",
        title={"text": title, "subtitle": {"text": note}, "x": 0, "xref": "paper", "automargin": True},
        meta={"note": note},
        font={"family": "system-ui, sans-serif", "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"family": "system-ui, sans-serif"}, "align": "left"},
        **layout,
    )
    figure.update_xaxes(**AXIS)
    figure.update_yaxes(**AXIS)
    return figure


# --- where the run and its steps go -------------------------------------------------------------------


def time_bar(time: Mapping[str, float]) -> go.Figure:
    """What the run's wall time went to: one stacked bar. time: kind of schema.TIME_KINDS -> s (`Analysis.time`)."""
    kinds = wording.kinds_of_time(time)
    traces = [
        go.Bar(
            name=kind.look.label, y=["run"], x=[round(kind.seconds, 3)], orientation="h",
            marker={"color": kind.look.color, "line": {"width": 0}},
            text=[text.percent(kind.percent) if kind.percent >= 4 else ""],
            textposition="inside", insidetextanchor="middle", textangle=0,
            textfont={"color": kind.look.ink, "size": 11},
            hovertemplate=f"{kind.look.label}: <b>{wording.duration(kind.seconds)}</b> ({text.percent(kind.percent)})"
            f"<br>{kind.look.meaning}<extra></extra>",
        )
        for kind in kinds
    ]  # fmt: skip
    figure = styled(traces, "Where the run goes", "", barmode="stack", height=120, showlegend=True)
    figure.update_layout(legend={"traceorder": "normal"}, uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_xaxes(ticksuffix=" s", range=[0, sum(time.values())])
    figure.update_yaxes(showticklabels=False, showgrid=False)
    return figure


def budget_bar(
    budget_by_rank: pd.DataFrame, budget: Mapping[str, float] | None = None, *, max_ranks: int = 24
) -> go.Figure:
    """Where each rank's mean ordinary step goes: a stacked bar a rank, and one for the mean.

    budget_by_rank: index rank, a column per part, ms. budget: part -> ms, the mean over ranks; by default that
    of the table. Of more than `max_ranks`, those with the most own work are shown.
    """
    table = budget_by_rank
    mean = dict(budget) if budget is not None else table.mean().to_dict()
    own = own_work_of_budget(table)
    shown = table.loc[sorted(own.sort_values(ascending=False, kind="stable").index[:max_ranks])]
    note = "" if len(shown) == len(table) else f"{len(shown)} of {len(table)} ranks: those with the most own work"
    labels = ["mean", *(f"rank {rank}" for rank in shown.index)]
    total = [sum(mean.values()), *shown.sum(axis=1)]
    traces = []
    hover = "%{{y}}: {0} <b>%{{x:,.2f}} ms</b> (%{{customdata}})<br>{1}<extra></extra>"
    for part in table.columns:
        values = [mean.get(part, 0.0), *shown[part]]
        shares = [100 * value / whole if whole > 0 else 0.0 for value, whole in zip(values, total, strict=True)]
        if max(shares) < 100 * LEAST_SEEN:
            continue
        look = palette.part(part)
        traces.append(
            go.Bar(
                name=look.label, y=labels, x=np.round(values, 3), orientation="h",
                marker={"color": look.color, "line": {"width": 0}},
                text=[text.percent(share) if share >= 6 else "" for share in shares],
                textposition="inside", insidetextanchor="middle", textangle=0,
                textfont={"color": look.ink, "size": 11},
                customdata=[text.percent(share) for share in shares],
                hovertemplate=hover.format(escape(look.label), look.meaning),
            )
        )  # fmt: skip
    figure = styled(
        traces, "Where the step goes", note, barmode="stack", bargap=0.25, height=110 + 26 * len(labels),
        uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip
    figure.update_xaxes(title="ms a step, mean of the ordinary steps", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


# --- devices ----------------------------------------------------------------------------------------

DEVICE_GAUGES = {
    gauges.SM_CLOCK: "SM clock, MHz",
    gauges.POWER: "power, W",
    gauges.TEMPERATURE: "temperature, C",
    gauges.UTILIZATION: "utilization, %",
}
"""What is drawn of what devices tell, in rows."""


def devices(told: pd.DataFrame, *, of_ranks: int | None = None, max_points: int = 1000) -> go.Figure:
    """Clock, power, temperature and utilization of each rank's device over time: a row each, a line a rank.

    told: rank, name, start_ns, value (`tables.device_gauges`). of_ranks: how many there are, if `told` is of some.
    Above `max_points` readings of a rank, the clock keeps the least of its neighbours, the others the most.
    """
    drawn = {name: label for name, label in DEVICE_GAUGES.items() if (told["name"] == name).any()}
    ranks = sorted(int(rank) for rank in told["rank"].unique())
    begin = int(told["start_ns"].min()) if len(told) else 0
    traces, notes = [], []
    for row, name in enumerate(drawn, 1):
        of_gauge = told[told["name"] == name]
        for index, rank in enumerate(ranks):
            mine = of_gauge[of_gauge["rank"] == rank].sort_values("start_ns")
            width = -(-len(mine) // max_points)
            if width > 1:
                window = np.arange(len(mine)) // width
                joined = mine.groupby(window)
                value = joined["value"].min() if name == gauges.SM_CLOCK else joined["value"].max()
                mine = pd.DataFrame({"start_ns": joined["start_ns"].first(), "value": value})
            axis = "" if row == 1 else str(row)
            color = palette.SERIES[index % len(palette.SERIES)]
            line = _line((mine["start_ns"] - begin) / 1e9, mine["value"], f"rank {rank}", color, 1.5)
            line.update(yaxis=f"y{axis}", legendgroup=str(rank), showlegend=row == 1, hovertemplate="%{y:,.4g}")
            traces.append(line)
    if of_ranks is not None and of_ranks > len(ranks):
        notes.append(f"{len(ranks)} of {text.count(of_ranks, 'rank')}")
    figure = styled(traces, "Devices", "; ".join(notes), height=60 + 130 * max(len(drawn), 1), hovermode="x")
    gap = 0.04
    high = (1 - gap * (len(drawn) - 1)) / max(len(drawn), 1)
    for row, label in enumerate(drawn.values()):
        top = 1 - row * (high + gap)
        place = {"domain": [max(top - high, 0), top], "title": label, "rangemode": "tozero", "anchor": "x"}
        figure.update_layout({f"yaxis{row + 1 if row else ''}": {**AXIS, **place}})
    figure.update_xaxes(title="s since the first reading", anchor=f"y{len(drawn) if len(drawn) > 1 else ''}")
    return figure


# --- over the steps ---------------------------------------------------------------------------------


def step_time(
    steps: pd.DataFrame, irregular: pd.DataFrame | None = None, profiled: Collection[int] = (), *,
    highlight: int | None = None, max_points: int = 1000, max_ranks: int = 4, max_marks: int = 300,
) -> go.Figure:  # fmt: skip
    """How long each step took, and how much of it each rank worked itself: a line a rank.

    steps: rank, step, dur_ns, ordinary, and the budget parts in ms; ordinary steps are shaded. irregular: rank, step,
    kind, excess_ms (`Analysis.irregular`); these steps are marked with what made them so, of more than `max_marks` the
    longest. profiled: steps that torch.profiler looked at.
    Above `max_ranks`, the ranks become a band from the least to the most busy, with `highlight` drawn on top; above
    `max_points` steps, neighbours are joined by their maximum.
    """
    whole = tables.by_step(steps, tables.step_ms(steps))
    own = tables.by_step(steps, tables.own_work_ms(steps))
    notes = []
    slowest, _, width = tables.coarsen(whole.max().to_frame().T, 1, max_points)
    if width > 1:
        notes.append(f"each point is the maximum of {width} steps")
    traces: list[Any] = []
    if len(own) <= max_ranks:
        joined, _, _ = tables.coarsen(own, max(len(own), 1), max_points)
        for index, rank in enumerate(joined.index):
            lead = rank == highlight
            color = palette.HIGHLIGHT if lead else palette.SERIES[index % (len(palette.SERIES) - 1)]
            traces.append(_line(joined.columns, joined.loc[rank], f"rank {rank}, own work", color, 2 if lead else 1.3))
    else:
        notes.append(f"the band spans the own work of all {len(own)} ranks")
        low, _, _ = tables.coarsen(own.min().to_frame().T, 1, max_points)
        high, _, _ = tables.coarsen(own.max().to_frame().T, 1, max_points)
        middle, _, _ = tables.coarsen(own.median().to_frame().T, 1, max_points)
        traces.append(_line(low.columns, low.iloc[0], "least busy rank", palette.NEUTRAL, 0))
        traces.append(_line(high.columns, high.iloc[0], "from the least to the most busy rank", palette.NEUTRAL, 0))
        traces[0].update(showlegend=False, hoverinfo="skip", hovertemplate=None)
        traces[1].update(fill="tonexty", fillcolor="rgba(138,144,153,0.3)", hoverinfo="skip", hovertemplate=None)
        traces.append(_line(middle.columns, middle.iloc[0], "median rank, own work", palette.SERIES[0], 1.5))
        if highlight in own.index:
            lead, _, _ = tables.coarsen(own.loc[[highlight]], 1, max_points)
            traces.append(_line(lead.columns, lead.iloc[0], f"rank {highlight}, own work", palette.HIGHLIGHT, 1.5))
    if not whole.empty:
        traces.append(_line(slowest.columns, slowest.iloc[0], "whole step", palette.NEUTRAL, 2.5))
    if irregular is not None and len(irregular):
        marked = tables.irregular_steps(irregular)
        if len(marked) > max_marks:
            notes.append(f"marked: of {len(marked):,} irregular steps the {max_marks} that took longest")
            marked = marked.nlargest(max_marks, "excess_ms").sort_values("step")
        traces += _marks(marked, whole.max())
    numbers = [int(step) for step in steps.loc[steps["ordinary"].astype(bool), "step"].unique()]
    gap = max(1, (max(numbers) - min(numbers)) // MAX_STRETCHES) if numbers else 1
    shaded = tables.stretches(numbers, gap)
    if len(shaded) < len(tables.stretches(numbers)):
        notes.append(f"gaps of fewer than {text.count(gap, 'step')} are shaded, too")
    figure = styled(traces, "Step time", "; ".join(notes), height=320, hovermode="x unified")
    for first, last in shaded:
        figure.add_vrect(
            x0=first - 0.5, x1=last + 0.5, fillcolor=palette.NEUTRAL, opacity=0.1, line_width=0, layer="below"
        )
    mark_profiled(figure, profiled)
    figure.update_xaxes(title="step")
    _few_steps(figure, whole.columns)
    figure.update_yaxes(title="ms", rangemode="tozero")
    return figure


def mark_profiled(figure: go.Figure, steps: Collection[int]) -> None:
    """Shade the steps that torch.profiler looked at (`--deep`), over the steps of a figure, and say so."""
    shaded = tables.stretches(list(steps))
    for first, last in shaded:
        figure.add_vrect(
            x0=first - 0.5, x1=last + 0.5, fillcolor=palette.PROFILED, opacity=0.16, line_width=0, layer="below",
            annotation={"text": "--deep", "font": {"size": 10}}, annotation_position="top left",
        )  # fmt: skip
    if shaded:
        told = " and ".join(f"{first} to {last}" if last > first else str(first) for first, last in shaded[:3])
        notes = [figure.layout.meta["note"], f"shaded violet, steps {told}, which torch.profiler looked at (--deep)"]
        note = "; ".join(filter(None, notes))
        figure.update_layout(meta={"note": note}, title_subtitle_text=note)


def _few_steps(figure: go.Figure, steps: Any) -> None:
    """No ticks between steps; and a line through one step is a point."""
    if len(steps) <= FEW_STEPS:
        figure.update_xaxes(tickmode="array", tickvals=[int(step) for step in steps])
    if len(steps) == 1:
        figure.update_traces(mode="markers", selector={"type": "scatter", "mode": "lines"})


def _line(x: Any, y: Any, name: str, color: str, width: float) -> go.Scatter:
    return go.Scatter(
        x=np.asarray(x), y=np.round(np.asarray(y, dtype="float64"), 3).astype("float32"), name=name, mode="lines",
        line={"color": color, "width": width}, hovertemplate="%{y:,.2f} ms",
    )  # fmt: skip


def _marks(marked: pd.DataFrame, whole: pd.Series) -> list[Any]:
    """A symbol a step, at the height of the whole step. marked: `tables.irregular_steps`; whole: step -> ms."""
    traces = []
    for kind, of_kind in marked[marked["step"].isin(whole.index)].groupby("kind", observed=True):
        look = palette.mark(str(kind))
        traces.append(
            go.Scatter(
                x=of_kind["step"].to_numpy(), y=np.round(whole[of_kind["step"]].to_numpy(dtype="float64"), 3),
                name=escape(text.clean(look.label)), mode="markers",
                marker={"symbol": look.symbol, "color": look.color, "size": 9, "line": {"width": 1}},
                text=["<br>".join(_excess(*part) for part in parts) for parts in of_kind["parts"]],
                hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    return traces


def _excess(kind: str, rank: int, excess_ms: float) -> str:
    label = escape(text.clean(palette.mark(kind).label))
    return f"{label}, most on rank {rank}: {text.ms(excess_ms)} more than an ordinary step"


def heatmap(
    steps: pd.DataFrame, delays: pd.DataFrame | None = None, *, max_columns: int = 500, max_rows: int = 128
) -> go.Figure:
    """Who was slower than the others, and when: a row a rank, a column a step.

    The colour is the rank's own work (the step without waiting for others) beyond that of the middle rank of the
    same step, ms; with one rank, beyond its median step. Where kernels were traced it is `delays`, [rank, step] how
    long the others' devices stood still for the rank alone, ms: its host's work says little of its device. A straggler
    is a row, a pause a cell. A larger table is reduced by joining neighbours by their maximum. Full colour is at least
    5 % of a step, so that noise stays pale, and at most the 99th percentile where single cells would outshine
    everything; it is chosen for the ordinary steps.
    The pointer tells whole numbers.
    """
    table = delays if delays is not None else tables.excess(tables.by_step(steps, tables.own_work_ms(steps)))
    joined, rows, columns = tables.coarsen(table, max_rows, max_columns)
    notes = []
    if rows > 1 or columns > 1:
        notes.append(f"a cell is the maximum of {text.count(rows, 'rank')} x {text.count(columns, 'step')}")
    values = joined.to_numpy(dtype="float64")
    ordinary = steps.loc[steps["ordinary"].astype(bool), "step"]
    usual, _, _ = tables.coarsen(table.loc[:, table.columns.isin(ordinary)], max_rows, max_columns)
    ceiling = _ceiling(usual.to_numpy(dtype="float64"))
    ceiling = max(ceiling, 0.05 * float(tables.step_ms(steps).median()) if len(steps) else 1.0)
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    if top > ceiling:
        notes.append(f"full colour from {text.ms(ceiling)}; the largest is {text.ms(top)}")
    meaning = "more own work than the middle rank" if delays is None else "the others' devices stand still for it alone"
    trace = go.Heatmap(
        x=joined.columns.to_numpy(), y=[f"rank {rank}" if rows == 1 else f"ranks {rank}-" for rank in joined.index],
        z=np.round(values, 2).astype("float32"), zmin=0, zmax=ceiling, hoverongaps=False,
        xgap=0, ygap=1 if len(joined) <= 40 else 0,
        colorscale=[[0, "rgba(181,18,27,0.05)"], [0.5, "rgba(214,90,40,0.62)"], [1, "rgba(181,18,27,1)"]],
        colorbar={"title": {"text": "ms"}, "thickness": 12, "outlinewidth": 0, "len": 1, "lenmode": "fraction"},
        hovertemplate=f"%{{y}}, step %{{x}}<br><b>%{{z:,.1f}} ms</b> {meaning}<extra></extra>",
    )  # fmt: skip
    title = "Own work beyond the middle rank" if delays is None else "Stood still for, by the others' devices"
    height = 154 + min(max(26 * len(joined), 60), 520)
    figure = styled([trace], title, "; ".join(notes), height=height)
    figure.update_layout(margin_t=34)  # the toolbar's place, beside which is the colour bar's title
    figure.update_xaxes(title="step", showgrid=False, zeroline=False)
    _few_steps(figure, joined.columns)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _ceiling(values: npt.NDArray[np.float64]) -> float:
    """The largest, or where that outshines everything the 99th percentile; 0 of nothing."""
    if not np.isfinite(values).any():
        return 0.0
    top, high = float(np.nanmax(values)), float(np.nanpercentile(values, 99))
    return top if top <= 3 * high else high
