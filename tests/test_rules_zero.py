"""Buckets of DeepSpeed's ZeRO 1 and 2: what would be one, and what a step would take; and in real jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_runs import JOBS, rows_of
from graphs import graph_of, steps_of
from jobs import Finished, profile

from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.step_graph import Task
from dsprof.analyzer.rules.comm.zero_buckets import GRADIENTS
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.merge import Merge, need_blocking, packed
from dsprof.analyzer.whatif.rebucket import NotRebucketed

GRADIENT = Task("1", "all_reduce gradient", gradient=True)
GATHER = Task("1", "all_gather parameter")
BLOCKING = "5 B 2 I0 0.1 W0 2 I1 0.1 W1 2 I2 0.1 W2 1 I3 0 W3 1"


def test_neighbours_are_packed_as_long_as_they_fit() -> None:
    steps = steps_of([BLOCKING] * 2, [1] * 4, [GRADIENT] * 3 + [GATHER], sizes=[100, 100, 40, 900])
    assert packed(steps, GRADIENTS, 0) == [[0], [1], [2]]
    assert packed(steps, GRADIENTS, 150) == [[0], [1, 2]]
    assert packed(steps, GRADIENTS, 200) == [[0, 1], [2]]
    assert packed(steps, GRADIENTS, 240) == [[0, 1, 2]]


def test_buckets_of_two_backwards_are_not_one() -> None:
    steps = steps_of(["B 2 I0 0 W0 2 I1 0 W1 B 2 I2 0 W2 1"], [1] * 3, [GRADIENT] * 3, sizes=[8, 8, 8])
    assert packed(steps, GRADIENTS, 1000) == [[0, 1], [2]]


def test_what_backward_waits_for_at_once_pays_its_latency_once() -> None:
    """Three reductions of 1 ms and 0.01 ms a byte: 240 bytes in one take 3.4 ms instead of 5.4."""
    steps = steps_of([BLOCKING] * 2, [1] * 4, [GRADIENT] * 3 + [GATHER], sizes=[100, 100, 40, 900])
    larger = Merge(GRADIENTS, Link(1.0, 0.01, True), most_bytes=240, blocking=True)
    (changed,) = apply(graph_of(steps), [larger]).templates
    assert len(changed.structure.tasks) == 2
    assert np.allclose(changed.transfer[0] + changed.wire[0], 3.4)


@pytest.mark.parametrize("program", ["B 2 I0 2 I1 0 W0 0 W1 1", "B 2 I0 0 W0 2 I1 1"])
def test_what_is_not_waited_for_at_once_is_not_tried(program: str) -> None:
    steps = steps_of([program], [1] * 2, [GRADIENT] * 2, sizes=[8, 8])
    with pytest.raises(NotRebucketed, match="backward goes on while a bucket is under way"):
        need_blocking(steps, GRADIENTS)


# --- real jobs ----------------------------------------------------------------------------------


def run(tmp_path: Path, stage: int, bucket: int, gathered: int = 0) -> Finished:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    tmp_path.mkdir()
    done = profile(
        tmp_path, JOBS / "deepspeed_buckets.py", str(stage), str(bucket), str(gathered), flags=("--no-report",)
    )
    assert done.status == 0, done.stderr
    return done


def of_comm(done: Finished) -> dict[str, dict[str, Any]]:
    return {item["code"]: item for item in done.findings["findings"] if item["code"].startswith("comm.")}


def reductions(done: Finished) -> int:
    """In a step."""
    rows = rows_of(done)
    return int(((rows["kind"] == "comm") & (rows["purpose"] == "gradient") & (rows["step"] == 10)).sum())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_small_buckets_of_deepspeed_are_found_and_the_key_mends_them(tmp_path: Path, stage: int) -> None:
    """24 layers, of which each is a bucket. What the fix names is what DeepSpeed then does."""
    small = run(tmp_path / "small", stage, 300)
    assert reductions(small) == 24
    found = of_comm(small)
    assert list(found) == ["comm.small-messages"]
    assert found["comm.small-messages"]["gain"]["ms"] > 0
    assert not {"comm.small-messages", "comm.exposed"} & small.findings["not_judged"].keys()
    (count, *_) = found["comm.small-messages"]["evidence"]
    assert (count["metric"], count["value"]) == ("gradient collectives a step", 24)
    (fix,) = found["comm.small-messages"]["fixes"]
    (change,) = fix["patch"]
    assert (fix["kind"], change["op"], change["path"]) == ("config", "add", "/zero_optimization/reduce_bucket_size")
    mended = run(tmp_path / "mended", stage, change["value"])
    assert reductions(mended) == count["expected"] < 24
    after = of_comm(mended).get("comm.small-messages")
    assert after is None or after["evidence"][0]["expected"] < count["expected"]


@pytest.mark.slow
def test_of_stage_3_the_keys_that_gather_and_reduce_more_at_a_time_are_named(tmp_path: Path) -> None:
    small = run(tmp_path / "small", 3, 300, 300)
    found = of_comm(small)
    assert list(found) == ["comm.small-messages"]
    (fix,) = found["comm.small-messages"]["fixes"]
    assert [item["path"].rpartition("/")[2] for item in fix["patch"]] == [
        "stage3_prefetch_bucket_size", "reduce_bucket_size",
    ]  # fmt: skip
    gathered, reduced = (item["value"] for item in fix["patch"])
    before = found["comm.small-messages"]["evidence"][0]
    mended = run(tmp_path / "mended", 3, reduced, gathered)
    assert reductions(mended) < reductions(small) == 24
    rows = rows_of(mended)
    shards = (rows["kind"] == "comm") & rows["purpose"].isin(["gradient", "parameter"]) & (rows["step"] == 10)
    assert int(shards.sum()) <= 1.5 * before["expected"] < before["value"]
