"""Jobs of `framework_jobs/` under `dsprof run`, and what a test wants to know of their rows."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from jobs import Finished, profile

from dsprof.trace import load

JOBS = Path(__file__).parent / "framework_jobs"
STEPS = 10
NEEDS = {
    "accelerate": ["accelerate"], "deepspeed": ["deepspeed"], "lightning": ["lightning"],
    "transformers": ["transformers", "accelerate"], "deepspeed_autotp.py": ["deepspeed", "transformers"],
}  # fmt: skip
"""Packages, of a job or of all whose names begin so."""
RUNS: dict[tuple[str, ...], Finished] = {}


def skip_without_packages(job: tuple[str, ...]) -> None:
    needed = NEEDS.get(job[0], NEEDS.get(job[0].split("_")[0], []))
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run_job(job: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The job under `dsprof run` on two ranks, once for all tests."""
    skip_without_packages(job)
    if job not in RUNS:
        RUNS[job] = profile(tmp_path_factory.mktemp(job[0][:-3]), JOBS / job[0], *job[1:], flags=("--no-report",))
    finished = RUNS[job]
    assert finished.status == 0, finished.stderr
    return finished


def rows_of(finished: Finished, rank: int = 0) -> pd.DataFrame:
    return load(finished.folder).read(rank)


def counts(rows: pd.DataFrame, *columns: str) -> dict[tuple[str, ...], int]:
    """How many rows have which values there."""
    return dict(Counter(tuple(map(str, values)) for values in rows[list(columns)].to_numpy(object)))


def of_step(rows: pd.DataFrame, kind: str, step: int = 5) -> pd.DataFrame:
    return rows[(rows["kind"] == kind) & (rows["step"] == step)]


def inside(inner: pd.DataFrame, outer: pd.DataFrame) -> bool:
    """Whether each of `inner` was issued while one of `outer` was under way."""
    when = inner["issue_ns"]
    return all(((outer["start_ns"] <= at) & (at <= outer["start_ns"] + outer["dur_ns"])).any() for at in when)


def check_common(finished: Finished, backwards: int = 1) -> pd.DataFrame:
    """What every job has: its steps, counted once, and waits that name numbered communications. Rows of rank 0."""
    rows = rows_of(finished)
    assert int((rows["kind"] == "step").sum()) == STEPS
    phases = of_step(rows, "phase")
    assert int((phases["name"] == "backward").sum()) == backwards
    assert int((phases["name"] == "optimizer").sum()) == 1
    assert int((phases["name"] == "forward").sum()) >= backwards
    comm, waits = rows[rows["kind"] == "comm"], rows[rows["kind"] == "wait"]
    assert comm["seq"].notna().all()
    assert (comm["bytes"] >= 0).all()
    known = set(counts(comm, "name", "group", "seq", "peer"))
    assert len(waits)
    assert set(counts(waits, "name", "group", "seq", "peer")) <= known
    info = finished.folder.read_info()
    assert [item.errors for item in info.ranks] == [0] * len(info.ranks)
    return rows
