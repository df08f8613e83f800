"""Memory over the steps: figures as pure functions of tables, and a line in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.analyzer import text
from dsprof.analyzer.memory.allocated_over_time import AllocationHistory
from dsprof.analyzer.memory.allocator_state import STATE_COLUMNS
from dsprof.analyzer.memory.use_by_step import HELD, MemoryUse, main_place
from dsprof.schema import MEMORY_PARTS

from . import graph_objects as go
from . import palette
from .plots import mark_profiled, styled

UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
FAR: Final = 4.0
"""A capacity so many times above the peak is told instead of drawn."""
MOST_ENDS: Final = 3
"""Steps at which lines end before the last that are told."""
LEAST_SHARE: Final = 0.001
"""A part of less of the peak is left out of a line."""


def main_uses(uses: Sequence[MemoryUse]) -> list[MemoryUse]:
    """Of each rank where its tensors are, by rank."""
    ranks = sorted({use.rank for use in uses})
    return [use for rank in ranks if (use := main_place(uses, rank)) is not None]


def over_steps(
    table: pd.DataFrame, uses: Sequence[MemoryUse], profiled: Collection[int] = (), *, highlight: int | None = None,
    max_ranks: int = 4,
) -> go.Figure:  # fmt: skip
    """What each rank had in use after each step, what its allocator held, and what there is.

    table: `use_by_step.COLUMNS`; uses: of each rank where its tensors are (`main_uses`); profiled: steps that
    torch.profiler looked at. Above `max_ranks`, the ranks
    become a band from the least to the most, with the one that has most, or `highlight`, drawn on top.
    """
    factor, unit = _unit(max((use.reserved for use in uses), default=0))
    held = {use.rank: _series(table, use, HELD[use.on_host][0], factor) for use in uses}
    cached = {use.rank: _series(table, use, "reserved", factor) for use in uses if not use.on_host}
    on_host = all(use.on_host for use in uses)
    what, notes, traces = "resident" if on_host else "allocated", [], []
    if len(uses) <= max_ranks:
        for index, use in enumerate(uses):
            color = palette.HIGHLIGHT if use.rank == highlight else palette.SERIES[index % (len(palette.SERIES) - 1)]
            traces.append(_line(held[use.rank], f"rank {use.rank}, {what}", color, unit))
            if use.rank in cached:
                traces.append(_line(cached[use.rank], f"rank {use.rank}, reserved", color, unit, dash="dot"))
    else:
        notes.append(f"the band spans all {len(uses)} ranks")
        wide = pd.DataFrame(held).sort_index().ffill()
        traces.append(_line(wide.min(axis=1), "least", palette.NEUTRAL, unit, width=0))
        traces.append(_line(wide.max(axis=1), f"{what}, from the least to the most", palette.NEUTRAL, unit, width=0))
        traces[0].update(showlegend=False, hoverinfo="skip", hovertemplate=None)
        traces[1].update(fill="tonexty", fillcolor="rgba(138,144,153,0.3)", hoverinfo="skip", hovertemplate=None)
        rank = highlight if highlight in held else max(uses, key=lambda use: use.peak).rank
        traces.append(_line(held[rank], f"rank {rank}, {what}", palette.HIGHLIGHT, unit))
        if rank in cached:
            traces.append(_line(cached[rank], f"rank {rank}, reserved", palette.HIGHLIGHT, unit, dash="dot"))
    title = "Resident memory of the processes" if on_host else "Memory of the devices"
    limits = sorted({use.capacity for use in uses if use.capacity})
    top = max((use.reserved for use in uses), default=0)
    far = [limit for limit in limits if limit > FAR * max(top, 1)]
    if far:
        shared = ", which the ranks of a host share" if on_host and len(uses) > 1 else ""
        notes.append(f"what was used, of {' and '.join(map(text.size, far))}{shared}")
    until = {rank: int(values.index.max()) for rank, values in held.items() if len(values)}
    by_end: dict[int, list[int]] = {}
    for rank, step in until.items():
        by_end.setdefault(step, []).append(rank)
    for step in sorted(by_end)[:-1][:MOST_ENDS]:
        notes.append(f"{text.ranks(by_end[step])} until step {step}, the last of which memory was told")
    figure = styled(traces, title, "; ".join(notes), height=320, hovermode="x unified")
    mark_profiled(figure, profiled)
    for limit in limits:
        if limit not in far:
            figure.add_hline(
                y=limit / factor, line={"color": palette.NEUTRAL, "width": 1.5, "dash": "dash"},
                annotation={"text": f"capacity {text.size(limit)}", "xanchor": "right", "yanchor": "bottom"},
            )  # fmt: skip
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=unit, rangemode="tozero")
    return figure


def by_part(uses: Sequence[MemoryUse], *, max_ranks: int = 24) -> go.Figure:
    """What the most that each rank had was for: a stacked bar a rank. Of more than `max_ranks`, those that had most."""
    shown = sorted(sorted(uses, key=lambda use: -use.peak)[:max_ranks], key=lambda use: use.rank)
    notes = [] if len(shown) == len(uses) else [f"{len(shown)} of {len(uses)} ranks: those that had most"]
    factor, unit = _unit(max((use.reserved for use in shown), default=0))
    labels = [f"rank {use.rank}" for use in shown]
    sizes = [parts_of(use) for use in shown]
    traces = []
    for part, look in palette.MEMORY.items():
        values = [of.get(part, 0) for of in sizes]
        if not any(values):
            continue
        shares = [value / max(use.reserved, 1) for value, use in zip(values, shown, strict=True)]
        traces.append(
            go.Bar(
                name=look.label, y=labels, x=[round(value / factor, 4) for value in values], orientation="h",
                marker={"color": look.color, "line": {"width": 0}},
                text=[text.size(value) if share >= 0.1 else "" for value, share in zip(values, shares, strict=True)],
                textposition="inside", insidetextanchor="middle", textangle=0,
                textfont={"color": look.ink, "size": 11}, customdata=[text.size(value) for value in values],
                hovertemplate=f"%{{y}}: {look.label} <b>%{{customdata}}</b><br>{look.meaning}<extra></extra>",
            )
        )  # fmt: skip
    figure = styled(
        traces, "What it was for", "; ".join(notes), barmode="stack", bargap=0.25, height=110 + 30 * len(labels),
        uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip
    figure.update_xaxes(title=f"{unit} at the peak", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def segments(table: pd.DataFrame, *, most: int = 400) -> go.Figure:
    """What a device's segments are: of each a bar as wide as it is large, its height divided by what its bytes are, so
    that areas are bytes. table: `analyzer.memory.segment_uses`. Neighbours that are wholly in use, or wholly free, are
    one bar; of more than `most` bars the last are one."""
    alike = table["releasable"].eq(table["reserved"]) * 2 + table["allocated"].eq(table["reserved"])
    bar = (alike.eq(0) | alike.ne(alike.shift())).cumsum().clip(upper=most)
    sizes = table[["reserved", *STATE_COLUMNS]].groupby(bar).sum()
    labels, notes = [], []
    for number, of in table.groupby(bar):
        first, last, total = of.index[0] + 1, of.index[-1] + 1, text.size(int(of["reserved"].sum()))
        if len(of) == 1:
            pool, stream = escape(text.clean(of["pool"].iloc[0])), int(of["stream"].iloc[0])
            labels.append(f"segment {first:,} of {len(table):,}, {total}<br>{pool} pool, stream {stream}")
        else:
            labels.append(f"segments {first:,} to {last:,} of {len(table):,}, {total}")
        if number == most and alike[of.index].nunique() > 1:
            notes.append(f"the {len(of):,} smallest of {len(table):,} segments are one bar")
    shown = sizes
    whole = shown["reserved"].to_numpy("int64")
    factor, unit = _unit(int(whole.sum()))
    width = whole / factor
    traces = []
    for state in STATE_COLUMNS:
        size, look = shown[state].to_numpy("int64"), palette.SEGMENTS[state]
        if not size.any():
            continue
        traces.append(
            go.Bar(
                name=f"{look.label} {text.size(int(size.sum()))}", x=(width.cumsum() - width).round(6),
                width=width.round(6), offset=0, y=(100 * size / whole).round(2),
                marker={"color": look.color, "line": {"width": 0.5, "color": "rgba(138,144,153,0.6)"}},
                customdata=[[label, text.size(int(of))] for label, of in zip(labels, size, strict=True)],
                hovertemplate=f"%{{customdata[0]}}<br>{look.label} <b>%{{customdata[1]}}</b>, %{{y}} %<extra></extra>",
            )
        )  # fmt: skip
    figure = styled(traces, "Segments, the largest first", "; ".join(notes), barmode="stack", height=300)
    figure.update_xaxes(title=f"{unit} reserved, segment after segment", range=[0, float(width.sum())], showgrid=False)
    figure.update_yaxes(title="% of the segment", range=[0, 100])
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def over_history(history: AllocationHistory, *, most: int = 4000) -> go.Figure:
    """Bytes in use after each allocation and free of the history; of more than `most` events, the largest of
    neighbours is drawn."""
    factor, unit = _unit(int(history.in_use.max(initial=1)))
    width = -(-len(history.in_use) // most)
    firsts = np.arange(0, len(history.in_use), width)
    largest = np.maximum.reduceat(history.in_use, firsts)
    at = history.seconds[firsts]
    line = go.Scatter(
        x=at.round(6), y=(largest / factor).round(4), name="in use", mode="lines", fill="tozeroy",
        line={"color": palette.SEGMENTS["allocated"].color, "width": 1.2, "shape": "hv"},
        hovertemplate=f"%{{y:,.2f}} {unit}, %{{x:,.3f}} s<extra></extra>",
    )  # fmt: skip
    top = go.Scatter(
        x=[round(float(history.seconds[history.peak]), 6)], y=[round(history.in_use[history.peak] / factor, 4)],
        name="peak", mode="markers", marker={"color": palette.HIGHLIGHT, "size": 9, "symbol": "diamond"},
        hovertemplate=f"peak: %{{y:,.2f}} {unit}<extra></extra>",
    )  # fmt: skip
    note = f"each point is the largest of {width} events" if width > 1 else ""
    figure = styled([line, top], "In use over the recorded history", note, height=260)
    figure.update_xaxes(title="s since the history began")
    figure.update_yaxes(title=unit, rangemode="tozero")
    return figure


def parts_of(use: MemoryUse) -> dict[str, int]:
    """What the most that a rank had was for: schema.MEMORY_PARTS, `rest` of what was in use, and what was `cached`."""
    found = {part: use.parts[part] for part in MEMORY_PARTS if use.parts.get(part)}
    over = sum(found.values()) - use.peak
    if over > 0 and "activations" in found:  # those of another moment than the peak's
        found["activations"] = max(found["activations"] - over, 0)
    return {**found, "rest": max(use.peak - sum(found.values()), 0), "cached": max(use.reserved - use.peak, 0)}


def line(uses: Sequence[MemoryUse]) -> str:
    """`412 MiB allocated at the peak on rank 0 (5.2 % of 8.0 GiB): parameters 100 MiB, ...`; empty without any."""
    mine = main_uses(uses)
    if not mine:
        return ""
    most = max(mine, key=lambda use: use.peak)
    what = "resident" if most.on_host else "allocated"
    words = f"{text.size(most.peak)} {what} at the peak"
    words += f" on rank {most.rank}, which has most" if len(mine) > 1 else ""
    if most.capacity:
        together = most.on_host and len(mine) > 1
        all_of_it = "; the ranks of a host together " if together else ", "
        words += f"{all_of_it}{text.percent(100 * (most.share or 0.0))} of {text.size(most.capacity)}"
    named = [
        f"{palette.MEMORY[part].label} {text.size(size)}"
        for part, size in parts_of(most).items()
        if part != "rest" and size >= LEAST_SHARE * most.reserved
    ]
    return words + (f" ({', '.join(named)})" if named else "")


def _series(table: pd.DataFrame, use: MemoryUse, name: str, factor: int) -> pd.Series:
    """Step -> number."""
    mine = table[(table["rank"] == use.rank) & (table["place"] == use.place)]
    return (mine.set_index("step")[name] / factor).dropna()


def _line(values: pd.Series, name: str, color: str, unit: str, *, dash: str = "solid", width: float = 1.8) -> Any:
    return go.Scatter(
        x=values.index.to_numpy(), y=values.round(4).to_numpy(), name=name, mode="lines",
        line={"color": color, "width": width, "dash": dash}, hovertemplate=f"%{{y:,.2f}} {unit}",
    )  # fmt: skip


def _unit(largest: int) -> tuple[int, str]:
    return next((one for one in UNITS if largest >= one[0]), UNITS[-1])
