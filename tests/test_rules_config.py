"""config.invalid: keys of a run's configuration that do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.reports.edits import changes

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def running(content: dict[str, Any] | None, dialect: str = "deepspeed") -> Analysis:
    facts = [
        {"fact": "config", "rank": rank, "dialect": dialect, "path": "/me/ds.json", "site": "/me/train.py:9",
         "framework": None, "content": content}
        for rank in (0, 1)
    ]  # fmt: skip
    job = Job(steps=40, data=constant(0.0), buckets=(1 << 10,), latency_ms=0.05, facts=facts)
    return analyze(job.trace())


def of(analysis: Analysis) -> Finding | None:
    return next((finding for finding in analysis.findings if finding.code == "config.invalid"), None)


@pytest.mark.plants("config.invalid")
@pytest.mark.parametrize(
    ("more", "title", "patch"),
    [
        (
            {"overlap_comm": True},
            "overlap_comm of ds.json does nothing: it belongs into zero_optimization, and is passed over where it is",
            {"op": "move", "from": "/overlap_comm", "path": "/zero_optimization/overlap_comm"},
        ),
        (
            {"gradient_cliping": 1.0},
            "gradient_cliping of ds.json does nothing: there is no such key; did you mean gradient_clipping?",
            {"op": "move", "from": "/gradient_cliping", "path": "/gradient_clipping"},
        ),
        (
            {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 1e7}},
            "zero_optimization.stage3_prefetch_bucket_size of ds.json does nothing: the stage is 2, and it takes "
            '"stage": 3',
            {"op": "remove", "path": "/zero_optimization/stage3_prefetch_bucket_size"},
        ),
    ],
)
def test_a_key_that_does_nothing(more: dict[str, Any], title: str, patch: dict[str, Any]) -> None:
    analysis = running({**GOOD, "zero_optimization": {"stage": 2}, **more})
    first = analysis.findings[0]
    assert (first.code, first.title, first.severity) == ("config.invalid", title, "info")
    assert first.fixes[0].patch == (patch,)
    assert analysis.verdict.status == "healthy"  # what a key would do is not known


def test_one_finding_tells_of_all_of_them() -> None:
    content = {**GOOD, "zero_optimization": {"stage": 2}, "overlap_comm": True, "gradient_cliping": 1.0}
    found = of(running(content))
    assert found is not None
    assert found.title.endswith(", and 1 other key like it")
    assert len(found.fixes) == 2


def test_a_key_is_not_moved_onto_one_that_is_heeded() -> None:
    """The section has it as well: to move the other there would overwrite what the job runs with."""
    found = of(running({**GOOD, "overlap_comm": False}))
    assert found is not None
    assert found.title.endswith("; zero_optimization.overlap_comm is given too")
    assert [fix.patch for fix in found.fixes] == [({"op": "remove", "path": "/overlap_comm"},)]
    assert [fix.title for fix in found.fixes] == ["remove overlap_comm"]


def test_a_section_that_is_not_there_is_made_once() -> None:
    content = {"train_micro_batch_size_per_gpu": 4, "overlap_comm": True, "reduce_bucket_size": 5e7}
    found = of(running(content))
    assert found is not None
    assert [fix.patch for fix in found.fixes] == [
        (
            {"op": "add", "path": "/zero_optimization", "value": {}},
            {"op": "move", "from": "/overlap_comm", "path": "/zero_optimization/overlap_comm"},
        ),
        ({"op": "move", "from": "/reduce_bucket_size", "path": "/zero_optimization/reduce_bucket_size"},),
    ]
    assert [str(edit) for fix in found.fixes for edit in changes(fix)] == [
        "zero_optimization = {}",
        "rename overlap_comm to zero_optimization.overlap_comm",
        "rename reduce_bucket_size to zero_optimization.reduce_bucket_size",
    ]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": "fp32"},  # which is like one that is there
        {"fp16": {"enabled": "auto", "loss_scale_window": 1000, "initial_scale_power": 16}},
        {"something_of_a_newer_version": {"enabled": True}},
        {"train_batch_size": "auto", "gradient_clipping": "auto"},  # as Transformers fills in
        {"wall_clock_breakdown": False, "steps_per_print": 10, "prescale_gradients": False},
        {"amp": {"enabled": True}, "elasticity": {"enabled": False}},  # DeepSpeed's, which the engine has not
        {
            "comms_logger": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2e8, "contiguous_gradients": True}},
        {"optimizer": {"type": "MyOwn", "params": {"lr": 1, "my_argument": 2}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "bf16": {"enabled": "auto"}},
    ],
)
def test_what_deepspeed_takes_is_no_finding(more: dict[str, Any]) -> None:
    assert of(running({**GOOD, **more})) is None


def test_a_configuration_that_was_not_captured_is_not_judged() -> None:
    assert "too long" in running(None).not_judged["config.invalid"]


def test_a_job_without_one_is_not_concerned() -> None:
    analysis = analyze(Job(steps=40).trace())
    assert "config.invalid" not in {*analysis.passed, *analysis.not_judged}
