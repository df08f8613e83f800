"""What larger buckets hold: dsprof's engine closes one once it has reached its size, DeepSpeed before it exceeds that.
Recorded bytes of the engine's have flags beside the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import steps_of
from meshes import Call, MeshJob, Phase, Program, Work
from test_zero_knobs import ELEMENTS, GATHER_MS, REDUCED, asked, config, job, reason, saved

from dsprof.analyzer.ask import ask
from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.step_graph import Task
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif.merge import Merge, packed
from dsprof.analyzer.whatif.select import Communications
from dsprof.knobs.predicted import turned

OF = Communications(purposes=("gradient",))
FLAGS = 16
"""Bytes: a flag of a parameter and one of the bucket, of two ranks."""


@pytest.mark.parametrize(
    ("most", "reached", "together"),
    [(2500, True, [3, 2]), (2500, False, [2, 2, 1]), (2000, True, [2, 2, 1]), (2010, False, [2, 2, 1]),
     (2000, False, [1] * 5), (0, True, [1] * 5), (0, False, [1] * 5)],
)  # fmt: skip
def test_layers_of_1000_elements_and_two_flags(most: float, reached: bool, together: list[int]) -> None:
    steps = steps_of(
        ["B I0 W0 1 I1 W1 1 I2 W2 1 I3 W3 1 I4 W4 1"], [1.0] * 5, [Task("0", "all_reduce gradient", gradient=True)] * 5,
        sizes=[1002.0] * 5,
    )  # fmt: skip
    assert [len(pack) for pack in packed(steps, OF, most, reached)] == together


def test_as_they_are_divides_nothing() -> None:
    assert not Merge(OF, Link(1.0, 0.01, True), most_bytes=0.0).divides
    assert Merge(OF, Link(1.0, 0.01, True), most_bytes=1.0).divides


def of_engine(stage: int, **zero: Any) -> list[dict[str, Any]]:
    return config("dsprof", stage, overlap_comm=False, **zero)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_of_exactly_two_layers(stage: int) -> None:
    """A latency of 6 ms less."""
    facts = of_engine(stage, reduce_bucket_size=ELEMENTS, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    made = job(facts, gathers=stage == 3, latency_ms=6.0, ms_per_mib=0.1, reduced=(4 * ELEMENTS + FLAGS,) * 2)
    (one,) = saved(made, REDUCED, 2 * ELEMENTS)
    assert one == pytest.approx(6.0, rel=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_reaches_beyond_its_size(stage: int) -> None:
    """Each layer is eight times what a bucket is to hold: alone in it, whether that is twice as large or not."""
    facts = of_engine(stage, reduce_bucket_size=ELEMENTS, stage3_prefetch_bucket_size=0)
    made = job(facts, gathers=stage == 3, reduced=(32 * ELEMENTS + FLAGS,) * 2)
    same, larger = saved(made, REDUCED, ELEMENTS, 2 * ELEMENTS)
    assert same == 0
    assert abs(larger) < 0.05 * GATHER_MS
    assert f"the run's buckets hold {ELEMENTS:,} elements" in reason(made, REDUCED, ELEMENTS // 2)


def test_scatters_are_counted_of_one_rank() -> None:
    """Two pairs of ranks: each rank scatters 8 times a step, in one of two groups."""

    def program(rank: int, step: int) -> Program:
        group = f"w{rank // 2}"
        gathers = tuple(Call(group, "all_gather", 8192, "parameter") for _ in range(2))
        scatters = tuple(Call(group, "reduce_scatter", 4096, "gradient") for _ in range(8))
        parts = [part for each in scatters for part in (Work(3.0), each)]
        return (
            Phase("forward", (gathers[0], Work(10.0))),
            Phase("backward", (gathers[1], *parts)),
            Phase("optimizer", (Work(1.0),)),
        )

    facts = [
        {**fact, "rank": rank} for rank in range(4) for fact in of_engine(3, reduce_bucket_size=1024)[:1]
    ]  # fmt: skip
    made = MeshJob(4, {"w0": ((0, 1), ""), "w1": ((2, 3), "")}, program, latency_ms=2.0, facts=facts)
    (row,) = ask(study(made.trace()), [[turned(REDUCED, 2048, "RUN")]]).rows
    assert row.gain is not None, row.reason
    assert row.notes == ("4 scatters a step instead of 8",)


def test_gathers_are_counted_of_one_rank() -> None:
    facts = config("dsprof", stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    made = replace(job(facts), micro=1)
    (row,) = asked(made, "zero_optimization.stage3_prefetch_bucket_size", ELEMENTS)
    assert row.notes[0].startswith("7 gathers a step instead of 8")
