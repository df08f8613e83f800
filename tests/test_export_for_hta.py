"""`dsprof export --to chrome` of a run on devices, as HTA (HolisticTraceAnalysis) wants a trace: a file a rank. Where
HTA is there, it says the same of the export as of the trace that the run was made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kineto_traces as kt
import pytest

from dsprof.analyzer import analyze
from dsprof.importers import import_trace
from dsprof.reports import export
from dsprof.reports.export import Selection

RANK_OF_HTA = re.compile(r'"rank":\s+(\d+)')
"""The first one in a file is the rank, whatever it is part of (hta/common/trace_file.py)."""
COMMUNICATES = re.compile(r"^nccl.*Kernel")
"""Of a kernel's name (hta/utils/utils.py)."""
STEPS = 3


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kt.two_ranks(tmp_path_factory.mktemp("traced"), steps=STEPS, args=kt.COLLECTIVE)


@pytest.fixture(scope="module")
def exported(traced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    analysis = analyze(import_trace(traced))
    for rank in (0, 1):
        with (folder / f"rank{rank}.json").open("wb") as file:
            export.write("chrome", analysis, file, Selection((rank,)))
    return folder


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_in_a_file_is_its_own(exported: Path, rank: int) -> None:
    found = RANK_OF_HTA.search((exported / f"rank{rank}.json").read_text())
    assert found is not None
    assert int(found[1]) == rank


def test_events_have_what_hta_reads(exported: Path) -> None:
    """Every event that lasts has a category, a name, ts and dur in us; on a stream are kernels and copies only, which a
    launch on the host leads to; a collective is a kernel of NCCL's, and a step has torch.profiler's name."""
    for rank in (0, 1):
        events = spans(exported / f"rank{rank}.json")
        assert all({"cat", "name", "ts", "dur", "pid", "tid"} <= set(event) for event in events)
        on_device = [event for event in events if "stream" in event["args"]]
        assert {event["cat"] for event in on_device} == {"kernel"}
        assert all(type(event["args"]["stream"]) is int for event in on_device)
        launches = {event["args"]["correlation"] for event in events if event["cat"] == "cuda_runtime"}
        assert {event["args"]["correlation"] for event in on_device} <= launches
        communicating = [event for event in on_device if COMMUNICATES.match(event["name"])]
        assert [(event["name"], event["args"]["stream"]) for event in communicating] == [
            ("ncclDevKernel_all_reduce", 20)
        ] * STEPS
        named = [event["name"] for event in events if event["cat"] == "user_annotation"]
        assert named == [f"ProfilerStep#{step}" for step in range(3, 3 + STEPS)]


def test_steps_and_collectives_come_back(traced: Path, exported: Path, tmp_path: Path) -> None:
    """What the file calls as torch.profiler does has dsprof's own names again when it is imported."""
    columns = ["kind", "name", "step", "start_ns", "dur_ns", "lane"]

    def chosen(rows: Any) -> list[list[Any]]:
        found = rows[rows["kind"].isin(["step", "comm"])][columns].astype(object)
        return sorted(found.to_numpy().tolist(), key=lambda row: (row[3], row[0]))

    (tmp_path / "rank1.json").write_bytes((exported / "rank1.json").read_bytes())
    again, first = import_trace(tmp_path / "rank1.json").read(1), import_trace(traced).read(1)
    assert len(chosen(first)) == 2 * STEPS
    assert chosen(again) == chosen(first)


def test_hta_says_the_same_of_it_as_of_the_trace_that_was_imported(traced: Path, exported: Path) -> None:
    hta = pytest.importorskip("hta.trace_analysis")

    def said(folder: Path) -> list[Any]:
        found = hta.TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
        assert sorted(found.t.traces) == [0, 1]
        idle = found.get_idle_time_breakdown(ranks=[1], visualize=False)[0].sort_values(["stream", "idle_category"])
        return [
            found.get_temporal_breakdown(visualize=False).to_dict("records"),
            found.get_comm_comp_overlap(visualize=False).to_dict("records"),
            [{key: str(value) for key, value in row.items()} for row in idle.to_dict("records")],
        ]

    assert said(exported) == said(traced)
