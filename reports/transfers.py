"""Bytes against transfer time of the collectives, as a figure: see plots for what all figures have in common."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import pandas as pd

from dsprof.analyzer import text

from . import graph_objects as go
from . import palette
from .plots import styled
from .tables import NS_PER_MS


def sized_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """Those with bytes and a measured transfer."""
    return table[(table["bytes"].fillna(-1) > 0) & (table["transfer_ns"].fillna(-1) > 0)]


def collectives(table: pd.DataFrame, *, max_points: int = 3000) -> go.Figure:
    """Bytes against transfer time (last arrival to end) of the matched collectives, a colour an operator.

    Of more than `max_points`, the slowest tenth is kept whole and the others are thinned evenly.
    """
    sized = sized_collectives(table)
    notes = []
    if len(sized) < len(table):
        notes.append(f"{len(table) - len(sized):,} without bytes or a measured transfer left out")
    if len(sized) > max_points:
        order = sized["transfer_ns"].sort_values(ascending=False).index
        keep = max_points // 10
        stride = -(-(len(order) - keep) // (max_points - keep))
        thinned = order[keep::stride]
        notes.append(
            f"{keep + len(thinned):,} of {len(sized):,}: the slowest {keep}, and of the others one in {stride}"
        )
        sized = sized.loc[order[:keep].append(thinned)]
    traces = []
    for index, (name, part) in enumerate(sized.groupby("name", observed=True)):
        transfer = part["transfer_ns"].to_numpy(dtype="float64")
        traces.append(
            go.Scatter(
                x=part["bytes"].to_numpy(dtype="float64"), y=np.round(transfer / NS_PER_MS, 4), mode="markers",
                name=escape(text.clean(name)),
                marker={"color": palette.SERIES[index % len(palette.SERIES)], "size": 7, "opacity": 0.55},
                text=[_collective_hover(row) for row in part.itertuples()],
                hovertemplate="%{text}<extra>%{fullData.name}</extra>",
            )
        )  # fmt: skip
    figure = styled(traces, "Collectives: bytes and transfer time", "; ".join(notes), height=360, showlegend=True)
    if len(sized):
        powers = range(int(np.log2(sized["bytes"].min())), int(np.ceil(np.log2(sized["bytes"].max()))) + 1)
        ticks = [2**power for power in powers if power % max(1, len(powers) // 6) == 0]
        figure.update_xaxes(tickvals=ticks, ticktext=[text.size(tick) for tick in ticks])
        wide = sized["transfer_ns"].max() > 10 * sized["transfer_ns"].min()
        figure.update_yaxes(**({"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"}))
    figure.update_xaxes(title="bytes", type="log")
    figure.update_yaxes(title="ms")
    return figure


def _collective_hover(row: Any) -> str:
    what = escape(text.clean(row.purpose if pd.notna(row.purpose) else row.name))
    return (
        f"{what}, group {escape(text.clean(row.group))}, seq {row.seq}, step {row.step}"
        f"<br>{text.size(row.bytes)} in {text.ms(row.transfer_ns / NS_PER_MS)}:"
        f" {row.bytes / row.transfer_ns:.2f} GB/s"
        f"<br>last to arrive: rank {row.late_rank}"
    )
