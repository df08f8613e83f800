"""Pipelines of several replicas, of which some ranks were not captured: who waited for these is held up by others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from made_up_mesh import Mesh, MeshPlant, MeshTimeline, make_mesh_run

from dsprof import trace
from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.rules.comm.dimensions import domains, fewer_of
from dsprof.analyzer.study import study
from dsprof.run import RunFolder

MESH = Mesh(tp=2, ep=1, replicas=3, pp=2, microbatches=6)
STEPS = 14
SLOW = np.where(np.arange(MESH.ranks) >= MESH.of_stage, 1.4, 1.0)[:, None]
"""Stage 1 takes 1.4 times as long as stage 0."""


def analyzed(folder: Path, missing: tuple[int, ...]) -> Analysis:
    make_mesh_run(folder, MESH, STEPS, seed=3, plant=MeshPlant(work=SLOW), missing=missing)
    return analyze(trace.load(RunFolder(folder)))


@pytest.mark.parametrize("missing", [(), (1,), (8,)], ids=["none", "of the first stage", "of the last stage"])
def test_a_stage_that_is_slow_is_priced_whoever_is_missing(tmp_path: Path, missing: tuple[int, ...]) -> None:
    """What a rank waited for of the missing one is no time of its own, which would last whatever a change did."""
    analysis = analyzed(tmp_path / "run", missing)
    lasted = [MeshTimeline(MESH, STEPS, 3, MeshPlant(work=work)).lasted_ms() for work in (SLOW, SLOW * 0 + SLOW.mean())]
    steps = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    saved = float((lasted[0] - lasted[1])[steps].mean())
    found = {one.code: one for one in analysis.findings}
    assert found["pipeline.imbalance"].where.stage == 1
    assert found["pipeline.imbalance"].gain.ms == pytest.approx(saved, rel=0.1)
    assert "pipeline.bubble" not in analysis.not_judged  # each rank that was captured runs as many micro-batches


@pytest.mark.parametrize(
    ("mesh", "missing", "slow"),
    [
        (MESH, tuple(range(MESH.of_stage)), 8),
        (Mesh(tp=1, ep=1, replicas=2, pp=4, microbatches=8), (0, 1), 5),
    ],
    ids=["a host with a whole stage", "both replicas of a stage"],
)
def test_where_all_of_a_stage_wait_for_who_is_missing_they_still_wait(
    tmp_path: Path, mesh: Mesh, missing: tuple[int, ...], slow: int
) -> None:
    """None of them has its messages, so none would hold the others up."""
    work = np.ones((mesh.ranks, 1))
    work[slow] = 1.4
    make_mesh_run(tmp_path / "run", mesh, STEPS, seed=3, plant=MeshPlant(work=work), missing=missing)
    (first, *_) = analyze(trace.load(RunFolder(tmp_path / "run"))).findings
    assert (first.code, first.where.ranks) == ("rank.straggler", (slow,))


def test_two_that_are_missing_of_different_stages(tmp_path: Path) -> None:
    """Rank 2 waits for rank 0, and its replica, rank 3, for rank 5."""
    mesh = Mesh(tp=1, ep=1, replicas=2, pp=4, microbatches=4)
    make_mesh_run(tmp_path / "run", mesh, STEPS, seed=3, plant=MeshPlant(), missing=(0, 5))
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    assert "pipeline.bubble" in {one.code for one in analysis.findings}


def test_fewer_collectives_are_a_part_of_all_that_is_communicated(tmp_path: Path) -> None:
    """Of all dimensions together, and of the messages between stages, which nobody removes."""
    make_mesh_run(tmp_path / "run", MESH, STEPS, seed=3, plant=MeshPlant())
    measured = study(trace.load(RunFolder(tmp_path / "run")))
    tables = [one.table for one in domains(measured)]
    parts = [fewer_of(measured, 1.0, table) for table in tables]
    together = fewer_of(measured, 0.5, *tables)
    assert len(parts) > 1
    assert together.part_of_all == pytest.approx(sum(one.part_of_all for one in parts))
    assert 0.5 < together.part_of_all < 1
    assert together.moved_bytes == pytest.approx(sum(one.moved_bytes for one in parts))
    assert together.share == 0.5


def test_of_one_replica_a_wait_for_what_is_missing_stays(tmp_path: Path) -> None:
    """Nobody else of its stage tells how late the message was: nothing is said of what it would be with less work."""
    alone = Mesh(tp=1, ep=1, replicas=1, pp=3, microbatches=6)
    make_mesh_run(tmp_path / "run", alone, STEPS, seed=3, plant=MeshPlant(), missing=(1,))
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    assert not [one for one in analysis.findings if one.code.startswith("pipeline.")]
    assert "of the 3 stages of the pipeline were captured" in analysis.not_judged["pipeline.imbalance"]


def test_collectives_are_judged_where_nobody_can_have_waited_for_who_is_missing(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path / "run", (1,))
    assert not {"comm.slow-link", "comm.volume", "comm.tensor-parallel"} & analysis.not_judged.keys()


def test_they_are_not_judged_where_who_is_missing_may_be_late(tmp_path: Path) -> None:
    work = np.ones((MESH.ranks, 1))
    work[1] = 1.5  # its tensor-parallel peer waits for it, and at the end of a step its replicas do
    make_mesh_run(tmp_path / "run", MESH, STEPS, seed=3, plant=MeshPlant(work=work), missing=(1,))
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    assert "waiting for a late peer looks the same" in analysis.not_judged["comm.volume"]


def test_a_slow_link_is_found_beside_a_group_that_is_not_whole(tmp_path: Path) -> None:
    wide = Mesh(tp=4, ep=1, replicas=4, pp=1, microbatches=4)
    link = np.ones((2, STEPS))
    link[1] = 20.0  # of the second host: ranks 8 to 15
    make_mesh_run(tmp_path / "run", wide, STEPS, seed=3, plant=MeshPlant(link=link), missing=(1,))
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    (found,) = [one for one in analysis.findings if one.code == "comm.slow-link"]
    assert found.where.ranks is not None
    assert {*found.where.ranks} <= {*range(8, 16)}
