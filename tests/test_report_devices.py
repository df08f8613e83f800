"""What devices told, in the HTML report and in TensorBoard."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pandas as pd
import pytest
from device_rows import joined, readings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsprof import gauges
from dsprof.analyzer.analysis import Analysis
from dsprof.reports import html, plots, tables, tensorboard

SECOND = 1_000_000_000


def told(ranks: int = 2, count: int = 4) -> pd.DataFrame:
    rows = [
        {"rank": rank, "step": number, "name": name, "start_ns": (5 + number) * SECOND, "value": 100.0 * rank + number}
        for rank in range(ranks)
        for number in range(count)
        for name in (gauges.SM_CLOCK, gauges.POWER, gauges.PCIE_REPLAYS)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def watched() -> Analysis:
    """A run whose two devices were asked every 200 ms."""
    analysis = factories.straggler()
    rows = [
        row
        for rank in (0, 1)
        for row in readings(analysis.trace, rank, 200.0, sm_clock_mhz=1500 + rank, power_w=lambda n: 300 + n)
    ]
    facts = [{"fact": "gpu", "rank": rank, "index": rank, "name": "H100"} for rank in (0, 1)]
    trace = joined(analysis.trace, rows, facts)
    return replace(analysis, trace=trace, run=trace.run)


def axis_of(figure: Any, line: Any) -> str:
    title: str = figure.layout[line.yaxis.replace("y", "yaxis")].title.text
    return title


def test_a_line_a_rank_in_a_row_a_gauge() -> None:
    figure = plots.devices(told())
    assert [(line.name, axis_of(figure, line)) for line in figure.data] == [
        ("rank 0", "SM clock, MHz"), ("rank 1", "SM clock, MHz"), ("rank 0", "power, W"), ("rank 1", "power, W"),
    ]  # fmt: skip
    assert [line.showlegend for line in figure.data] == [True, True, False, False]
    assert figure.data[1].x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert figure.data[1].y.tolist() == [100.0, 101.0, 102.0, 103.0]
    assert figure.layout.meta["note"] == ""
    upper, lower = figure.layout.yaxis.domain, figure.layout.yaxis2.domain
    assert 0 <= lower[0] < lower[1] < upper[0] < upper[1] <= 1
    assert figure.layout.xaxis.anchor == "y2"


def test_one_gauge_has_one_row() -> None:
    only = told()
    figure = plots.devices(only[only["name"] == gauges.POWER], of_ranks=64)
    assert len(figure.data) == 2
    assert figure.layout.yaxis.domain == (0, 1)
    assert figure.layout.xaxis.anchor == "y"
    assert figure.layout.meta["note"] == "2 of 64 ranks"


def test_a_long_run_keeps_the_lowest_clock_and_the_highest_power() -> None:
    long = told(ranks=1, count=5000)
    dip = (long["name"] == gauges.SM_CLOCK) & (long["start_ns"] == 5 * SECOND + 3333 * SECOND)
    long.loc[dip, "value"] = -1.0
    figure = plots.devices(long)
    clock, power = figure.data
    assert len(clock.x) == len(power.x) == 1000
    assert clock.y.min() == -1.0
    assert power.y.max() == 4999.0
    assert clock.y[0] == 0.0


def test_what_a_trace_holds() -> None:
    found = tables.device_gauges(watched().trace, [1])
    assert set(found["name"]) == {gauges.SM_CLOCK, gauges.POWER}
    assert set(found["rank"]) == {1}
    assert found["step"].min() == 0
    assert found["start_ns"].is_monotonic_increasing
    assert tables.device_gauges(factories.straggler().trace, [0, 1]).empty


def test_the_page_has_a_section_where_devices_told_something() -> None:
    page = html.render(watched())
    assert re.search(r'<section id="devices" .*>\s*<h2 id="title-devices">Devices</h2>', page)
    assert 'id="plot-devices"' in page
    assert '"devices":{"data":[' in page
    assert '<section id="devices"' not in html.render(factories.straggler())


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard.write(watched(), tmp_path)
    assert {"device0", "device1"} <= {path.name for path in tmp_path.iterdir()}
    reader = EventAccumulator(str(tmp_path / "device1"), size_guidance={"scalars": 0})
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["device/power_w", "device/sm_clock_mhz"]
    clock = reader.Scalars("device/sm_clock_mhz")
    assert {event.value for event in clock} == {1501.0}
    assert [event.step for event in clock] == sorted({event.step for event in clock})
    power = np.array([event.value for event in reader.Scalars("device/power_w")])
    assert (np.diff(power) > 0).all()
    first = reader.Scalars("device/power_w")[0]
    assert first.wall_time == pytest.approx(1795169700.0, abs=1.0)  # 2026-11-20T10:15:00Z
