"""comm.redundant-reduce and comm.buffers: what is communicated for nothing, on made-up records."""

from __future__ import annotations

from typing import Any

import pytest
from findings import of
from synthetic import Accumulating, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.ask import ask
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned


def ddp(gradient_mib: int = 8, number: int = 1, **more: Any) -> list[dict[str, Any]]:
    """What both ranks state of their DistributedDataParallel."""
    fact = {"fact": "ddp", "number": number, "gradient_bytes": [gradient_mib << 20], "bucket_cap_mb": 25.0,
            "site": "train.py:12", **more}  # fmt: skip
    return [{**fact, "rank": rank} for rank in (0, 1)]


def accumulating(**changes: Any) -> Accumulating:
    """4 micro-batches of 10 and 20 ms, and 8.2 ms for the reduction after each; 5 ms for the optimizer."""
    usual = {"forward": constant(10), "backward": constant(20), "jitter": 0.002, "steps": 24, "facts": ddp()}
    return Accumulating(**{**usual, **changes})


@pytest.mark.plants("comm.redundant-reduce")
def test_gradients_reduced_in_each_micro_batch() -> None:
    analysis = analyze(accumulating().trace())
    first = analysis.findings[0]
    assert first.code == "comm.redundant-reduce"
    assert first.gain.ms == pytest.approx(3 * 8.2, rel=0.1)
    assert first.gain.low <= 3 * 8.2 <= first.gain.high
    assert first.fixes[0].title == (
        "`with model.no_sync():` around forward and backward of all micro-batches but the last of a step (train.py:12)"
    )
    assert dict(first.fixes[0].knobs) == {"ddp.accumulate": 4}
    assert {item.metric: item.value for item in first.evidence}["reduced for nothing a step"] == 24.0


@pytest.mark.parametrize(
    "changes",
    [
        {"reduces": lambda micro: micro == 3},  # as no_sync has it
        {"micro": 1},
        # Two models, each with a backward of its own: both have to be reduced.
        {"micro": 2, "facts": ddp() + ddp(number=2)},
        {"micro": 2, "grad_bytes": lambda micro: (8, 5)[micro] << 20, "facts": ddp() + ddp(5, number=2)},
        # Models of which nothing is known, with an optimizer each.
        {"micro": 2, "facts": [{"fact": "optimizer", "rank": rank, "number": n} for rank in (0, 1) for n in (1, 2)]},
    ],
)
def test_what_has_to_be_reduced(changes: dict[str, Any]) -> None:
    analysis = analyze(accumulating(**changes).trace())
    assert of(analysis, "comm.redundant-reduce") is None
    assert "comm.redundant-reduce" in analysis.passed


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        (ddp(framework="accelerate"), "Accelerator(gradient_accumulation_steps=4)"),
        (ddp(framework="lightning"), "Trainer(accumulate_grad_batches=4)"),
        ([{"fact": "fsdp", "rank": 0, "version": 2, "units": 4}], "model.set_requires_gradient_sync(False)"),
        (
            [{"fact": "config", "rank": 0, "dialect": "dsprof", "content": {"zero_optimization": {"stage": 2}}}],
            "zero_optimization.stage 1: stages 2 and 3 reduce in each micro-batch",
        ),
        (
            [{"fact": "optimizer", "rank": rank, "number": n, "of_engine": True} for rank in (0, 1) for n in (1, 2)],
            "reduce gradients in the last micro-batch of a step only",  # Muon steps an Adam within
        ),
        ([], "reduce gradients in the last micro-batch of a step only"),
    ],
)
def test_the_fix_is_in_the_words_of_the_job(facts: list[dict[str, Any]], title: str) -> None:
    found = of(analyze(accumulating(facts=facts).trace()), "comm.redundant-reduce")
    assert found is not None
    assert found.fixes[0].title.startswith(title)


@pytest.mark.plants("comm.buffers")
def test_buffers_before_each_forward() -> None:
    facts = ddp(broadcast_buffers=True, buffer_bytes=16 << 20, statistics=False)
    job = accumulating(micro=1, buffer_bytes=16 << 20, pack_ms=4.0, facts=facts)
    first = analyze(job.trace()).findings[0]
    assert first.code == "comm.buffers"
    assert first.gain.ms == pytest.approx(16.2 + 2 * 4.0, rel=0.1)  # the broadcast, packing and unpacking
    assert first.gain.low <= 24.2 <= first.gain.high
    assert first.fixes[0].title == "DistributedDataParallel(broadcast_buffers=False) (train.py:12)"
    assert dict(first.fixes[0].knobs) == {"ddp.broadcast_buffers": False}


def test_statistics_that_training_changes_are_named_with_the_fix() -> None:
    job = accumulating(micro=2, buffer_bytes=4 << 20, pack_ms=1.0, facts=ddp(statistics=True))
    found = of(analyze(job.trace()), "comm.buffers")
    assert found is not None
    assert found.gain.ms == pytest.approx(2 * (4.2 + 2 * 1.0), rel=0.1)
    assert "running statistics (BatchNorm) are then each rank's own" in found.fixes[0].title


def test_a_few_numbers_are_no_finding() -> None:
    analysis = analyze(accumulating(micro=1, buffer_bytes=64, facts=ddp(statistics=True)).trace())
    found = of(analysis, "comm.buffers")
    assert found is None


def test_turning_the_knob_saves_what_the_finding_says() -> None:
    job = accumulating(buffer_bytes=4 << 20, pack_ms=1.0, facts=ddp(statistics=False))
    analysis = analyze(job.trace())
    asked = [
        ("ddp.accumulate", 4),
        ("ddp.broadcast_buffers", False),
        ("ddp.accumulate", 3),
        ("ddp.broadcast_buffers", True),
    ]
    reduced, quiet, wrong, more = ask(study(job.trace()), [[turned(key, value, "RUN")] for key, value in asked]).rows
    for row, code in ((reduced, "comm.redundant-reduce"), (quiet, "comm.buffers")):
        found = of(analysis, code)
        assert found is not None
        assert row.gain is not None
        assert row.gain.ms == pytest.approx(found.gain.ms, rel=0.05)
    assert "the optimizer steps after 4 backwards that reduce" in wrong.reason
    assert "only told by a job that does it" in more.reason


def test_knobs_that_change_nothing_of_a_run_say_so() -> None:
    whole = study(accumulating(micro=1).trace())
    rows = ask(
        whole, [[turned(key, value, "RUN")] for key, value in (("ddp.accumulate", 2), ("ddp.broadcast_buffers", False))]
    ).rows
    assert [row.reason for row in rows] == [
        "no gradients are reduced more than once for one step of the optimizer", "no buffers are broadcast in this run",
    ]  # fmt: skip
