"""TensorBoard event files of an analysis: curves of the steps, and the verdict as text.

Runs in the dashboard: `mean` and `max` over the ranks (tags `step_ms/...`, `budget_ms/...` and `memory_gib/...`),
`rank<N>` where they are few (`by_rank_ms/...`, `by_rank_gib/...`), `device<N>` what the device of rank N told
(`device/...`), and `verdict` with the text and the kinds of time (`time_s/...`, one point each).
A TensorBoard chart keeps 1,000 points a tag, chosen at random, so that a rare spike would vanish: above 1,000
steps, neighbouring steps are joined, `max` and the ranks keep each window's maximum, and `p99` is added.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.record_writer import RecordWriter

from dsprof import gauges, regular_files
from dsprof.analyzer.analysis import Analysis
from dsprof.atomic import write_atomically
from dsprof.permissions import make_folder

from .. import tables, wording
from .text import markdown_texts

MAX_POINTS: Final = 1000
WINDOWS: Final = 500
MAX_RANKS: Final = 16

SAMPLED: Final = ("allocated", "reserved", "resident")
"""Numbers of `Analysis.memory_steps` that are drawn."""
GIB: Final = 1 << 30

SUFFIX: Final = ".dsprof"
"""Ends the names of our event files, so that writing again removes these and nothing else."""


def write(analysis: Analysis, folder: Path) -> None:
    """Write the event files under `folder`, in place of those of an earlier call."""
    remove(folder)
    start = _start_seconds(analysis)
    for name, values in {**_curves(analysis), **_device_curves(analysis)}.items():
        events = [_layout_event(start)] if name == "mean" else []
        events += list(_scalar_events(values, start))
        _save(folder / name, events, start)
    _save(folder / "verdict", [*_text_events(analysis, start), *_time_events(analysis, start)], start)


def remove(folder: Path) -> None:
    """Delete the event files that `write` left under `folder`."""
    for run in regular_files.folders(folder):
        for path in regular_files.files(run, f"events.out.tfevents.*{SUFFIX}"):
            path.unlink()


def _curves(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """Run -> a row per step (or the last step of a window), a column per tag, and `seconds` since the first step."""
    steps = analysis.steps
    if steps.empty:
        return {}
    parts = [part for part in analysis.budget if (steps[part] > 0).any()]
    values = pd.DataFrame({
        "step": steps["step"], "rank": steps["rank"],
        "seconds": (steps["start_ns"] - steps["start_ns"].min()) / 1e9,
        "step_ms/whole": tables.step_ms(steps), "step_ms/own_work": tables.own_work_ms(steps),
        **{f"budget_ms/{part}": steps[part] for part in parts},
    })  # fmt: skip
    values = values.merge(_memory(analysis), how="left", on=["rank", "step"])
    numbers = np.sort(values["step"].unique())
    width = -(-len(numbers) // WINDOWS) if len(numbers) > MAX_POINTS else 1
    window = np.searchsorted(numbers, values["step"].to_numpy()) // width
    values["step"] = numbers[np.minimum((window + 1) * width, len(numbers)) - 1]

    columns = values.drop(columns="rank").groupby("step")
    curves = {"mean": columns.mean(), "max": columns.max()}
    if width > 1:
        curves["p99"] = columns.quantile(0.99)
    ranks = sorted(int(rank) for rank in values["rank"].unique())
    named = [rank for finding in analysis.findings for rank in finding.where.ranks or ()]
    shown = ranks if len(ranks) <= MAX_RANKS else sorted(set(named) & set(ranks))[:MAX_RANKS]
    if len(ranks) > 1:
        for rank in shown:
            own = values[values["rank"] == rank].drop(columns="rank").groupby("step").max()
            tags = {name: f"by_rank_{_unit(name)}/{name.rpartition('/')[2]}" for name in own if "/" in name}
            curves[f"rank{rank}"] = own.rename(columns=tags)
    return curves


def _unit(tag: str) -> str:
    return tag.partition("/")[0].rpartition("_")[2]


def _memory(analysis: Analysis) -> pd.DataFrame:
    """rank, step, and a column a tag: what was in use, and what allocators held; of several devices the most."""
    table = analysis.memory_steps
    known = [name for name in SAMPLED if table[name].notna().any()]
    by_step = table.groupby(["rank", "step"])[known].max() / GIB
    return by_step.rename(columns={name: f"memory_gib/{name}" for name in known}).reset_index()


def _device_curves(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """The same of what devices tell about once a second, as means of a step, or of as many as there is room for."""
    watched = sorted({int(fact["rank"]) for fact in analysis.run.facts if fact.get("fact") == "gpu"})
    begin = int(analysis.steps["start_ns"].min()) if len(analysis.steps) else 0
    curves = {}
    for rank in tables.pick_ranks(watched, (), MAX_RANKS):
        told = tables.device_gauges(analysis.trace, [rank])
        told = told[told["step"] >= 0]
        if told.empty or not begin:
            continue
        numbers = np.unique(told["step"].to_numpy(np.int64))
        width = -(-len(numbers) // WINDOWS)
        step = numbers[np.searchsorted(numbers, told["step"].to_numpy(np.int64)) // width * width]
        tag = told["name"].str.replace(gauges.DEVICE, "device/", n=1, regex=False)
        values = told["value"].groupby([step, tag]).mean().unstack()
        seconds = (told["start_ns"] - begin).groupby(step).mean() / 1e9
        curves[f"device{rank}"] = values.assign(seconds=seconds)
    return curves


def _scalar_events(values: pd.DataFrame, start: float) -> Iterator[Any]:
    tags = [tag for tag in values if tag != "seconds"]
    for step, seconds, *row in zip(values.index, values["seconds"], *(values[tag] for tag in tags), strict=True):
        summary = Summary(
            value=[
                Summary.Value(tag=tag, simple_value=value)
                for tag, value in zip(tags, row, strict=True)
                if np.isfinite(value)
            ]
        )
        yield Event(wall_time=start + seconds, step=int(step), summary=summary)


def _text_events(analysis: Analysis, start: float) -> Iterator[Any]:
    for tag, markdown in markdown_texts(analysis).items():
        yield _text_event(tag, markdown, start)


def _time_events(analysis: Analysis, start: float) -> Iterator[Any]:
    """What the run's wall time went to, s."""
    kinds = wording.kinds_of_time(analysis.time)
    values = [Summary.Value(tag=f"time_s/{kind.name}", simple_value=kind.seconds) for kind in kinds]
    if values:
        yield Event(wall_time=start, step=0, summary=Summary(value=values))


def _text_event(tag: str, markdown: str, start: float) -> Any:
    metadata = text_plugin.create_summary_metadata(display_name=tag, description="")
    return Event(wall_time=start, summary=Summary(value=[_text_value(tag, markdown.encode(), metadata)]))


def _text_value(tag: str, content: bytes, metadata: Any) -> Any:
    tensor = TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _layout_event(start: float) -> Any:
    """The Custom Scalars tab: the parts of the step in one chart each way of asking."""

    def chart(title: str, pattern: str) -> Any:
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))

    charts = [
        chart("where the step goes, ms: mean and maximum over the ranks", r"budget_ms/.*"),
        chart("each rank's own work, ms", r"by_rank_ms/own_work"),
        chart("each rank's waiting for others, ms", r"by_rank_ms/(peer_wait|comm_exposed|bubble)"),
        chart("each rank's memory, GiB", r"by_rank_gib/.*"),
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="budget", chart=charts)])
    metadata = custom_scalar.create_summary_metadata()
    value = _text_value(custom_scalar.CONFIG_SUMMARY_TAG, layout.SerializeToString(), metadata)
    return Event(wall_time=start, summary=Summary(value=[value]))


def _save(folder: Path, events: list[Any], start: float) -> None:
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in [Event(wall_time=start, file_version="brain.Event:2"), *events]:
        writer.write(event.SerializeToString())
    make_folder(folder.parent, parents=True)
    make_folder(folder)
    write_atomically(folder / f"events.out.tfevents.{int(start)}{SUFFIX}", content.getvalue())


def _start_seconds(analysis: Analysis) -> float:
    """When the run began, Unix time; 0 where that is not known, so that the same run gives the same files."""
    try:
        return datetime.datetime.fromisoformat(analysis.run.started).timestamp()
    except ValueError:
        return 0.0
