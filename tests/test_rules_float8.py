"""precision.fp8, on made-up jobs: which layers gain, by how much, and where nothing is said."""

from __future__ import annotations

from typing import Any, Final

import pytest
from device_rows import MS, joined
from made_up_device import DeviceJob

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.ask import ask
from dsprof.analyzer.finding import Finding, Gain
from dsprof.analyzer.rules.compute.float8 import covering
from dsprof.analyzer.study import study
from dsprof.engine.precision.gain import layer_time, listed_rates
from dsprof.fix import proposals
from dsprof.knobs import flags, parse_settings
from dsprof.knobs.predicted import turned
from dsprof.schema import COUNTED, FLOPS, LINEAR_FACT
from dsprof.trace import Trace

H100: Final = "NVIDIA H100 80GB HBM3"
ROWS: Final = 8192

LARGE: Final = [[f"blocks.{number}.up", 8192, 28_672, "bfloat16"] for number in range(2)]
SMALL: Final = [["blocks.0.gate", 1024, 256, "bfloat16"], ["head", 8192, 50_257, "bfloat16"],
                ["router", 8192, 64, "float32"]]  # fmt: skip


def analyzed(
    layers: list[list[Any]], *more: dict[str, Any], device: str | None = H100, counted: bool = True
) -> Analysis:
    return analyze(job(layers, *more, device=device, counted=counted))


def job(layers: list[list[Any]], *more: dict[str, Any], device: str | None = H100, counted: bool = True) -> Trace:
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
    return whole


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
    analysis = analyzed(LARGE, of_engine({"fp8": {"enabled": False, "skip": ["head"]}}))
    found = of(analysis)
    assert found is not None
    section = {"enabled": True, "skip": ["head"], "filter": ["blocks.*.up"]}
    assert [dict(one) for one in found.fixes[0].patch] == [{"op": "add", "path": "/fp8", "value": section}]
    (one,) = (one for one in proposals(analysis.to_dict()) if one.code == "precision.fp8")
    assert one.knobs == {"fp8": section}
    (_, word) = flags(one.knobs.items())
    assert parse_settings([word]) == {"fp8": section}  # as it is typed


def of_engine(content: Any) -> dict[str, Any]:
    return {"fact": "config", "rank": 0, "dialect": "dsprof", "path": "ds.json", "content": content}


def test_a_configuration_that_was_not_kept_is_not_patched() -> None:
    found = of(analyzed(LARGE, of_engine(None)))
    assert found is not None
    assert [(fix.kind, fix.patch, fix.knobs) for fix in found.fixes] == [("config", (), ())]


def test_an_engine_that_computes_in_float8_is_not_told_to() -> None:
    analysis = analyzed(LARGE, of_engine({"fp8": {"enabled": True}}))
    assert of(analysis) is None
    assert "precision.fp8" not in {*analysis.passed, *analysis.not_judged}


# --- asked about


def answered(trace: Trace, key: str, value: Any) -> Gain | str:
    (row,) = ask(study(trace), [[turned(key, value, "RUN")]]).rows
    return row.reason if row.gain is None else row.gain


def test_what_float8_would_save_can_be_asked() -> None:
    """As long as the device leads, all that its layers save."""
    trace = job([*LARGE, *SMALL], of_engine({}))
    rates = listed_rates(H100, "bfloat16")
    assert rates is not None
    least, expected, most = (2e3 * layer_time(ROWS, 8192, 28_672, one).saved for one in rates)
    found = answered(trace, "fp8.enabled", True)
    assert isinstance(found, Gain), found
    assert found.ms == pytest.approx(expected, rel=0.02)
    assert found.low <= least * 1.02
    assert found.high >= most * 0.98
    one = answered(trace, "fp8", {"enabled": True, "filter": ["blocks.0.*"]})
    assert isinstance(one, Gain)
    assert one.ms == pytest.approx(expected / 2, rel=0.02)
    none = answered(trace, "fp8", {"enabled": True, "skip": ["blocks.*.up"]})
    assert isinstance(none, Gain)
    assert none.ms == pytest.approx(0, abs=1e-6)
    loses = answered(trace, "fp8", {"enabled": True, "filter": "all", "skip": ["blocks.*.up"]})
    assert isinstance(loses, Gain)
    assert loses.ms < 0  # a small layer


@pytest.mark.parametrize(
    ("layers", "content", "device", "value", "says"),
    [
        (LARGE, None, H100, True, "no configuration of dsprof's engine"),
        (LARGE, {}, H100, False, "float8 off"),
        (LARGE, {"fp8": {"enabled": True}}, H100, False, "which does not tell what they take without"),
        (LARGE, {}, "NVIDIA A100-SXM4-80GB", True, "not predicted: NVIDIA A100-SXM4-80GB has no float8"),
        ([], {}, H100, True, "the sizes of linear layers are not known"),
    ],
)
def test_what_is_not_told_is_said(layers: list[list[Any]], content: Any, device: str, value: bool, says: str) -> None:
    assert says in str(answered(job(layers, of_engine(content), device=device), "fp8.enabled", value))


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
