"""Captures that lack something: the analyzer says what, and never raises."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.trace import Trace


def changed(trace: Trace, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Analysis:
    analysis = analyze(Trace.of(trace.run, change(trace.rows.copy())))
    assert not any("failed" in reason for reason in analysis.not_judged.values())
    json.dumps(analysis.to_dict(), allow_nan=False)
    return analysis


def above_info(analysis: Analysis) -> list[str]:
    return [finding.code for finding in analysis.findings if finding.severity != "info"]


def test_nothing_at_all() -> None:
    analysis = changed(Job().trace(), lambda rows: rows.iloc[:0])
    assert analysis.verdict.status == "failed"
    assert "no complete step" in analysis.verdict.headline


@pytest.mark.parametrize("count", [0, 1])
def test_no_step_and_one_step(count: int) -> None:
    analysis = changed(Job(steps=count).trace(), lambda rows: rows)
    assert analysis.verdict.status == ("failed" if count == 0 else "inconclusive")


def test_one_rank_of_many_is_not_called_healthy() -> None:
    analysis = changed(Job(ranks=4).trace(), lambda rows: rows[rows["rank"] == 2])
    assert analysis.ranks_captured == (2,)
    assert analysis.verdict.status == "inconclusive"
    assert "1 of 4 ranks" in analysis.verdict.headline
    assert "rank.straggler" in analysis.not_judged


def test_a_rank_that_stops_half_way() -> None:
    trace = Job(steps=60).trace()
    analysis = changed(trace, lambda rows: rows[(rows["rank"] == 0) | (rows["step"] < 30)])
    assert analysis.steps.loc[analysis.steps["ordinary"], "step"].max() == 29
    assert set(above_info(analysis)) <= {"comm.large-bucket"}


@pytest.mark.parametrize("jump_s", [-3.0, 3.0])
def test_a_clock_that_jumps_accuses_nobody(jump_s: float) -> None:
    def jump(rows: pd.DataFrame) -> pd.DataFrame:
        later = (rows["rank"] == 1) & (rows["step"] >= 20)
        rows.loc[later, "start_ns"] += int(jump_s * 1e9)
        rows.loc[later, "issue_ns"] += int(jump_s * 1e9)
        rows.loc[later, "arrival_ns"] += int(jump_s * 1e9)
        return rows

    analysis = changed(Job().trace(), jump)
    assert above_info(analysis) == []
    assert analysis.verdict.status != "healthy"
    expected = f"rank 1: its clock moves by {jump_s:+.1f} s against the others' in step 20"
    assert any(warning.startswith(expected) for warning in analysis.capture.warnings)
    assert "3.00 s apart" in analysis.verdict.headline


def test_collectives_in_another_order_on_two_ranks_are_named() -> None:
    def swap(rows: pd.DataFrame) -> pd.DataFrame:
        rows["name"] = rows["name"].astype(object)
        mine = (rows["kind"] == "comm") & (rows["rank"] == 1) & (rows["step"] == 12)
        rows.loc[mine, "name"] = np.where(rows.loc[mine, "seq"] % 2 == 0, "broadcast", "all_reduce")
        return rows

    analysis = changed(Job().trace(), swap)
    expected = "collective 24 of group 0 is not the same on all ranks: all_reduce on rank 0, broadcast on rank 1"
    assert expected in analysis.capture.warnings


def test_no_two_ranks_share_a_collective() -> None:
    def apart(rows: pd.DataFrame) -> pd.DataFrame:
        comm = rows["kind"] == "comm"
        rows["group"] = rows["group"].astype(object)
        rows.loc[comm, "group"] = "of " + rows.loc[comm, "rank"].astype(str)
        return rows

    changed(Job().trace(), apart)


def test_collectives_without_numbers_and_messages_without_partners() -> None:
    def poor(rows: pd.DataFrame) -> pd.DataFrame:
        comm = rows["kind"] == "comm"
        rows.loc[comm & (rows["step"] % 2 == 0), "seq"] = pd.NA
        rows.loc[comm & (rows["step"] % 2 == 1), "peer"] = 1
        return rows

    changed(Job().trace(), poor)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_rank_whose_steps_are_not_known_is_left_out(lost: int) -> None:
    job = Job(ranks=4, forward=lambda rank, step: 90 if rank == (lost + 1) % 4 else 40)
    analysis = changed(job.trace(), lambda rows: rows[(rows["rank"] != lost) | (rows["kind"] != "step")])
    assert lost not in set(analysis.steps["rank"])
    slow = next((finding for finding in analysis.findings if finding.code == "rank.straggler"), None)
    assert slow is not None, analysis.verdict
    assert slow.where.ranks == ((lost + 1) % 4,)
    assert slow.where.op == "forward"
    evidence = {item.metric: (item.value, item.expected) for item in slow.evidence}
    assert evidence["forward a step"] == (pytest.approx(90, abs=1), pytest.approx(40, abs=1))
