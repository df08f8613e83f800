"""Ranks whose clocks differ, from what they wrote to what is said of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import environment

from dsprof.analyzer import analyze
from dsprof.analyzer.align.aligned import align
from dsprof.analyzer.analysis import Analysis
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.ondisk import CHUNK_HEADER_BYTES, CHUNK_RECORDS, RECORD_BYTES
from dsprof.reports.wording import capture_facts
from dsprof.run import RunFolder
from dsprof.schema import Kind
from dsprof.trace import load
from dsprof.trace.capture import read_capture
from dsprof.trace.records import encode

MS, S = 1_000_000, 1_000_000_000
STEPS = 1000

SCRIPT = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def written(run: Path, rank: int, clock: str) -> Path:
    """The capture of a rank of host `clock`: 100 s of steps of 100 ms, each with an all-reduce that ends within 20 us
    of the other rank's."""
    folder = run / "capture" / f"rank{rank:05d}.0.{clock}.{100 + rank}"
    folder.mkdir(parents=True)
    recorder = PyRecorder(folder)
    draw = np.random.default_rng(rank)
    forward, reduce, step, group = (recorder.intern(name) for name in ("forward", "all_reduce", "step", "0"))
    for number in range(STEPS):
        begin = S + number * 100 * MS
        end = begin + 80 * MS + int(draw.integers(0, 20_000))
        recorder.put(Kind.PHASE, forward, begin, begin + 50 * MS)
        recorder.comm(
            Kind.COMM, reduce, begin + 60 * MS, end, begin + 60 * MS, 1000, group, number, -1, 0, 0, -1, -1, 0, 0
        )
        recorder.put(Kind.STEP, step, begin, begin + 100 * MS)
    recorder.close()
    (folder / "meta.json").write_text(json.dumps({"world_size": 2, "closed": True, "clock": {"id": clock}}))
    return folder


def rescale(folder: Path, ppm: int, ahead_ns: int) -> None:
    """Write the capture's records again, as a clock would have stamped them that runs fast by so many ppm."""
    records = read_capture(folder).records
    for name in ("start_ns", "end_ns", "issue_ns"):
        known = records[name] > 0
        records[name][known] += ahead_ns + records[name][known] * ppm // 1_000_000
    content = encode(records)
    for index, path in enumerate(sorted(folder.glob("chunk-*.bin"))):
        part = content[index * CHUNK_RECORDS * RECORD_BYTES : (index + 1) * CHUNK_RECORDS * RECORD_BYTES]
        path.write_bytes(path.read_bytes()[:CHUNK_HEADER_BYTES] + part)


def ends_apart(analysis: Analysis) -> np.ndarray:
    """By how much rank 1 left each collective later than rank 0, ns."""
    rows = [analysis.trace.read(rank, ("kind", "name", "seq", "start_ns", "dur_ns")) for rank in (0, 1)]
    ends = []
    for table in rows:
        table = table[(table["kind"] == "comm") & (table["name"] == "all_reduce")].set_index("seq")
        ends.append(table["start_ns"] + table["dur_ns"].astype("int64"))
    return (ends[1] - ends[0]).dropna().to_numpy(np.int64)


@pytest.mark.parametrize("ppm", [50, -50])
def test_a_capture_whose_clock_drifts_by_50_ppm_is_aligned_and_the_error_said(tmp_path: Path, ppm: int) -> None:
    written(tmp_path, 0, "a")
    rescale(written(tmp_path, 1, "b"), ppm, 3600 * S)
    analysis = analyze(load(RunFolder(tmp_path)))
    apart = ends_apart(analysis)
    assert len(apart) == STEPS
    assert np.abs(apart).max() < 40_000  # of the 5 ms that the clock gained
    assert 2 < analysis.capture.clock_error_us < 40
    said = re.search(r"clocks within (\S+) us", capture_facts(analysis))
    assert said is not None
    assert float(said[1]) == pytest.approx(analysis.capture.clock_error_us, rel=0.01)


def test_the_error_says_what_a_drift_that_cannot_be_told_leaves(tmp_path: Path) -> None:
    """Of seven collectives a drift cannot be told from chance: the offset is a number, and what that leaves is said."""
    for rank, host in enumerate("ab"):
        folder = written(tmp_path, rank, host)
        records = read_capture(folder).records[:21]
        (chunk, *_) = sorted(folder.glob("chunk-*.bin"))
        chunk.write_bytes(chunk.read_bytes()[:CHUNK_HEADER_BYTES] + encode(records))
    rescale(folder, 50, 0)
    analysis = analyze(load(RunFolder(tmp_path)))
    assert len(ends_apart(analysis)) == 7
    # 0.6 s at 50 ppm: up to 15 us from the middle, beside chance; and 30 for a clock that may drift by 100 ppm.
    assert 40 < analysis.capture.clock_error_us < 80


def test_ranks_of_one_host_name_may_have_two_clocks(tmp_path: Path) -> None:
    """Two machines that both call themselves `localhost`."""
    for rank in (0, 1):
        folder = written(tmp_path, rank, f"boot-{rank}")
        folder.rename(folder.with_name(f"rank{rank:05d}.0.localhost.{100 + rank}"))
    rescale(tmp_path / "capture" / "rank00001.0.localhost.101", 0, 7 * S)
    assert np.abs(ends_apart(analyze(load(RunFolder(tmp_path))))).max() < 40_000


def test_a_rank_in_a_shifted_time_namespace_is_aligned(tmp_path: Path) -> None:
    shifted = ["unshare", "--time", "--fork", "--monotonic", "1000", "--boottime", "1000"]
    if subprocess.run([*shifted, "true"], capture_output=True).returncode:
        pytest.skip("a time namespace is not permitted here")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    env = environment(DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE="off", OMP_NUM_THREADS="1")
    for attempt in range(3):  # gloo may abort on its way out, with any profiler or none
        command = [sys.executable, "train.py"]
        meet = str(tmp_path / f"store{attempt}")
        ranks = [
            subprocess.Popen([*prefix, *command, str(rank), meet], cwd=tmp_path, env=env)
            for rank, prefix in enumerate(([], shifted))
        ]
        if [process.wait(timeout=120) for process in ranks] == [0, 0]:
            break
    trace = load(RunFolder(run))
    clocks = {item.rank: item.clock for item in trace.run.ranks}
    assert clocks[1] == clocks[0].replace("+0.0", "+1000.0")
    raw = [trace.read(rank)["start_ns"].min() for rank in (0, 1)]
    assert 900 * S < raw[1] - raw[0] < 1100 * S
    aligned, _ = align(trace)
    analysis = analyze(trace)
    assert np.abs(np.median(ends_apart(analysis))) < S
    assert 0 < aligned.clock_error_us < 1e6
    assert analysis.capture.clock_error_us == aligned.clock_error_us
    assert "clocks within " in capture_facts(analysis)
