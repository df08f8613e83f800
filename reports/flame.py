"""The flame graph of a difference: in which lines a rank's step goes, and in which of them it differs from others."""

from __future__ import annotations

from html import escape
from typing import Final

from dsprof.analyzer.text import clean, count, ms, percent
from dsprof.analyzer.text import ranks as ranks_in_words
from dsprof.analyzer.work.stack_difference import Node, StackDifference

from . import graph_objects as go
from . import palette
from .plots import styled

LOOKS: Final = {
    "most": ("takes longer here: most of the difference", "#B5121B", palette.WHITE),
    "more": ("takes longer here", "#E0914A", palette.BLACK),
    "alike": ("as on the others, or not certain", "#ADADAD", palette.BLACK),
    "less": ("takes less here", "#45C8F5", palette.BLACK),
}
"""How a line is shown, by how it differs; in the order of the legend."""
ALONE: Final = ("time in the line", "#2F86EE", palette.BLACK)
"""Where no other rank was sampled."""
MOST_OF: Final = 0.5
"""Of what the ranks take longer in all."""
MOST_ROWS: Final = 24
ROW: Final = 24
"""Pixels."""


def look_of(node: Node, found: StackDifference) -> str:
    """Which of LOOKS a line has."""
    if not node.differs:
        return "alike"
    if node.more_ms < 0:
        return "less"
    whole = max((one.more_ms for one in found.nodes), default=0.0)
    return "most" if node.more_ms >= MOST_OF * whole else "more"


def whom(found: StackDifference) -> str:
    """`rank 1 beside ranks 0, 2`."""
    beside = f" beside {ranks_in_words(found.others)}" if found.others else ""
    return f"{ranks_in_words(found.ranks)}{beside}"


def short(frame: str) -> str:
    """A line without the folders above its file; a function of a library as it is named."""
    return clean(frame.rpartition("/")[2] if frame.rpartition(":")[2].isdigit() else frame)


def difference(found: StackDifference) -> go.Figure:
    """A row for each depth, the outermost line above; as wide as it is long on the ranks that are looked at, in the
    colour of its difference from the others."""
    whole = found.whole_ms
    depth = min(max(len(node.path) for node in found.nodes), MOST_ROWS)
    shown = [node for node in found.nodes if len(node.path) <= depth]
    looks = LOOKS if found.others else {"alone": ALONE}
    traces = []
    for name, (label, color, ink) in looks.items():
        nodes = [node for node in shown if not found.others or look_of(node, found) == name]
        if nodes:
            traces.append(_bars(nodes, label, color, ink, found))
    note = f"{whom(found)}; {count(found.samples, 'sample')}"
    if len(shown) < len(found.nodes):
        note += f"; the outermost {depth} lines"
    figure = styled(
        traces, "Where it differs" if found.others else "Where the time goes", note, barmode="overlay",
        height=110 + ROW * depth, dragmode="zoom", showlegend=True, uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip
    figure.update_xaxes(title=f"ms a step of {ranks_in_words(found.ranks)}", range=[0, whole])
    figure.update_yaxes(
        range=[depth - 0.5, -0.5], showticklabels=False, showgrid=False, zeroline=False, fixedrange=True
    )
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def _bars(nodes: list[Node], label: str, color: str, ink: str, found: StackDifference) -> go.Bar:
    whole = found.whole_ms
    return go.Bar(
        name=label, orientation="h", base=[round(node.start_ms, 3) for node in nodes],
        x=[round(node.ms, 3) for node in nodes], y=[len(node.path) - 1 for node in nodes], width=0.94,
        text=[escape(short(node.path[-1])) if node.ms > 0.03 * whole else "" for node in nodes],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
        textfont={"color": ink, "size": 11},
        marker={"color": color, "line": {"width": 0.5, "color": "rgba(0,0,0,0.45)"}},
        hovertext=[_told(node, found) for node in nodes],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _told(node: Node, found: StackDifference) -> str:
    share = percent(100 * node.ms / found.whole_ms)
    lines = [f"<b>{escape(clean(node.path[-1]))}</b>", f"{ms(node.ms)} a step ({share})"]
    if found.others:
        how = "more" if node.more_ms >= 0 else "less"
        sure = "" if node.differs else ", which may be chance"
        lines.append(f"{ms(node.others_ms)} on {ranks_in_words(found.others)}: {ms(abs(node.more_ms))} {how}{sure}")
    return "<br>".join(lines)
