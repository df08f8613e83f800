"""What-ifs of the number formats in which parameters and gradients travel, where the two are not in the same one.

Four units of 8 MiB over two hosts: 8 gathers of 8 ms and 4 scatters of 8 ms in a step, around 24 ms of computation.
Half of the bytes of gathers saves 35 ms, of scatters 10 ms: what is left is hidden beside more, or less, of that.
"""

from __future__ import annotations

from typing import Any

import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Work
from synthetic import Job
from test_rules_volume import on_hosts, shards

from dsprof.analyzer import analyze
from dsprof.analyzer.ask import Answered, ask
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.trace import Trace

PARAM, REDUCE = "fsdp2.param_dtype", "fsdp2.reduce_dtype"
GATHERS_MS, SCATTERS_MS = 35.4, 10.2
CAST_MS = 4 * 8 * 2**20 * 6e-7
"""20 ms: of 32 MiB of gradients that a CPU turns into another format."""


def run(parameters: str = "float32", gradients: str = "float32", facts: list[dict[str, Any]] | None = None) -> Trace:
    """A run whose shards are gathered, and whose gradients are scattered, in these formats. facts: in the place of what
    FSDP2 states."""
    job = shards(2)
    job.facts = job.facts if facts is None else facts
    trace = on_hosts(job.trace(), "a", "b")
    rows = trace.rows.astype({"dtype": object})
    for purpose, dtype in (("parameter", parameters), ("gradient", gradients)):
        rows.loc[(rows["kind"] == "comm") & (rows["purpose"] == purpose), "dtype"] = dtype
    return Trace.of(trace.run, rows.astype({"dtype": "category"}))


def of_fsdp2(**told: Any) -> list[dict[str, Any]]:
    fact = {"fact": "fsdp", "version": 2, "units": 4, "site": "train.py:30", **told}
    return [{**fact, "rank": rank} for rank in (0, 1)]


def answered(trace: Trace, **knobs: Any) -> Answered:
    settings = [turned(key.replace("__", "."), value, "RUN") for key, value in knobs.items()]
    return ask(study(trace), [settings]).rows[0]


def saved(trace: Trace, **knobs: Any) -> float:
    row = answered(trace, **knobs)
    assert row.gain is not None, row.reason
    return row.gain.ms


def test_gradients_travel_in_what_layers_compute_in_unless_it_is_said() -> None:
    """Of both, or of gathers alone, where each rank widens its gradients."""
    silent, whole = run(facts=of_fsdp2(reduce_dtype=None)), run(facts=of_fsdp2(reduce_dtype="float32"))
    both = saved(silent, fsdp2__param_dtype="bfloat16")
    assert both == pytest.approx(GATHERS_MS + SCATTERS_MS, rel=0.05)
    assert saved(silent, fsdp2__param_dtype="bfloat16", fsdp2__reduce_dtype="bfloat16") == pytest.approx(both)
    assert saved(whole, fsdp2__param_dtype="bfloat16", fsdp2__reduce_dtype="bfloat16") == pytest.approx(both)
    assert saved(whole, fsdp2__param_dtype="bfloat16") == pytest.approx(GATHERS_MS - CAST_MS, abs=2)
    alone = saved(silent, fsdp2__param_dtype="bfloat16", fsdp2__reduce_dtype="float32")
    assert alone == pytest.approx(GATHERS_MS - CAST_MS, abs=2)


def test_gradients_alone_in_half_the_bytes_are_turned_by_each_rank() -> None:
    assert saved(run(), fsdp2__reduce_dtype="bfloat16") == pytest.approx(SCATTERS_MS - CAST_MS, abs=2)


def test_what_travels_in_half_the_bytes_already_is_not_halved_again() -> None:
    """As MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) has it: gathers of half the bytes."""
    mixed = run("bfloat16", "float32", of_fsdp2(param_dtype="bfloat16", reduce_dtype="float32"))
    assert (
        "parameters of sharded layers travel in short numbers already" in answered(mixed, **{PARAM: "bfloat16"}).reason
    )
    # The gradients of what computes in bfloat16 need no turning.
    assert saved(mixed, fsdp2__reduce_dtype="bfloat16") == pytest.approx(SCATTERS_MS, abs=1)
    found = of(analyze(mixed), "comm.volume")
    assert found is not None
    assert dict(found.fixes[0].knobs) == {REDUCE: "bfloat16"}
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16" in found.fixes[0].title
    assert found.gain.ms == pytest.approx(saved(mixed, fsdp2__reduce_dtype="bfloat16"), rel=1e-6)


@pytest.mark.parametrize(
    ("told", "expected"), [({}, GATHERS_MS + SCATTERS_MS), ({"communication_data_type": "fp32"}, GATHERS_MS - CAST_MS)]
)
def test_of_a_configuration_it_is_the_same(told: dict[str, str], expected: float) -> None:
    content = {"zero_optimization": {"stage": 3}, **told}
    facts: list[dict[str, Any]] = [
        {"fact": kind, "zero_stage": 3, "dialect": "deepspeed", "content": content, "rank": rank}
        for rank in (0, 1)
        for kind in ("deepspeed", "config")
    ]
    trace = run(facts=facts)
    assert saved(trace, bf16__enabled=True) == pytest.approx(expected, abs=2)
    both = saved(trace, bf16__enabled=True, communication_data_type="bf16")
    assert both == pytest.approx(GATHERS_MS + SCATTERS_MS, rel=0.05)
    found = of(analyze(trace), "comm.volume")
    assert found is not None
    assert found.gain.ms == pytest.approx(saved(trace, **{k.replace(".", "__"): v for k, v in found.fixes[0].knobs}))
    assert saved(trace, communication_data_type="bf16") == pytest.approx(SCATTERS_MS - CAST_MS, abs=2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bf16.enabled": True}, "no configuration of an engine was seen in this run"),
        ({"communication_data_type": "bf16"}, "no configuration of an engine was seen in this run"),
        ({"optimizer.type": "OnebitAdam"}, "no configuration of an engine was seen in this run"),
        ({"optimizer.params.freeze_step": 10}, "no configuration of an engine was seen in this run"),
    ],
)
def test_what_has_no_json_takes_no_key_of_one(settings: dict[str, Any], why: str) -> None:
    assert answered(run(), **settings).reason == why
    assert answered(Job(steps=24).trace(), **settings).reason == why


@pytest.mark.parametrize("key", [PARAM, REDUCE])
def test_what_fully_shard_has_not_divided_takes_no_policy_of_its(key: str) -> None:
    first = run(facts=[{**fact, "version": 1} for fact in of_fsdp2()])
    assert answered(first, **{key: "bfloat16"}).reason == "no call of fully_shard was seen in this run"
    assert answered(first, **{key: "float32"}).reason.endswith("and not float32")


# --- shards with replicas (HSDP): scattered gradients are reduced once more, in the same numbers

SHARDS = {"s0": ((0, 1), ""), "s1": ((2, 3), "")}
REPLICAS = {"r0": ((0, 2), ""), "r1": ((1, 3), "")}
UNITS, SIZE = 4, 8 * 2**20


def with_replicas(
    gradients: float = 1.0, again: float = 1.0, hosts: tuple[str, ...] = ("a", "b", "c", "d"), **told: Any
) -> MeshJob:
    """2 x 2 ranks; gradients, again: how large those are that are scattered, and that are reduced once more, times what
    they are of float32."""

    def program(rank: int, step: int) -> Program:
        shard, replica = f"s{rank // 2}", f"r{rank % 2}"
        gather = Call(shard, "all_gather", SIZE, "parameter")
        reduce = (
            Call(shard, "reduce_scatter", int(SIZE * gradients), "gradient"),
            Call(replica, "all_reduce", int(SIZE / 2 * again), "gradient"),
        )
        return (
            Phase("forward", (gather, Work(2)) * UNITS),
            Phase("backward", (gather, Work(4), *reduce) * UNITS),
            Phase("optimizer", (Work(1),)),
        )

    facts = [{**of_fsdp2(**told)[0], "rank": rank} for rank in range(4)]
    return MeshJob(4, {**SHARDS, **REPLICAS}, program, latency_ms=0.1, facts=facts, hosts=hosts)


def in_formats(job: MeshJob, **formats: str) -> Trace:
    """formats: of `parameter`, and of what groups that begin so communicate as gradients."""
    trace = job.trace()
    rows = trace.rows.astype({"dtype": object})
    for name, dtype in formats.items():
        mine = rows["purpose"].eq(name) | (
            rows["purpose"].eq("gradient") & rows["group"].astype(str).str.startswith(name)
        )
        rows.loc[(rows["kind"] == "comm") & mine, "dtype"] = dtype
    return Trace.of(trace.run, rows.astype({"dtype": "category"}))


WHOLE = {"parameter": "float32", "s": "float32", "r": "float32"}


def test_both_reductions_of_shards_with_replicas_have_half_the_bytes() -> None:
    true = with_replicas().step_ms() - with_replicas(0.5, 0.5).step_ms()
    assert true == pytest.approx(UNITS * (4 + 2), abs=1)  # ms: at 1 ms a MiB
    found = answered(in_formats(with_replicas(), **WHOLE), fsdp2__reduce_dtype="bfloat16")
    assert found.gain is not None
    assert found.gain.ms + CAST_MS == pytest.approx(true, rel=0.03)  # what is reduced once more is turned already
    silent = in_formats(with_replicas(reduce_dtype=None), **WHOLE)
    assert saved(silent, fsdp2__param_dtype="bfloat16") == pytest.approx(true + 2 * UNITS * 4, rel=0.03)
    whole = in_formats(with_replicas(reduce_dtype="float32"), **WHOLE)
    assert saved(whole, fsdp2__param_dtype="bfloat16") == pytest.approx(2 * UNITS * 4 - CAST_MS, abs=2)


def test_what_replicas_reduce_in_short_numbers_already_is_not_told_to_shrink() -> None:
    row = answered(in_formats(with_replicas(again=0.5), **{**WHOLE, "r": "bfloat16"}), fsdp2__reduce_dtype="bfloat16")
    assert (row.gain, row.reason) == (
        None, "gradients that replicas reduce travel in short numbers already, or their number format was not captured"
    )  # fmt: skip


def test_over_the_network_between_replicas_alone_that_much_is_sure() -> None:
    """Shards are of one host, whose cores have no less to do; of the four all-reduces of 4 MiB half is saved."""
    apart = with_replicas(hosts=("a", "a", "b", "b"))
    row = answered(in_formats(apart, **WHOLE), fsdp2__param_dtype="bfloat16", fsdp2__reduce_dtype="bfloat16")
    assert row.gain is not None
    sure = UNITS * 2
    assert 0.3 * sure < row.gain.low < sure


def test_the_gradients_of_replicas_may_be_those_of_another_wrapper() -> None:
    job = with_replicas()
    job.facts.append({"fact": "ddp", "rank": 0, "site": "train.py:9", "gradient_bytes": [4 << 20]})
    row = answered(in_formats(job, **WHOLE), fsdp2__reduce_dtype="bfloat16")
    assert row.gain is None
    assert "which DistributedDataParallel's, was not captured" in row.reason
