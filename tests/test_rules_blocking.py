"""comm.blocking: what the loop itself communicates in each step, on made-up jobs."""

from __future__ import annotations

from typing import Any

import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Work

from dsprof.analyzer import analyze

LINE = "/home/me/train.py:40"
METRIC, BARRIER = Call("w", "all_reduce", 4), Call("w", "barrier", 0)


def job(
    *,
    after_optimizer: tuple[Any, ...] = (),
    after_data: tuple[Any, ...] = (),
    in_forward: tuple[Any, ...] = (),
    after_forward: tuple[Any, ...] = (),
    after_backward: tuple[Any, ...] = (),
    loader: bool = True,
    every: int = 1,
    gradients: int = 1 << 20,
    lines: dict[tuple[str, int], str] | None = None,
    latency_ms: float = 3.0,
) -> MeshJob:
    """Two ranks in turn 4 ms late, so that a barrier costs what it makes them wait twice."""

    def program(rank: int, step: int) -> Program:
        late = 4.0 * ((step + rank) % 2)
        return (
            *((Phase("data", (Work(1),)), Work(0.1), *after_data) if loader else after_data),
            Phase("forward", (Work(20 + late), *in_forward)),
            *((Work(0.1), *after_forward) if after_forward else ()),
            Phase("backward", (Work(30), Call("w", "all_reduce", gradients, "gradient"))),
            *((Work(0.1), *after_backward) if after_backward else ()),
            Phase("optimizer", (Work(2 + 4.0 - late),)),
            Work(0.2),
            *(after_optimizer if step % every == 0 else ()),
        )

    return MeshJob(2, {"w": ((0, 1), "")}, program, steps=40, latency_ms=latency_ms, lines=lines or {})


@pytest.mark.plants("comm.blocking")
def test_numbers_for_a_log_in_each_step() -> None:
    planted = job(after_optimizer=(METRIC, METRIC), lines={("all_reduce", 4): LINE})
    first = analyze(planted.trace()).findings[0]
    assert first.code == "comm.blocking"
    assert first.title.startswith("2 all_reduces in each step (train.py:40) are waited for at once: ")
    assert first.fixes[0].title == (
        "all_reduce (train.py:40): packed in one tensor, every 50 steps if it is only logged, or with async_op=True "
        "and waited for where the number is read"
    )
    assert first.fixes[0].patch == ({"file": "/home/me/train.py", "line": 40, "argument": "async_op", "value": True},)
    true = planted.step_ms() - job().step_ms()
    assert true > 5
    assert first.gain.ms == pytest.approx(true, rel=0.1)
    assert first.gain.low <= true <= first.gain.high


def test_a_barrier_in_each_step() -> None:
    planted = job(after_backward=(BARRIER,), lines={("barrier", 0): LINE}, gradients=1 << 10)
    first = analyze(planted.trace()).findings[0]
    assert (first.code, first.where.op) == ("comm.blocking", "barrier")
    assert first.fixes[0].title.startswith(
        "leave out the barrier (train.py:40): the collectives of the next step wait for late ranks all the same"
    )
    true = planted.step_ms() - job(gradients=1 << 10).step_ms()
    assert first.gain.low <= true <= first.gain.high


@pytest.mark.parametrize(
    "where", [{"after_forward": (METRIC,)}, {"after_optimizer": (METRIC,), "loader": False}], ids=["loss", "no loader"]
)
def test_what_may_be_needed_for_what_is_computed_next_is_no_more_than_a_remark(where: dict[str, Any]) -> None:
    found = of(analyze(job(**where).trace()), "comm.blocking")
    assert found is not None
    assert found.severity == "info"
    assert found.gain.low <= 0
    assert "needless if what it tells is only logged" in found.title


@pytest.mark.parametrize(
    "planted",
    [
        job(),
        job(after_data=(METRIC,)),  # how many words the batch has on all ranks
        job(in_forward=(METRIC,)),  # statistics of a batch
        job(after_backward=(Call("w", "all_reduce", 8),)),  # whether some rank overflowed
        job(after_optimizer=(METRIC,), every=20),
        job(after_optimizer=(Call("w", "broadcast", 4096),) * 4, gradients=8192),  # parameters that a script sends
        job(after_optimizer=(METRIC,), lines={("all_reduce", 4): "/usr/lib/python3/site-packages/trainer/loop.py:9"}),
        job(after_optimizer=(METRIC,), in_forward=(METRIC,)),  # which of them is which is not known
    ],
    ids=["nothing", "words", "statistics", "overflow", "seldom", "parameters", "framework", "two alike"],
)
def test_what_is_needed_or_is_not_the_scripts(planted: MeshJob) -> None:
    assert of(analyze(planted.trace()), "comm.blocking") is None
