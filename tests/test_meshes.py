"""What is said of made-up jobs whose ranks form a mesh: each dimension is judged by itself."""

from __future__ import annotations

from typing import Any

import pytest
from meshes import Call, MeshJob, Phase, Program, Work

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.analyze import analyze

ROWS = {"r0": ((0, 1), ""), "r1": ((2, 3), "")}
COLUMNS = {"c0": ((0, 2), ""), "c1": ((1, 3), "")}
WORLD = {"w": ((0, 1, 2, 3), "")}


def row_of(rank: int) -> str:
    return f"r{rank // 2}"


def column_of(rank: int) -> str:
    return f"c{rank % 2}"


def above_info(analysis: Analysis) -> list[str]:
    return [finding.code for finding in analysis.findings if finding.severity != "info"]


# --- experts ------------------------------------------------------------------------------------


def experts(skew: float, slow: int | None = None) -> MeshJob:
    """2 x 2: tokens are exchanged in rows; of dense layers all average gradients, of experts those of a column do."""

    def program(rank: int, step: int) -> Program:
        share = 1 + skew if rank % 2 == 0 else 1 - skew
        slower = 1.5 if rank == slow else 1.0
        size = int(4096 * max(share, 1.0))

        def layer(ms: float) -> tuple[Any, ...]:
            exchange = Call(row_of(rank), "all_to_all", size)
            return Work(ms * slower), exchange, Work(ms * share * slower), exchange

        gradients = Call("w", "all_reduce", 65536, "gradient"), Call(column_of(rank), "all_reduce", 16384, "gradient")
        parts = Phase("forward", layer(10)), Phase("backward", layer(20)), *gradients, Phase("optimizer", (Work(1),))
        return (*parts, Work(0.2))

    return MeshJob(4, {**ROWS, **COLUMNS, **WORLD}, program)


@pytest.mark.parametrize("skew", [0.2, 0.5])
def test_unequal_shares_of_tokens_are_neither_a_slow_rank_nor_unequal_inputs(skew: float) -> None:
    analysis = analyze(experts(skew).trace())
    assert above_info(analysis) == []
    assert "rank.straggler" in analysis.passed
    assert "unequal shares of tokens (all_to_all in dimension ep" in analysis.not_judged["data.imbalance"]
    assert "bucket" not in analysis.verdict.headline


def test_a_slow_rank_among_equal_experts_is_named_with_its_coordinate() -> None:
    analysis = analyze(experts(0.0, slow=2).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (2,))
    assert first.where.coordinate == {"dp-of-2": 1, "ep": 0}
    assert first.title.startswith("rank 2 (dp-of-2 1 ep 0) arrives")
