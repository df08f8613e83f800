"""The figure of one step: what each rank did and when, a few lanes a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

import pandas as pd

from dsprof.analyzer import text
from dsprof.schema import CALL_SITE, PHASES

from . import graph_objects as go
from . import palette, tables
from .plots import styled
from .tables import NS_PER_MS

KINDS: Final = ("step", "phase", "wait", "pause", "comm", "module", "pipe", "mark")
MAX_COMM_LANES: Final = 4
MAX_SPAN_LANES: Final = 4

_PHASE_COLORS: Final = {
    "loader_start": "#5FA98A",
    "data": palette.PARTS["data"].color,
    "between": "#D2D2D2",
    "forward": palette.PARTS["compute"].color,
    "loss": "#8DBDF7",
    "backward": "#1A5DB0",
    "clip": "#1C86AD",
    "optimizer": palette.PARTS["optimizer"].color,
    "evaluation": palette.TIMES["evaluation"].color,
    "checkpoint": palette.TIMES["checkpointing"].color,
    "compile": palette.TIMES["compilation"].color,
}
_PHASE_LABELS: Final = {
    "loader_start": "loader's start",
    "between": "optimizer to forward",
    "evaluation": "forward without gradients",
}
_PHASE_OF_PIPE: Final = {"F": "forward", "B": "backward", "W": "backward"}
"""Actions of a pipeline's schedule."""
_PEERS: Final = ("waiting for peers", palette.PARTS["peer_wait"].color)
_TRANSFER: Final = ("transfer", palette.PARTS["comm_exposed"].color)
_PAUSE: Final = ("pause", palette.PARTS["pause"].color)
_LANE: Final = ("waiting for another lane", palette.PARTS["offload"].color)
_WAIT: Final = ("wait, not told for whom", palette.NEUTRAL)
_SPAN: Final = ("span", "#7D8FA3")
_DARK: Final = frozenset({"data", "backward", "evaluation", "compile", "waiting for peers", "pause"})
"""Colours that want white text."""


@dataclass
class _Bars:
    """The bars of one colour."""

    color: str
    start_ms: list[float] = field(default_factory=list)
    dur_ms: list[float] = field(default_factory=list)
    lane: list[float] = field(default_factory=list)
    height: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)
    pattern: list[str] = field(default_factory=list)


def timeline(
    rows: pd.DataFrame, step: int, *, waits: pd.DataFrame | None = None, collectives: pd.DataFrame | None = None,
    ranks: Sequence[int] = (), max_ranks: int = 8, max_events: int = 4000, of_ranks: int | None = None,
) -> go.Figure:  # fmt: skip
    """One step of `rows` (the trace table): phases, waits, collectives and spans of each rank.

    Waits in `waits` (`Analysis.waits`: rank, start_ns, arrival_ns) and the collectives in `collectives` (group, seq,
    last_ns) are split at the last arrival into waiting for peers and transfer; other waits are not, and those without
    an arrival_ns were for another lane. `ranks` are shown first where there are more than `max_ranks`; of more than
    `max_events` events the longest are shown. What never ended is hatched. `of_ranks`: how many ranks there are, if
    `rows` are of some of them only.
    """
    found = rows[(rows["step"] == step) & rows["kind"].isin(KINDS)]
    everyone = sorted(int(rank) for rank in found["rank"].unique())
    shown = tables.pick_ranks(everyone, ranks, max_ranks)
    events = found[found["rank"].isin(shown)]
    notes = [f"step {step}"]
    if len(shown) < (of_ranks or len(everyone)):
        notes.append(f"{len(shown)} of {of_ranks or len(everyone)} ranks")
    if len(events) > max_events:
        notes.append(f"the {max_events:,} longest of {len(events):,} events")
        longest = events["dur_ns"].astype("float64").fillna(float("inf")).sort_values(ascending=False, kind="stable")
        events = events.loc[longest.index[:max_events]]
    if events.empty:
        return styled([], "One step", "; ".join(notes), height=120)

    ends = (events["start_ns"] + events["dur_ns"].fillna(0)).astype("int64")
    origin, until = int(events["start_ns"].min()), int(ends.max())
    if (events["dur_ns"].isna() & ~events["ended"].fillna(False)).any():
        until += max((until - origin) // 20, 1)
        notes.append("hatched: never ended")
    drawing = _Drawing(origin, until, _last_arrivals(collectives), _wait_arrivals(waits))
    for rank in shown:
        drawing.add_rank(rank, events[events["rank"] == rank].sort_values("start_ns"))
    return drawing.figure("; ".join(notes))


def _last_arrivals(collectives: pd.DataFrame | None) -> Mapping[tuple[str, int], int]:
    if collectives is None:
        return {}
    return {
        (str(group), int(seq)): int(last)
        for group, seq, last in zip(collectives["group"], collectives["seq"], collectives["last_ns"], strict=True)
        if pd.notna(last)
    }


def _wait_arrivals(waits: pd.DataFrame | None) -> Mapping[tuple[int, int], int | None]:
    """(rank, start_ns) of a wait -> when the last rank arrived; None: it was for another lane of its rank."""
    if waits is None:
        return {}
    return {
        (int(rank), int(start)): None if pd.isna(arrival) else int(arrival)
        for rank, start, arrival in zip(waits["rank"], waits["start_ns"], waits["arrival_ns"], strict=True)
    }


class _Drawing:
    """Bars by colour, and the lanes they lie on; y grows downwards, one unit a full lane."""

    def __init__(
        self,
        origin: int,
        until: int,
        arrivals: Mapping[tuple[str, int], int],
        waits: Mapping[tuple[int, int], int | None],
    ) -> None:
        self.origin, self.until, self.arrivals, self.waits = origin, until, arrivals, waits
        self.y = 0.0
        self.bars: dict[str, _Bars] = {}
        self.marks: list[tuple[float, float, str]] = []
        self.ticks: list[tuple[float, str]] = []

    def add_rank(self, rank: int, events: pd.DataFrame) -> None:
        if self.ticks:
            self.y += 0.6
        known = events["name"].isin(PHASES)
        self._lane(f"<b>rank {rank}</b>", events[(events["kind"] == "step") | (events["kind"] == "phase") & known], 1.0)
        for item in events[(events["kind"] == "mark") & (events["name"] != CALL_SITE)].itertuples():
            self.marks.append((self._at(item.start_ns), self.y - 1.0, self._hover(item)))
        self._lane("waits", events[events["kind"].isin(["wait", "pause"])], 0.6)
        self._packed("comm", events[events["kind"] == "comm"], MAX_COMM_LANES)
        spans = events["kind"].isin(["module", "pipe"]) | (events["kind"] == "phase") & ~known
        self._packed("spans", events[spans], MAX_SPAN_LANES)

    def _lane(self, label: str, events: pd.DataFrame, height: float) -> None:
        if events.empty and height < 1:
            return
        self.ticks.append((self.y + height / 2, label))
        for item in events.itertuples():
            self._event(item, self.y + height / 2, height)
        self.y += height

    def _packed(self, label: str, events: pd.DataFrame, limit: int) -> None:
        """Overlapping events on lanes of their own."""
        if events.empty:
            return
        starts = list(events["start_ns"])
        lanes = tables.pack(starts, [self._end(item) for item in events.itertuples()], limit)
        height = 0.5
        used = max(lanes) + 1
        self.ticks.append((self.y + height * used / 2, label))
        for item, lane in zip(events.itertuples(), lanes, strict=True):
            self._event(item, self.y + height * (lane + 0.5), height)
        self.y += height * used

    def _event(self, item: Any, y: float, height: float) -> None:
        start, end = int(item.start_ns), self._end(item)
        if item.kind == "step":
            self._bar("unexplained", palette.PARTS["other"].color, start, end, y, height * 0.35, item)
        elif item.kind == "pause":
            self._bar(*_PAUSE, start, end, y, height, item)
        elif item.kind in ("comm", "wait"):
            arrival = self._arrival(item)
            if arrival is None and item.kind == "wait":
                of_lane = (int(item.rank), start) in self.waits
                self._bar(*(_LANE if of_lane else _WAIT), start, end, y, height, item)
                return
            if arrival is None and _never_ended(item):
                arrival = end
            split = min(max(arrival, start), end) if arrival is not None else start
            if split > start:
                self._bar(*_PEERS, start, split, y, height, item)
            if end > split:
                self._bar(*_TRANSFER, split, end, y, height, item)
        elif (phase := _phase(item)) in _PHASE_COLORS:
            self._bar(phase, _PHASE_COLORS[phase], start, end, y, height, item)
        else:
            self._bar(*_SPAN, start, end, y, height, item)

    def _arrival(self, item: Any) -> int | None:
        """When the last rank arrived at a collective, or at the one waited for; None where that is not known."""
        if item.kind == "wait":
            return self.waits.get((int(item.rank), int(item.start_ns)))
        if pd.isna(item.group) or pd.isna(item.seq):
            return None
        return self.arrivals.get((str(item.group), int(item.seq)))

    def _bar(self, name: str, color: str, start: int, end: int, y: float, height: float, item: Any) -> None:
        bars = self.bars.setdefault(name, _Bars(color))
        wide = (end - start) > 0.07 * (self.until - self.origin)
        bars.start_ms.append(self._at(start))
        bars.dur_ms.append(round((end - start) / NS_PER_MS, 4))
        bars.lane.append(y)
        bars.height.append(height * 0.92)
        bars.text.append(escape(text.clean(item.name, 20)) if wide and item.kind != "step" else "")
        bars.hover.append(self._hover(item, name))
        bars.pattern.append("/" if _never_ended(item) else "")

    def _at(self, ns: int) -> float:
        return round((ns - self.origin) / NS_PER_MS, 4)

    def _end(self, item: Any) -> int:
        if pd.notna(item.dur_ns):
            return int(item.start_ns) + int(item.dur_ns)
        if _never_ended(item):
            return self.until
        return int(item.start_ns) + max((self.until - self.origin) // 300, 1)  # a sliver: nobody measured its end

    def _hover(self, item: Any, part: str = "") -> str:
        """What is known of an event, for the pointer."""
        whole = "never ended" if _never_ended(item) else "not timed"
        if pd.notna(item.dur_ns):
            whole = "mark" if item.kind == "mark" else text.ms(item.dur_ns / NS_PER_MS)
        lines = [f"<b>{_text(item.name)}</b> {whole}, from {self._at(int(item.start_ns)):,.2f} ms"]
        if item.kind == "step":
            lines = [f"<b>step {item.step}</b> {whole}"]
        if part in (_PEERS[0], _TRANSFER[0]):
            lines.append(f"here: {part}")
        facts = []
        if pd.notna(item.bytes):
            facts.append(text.size(item.bytes))
        if pd.notna(item.group):
            facts.append(f"group {_text(item.group)}")
        if pd.notna(item.seq):
            facts.append(f"seq {item.seq}")
        if pd.notna(item.stage):
            facts.append(f"stage {item.stage}")
        if pd.notna(item.microbatch):
            facts.append(f"micro-batch {item.microbatch}")
        for value in (item.purpose, item.module, item.site):
            if pd.notna(value):
                facts.append(_text(value))
        if item.source == "derived":
            facts.append("derived")
        return "<br>".join([*lines, *([", ".join(facts)] if facts else []), f"rank {item.rank}"])

    def figure(self, note: str) -> go.Figure:
        order = ["unexplained", *_PHASE_COLORS, _PAUSE[0], _PEERS[0], _TRANSFER[0], _LANE[0], _WAIT[0], _SPAN[0]]
        traces: list[Any] = [
            go.Bar(
                name=_PHASE_LABELS.get(name, name), orientation="h",
                base=bars.start_ms, x=bars.dur_ms, y=bars.lane, width=bars.height,
                text=bars.text, textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
                textfont={"color": palette.WHITE if name in _DARK else palette.BLACK, "size": 11},
                hovertext=bars.hover, hovertemplate="%{hovertext}<extra></extra>",
                marker={"color": bars.color, "line": {"width": 0}, "pattern": {
                    "shape": bars.pattern, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)", "solidity": 0.25,
                }},
            )
            for name in order
            if (bars := self.bars.get(name)) is not None
        ]  # fmt: skip
        if self.marks:
            x, y, hover = zip(*self.marks, strict=True)
            traces.append(
                go.Scatter(
                    x=x, y=y, mode="markers", name="mark", hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
                    marker={"symbol": "triangle-down", "size": 9, "color": palette.SERIES[5], "line": {"width": 1}},
                    cliponaxis=False,  # on the edge of a bar, whose label it would cover
                )
            )  # fmt: skip
        figure = styled(
            traces,
            "One step",
            note,
            barmode="overlay",
            height=int(130 + 26 * self.y),
            dragmode="zoom",
            showlegend=True,
            uniformtext={"minsize": 9, "mode": "hide"},
        )
        figure.update_xaxes(title="ms from the start of the step", range=[0, self._at(self.until)])
        figure.update_yaxes(
            tickvals=[y for y, _ in self.ticks], ticktext=[label for _, label in self.ticks],
            range=[self.y + 0.1, -0.1], showgrid=False, zeroline=False, fixedrange=True,
        )  # fmt: skip
        return figure


def _phase(item: Any) -> str:
    """The phase an event is drawn as; empty where it is none."""
    name = str(item.name)
    if item.kind == "pipe":
        return _PHASE_OF_PIPE.get(name, "")
    if item.kind != "phase":
        return ""
    return "evaluation" if name == "forward" and pd.notna(item.grad) and not item.grad else name


def _never_ended(item: Any) -> bool:
    """Whether the process ended before the event did; a GPU's collective may have ended without being timed."""
    return bool(pd.isna(item.dur_ns)) and (pd.isna(item.ended) or not item.ended)


def _text(value: object) -> str:
    return escape(text.clean(value))
