"""precision.fp8, on made-up jobs: which layers gain, by how much, and where nothing is said."""

from __future__ import annotations

from typing import Any, Final

import pytest
from device_rows import MS, joined
from made_up_device import DeviceJob

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.compute.float8 import covering
from dsprof.engine.precision.gain import layer_time, listed_rates
from dsprof.schema import COUNTED, FLOPS, LINEAR_FACT

H100: Final = "NVIDIA H100 80GB HBM3"
ROWS: Final = 8192

LARGE: Final = [[f"blocks.{number}.up", 8192, 28_672, "bfloat16"] for number in range(2)]
SMALL: Final = [["blocks.0.gate", 1024, 256, "bfloat16"], ["head", 8192, 50_257, "bfloat16"],
                ["router", 8192, 64, "float32"]]  # fmt: skip


def analyzed(
    layers: list[list[Any]], *more: dict[str, Any], device: str | None = H100, counted: bool = True
) -> Analysis:
    """A job of two ranks whose forward calls each layer once, with ROWS rows."""
    trace, _ = DeviceJob(steps=24, item_every=1).run()
    before, rows = trace.rows, []
    for rank in (0, 1):
        mine = before[before["rank"] == rank]
        forwards = mine[(mine["kind"] == "phase") & (mine["name"] == "forward")]
        for begin, length in zip(forwards["start_ns"], forwards["dur_ns"], strict=True):
            each = int(length) // (len(layers) + 1)
            rows += [
                {"rank": rank, "kind": "module", "name": layer[0], "lane": "main", "thread": 1,
                 "start_ns": int(begin) + place * each, "dur_ns": each // 2}
                for place, layer in enumerate(layers)
            ]  # fmt: skip
        steps = mine[mine["kind"] == "step"]
        begin, length = int(steps["start_ns"].iloc[6]), int(steps["dur_ns"].iloc[6])
        gauge = {"rank": rank, "kind": "gauge", "lane": "main", "thread": 0, "start_ns": begin, "dur_ns": length}
        rows += [{**gauge, "name": COUNTED, "value": 1.0}] if counted else []
        rows += [
            {**gauge, "name": f"{FLOPS}{dtype}", "module": name, "purpose": what, "value": factor * ROWS * k * n}
            for name, k, n, dtype in layers
            for what, factor in (("forward", 2.0), ("backward", 4.0)) if counted
        ]  # fmt: skip
    facts: list[dict[str, Any]] = [{"fact": LINEAR_FACT, "rank": rank, "layers": layers} for rank in (0, 1) if layers]
    whole = joined(trace, rows, [*facts, *more])
    for fact in whole.run.facts:
        if fact["fact"] == "device" and device is not None:
            fact["name"] = device
    return analyze(whole)


def of(analysis: Analysis) -> Finding | None:
    return next((one for one in analysis.findings if one.code == "precision.fp8"), None)


@pytest.mark.plants("precision.fp8")
def test_large_layers_in_bf16() -> None:
    found = of(analyzed([*LARGE, *SMALL]))
    assert found is not None
    rates = listed_rates(H100, "bfloat16")
    assert rates is not None
    least, expected, most = (2e3 * layer_time(ROWS, 8192, 28_672, one).saved for one in rates)
    assert found.gain.ms == pytest.approx(expected)
    assert found.gain.low <= least < expected
    assert found.gain.high == pytest.approx(most)
    assert found.gain.method == "shapes and data sheet"
    assert found.severity == "info"  # it costs precision, which is the user's to give
    assert found.title.startswith("2 linear layers of 3 would be faster in float8: ")
    evidence = {item.metric: item.value for item in found.evidence}
    assert evidence["blocks.0.up: rows, inputs, outputs"] == "8192 x 8192 x 28672"
    assert float(evidence["blocks.0.gate would lose, a step"]) > 0
    (fix,) = found.fixes
    assert fix.kind == "code"
    assert fix.patch[0]["value"] == ["blocks.*.up"]


def test_the_engines_configuration_is_given() -> None:
    found = of(analyzed(LARGE, {"fact": "config", "rank": 0, "dialect": "dsprof", "content": {}}))
    assert found is not None
    assert [dict(one) for one in found.fixes[0].patch] == [
        {"op": "add", "path": "/fp8", "value": {"enabled": True, "filter": ["blocks.*.up"]}}
    ]


@pytest.mark.parametrize("layers", [SMALL[:1], SMALL[1:]])
def test_layers_that_cannot_gain_pass(layers: list[list[Any]]) -> None:
    """Too small; of sizes that 16 does not divide, or in float32."""
    analysis = analyzed(layers)
    assert of(analysis) is None
    assert "precision.fp8" in analysis.passed


@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"])
def test_a_device_without_float8_is_not_concerned(device: str) -> None:
    analysis = analyzed(LARGE, device=device)
    assert of(analysis) is None
    assert "precision.fp8" not in {*analysis.passed, *analysis.not_judged}


@pytest.mark.parametrize(
    ("layers", "device", "counted", "says"),
    [
        (LARGE, None, True, "which devices the ranks have is not known: run with `dsprof run --level full`"),
        (LARGE, "Some GPU", True, "no data sheet is known of Some GPU, so what float8 gains there is not predicted"),
        ([], H100, True, "the sizes of linear layers are not known: run with `dsprof run --level full`"),
        (LARGE, H100, False, "the operations of linear layers were not counted: run with `dsprof run --level full`, "
         "for seven steps at least"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(layers: list[list[Any]], device: str | None, counted: bool, says: str) -> None:
    analysis = analyzed(layers, device=device, counted=counted)
    assert of(analysis) is None
    assert analysis.not_judged["precision.fp8"] == says


def test_a_step_that_is_not_like_the_others_is_not_judged() -> None:
    """Its layers would take longer than the step."""
    analysis = analyzed([[f"blocks.{number}.up", 8192, 28_672, "bfloat16"] for number in range(9)])
    assert "is not like the others" in analysis.not_judged["precision.fp8"]


@pytest.mark.parametrize(
    ("chosen", "every", "patterns"),
    [
        (["a.0.up", "a.1.up"], ["a.0.up", "a.1.up", "a.0.down"], ["a.*.up"]),
        (["a.0.up"], ["a.0.up", "a.1.up"], ["a.0.up"]),
        (["0", "head"], ["0", "head"], ["*", "head"]),
        (["layer1.up"], ["layer1.up", "layer2.up"], ["layer1.up"]),
    ],
)
def test_patterns_fit_those_that_are_meant_alone(chosen: list[str], every: list[str], patterns: list[str]) -> None:
    assert covering(chosen, every) == patterns


def test_the_step_is_long_enough_for_what_is_planted() -> None:
    """Else the tests above would be about a job that cannot be."""
    assert 60 * MS < DeviceJob(steps=24, item_every=1).run()[1] * MS < 200 * MS
