"""What `--set bf16.check_grad_overflow=...` says of runs of both engines, on a CPU and on devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from made_up_device import DeviceJob, always
from synthetic import Job

from dsprof.analyzer.ask import Answered, ask
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

KEY, SITE = "bf16.check_grad_overflow", "/engine/optimizer_step.py:105"
BF16 = {"bf16": {"enabled": True}}


def configured(trace: Trace, content: dict[str, Any], dialect: str = "dsprof") -> Trace:
    fact = {"fact": "config", "rank": 0, "dialect": dialect, "path": None, "content": content}
    return Trace.of(replace(trace.run, facts=[*trace.run.facts, fact]), trace.rows)


def asked(trace: Trace, value: bool = False, **beside: Any) -> Answered:
    knobs = {KEY: value, **{key.replace("__", "."): one for key, one in beside.items()}}
    return ask(study(trace), [[turned(key, one, "RUN") for key, one in knobs.items()]]).rows[0]


def on_cpu(content: dict[str, Any], dialect: str = "dsprof") -> Trace:
    return configured(Job(steps=24).trace(), content, dialect)


def test_on_a_cpu_the_engine_works_out_the_norm_all_the_same() -> None:
    row = asked(on_cpu(BF16))
    assert row.gain is not None
    assert row.gain.ms == pytest.approx(0, abs=1e-9)
    assert row.gain.low < 0 < row.gain.high
    assert row.notes == ("the norm is worked out, reduced and read by the host all the same",)
    on = asked(on_cpu({"bf16": {"enabled": True, "check_grad_overflow": False}}), True)
    assert on.gain is not None
    assert on.gain.ms == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("content", "value", "why"),
    [
        ({}, False, "without bf16.enabled the key has no effect"),
        ({"fp16": {"enabled": True}}, False, "without bf16.enabled the key has no effect"),
        (BF16, True, "it is true in this run"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False, "it is false in this run"),
    ],
)
def test_where_it_changes_nothing_that_is_said(content: dict[str, Any], value: bool, why: str) -> None:
    row = asked(on_cpu(content), value)
    assert (row.gain, row.reason) == (None, why)


def test_what_a_run_cannot_tell() -> None:
    assert "is not told apart from the rest of its step" in asked(on_cpu(BF16, "deepspeed")).reason
    assert asked(Job(steps=24).trace()).reason == "no configuration of an engine was seen in this run"
    both = asked(on_cpu({"fp16": {"enabled": True}}), bf16__enabled=True)
    assert "is only told by a job that runs in it" in both.reason


# --- on a device


def waiting(host_ms: float, *, elsewhere: bool = False) -> tuple[Trace, float]:
    """A host that waits for its device in the engine's step, and then is busy for so long; and what a step
    takes."""
    trace, step_ms = DeviceJob(ranks=1, buckets=1, item_every=1, load=always(host_ms)).run()
    rows = trace.rows.astype({"site": object})
    marks = rows["kind"] == "mark"
    rows.loc[marks, "site"] = SITE
    rows.loc[marks, "step"] -= 1
    for step in rows["step"][marks]:  # it waits in the phase of the optimizer
        phase = (rows["kind"] == "phase") & (rows["name"] == "optimizer") & (rows["step"] == step)
        mark = rows.loc[marks & (rows["step"] == step)].iloc[0]
        rows.loc[phase, "dur_ns"] = int(mark["start_ns"] + mark["dur_ns"] - rows.loc[phase, "start_ns"].iloc[0]) + 1
    for_writes = rows[marks].assign(purpose="Event.synchronize", dur_ns=1)
    other = rows[marks].assign(site="/me/train.py:9", dur_ns=2, start_ns=rows.loc[marks, "start_ns"] - 1)
    for_writes["start_ns"] += 2
    more = [rows, for_writes, *([other] if elsewhere else [])]
    whole = pd.concat([one.astype(object) for one in more], ignore_index=True)
    whole = whole.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True).astype(COLUMNS)
    return configured(Trace.of(trace.run, whole), BF16), step_ms


@pytest.mark.parametrize("host_ms", [0.5, 12.0])
def test_a_host_that_waits_for_the_norm_alone_could_be_ahead(host_ms: float) -> None:
    trace, step_ms = waiting(host_ms)
    _, without = DeviceJob(ranks=1, buckets=1, item_every=1000, load=always(host_ms)).run()
    row = asked(trace)
    assert row.gain is not None, row.reason
    assert row.gain.ms == pytest.approx(step_ms - without, rel=0.07, abs=0.3)  # the last step has no next one
    assert row.gain.low <= step_ms - without <= row.gain.high
    assert row.notes == ("steps whose gradients are not finite are taken",)


def test_where_it_waits_elsewhere_too_that_is_not_known() -> None:
    trace, _ = waiting(12.0, elsewhere=True)
    assert "the host also waits for the device at item at train.py:9" in asked(trace).reason


def test_without_such_a_wait_or_with_the_optimizer_on_the_host() -> None:
    plain = DeviceJob(ranks=1, item_every=1000).run()[0]
    assert "was not seen in this run" in asked(configured(plain, BF16)).reason
    off = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    assert "only told by a job in which it does" in asked(configured(plain, off), True).reason
    offloaded = {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    row = asked(configured(plain, offloaded))
    assert row.gain is not None
    assert row.gain.ms == 0
