"""comm.volume: bytes that no division and no overlap hides, on made-up records of jobs whose times are written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Wait, Work
from synthetic import Accumulating, Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.ask import ask
from dsprof.analyzer.price.contention import part_of_cores
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.trace import Trace

MIB = 1 << 20


def ddp(*mib: int, **more: Any) -> list[dict[str, Any]]:
    """What both ranks state of their DistributedDataParallel, whose tensors have so many MiB."""
    fact = {"fact": "ddp", "number": 1, "gradient_bytes": [size * MIB for size in mib], "bucket_cap_mb": 25.0,
            "site": "train.py:12", **more}  # fmt: skip
    return [{**fact, "rank": rank} for rank in (0, 1)]


def one_tensor(**changes: Any) -> Job:
    """A tensor of 64 MiB, whose reduction takes 64 ms, after 120 ms of computing; 6 ms for all else."""
    usual = {"buckets": (64 * MIB,), "latency_ms": 0.0, "facts": ddp(64), "jitter": 0.003}
    return Job(**{**usual, **changes})


def on_hosts(trace: Trace, *hosts: str) -> Trace:
    for item, host in zip(trace.run.ranks, hosts, strict=True):
        item.host = host
    return trace


@pytest.mark.plants("comm.volume")
def test_one_large_tensor_over_a_network_travels_in_half_the_bytes_or_half_as_often() -> None:
    """At 10 ms a MiB, 100 MB/s, the 640 ms of the 766 ms step are the bytes."""
    job = one_tensor(ms_per_mib=10.0)
    first = analyze(on_hosts(job.trace(), "a", "b")).findings[0]
    assert (first.code, first.severity) == ("comm.volume", "high")
    hook, micro_batches = first.fixes
    assert dict(hook.knobs) == {"ddp.comm_hook": "fp16"}
    assert "default_hooks.fp16_compress_hook) of the DistributedDataParallel (train.py:12)" in hook.title
    assert micro_batches.title.startswith(
        "2 micro-batches for each step of the optimizer, `with model.no_sync():` around forward and backward of all "
        "but the last (train.py:12)"
    )
    # Half of 640 ms, less what a CPU takes to round 64 MiB and to widen them again: 20 to 80 ms.
    assert first.gain.low < 320 - 80 < 320 - 20 < first.gain.high
    assert micro_batches.gain is not None
    assert micro_batches.gain.ms == pytest.approx(320, rel=0.02)


def test_turning_the_knob_saves_what_the_fix_says() -> None:
    trace = on_hosts(one_tensor(ms_per_mib=10.0).trace(), "a", "b")
    told = analyze(trace).findings[0].gain
    (row,) = ask(study(trace), [[turned("ddp.comm_hook", "bf16", "RUN")]]).rows
    assert row.gain is not None
    assert row.gain.ms == pytest.approx(told.ms, rel=0.02)
    assert any("fp16 is always taken" in note for note in row.notes)  # the made-up ranks train on a CPU


def test_on_one_host_only_fewer_reductions_are_sure_to_help() -> None:
    """Cores move and add the bytes there, and short numbers take them longer."""
    first = analyze(one_tensor().trace()).findings[0]
    assert (first.code, first.severity) == ("comm.volume", "high")
    assert first.title.startswith("64.0 ms of each step (34 %) wait for 64.0 MiB of gradients, which neither other")
    assert first.fixes[0].title.startswith("2 micro-batches for each step of the optimizer")
    assert first.gain.ms == pytest.approx(32, rel=0.05)
    assert all(fix.gain is not None and fix.gain.low <= 0 for fix in first.fixes[1:])


@pytest.mark.parametrize(
    ("framework", "knobs"),
    [
        ("transformers", {"trainer.gradient_accumulation_steps": 2}),
        ("accelerate", {"accelerate.gradient_accumulation_steps": 2}),
        ("lightning", {"lightning.accumulate_grad_batches": 2}),
    ],
)
def test_the_fix_is_in_the_words_of_the_job(framework: str, knobs: dict[str, int]) -> None:
    first = analyze(one_tensor(facts=ddp(64, framework=framework)).trace()).findings[0]
    assert first.code == "comm.volume"
    assert dict(first.fixes[0].knobs) == knobs


@pytest.mark.parametrize(
    ("framework", "title"),
    [
        (None, "gradient_accumulation_steps: 2: half as much"),
        (
            "transformers",
            '--gradient_accumulation_steps 2, with "gradient_accumulation_steps": "auto" in the JSON: half',
        ),
    ],
)
def test_of_deepspeed_it_is_said_where_the_number_is_written(framework: str | None, title: str) -> None:
    """transformers refuses a JSON that has another number than its own argument."""
    content = {"gradient_accumulation_steps": 1, "train_batch_size": 16}
    facts: list[dict[str, Any]] = [
        {"fact": "deepspeed", "rank": 0, "zero_stage": 1, "accumulation": 1},
        {"fact": "config", "rank": 0, "dialect": "deepspeed", "framework": framework, "content": content},
    ]
    trace = on_hosts(one_tensor(ms_per_mib=10.0, facts=facts).trace(), "a", "b")
    found = of(analyze(trace), "comm.volume")
    assert found is not None
    assert found.fixes[0].title.startswith("communication_data_type: bf16: gradients travel in bfloat16")
    (row,) = ask(study(trace), [[turned("communication_data_type", "bf16", "RUN")]]).rows
    assert row.gain is not None
    assert row.gain.ms == pytest.approx(found.gain.ms, rel=1e-6)
    assert found.fixes[1].title.startswith(title)


@pytest.mark.parametrize(
    "changes",
    [
        {"ms_per_mib": 0.15},  # 10 ms, 7 % of the step
        {"buckets": (64 << 10,) * 8, "latency_ms": 12.0, "facts": ddp(1)},  # latency, not bytes
        {"facts": ddp(*[1] * 64), "ms_per_mib": 0.8},  # smaller buckets may hide it
        {"buckets": (8 * MIB,) * 8, "facts": ddp(*[8] * 8)},  # all but the last are hidden
    ],
)
def test_what_can_be_hidden_or_is_no_matter_of_bytes(changes: dict[str, Any]) -> None:
    analysis = analyze(one_tensor(**changes).trace())
    assert of(analysis, "comm.volume") is None
    assert "comm.volume" in analysis.passed


def test_without_knowing_the_bytes_it_is_not_judged() -> None:
    """As of a trace of another tool that tells when collectives ran, and not of what."""
    trace = one_tensor(ms_per_mib=10.0).trace()
    rows = pd.concat([trace.read(rank) for rank in trace.ranks], ignore_index=True)
    analysis = analyze(Trace.of(trace.run, rows.assign(bytes=rows["bytes"].where(rows["kind"] != "comm"))))
    assert "how many bytes" in analysis.not_judged["comm.volume"]
    assert analysis.verdict.status == "inconclusive"


def test_gradients_reduced_for_nothing_are_another_fault() -> None:
    job = Accumulating(forward=constant(10), backward=constant(20), jitter=0.002, steps=24, facts=ddp(8))
    analysis = analyze(job.trace())
    assert analysis.findings[0].code == "comm.redundant-reduce"
    assert of(analysis, "comm.volume") is None


def test_gradients_that_a_script_reduces_after_backward_could_be_hidden() -> None:
    """30 ms of reductions after 60 ms of backward: it is when they are issued, and not how many bytes there are."""

    def program(rank: int, step: int) -> Program:
        reduced = tuple(Call("w", "all_reduce", 10 * MIB, "gradient") for _ in range(3))
        return Phase("forward", (Work(30),)), Phase("backward", (Work(60),)), *reduced, Phase("optimizer", (Work(3),))

    analysis = analyze(MeshJob(2, {"w": ((0, 1), "")}, program, latency_ms=0.1).trace())
    assert of(analysis, "comm.volume") is None


def shards(ms: float) -> MeshJob:
    """Four units of 8 MiB, gathered in forward and in backward and reduced: 12 transfers of 8 ms, around so many ms of
    computation in each unit."""

    def program(rank: int, step: int) -> Program:
        def units(ms: float, reduces: bool) -> tuple[Any, ...]:
            gathers = [Call("w", "all_gather", 8 * MIB, "parameter", f"unit {i}") for i in range(4)]
            parts: list[Any] = [gathers[0]]
            for i in range(4):
                parts += [gathers[i + 1]] if i < 3 else []
                parts += [Wait(f"unit {i}"), Work(ms)]
                parts += [Call("w", "reduce_scatter", 8 * MIB, "gradient", f"gradient {i}")] if reduces else []
            return (*parts, *(Wait(f"gradient {i}") for i in range(4) if reduces))

        return (
            Phase("forward", units(ms, False)),
            Phase("backward", units(2 * ms, True)),
            Phase("optimizer", (Work(1),)),
        )

    facts = [{"fact": "fsdp", "version": 2, "units": 4, "site": "train.py:30", "rank": rank} for rank in (0, 1)]
    return MeshJob(2, {"w": ((0, 1), "")}, program, latency_ms=0.1, facts=facts)


def test_shards_that_take_longer_than_the_computation() -> None:
    """96 ms of transfers beside 24 ms of computation."""
    analysis = analyze(on_hosts(shards(2).trace(), "a", "b"))
    found = of(analysis, "comm.volume")
    assert found is not None
    assert found.is_problem
    assert dict(found.fixes[0].knobs) == {"fsdp2.param_dtype": "bfloat16", "fsdp2.reduce_dtype": "bfloat16"}
    assert "(train.py:30)" in found.fixes[0].title
    assert of(analyze(on_hosts(shards(12).trace(), "a", "b")), "comm.volume") is None


@pytest.mark.parametrize(("ms_per_mib", "part"), [(50.0, 0.6), (1.0, 0.0)])
def test_a_link_that_is_much_slower_than_idle_cores_is_slow_inside_of_a_host_too(
    ms_per_mib: float, part: float
) -> None:
    """20 MB/s are no cores' doing that have time for more; 1 GB/s may be."""
    job = one_tensor(ms_per_mib=ms_per_mib, cpus=lambda rank: list(range(8)))
    whole = study(job.trace())
    gain = ask(whole, [[turned("ddp.comm_hook", "fp16", "RUN")]]).rows[0].gain
    assert gain is not None
    assert (gain.low > part * gain.ms) if part else (gain.low <= 0)
    assert part_of_cores(whole, ms_per_mib / MIB) < 0.3 if part else part_of_cores(whole, ms_per_mib / MIB) == 1.0
    on_unknown_cores = replace(whole, load=None)
    assert part_of_cores(on_unknown_cores, ms_per_mib / MIB) == 1.0


@pytest.mark.parametrize(("latency_ms", "low", "high"), [(8.0, (-8, 2), (3, 7)), (30.0, (8, 14), (15, 25))])
def test_small_gradients_of_one_size_may_be_slow_by_their_bytes(
    latency_ms: float, low: tuple[float, float], high: tuple[float, float]
) -> None:
    """0.5 MiB in 8 ms: latency, as far as is known; or 65 MB/s, and half of it is saved. 30 ms are no latency."""
    facts = ddp(1)
    for fact in facts:
        fact["gradient_bytes"] = [MIB // 2]
    trace = on_hosts(
        one_tensor(buckets=(MIB // 2,), latency_ms=latency_ms, ms_per_mib=0.0, facts=facts).trace(), "a", "b"
    )
    (row,) = ask(study(trace), [[turned("ddp.comm_hook", "fp16", "RUN")]]).rows
    assert row.gain is not None
    assert low[0] < row.gain.low < low[1]
    assert high[0] < row.gain.high < high[1]
