"""precision.overflow: steps that are skipped in fp16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from armed import both, captured, train
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.schema import COLUMNS, Kind
from dsprof.trace import Trace, concat_rows

Chosen = Callable[[int], bool]
STEPS = 120


def scaled(skips: Chosen, more: int = 0, **changes: Any) -> Job:
    """A loop with a GradScaler: what it skips is a part of the next step, which has a forward and backward more."""
    fact = {"fact": "grad_scaler", "enabled": True, "growth_interval": 2000, "seen": True, "site": "/me/train.py:40",
            "framework": None, **changes}  # fmt: skip
    return Job(
        steps=STEPS, data=constant(0.0), forward=lambda rank, step: 80.0 if skips(step) else 40.0,
        backward=lambda rank, step: 120.0 if skips(step) else 60.0, buckets=(1 << 10,), latency_ms=0.05,
        facts=[{**fact, "rank": rank} for rank in (0, 1)],
    )  # fmt: skip


def with_marks(job: Job, skips: Chosen, *, twice: bool, scale: float = 1024.0) -> Trace:
    """twice: the backward of such a step is two."""
    trace = job.trace()
    rows = trace.rows
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward")]
    hit = backward["step"].map(lambda step: skips(int(step))).astype(bool)
    marks = backward[hit].assign(
        kind="mark", name="overflow", value=scale, dur_ns=0, start_ns=backward["start_ns"] + backward["dur_ns"] // 2
    )
    added = [marks]
    if twice:
        half = backward["dur_ns"][hit] // 2
        second = backward[hit].assign(dur_ns=half, start_ns=backward["start_ns"][hit] + half)
        rows = rows.copy()
        rows.loc[half.index, "dur_ns"] = half - 1
        added.append(second)
    joined = concat_rows([rows, *(one.astype(COLUMNS) for one in added)])
    ordered = joined.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True)
    return Trace.of(trace.run, pd.DataFrame(ordered))


def of(analysis: Analysis) -> Finding | None:
    return next((finding for finding in analysis.findings if finding.code == "precision.overflow"), None)


def each(number: int) -> Chosen:
    return lambda step: step % number == number - 1


def now_and_then(step: int) -> bool:
    return step * 7919 % 101 < 18  # 22 of 120, at no regular distance


@pytest.mark.plants("precision.overflow")
def test_steps_that_a_scaler_skips_again_and_again() -> None:
    trace = with_marks(scaled(now_and_then), now_and_then, twice=True)
    first = analyze(trace).findings[0]
    assert first.code == "precision.overflow"
    judged = range(30, STEPS)  # after warm-up
    skipped = sum(map(now_and_then, judged))
    assert first.title.startswith(f"{100 * skipped / (len(judged) + skipped):.0f} % of the steps are skipped")
    expected = skipped * (210 / 2) / len(judged)  # half of each longer step
    assert first.gain.ms == pytest.approx(expected, rel=0.05)
    assert first.fixes[0].title.startswith("torch.autocast(..., dtype=torch.bfloat16) without a GradScaler")
    assert (first.fixes[0].patch[0]["file"], first.fixes[0].patch[0]["line"]) == ("/me/train.py", 40)


def test_a_scale_that_is_raised_too_often() -> None:
    job = scaled(each(10), growth_interval=8)
    first = analyze(with_marks(job, each(10), twice=True)).findings[0]
    assert first.code == "precision.overflow"
    assert "one about every 10 steps, whenever the scale of the loss was raised" in first.title
    assert first.fixes[0].title.startswith("GradScaler(growth_interval=2000), not 8")
    assert (first.fixes[0].patch[0]["file"], first.fixes[0].patch[0]["line"]) == ("/me/train.py", 40)


def test_what_overflows_sooner_than_the_scale_is_raised_has_another_reason() -> None:
    """Such as the same bad batch in each epoch: the scale would be raised after 500 steps only."""
    job = scaled(each(10), growth_interval=500)
    first = analyze(with_marks(job, each(10), twice=True)).findings[0]
    assert first.code == "precision.overflow"
    assert "was raised" not in first.title
    assert not any("growth_interval" in fix.title for fix in first.fixes)


@pytest.mark.parametrize("fp16", [{"loss_scale": 128}, {"loss_scale_window": "auto"}])
def test_a_window_that_is_not_heeded_or_not_known_is_no_fix(fp16: dict[str, Any]) -> None:
    fact = {"fact": "config", "rank": 0, "dialect": "deepspeed", "path": "/ds.json", "site": None, "framework": None,
            "content": {"fp16": {"enabled": True, **fp16}}}  # fmt: skip
    job = Job(steps=STEPS, data=constant(0.0), buckets=(1 << 10,), latency_ms=0.05, facts=[fact])
    first = analyze(with_marks(job, each(10), twice=False)).findings[0]
    assert first.code == "precision.overflow"
    assert first.fixes[0].title.startswith("bf16.enabled: true")


def test_deepspeed_is_told_its_own_keys() -> None:
    """There a skipped step ends as any other does, and all of it is lost."""
    content = {"fp16": {"enabled": True, "loss_scale_window": 2000}, "zero_optimization": {"stage": 1}}
    facts = [{"fact": "config", "rank": 0, "dialect": "deepspeed", "path": "/ds.json", "site": None, "framework": None,
              "content": content}]  # fmt: skip
    job = Job(steps=STEPS, data=constant(0.0), buckets=(1 << 10,), latency_ms=0.05, facts=facts)
    first = analyze(with_marks(job, now_and_then, twice=False)).findings[0]
    assert first.code == "precision.overflow"
    skipped = sum(map(now_and_then, range(30, STEPS)))
    assert first.title.startswith(f"{100 * skipped / 90:.0f} % of the steps are skipped")
    assert first.gain.percent == pytest.approx(100 * skipped / 90, rel=0.05)
    assert first.fixes[0].patch == (
        {"op": "replace", "path": "/fp16/enabled", "value": False},
        {"op": "add", "path": "/bf16", "value": {"enabled": True}},
    )


def test_an_overflow_when_training_begins_or_once_is_by_design() -> None:
    early = lambda step: step < 8 or step == 60  # noqa: E731
    analysis = analyze(with_marks(scaled(early), early, twice=True))
    assert of(analysis) is None
    assert "precision.overflow" in analysis.passed
    assert [finding.code for finding in analysis.findings if finding.is_problem] == []


def test_a_fused_optimizer_looks_at_overflows_on_its_device() -> None:
    analysis = analyze(scaled(lambda step: False, seen=False).trace())
    assert "fused" in analysis.not_judged["precision.overflow"]


def test_a_job_without_a_scale_is_not_concerned() -> None:
    analysis = analyze(Job(steps=40).trace())
    assert "precision.overflow" not in {*analysis.passed, *analysis.not_judged}


@both
def test_what_a_scaler_skips_is_marked(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * (float("inf") if step in (3, 5) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        print(float(scaler.get_scale()))
        """,
        native=native,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["16.0"])
    run = captured(tmp_path)
    marks = [row.value for row in run.rows if row.kind is Kind.MARK and row.name == "overflow"]
    assert marks == [64.0, 32.0]
    assert run.of("grad_scaler") == [
        {"enabled": True, "growth_interval": 100, "seen": True, "site": f"{tmp_path}/train.py:9", "framework": None}
    ]


@both
def test_a_scaler_that_is_switched_off_is_no_error(native: str, tmp_path: Path) -> None:
    """As scripts have it that can train in fp16 and in bf16: it has no scale, and skips nothing."""
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        native=native,
    )
    assert done.returncode == 0
    run = captured(tmp_path)
    assert [row for row in run.rows if row.kind is Kind.MARK and row.name == "overflow"] == []
    assert run.of("grad_scaler") == [
        {"enabled": False, "growth_interval": None, "seen": True, "site": f"{tmp_path}/train.py:9", "framework": None}
    ]
