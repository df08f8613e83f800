"""Memory in the reports: the figures, the line, the section of the HTML report, TensorBoard's scalars."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.memory.use_by_step import COLUMNS, MemoryUse
from dsprof.reports import html, memory, palette, plots, tensorboard, terminal
from dsprof.schema import MEMORY_PARTS

GiB = 1 << 30
MiB = 1 << 20
PARTS = {"parameters": 6 * GiB, "gradients": 6 * GiB, "optimizer_states": 24 * GiB, "activations": 20 * GiB}


def on_devices(ranks: int = 2, steps: int = 40) -> tuple[pd.DataFrame, list[MemoryUse]]:
    """60 GiB allocated between steps, a GiB more on each rank; the cache holds 5 GiB more."""
    rows = [
        {"rank": rank, "place": "cuda.0", "step": step, "allocated": (40 + rank) * GiB, "reserved": (70 + rank) * GiB}
        for rank in range(ranks)
        for step in range(steps)
    ]
    uses = [
        MemoryUse(rank, "cuda.0", (60 + rank) * GiB, (70 + rank) * GiB, 80 * GiB, (60 + rank) / 80, 0, 0, PARTS)
        for rank in range(ranks)
    ]
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS)), uses


def on_the_host() -> tuple[pd.DataFrame, list[MemoryUse]]:
    rows = [
        {"rank": rank, "place": "host", "step": step, "resident": (400 + 10 * rank) * MiB}
        for rank in range(2)
        for step in range(40)
    ]
    uses = [
        MemoryUse(rank, "host", (420 + 10 * rank) * MiB, (420 + 10 * rank) * MiB, 16 * GiB, 850 / 16384, 0, 0,
                  {"parameters": 100 * MiB})
        for rank in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS)), uses


def analysis_with(table: pd.DataFrame, uses: list[MemoryUse]) -> Analysis:
    return replace(factories.healthy(), memory_steps=table, memory_uses=tuple(uses))


def named(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_a_line_a_rank_with_what_the_allocator_held_and_what_there_is() -> None:
    figure = memory.over_steps(*on_devices())
    traces = named(figure)
    assert list(traces) == [
        "rank 0, allocated", "rank 0, reserved", "rank 1, allocated", "rank 1, reserved",
    ]  # fmt: skip
    assert set(traces["rank 1, allocated"].y) == {41.0}
    assert set(traces["rank 0, reserved"].y) == {70.0}
    assert figure.layout.yaxis.title.text == "GiB"
    (line,) = figure.layout.shapes
    assert line.y0 == line.y1 == 80
    assert figure.layout.annotations[0].text == "capacity 80.0 GiB"
    assert figure.layout.meta["note"] == ""


def test_a_capacity_far_above_is_told_instead_of_drawn() -> None:
    figure = memory.over_steps(*on_the_host())
    assert list(named(figure)) == ["rank 0, resident", "rank 1, resident"]
    assert not figure.layout.shapes
    assert figure.layout.meta["note"] == "what was used, of 16.0 GiB, which the ranks of a host share"
    assert figure.layout.yaxis.title.text == "MiB"


def test_steps_that_the_profiler_looked_at_are_marked() -> None:
    figure = memory.over_steps(*on_the_host(), [20, 21, 22])
    (shade,) = figure.layout.shapes
    assert (shade.x0, shade.x1, shade.fillcolor) == (19.5, 22.5, palette.PROFILED)
    assert figure.layout.annotations[0].text == "--deep"
    assert figure.layout.meta["note"].endswith("shaded violet, steps 20 to 22, which torch.profiler looked at (--deep)")
    assert figure.layout.title.subtitle.text == figure.layout.meta["note"]
    steps = plots.step_time(factories.healthy().steps, profiled=[20, 21, 22])
    (shade,) = (shape for shape in steps.layout.shapes if shape.fillcolor == palette.PROFILED)
    assert (shade.x0, shade.x1) == (19.5, 22.5)
    assert "steps 20 to 22, which torch.profiler looked at" in steps.layout.meta["note"]


def test_many_ranks_are_a_band_with_the_one_that_has_most() -> None:
    figure = memory.over_steps(*on_devices(ranks=16))
    traces = named(figure)
    assert "rank 15, allocated" in traces
    band = traces["allocated, from the least to the most"]
    assert set(band.y) == {55.0}
    assert "the band spans all 16 ranks" in figure.layout.meta["note"]


def test_what_it_was_for() -> None:
    _, uses = on_devices()
    traces = named(memory.by_part(uses))
    assert {name: list(trace.x) for name, trace in traces.items()} == {
        "parameters": [6, 6], "gradients": [6, 6], "optimizer states": [24, 24], "activations": [20, 20],
        "rest": [4, 5], "cached": [10, 10],
    }  # fmt: skip


def test_activations_of_another_moment_than_the_peaks_do_not_lengthen_the_bar() -> None:
    use = MemoryUse(0, "cuda.0", 50 * GiB, 50 * GiB, None, None, 0, 0, PARTS)
    assert memory.parts_of(use) == {**PARTS, "activations": 14 * GiB, "rest": 0, "cached": 0}


def test_every_part_has_a_look() -> None:
    assert tuple(palette.MEMORY) == (*MEMORY_PARTS, "rest", "cached")


def test_in_words() -> None:
    assert memory.line(on_devices()[1]) == (
        "61.0 GiB allocated at the peak on rank 1, which has most, 76 % of 80.0 GiB (parameters 6.00 GiB, gradients "
        "6.00 GiB, optimizer states 24.0 GiB, activations 20.0 GiB, cached 10.0 GiB)"
    )
    assert memory.line(on_the_host()[1]) == (
        "430 MiB resident at the peak on rank 1, which has most; the ranks of a host together 5.2 % of 16.0 GiB "
        "(parameters 100 MiB)"
    )
    assert memory.line([]) == ""


def test_on_the_terminal() -> None:
    said = io.StringIO()
    terminal.render(analysis_with(*on_devices()), said, color=False, width=100)
    assert "\nmemory  61.0 GiB allocated at the peak on rank 1, which has most, 76 % of 80.0 GiB (parameters\n" in (
        said.getvalue()
    )


@pytest.mark.parametrize("made", [on_devices, on_the_host])
def test_in_the_html_report(made: Any) -> None:
    page = html.render(analysis_with(*made()))
    assert '<section id="memory-use"' in page
    assert 'id="plot-memory"' in page
    assert 'id="plot-memory-parts"' in page
    assert '<section id="memory-use"' not in html.render(factories.healthy())


def test_in_tensorboard(tmp_path: Path) -> None:
    tensorboard.write(analysis_with(*on_devices()), tmp_path)

    def read(run: str, tag: str) -> list[float]:
        found = EventAccumulator(str(tmp_path / run), {"scalars": 0})
        found.Reload()
        return [event.value for event in found.Scalars(tag)]

    assert read("max", "memory_gib/allocated") == pytest.approx(np.full(40, 41.0))
    assert read("rank0", "by_rank_gib/reserved") == pytest.approx(np.full(40, 70.0))
