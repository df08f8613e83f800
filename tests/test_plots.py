"""The figures: what they draw from a table, and that each limit is told."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import factories
import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.analysis import typical_step
from dsprof.reports import palette, plots, tables, transfers
from dsprof.reports.timeline import timeline
from dsprof.schema import BUDGET_PARTS, TIME_KINDS

MS = 1_000_000


def note_of(figure: Any) -> str:
    note = figure.layout.meta["note"]
    assert figure.layout.title.subtitle.text == note
    return str(note)


def trace_of(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


# --- colours ----------------------------------------------------------------------------------------

SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
"""Machado, Oliveira and Fernandes (2009), full severity, on linear RGB."""


def lab(color: str, sight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    srgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(sight @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_budget_part_has_a_look() -> None:
    assert tuple(palette.PARTS) == BUDGET_PARTS
    assert tuple(palette.TIMES) == TIME_KINDS


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("looks", [palette.PARTS, palette.TIMES], ids=["parts", "times"])
def test_parts_stay_apart_for_everyone(sight: str, looks: dict[str, palette.Part]) -> None:
    seen = {name: lab(part.color, SIGHT[sight]) for name, part in looks.items()}
    closest = min((float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in itertools.combinations(seen, 2))
    assert closest[0] >= 19.5, closest


# --- the budget -------------------------------------------------------------------------------------


def test_budget_bar() -> None:
    analysis = factories.straggler()
    figure = plots.budget_bar(analysis.budget_by_rank, analysis.budget)
    assert [trace.name for trace in figure.data] == [
        "compute", "exposed comm", "peer wait", "data", "optimizer", "other",
    ]  # fmt: skip
    wait = trace_of(figure, "peer wait")
    assert wait.y == ("mean", "rank 0", "rank 1")
    assert list(wait.x) == [19.0, 38.0, 0.0]
    assert wait.text == ("8.9 %", "18 %", "")
    assert wait.marker.color == palette.PARTS["peer_wait"].color
    assert note_of(figure) == ""


def test_budget_bar_of_many_ranks_keeps_the_busiest() -> None:
    figure = plots.budget_bar(factories.wide(ranks=64, steps=8).budget_by_rank, max_ranks=3)
    assert len(figure.data[0].y) == 4
    assert "rank 5" in figure.data[0].y
    assert note_of(figure) == "3 of 64 ranks: those with the most own work"


def test_time_bar() -> None:
    figure = plots.time_bar(factories.evaluates().time)
    shown = [(trace.name, trace.x[0], trace.text[0]) for trace in figure.data]
    assert shown == [
        ("training", 12.645, "68 %"), ("evaluation", 1.26, "6.8 %"), ("checkpointing", 0.2, ""),
        ("start-up", 4.02, "22 %"), ("rest", 0.41, ""),
    ]  # fmt: skip
    assert figure.data[0].hovertemplate.startswith("training: <b>12.6 s</b> (68 %)<br>")
    assert figure.layout.xaxis.range == (0, pytest.approx(18.5354))


# --- over the steps ---------------------------------------------------------------------------------


def table(own: dict[int, list[float]], waits: dict[int, list[float]]) -> pd.DataFrame:
    """A steps table in which a step is own work and waiting for peers, ms."""
    rows = [
        {"rank": rank, "step": step, "dur_ns": round((work + waits[rank][step]) * MS), "ordinary": True,
         "start_ns": 0, **dict.fromkeys(BUDGET_PARTS, 0.0), "compute": work, "peer_wait": waits[rank][step]}
        for rank, works in own.items()
        for step, work in enumerate(works)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_heatmap_shows_work_beyond_the_middle_rank() -> None:
    steps = table({0: [10, 10], 1: [10, 14], 2: [12, 10]}, {0: [2, 4], 1: [2, 0], 2: [0, 4]})
    cells = plots.heatmap(steps).data[0]
    assert cells.y == ("rank 0", "rank 1", "rank 2")
    assert np.asarray(cells.z).tolist() == [[0, 0], [0, 4], [2, 0]]


def test_heatmap_of_two_ranks_shows_the_whole_difference() -> None:
    steps = table({0: [10], 1: [25]}, {0: [15], 1: [0]})
    assert np.asarray(plots.heatmap(steps).data[0].z).tolist() == [[0], [15]]


def test_heatmap_of_one_rank_shows_work_beyond_its_median_step() -> None:
    steps = table({0: [10, 11, 10, 30]}, {0: [0, 0, 0, 0]})
    assert np.asarray(plots.heatmap(steps).data[0].z).tolist() == [[0, 0.5, 0, 19.5]]


def test_heatmap_of_noise_stays_pale() -> None:
    cells = plots.heatmap(factories.healthy().steps).data[0]
    assert float(np.max(cells.z)) == pytest.approx(0.6)
    assert cells.zmax == pytest.approx(0.05 * 174.6)


def test_full_colour_that_is_the_largest_needs_no_note() -> None:
    steps = table({0: [10.1, 10.1], 1: [10.1, 14.3], 2: [12.2, 10.1]}, {0: [2, 4], 1: [2, 0], 2: [0, 4]})
    assert note_of(plots.heatmap(steps)) == ""


def test_one_bright_cell_does_not_blind_the_others() -> None:
    figure = plots.heatmap(factories.wide(ranks=8, steps=100).steps)
    assert float(np.max(figure.data[0].z)) > 150
    assert figure.data[0].zmax < 25
    assert note_of(figure).startswith("full colour from 21.")


def test_large_heatmap_is_joined_by_maxima() -> None:
    ranks, steps = 64, 10_000
    rank, step = np.divmod(np.arange(ranks * steps), steps)
    own = np.full(ranks * steps, 100.0)
    own[17 * steps + 4321] = 180.0
    big = pd.DataFrame(
        {"rank": rank, "step": step, "dur_ns": own * MS, "ordinary": True, **dict.fromkeys(BUDGET_PARTS, 0.0)}
    )
    figure = plots.heatmap(big, max_columns=500, max_rows=32)
    cells = np.asarray(figure.data[0].z)
    assert cells.shape == (32, 500)
    assert cells[8, 216] == 80
    assert cells.sum() == 80
    assert note_of(figure).startswith("a cell is the maximum of 2 ranks x 20 steps")
    assert len(figure.to_json()) < 300_000


def test_irregular_steps_do_not_blind_the_ordinary_ones() -> None:
    """A straggler of 20 ms shows beside evaluations of 420."""
    job = replace(factories.EVALUATES, slow={1: 20.0})
    figure = plots.heatmap(factories.build(job).steps)
    assert figure.data[0].zmax == pytest.approx(20.4)
    assert note_of(figure) == "full colour from 20.4 ms; the largest is 919 ms"


def test_step_time_lines() -> None:
    analysis = factories.straggler()
    figure = plots.step_time(analysis.steps, highlight=1)
    assert [trace.name for trace in figure.data] == ["rank 0, own work", "rank 1, own work", "whole step"]
    assert np.asarray(trace_of(figure, "rank 1, own work").y)[0] == pytest.approx(200.4)
    assert np.asarray(trace_of(figure, "whole step").y)[0] == pytest.approx(212.4)
    assert trace_of(figure, "rank 1, own work").line.color == palette.HIGHLIGHT
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes] == [(4.5, 39.5)]


def test_irregular_steps_are_marked_and_not_shaded() -> None:
    analysis = factories.evaluates()
    figure = plots.step_time(analysis.steps, analysis.irregular)
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes] == [
        (6.5, 8.5), (9.5, 13.5), (14.5, 18.5), (19.5, 28.5), (29.5, 32.5), (33.5, 38.5), (39.5, 43.5), (44.5, 48.5),
        (49.5, 58.5),
    ]  # fmt: skip
    evaluation, stop = trace_of(figure, "evaluation"), trace_of(figure, "stop")
    assert list(evaluation.x) == [9, 19, 29, 39, 49, 59]
    assert evaluation.y[0] == pytest.approx(594.4)
    assert evaluation.text[0] == "evaluation, most on rank 0: 420 ms more than an ordinary step"
    assert evaluation.marker.symbol == "diamond"
    assert list(stop.text) == ["stop, most on rank 1: 900 ms more than an ordinary step"]
    assert list(trace_of(figure, "checkpointing").x) == [14, 44]
    assert note_of(figure) == ""


def test_a_step_that_was_longer_for_two_reasons_has_one_mark() -> None:
    analysis = factories.evaluates()
    both = analysis.irregular[analysis.irregular["step"] == 33]
    both = pd.concat([both, both.assign(rank=0, kind="checkpointing", excess_ms=9.5)])
    figure = plots.step_time(analysis.steps, both)
    assert [(trace.name, list(trace.x)) for trace in figure.data[3:]] == [("stop", [33])]
    assert figure.data[3].text[0] == (
        "stop, most on rank 1: 900 ms more than an ordinary step<br>"
        "checkpointing, most on rank 0: 9.50 ms more than an ordinary step"
    )


def test_of_many_irregular_steps_the_longest_are_marked() -> None:
    analysis = factories.evaluates()
    figure = plots.step_time(analysis.steps, analysis.irregular, max_marks=2)
    assert [(trace.name, list(trace.x)) for trace in figure.data[3:]] == [("evaluation", [9]), ("stop", [33])]
    assert note_of(figure) == "marked: of 9 irregular steps the 2 that took longest"


def test_a_kind_that_is_not_known_is_marked_under_its_own_name() -> None:
    analysis = factories.evaluates()
    odd = analysis.irregular.assign(kind="<b>new_kind</b>")
    figure = plots.step_time(analysis.steps, odd)
    assert trace_of(figure, "&lt;b&gt;new kind&lt;/b&gt;").marker.symbol == "star"


def test_narrow_gaps_between_ordinary_steps_of_a_long_run_are_shaded_too() -> None:
    steps = table({0: [10] * 1000}, {0: [0] * 1000})
    steps["ordinary"] = (steps["step"] % 4 > 0) & ~steps["step"].between(500, 520)
    figure = plots.step_time(steps)
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes] == [(0.5, 499.5), (520.5, 999.5)]
    assert note_of(figure) == "gaps of fewer than 4 steps are shaded, too"


def test_step_time_of_many_ranks_and_steps() -> None:
    figure = plots.step_time(factories.wide(ranks=8, steps=200).steps, highlight=5, max_points=50)
    assert [trace.name for trace in figure.data][2:] == ["median rank, own work", "rank 5, own work", "whole step"]
    whole = np.asarray(trace_of(figure, "whole step").y)
    assert len(whole) == 50
    assert np.flatnonzero(whole > 300).tolist() == [17 // 4, 67 // 4, 117 // 4, 167 // 4]
    assert note_of(figure) == "each point is the maximum of 4 steps; the band spans the own work of all 8 ranks"


# --- collectives and the timeline ---------------------------------------------------------------------


def test_collectives() -> None:
    figure = transfers.collectives(factories.straggler().collectives)
    assert [trace.name for trace in figure.data] == ["all_reduce"]
    assert figure.data[0].text[0] == (
        "gradient, group 0, seq 0, step 0<br>25.0 MiB in 12.0 ms: 2.18 GB/s<br>last to arrive: rank 1"
    )


def test_collectives_are_thinned_but_the_slowest_stay() -> None:
    many = factories.build(factories.Job(steps=100)).collectives.copy()
    many.loc[7, "transfer_ns"] = 900 * MS
    many.loc[8, "bytes"] = -1
    figure = transfers.collectives(many, max_points=50)
    assert len(figure.data[0].x) <= 50
    assert max(figure.data[0].y) == 900.0
    assert note_of(figure) == (
        "1 without bytes or a measured transfer left out; 47 of 299: the slowest 5, and of the others one in 7"
    )


def test_timeline_splits_at_the_last_arrival() -> None:
    analysis = factories.straggler()
    figure = timeline(analysis.rows, 10, waits=analysis.waits, collectives=analysis.collectives)
    assert figure.layout.yaxis.ticktext == ("<b>rank 0</b>", "waits", "comm", "<b>rank 1</b>", "waits", "comm")
    peers, transfer = trace_of(figure, "waiting for peers"), trace_of(figure, "transfer")
    waits = figure.layout.yaxis.tickvals[1]
    assert [(base, dur) for base, dur, y in zip(peers.base, peers.x, peers.y, strict=True) if y == waits] == [
        (144, 38.4)
    ]
    assert [(base, dur) for base, dur, y in zip(transfer.base, transfer.x, transfer.y, strict=True) if y == waits] == [
        (182.4, 12)
    ]
    assert "all_reduce" in peers.hovertext[0]
    assert "25.0 MiB, group 0, seq 30, gradient" in "".join(peers.hovertext)
    assert note_of(figure) == "step 10"


def test_timeline_binds_no_wait_itself() -> None:
    analysis = factories.straggler()
    figure = timeline(analysis.rows, 10, collectives=analysis.collectives)
    assert [trace_of(figure, "wait, not told for whom").x[rank] for rank in (0, 1)] == [50.4, 12]


def test_timeline_tells_waits_for_another_lane() -> None:
    analysis = factories.straggler()
    waits = analysis.waits.assign(arrival_ns=analysis.waits["arrival_ns"].astype("Int64"))
    waits.loc[waits["rank"] == 1, "arrival_ns"] = pd.NA
    figure = timeline(analysis.rows, 10, waits=waits, collectives=analysis.collectives)
    other = trace_of(figure, "waiting for another lane")
    assert (list(other.x), other.marker.color) == ([12], palette.PARTS["offload"].color)


def test_timeline_tells_forwards_without_gradients_and_checkpoints() -> None:
    analysis = factories.evaluates()
    figure = timeline(analysis.rows, 9, waits=analysis.waits, collectives=analysis.collectives)
    evaluation = trace_of(figure, "forward without gradients")
    assert (list(evaluation.x), list(evaluation.base)) == ([420], [0])
    assert evaluation.marker.color == palette.TIMES["evaluation"].color
    assert len(trace_of(figure, "forward").x) == 2
    assert list(trace_of(timeline(analysis.rows, 14), "checkpoint").x) == [95, 105]


def test_timeline_tells_what_lies_between_optimizer_and_forward() -> None:
    rows = factories.healthy().rows.iloc[1:3].assign(name=["between", "loader_start"])
    figure = timeline(rows, 0)
    assert [trace.name for trace in figure.data] == ["loader's start", "optimizer to forward"]
    assert figure.layout.yaxis.ticktext == ("<b>rank 0</b>",)


def test_timeline_of_a_pipeline_tells_stage_and_micro_batch() -> None:
    rows = factories.healthy().rows.iloc[:2].assign(kind="pipe", name=["F", "B"])
    rows = rows.assign(stage=pd.array([2, 2], "Int16"), microbatch=pd.array([5, 4], "Int16"))
    figure = timeline(rows, 0)
    assert [trace.name for trace in figure.data] == ["forward", "backward"]
    assert "stage 2, micro-batch 5" in figure.data[0].hovertext[0]


def test_timeline_hatches_what_never_ended() -> None:
    analysis = factories.dead_rank()
    figure = timeline(analysis.rows, 12, waits=analysis.waits, collectives=analysis.collectives)
    forward = trace_of(figure, "forward")
    assert forward.marker.pattern.shape == ("", "/")
    assert "never ended" in forward.hovertext[1]
    assert note_of(figure) == "step 12; hatched: never ended"


def test_timeline_tells_its_limits() -> None:
    analysis = factories.wide(ranks=64, steps=4)
    figure = timeline(analysis.rows, 2, ranks=[5], max_ranks=4, max_events=20)
    assert [label for label in figure.layout.yaxis.ticktext if "rank" in label] == [
        "<b>rank 0</b>", "<b>rank 5</b>", "<b>rank 22</b>", "<b>rank 43</b>",
    ]  # fmt: skip
    assert note_of(figure) == "step 2; 4 of 64 ranks; the 20 longest of 36 events"


def test_an_empty_run_has_empty_figures() -> None:
    analysis = factories.empty()
    for figure in (
        plots.budget_bar(analysis.budget_by_rank), plots.step_time(analysis.steps), plots.heatmap(analysis.steps),
        transfers.collectives(analysis.collectives), timeline(analysis.rows, 0), plots.time_bar(analysis.time),
        plots.step_time(analysis.steps, analysis.irregular),
    ):  # fmt: skip
        assert "NaN" not in figure.to_json()


def test_tags_in_names_are_escaped() -> None:
    analysis = factories.straggler()
    rows = analysis.rows.assign(name=analysis.rows["name"].astype(object).replace("all_reduce", "<a href='x'>b</a>"))
    hover = "".join(trace_of(timeline(rows, 3), "transfer").hovertext)
    assert "&lt;a href=&#x27;x&#x27;&gt;b&lt;/a&gt;" in hover
    matched = replace(analysis, collectives=analysis.collectives.assign(name="<b>x</b>")).collectives
    assert transfers.collectives(matched).data[0].name == "&lt;b&gt;x&lt;/b&gt;"


# --- tables -----------------------------------------------------------------------------------------


def test_pack() -> None:
    assert tables.pack([0, 1, 2, 5], [4, 3, 6, 7], limit=4) == [0, 1, 2, 0]
    assert tables.pack([0, 1, 2], [9, 9, 9], limit=2) == [0, 1, 1]


def test_pick_ranks() -> None:
    assert tables.pick_ranks(range(4), [], 8) == [0, 1, 2, 3]
    assert tables.pick_ranks(range(100), [99, 7], 4) == [0, 7, 50, 99]


def test_stretches() -> None:
    assert tables.stretches([7, 1, 2, 3, 9]) == [(1, 3), (7, 7), (9, 9)]
    assert tables.stretches([7, 1, 2, 3, 9], gap=2) == [(1, 3), (7, 9)]
    assert tables.stretches([]) == []


def test_typical_step_is_nearest_to_the_mean_of_the_ordinary() -> None:
    steps = table({0: [50, 10, 20, 14, 90]}, {0: [0] * 5})
    steps["ordinary"] = [False, True, True, True, False]
    assert typical_step(steps) == 3
    assert typical_step(steps[:0]) is None
