"""What `dsprof doctor` says of settings that are valid and slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsprof.cli import main
from dsprof.engine.config import load
from dsprof.slow_settings import slow_settings

EXAMPLE = Path(__file__).parents[1] / "examples" / "zero2.json"
FIVE_BAD_KEYS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "wall_clock_breakdown": True,
    "zero_optimization": {
        "stage": 3, "overlap_comm": False, "reduce_bucket_size": 20000, "stage3_prefetch_bucket_size": 10000,
        "stage3_max_live_parameters": 1000, "stage3_param_persistence_threshold": 10000,
    },
}  # fmt: skip


def said(zero: dict[str, Any], **top: Any) -> list[str]:
    config = load({"train_batch_size": 8, "zero_optimization": zero, **top})
    return [line.removeprefix("zero_optimization.") for line in slow_settings(config)]


def test_a_bucket_that_was_given_in_bytes_or_too_small() -> None:
    """Of two or four bytes an element."""
    assert said({"stage": 2, "reduce_bucket_size": 20000}) == [
        "reduce_bucket_size: gradients are reduced 20,000 elements at a time, which are 78.1 KiB; it counts elements, "
        "not bytes, and so small a message mostly waits for its latency; write 50,000,000, or remove it: the default "
        "is 500,000,000"
    ]
    (in_bf16,) = said({"stage": 1, "reduce_bucket_size": 20000}, bf16={"enabled": True})
    assert "which are 39.1 KiB" in in_bf16
    assert said({"stage": 2, "reduce_bucket_size": 65536}) == []
    assert said({"stage": 2, "reduce_bucket_size": 131071}, bf16={"enabled": True})
    assert said({"stage": 2, "reduce_bucket_size": 131072}, bf16={"enabled": True}) == []


def test_what_only_one_of_the_engines_goes_by_is_said_of_it() -> None:
    """DeepSpeed reduces at stage 0 what it chooses itself, never reads allgather_partitions, and all-reduces buckets of
    many ranks whatever reduce_scatter says."""
    for stage, key, value in ((0, "reduce_bucket_size", 20000), (1, "allgather_partitions", False)):
        (line,) = said({"stage": stage, key: value})
        assert " under dsprof's engine (DeepSpeed does not go by it); " in line
    assert "dsprof's engine" in said({"stage": 2, "reduce_scatter": False})[0]
    assert "dsprof's engine" not in said({"stage": 1, "reduce_bucket_size": 20000})[0]


def test_parameters_are_as_wide_as_they_are_trained() -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 100_000}
    (line,) = said(zero, bf16={"enabled": True}, communication_data_type="fp32")
    assert "100,000 elements at a time, which are 195 KiB" in line


@pytest.mark.parametrize(
    ("zero", "begins"),
    [
        ({"stage": 2, "allgather_bucket_size": 0}, "allgather_bucket_size: parameters are gathered after a step: one"),
        ({"stage": 3, "stage3_prefetch_bucket_size": 0}, "stage3_prefetch_bucket_size: parameters are gathered ahead"),
        ({"stage": 3, "stage3_max_live_parameters": 1000}, "stage3_max_live_parameters: 1,000 elements may be there"),
        ({"stage": 3, "overlap_comm": False}, "overlap_comm: false, so backward stands still"),
        ({"stage": 2, "reduce_scatter": False}, "reduce_scatter: false, so gradients are reduced by all-reduce"),
        ({"stage": 2, "allgather_partitions": False}, "allgather_partitions: false, so updated parameters come"),
        ({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}, "offload_param.pin_memory: false"),
    ],
)
def test_each_says_what_it_costs_and_what_to_write(zero: dict[str, Any], begins: str) -> None:
    (line,) = said(zero)
    assert line.startswith(begins)
    assert "; write " in line


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2},  # defaults are DeepSpeed's, and nobody's mistake
        {"stage": 3},
        {"stage": 2, "stage3_prefetch_bucket_size": 0},  # not of this stage
        {"stage": 3, "allgather_bucket_size": 10},
        {"stage": 0, "overlap_comm": False},
        {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": False}},
        {"stage": 3, "stage3_max_live_parameters": 5e7, "stage3_prefetch_bucket_size": 5e7},
    ],
)
def test_what_costs_nothing_is_passed_over(zero: dict[str, Any]) -> None:
    assert said(zero) == []


def test_timers_that_wait_for_the_device() -> None:
    assert [line.partition(":")[0] for line in said({}, wall_clock_breakdown=True, comms_logger={"enabled": True})] == [
        "wall_clock_breakdown",
        "comms_logger.enabled",
    ]


def test_the_bad_keys_of_a_file_are_named_and_mended_it_is_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FIVE_BAD_KEYS))
    assert main(["doctor", str(path), "--world-size", "8", "--json"]) == 0
    told = [line.partition(":")[0] for line in json.loads(capsys.readouterr().out)["warnings"]]
    bad = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "overlap_comm"]
    assert told[:5] == [*(f"zero_optimization.{key}" for key in bad), "wall_clock_breakdown"]

    zero = FIVE_BAD_KEYS["zero_optimization"] | {"overlap_comm": True, "reduce_bucket_size": 50_000_000}
    del zero["stage3_prefetch_bucket_size"], zero["stage3_max_live_parameters"]
    mended = load({**FIVE_BAD_KEYS, "wall_clock_breakdown": False, "zero_optimization": zero}, world_size=8)
    assert list(slow_settings(mended)) == []


def test_the_example_is_fine() -> None:
    assert list(slow_settings(load(EXAMPLE))) == []
