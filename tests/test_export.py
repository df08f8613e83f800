"""`dsprof export`: what other tools read is what the run says."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from factories import Job, build

from dsprof import reports
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding, Fix, Gain, Where
from dsprof.cli import main
from dsprof.reports import export
from dsprof.reports.export import Selection
from dsprof.reports.export.slices import lanes

BOTH = Selection((0, 1))


@cache
def analysis() -> Analysis:
    finding = Finding(
        "rank.straggler", "rank 1 is late", "high", Where(ranks=(1,), steps=(10, 20)), (),
        Gain(20.0, 10.0, 18.0, 22.0, "replay"), (Fix("code", "look at <rank> 1"),),
    )  # fmt: skip
    return build(Job(slow={1: 20.0}, steps=30), (finding,))


def written(to: Any, selection: Selection = BOTH, of: Analysis | None = None) -> bytes:
    file = io.BytesIO()
    assert export.write(to, of or analysis(), file, selection) > 0
    return file.getvalue()


def spans(rank: int, kind: str) -> pd.DataFrame:
    rows = analysis().trace.read(rank)
    return rows[rows["kind"] == kind]


# --- tracks ---------------------------------------------------------------------------------------


def test_spans_of_a_track_nest_or_are_disjoint() -> None:
    for _, track in lanes(analysis().trace.read(0)):
        ends: list[int] = []
        for start, dur in zip(track["start_ns"], track["dur_ns"], strict=True):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + dur <= ends[-1]
            ends.append(start + dur)


def test_communications_that_overlap_have_tracks_of_their_own() -> None:
    rows = analysis().trace.read(0).iloc[:2].copy()
    rows["kind"], rows["lane"], rows["name"] = "comm", "comm.0", "all_reduce"
    rows["start_ns"], rows["dur_ns"] = [0, 5], [10, 10]
    assert [(name, len(track)) for name, track in lanes(rows)] == [("comm.0", 1), ("comm.0 (2)", 1)]


# --- Perfetto -------------------------------------------------------------------------------------


@cache
def packets() -> Any:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(written("perfetto"))
    return trace.packet


def test_every_slice_of_a_rank_is_there_and_ends() -> None:
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in packets() if p.HasField("track_descriptor")}
    depth: Counter[int] = Counter()
    at: dict[int, int] = defaultdict(int)
    begun: Counter[str] = Counter()
    for packet in packets():
        event = packet.track_event
        if not packet.HasField("track_event") or event.type not in (event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END):
            continue
        assert packet.timestamp >= at[event.track_uuid]
        at[event.track_uuid] = packet.timestamp
        depth[event.track_uuid] += 1 if event.type == event.TYPE_SLICE_BEGIN else -1
        assert depth[event.track_uuid] >= 0
        if event.type == event.TYPE_SLICE_BEGIN:
            begun[event.categories[0]] += 1
    assert set(depth.values()) == {0}
    for kind in ("step", "phase", "comm", "wait"):
        assert begun[kind] == sum(len(spans(rank, kind)) for rank in (0, 1))
    processes = {track.process.process_name for track in tracks.values() if track.HasField("process")}
    assert {"rank 0", "rank 1"} <= {name.split(" (")[0] for name in processes}
    assert all(track.parent_uuid in tracks for track in tracks.values() if not track.HasField("process"))


def test_a_collective_is_one_flow_through_all_ranks() -> None:
    flows: dict[int, set[int]] = defaultdict(set)
    parent = {p.track_descriptor.uuid: p.track_descriptor.parent_uuid for p in packets()}
    for packet in packets():
        if "comm" in packet.track_event.categories:
            for flow in packet.track_event.flow_ids:
                flows[flow].add(parent[packet.track_event.track_uuid])
    matched = spans(0, "comm").dropna(subset=["seq"])
    assert len(flows) == len(matched) > 50
    assert all(len(ranks) == 2 for ranks in flows.values())


def test_findings_stand_over_their_steps() -> None:
    (packet,) = [p for p in packets() if "rank.straggler" in p.track_event.categories]
    said = {one.name: one for one in packet.track_event.debug_annotations}
    assert said["gain_ms"].double_value == 20.0
    assert said["fix 1"].string_value == "look at <rank> 1"
    steps = analysis().steps
    assert packet.timestamp == steps.loc[steps["step"] == 10, "start_ns"].min()


def test_names_are_written_once() -> None:
    names = [name.name for p in packets() for name in p.interned_data.event_names]
    assert len(names) == len(set(names))
    assert {"forward", "backward", "all_reduce"} <= set(names)


# --- the others -----------------------------------------------------------------------------------


def test_chrome() -> None:
    found = json.loads(written("chrome"))
    events = found["traceEvents"]
    assert Counter(e["cat"] for e in events if e["ph"] == "X")["phase"] == sum(len(spans(r, "phase")) for r in (0, 1))
    first = min(e["ts"] for e in events if "ts" in e)
    assert first == 0.0
    forward = next(e for e in events if e["name"] == "forward")
    assert forward["dur"] == pytest.approx(float(spans(0, "phase").query("name == 'forward'")["dur_ns"].iloc[0]) / 1e3)
    assert found["distributedInfo"]["world_size"] == 2


def test_kernels_have_the_names_of_torch_profiler() -> None:
    rows = analysis().trace.read(0).iloc[:2].copy()
    rows["kind"], rows["lane"], rows["corr"] = ["launch", "kernel"], ["main", "cuda.0.7"], 41
    made = replace(analysis(), trace=type(analysis().trace).of(analysis().run, rows))
    launch, kernel = (e for e in json.loads(written("chrome", Selection((0,)), made))["traceEvents"] if e["ph"] == "X")
    if launch["cat"] == "kernel":
        launch, kernel = kernel, launch
    assert (launch["cat"], launch["args"]["correlation"]) == ("cuda_runtime", 41)
    assert (kernel["cat"], kernel["args"]["stream"], kernel["args"]["device"]) == ("kernel", 7, 0)


def test_parquet() -> None:
    table = pq.read_table(io.BytesIO(written("parquet"))).to_pandas()
    assert len(table) == sum(len(analysis().trace.read(rank)) for rank in (0, 1))
    assert set(table["rank"]) == {0, 1}


def test_some_steps_of_one_rank() -> None:
    table = pq.read_table(io.BytesIO(written("parquet", Selection((1,), (10, 12))))).to_pandas()
    assert set(table["rank"]) == {1}
    assert sorted(table.loc[table["kind"] == "step", "step"]) == [10, 11]
    assert set(table["step"]) <= {10, 11}


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs" / "gpt"
    (folder / "capture").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": "gpt", "name": "gpt", "command": []}))
    monkeypatch.setattr(reports, "examine", lambda _: analysis())
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_file_beside_you(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", "chrome"]) == 0
    assert json.loads(Path("gpt.trace.json").read_text())["traceEvents"]
    assert main(["export", str(run), "--to", "chrome"]) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "parquet", "-o", "x.parquet", "--ranks", "1", "--steps", "3:5"]) == 0
    assert set(pq.read_table("x.parquet").to_pandas()["step"]) <= {3, 4}


@pytest.mark.parametrize(("words", "status", "says"), [
    (["--ranks", "7"], 2, "captures of the ranks 0, 1"),
    (["--ranks", "x"], 2, "x"),
    (["--steps", "9:3"], 2, "9:3"),
    (["--steps", "900:903"], 2, "nothing in it is of these ranks and steps"),
    (["-o", "gone/x.json"], 2, "cannot be written"),
])  # fmt: skip
def test_mistakes(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str) -> None:
    assert main(["export", str(run), "--to", "chrome", *words]) == status
    assert says in capsys.readouterr().err
    assert list(Path().glob("*.json")) == []


# --- SARIF ----------------------------------------------------------------------------------------


def blamed(*fixes: Fix, severity: Any = "medium") -> Finding:
    gain = Gain(20.0, 10.0, 18.0, 22.0, "replay")
    return Finding("data.stall", "the loop waits", severity, Where(ranks=(1,)), (), gain, fixes)


def at(file: str | None, line: int | None) -> Fix:
    return Fix("code", "turn num_workers", ({"file": file, "line": line, "argument": "num_workers", "value": 4},))


def test_findings_stand_at_the_lines_that_they_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    findings = (
        blamed(at(f"{tmp_path}/src/train.py", 31), at("/elsewhere/data.py", 7), at(f"{tmp_path}/src/train.py", 31)),
        blamed(at(None, None)),
        blamed(at(f"{tmp_path}/src/train.py", 9), severity="info"),
    )
    log = json.loads(written("sarif", of=build(Job(steps=30), findings)))
    (run,) = log["runs"]
    (result,) = run["results"]
    assert (log["version"], result["ruleId"], result["level"]) == ("2.1.0", "data.stall", "warning")
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["data.stall"]
    assert result["message"]["text"].splitlines()[:2] == ["the loop waits", "Fix: turn num_workers"]
    assert [place["physicalLocation"] for place in (*result["locations"], *result["relatedLocations"])] == [
        {"artifactLocation": {"uri": "src/train.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 31}},
        {"artifactLocation": {"uri": "file:///elsewhere/data.py"}, "region": {"startLine": 7}},
    ]


def test_a_run_without_a_line_to_blame_is_a_valid_empty_log() -> None:
    file = io.BytesIO()
    assert export.write("sarif", build(Job(steps=30), ()), file, BOTH) == 0
    assert json.loads(file.getvalue())["runs"][0]["results"] == []
