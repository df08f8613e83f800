"""data.stall and data.imbalance: what workers gain on the cores there are, workers started anew, and what to type."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from meshes import Call, MeshJob, Phase, Program, Work
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.ask import Answered, ask
from dsprof.analyzer.finding import Finding, Gain
from dsprof.analyzer.price.excess import widened
from dsprof.analyzer.rules.base import at, ddp_argument_fix, settings_fix
from dsprof.analyzer.rules.registry import rule_of
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.trace import Trace

SITE = "/home/me/train.py:12"


def dataloader(rank: int = 0, number: int = 1, **settings: Any) -> dict[str, Any]:
    told = {"num_workers": 0, "batch_size": 32, "persistent_workers": False, "iterable": False, "site": SITE}
    return {"fact": "dataloader", "rank": rank, "number": number, "framework": None, **told, **settings}


def job(**settings: Any) -> Job:
    """Two ranks that compute for 33 ms and say next to nothing to one another."""
    usual: dict[str, Any] = {
        "steps": 120, "forward": constant(10), "backward": constant(20), "optimizer": constant(3), "cpu_share": 0.98,
        "loader": 1, "facts": [dataloader()], "buckets": (64 << 10,), "ms_per_mib": 0.5, "jitter": 0.02,
    }  # fmt: skip
    return Job(**{**usual, **settings})


def stalls(analysis: Analysis) -> list[Finding]:
    return [finding for finding in analysis.findings if finding.code == "data.stall"]


def bound_to(cores: int, each: int = 0) -> Any:
    """Ranks bound to the same cores, or to `each` of their own."""
    return lambda rank: list(range(each * rank, each * rank + (each or cores)))


@pytest.mark.parametrize("iterable", [False, True])
def test_set_cannot_give_workers_to_a_data_set_that_each_would_read_whole(iterable: bool) -> None:
    facts = [dataloader(iterable=iterable)]
    found = analyze(job(ranks=2, steps=60, data=constant(20), cpus=bound_to(16), facts=facts).trace())
    (stall,) = stalls(found)
    assert ("get_worker_info" in stall.fixes[0].title) is iterable
    assert bool(stall.fixes[0].knobs) is not iterable


def test_loading_that_computes_gains_nothing_where_no_core_is_free() -> None:
    """A wait of 4.5 ms, two ranks on two cores, and what is idle there is idle while they wait for one another."""
    found = analyze(job(data=constant(4.5), cpus=bound_to(2), buckets=(1 << 20,) * 2, latency_ms=1.5).trace())
    (stall,) = stalls(found)
    assert stall.severity == "info"
    assert stall.title == "the loop waits 4.51 ms of each step for input; no core is free for workers"
    assert stall.gain.low < 0 < stall.gain.high < 4.5
    assert stall.fixes == ()


@pytest.mark.parametrize(("ranks", "cpus", "workers"), [
    (8, bound_to(4), None),  # eight ranks on the same four cores
    (8, bound_to(0, each=1), None),
    (8, bound_to(0, each=2), 1),
    (2, bound_to(16), 2),
])  # fmt: skip
def test_no_more_workers_than_cores(ranks: int, cpus: Any, workers: int | None) -> None:
    (stall,) = stalls(analyze(job(ranks=ranks, steps=60, data=constant(20), cpus=cpus).trace()))
    if workers is None:
        assert (stall.severity, stall.fixes) == ("info", ())
        return
    assert stall.severity == "high"
    assert stall.fixes[0].patch[0] == {
        "file": "/home/me/train.py", "line": 12, "argument": "num_workers", "value": workers,
    }  # fmt: skip
    # One worker loads a batch in 20 ms, and the rest of the step takes 33: what is left is handing it over.
    # From 15.0 to 19.5 ms, and the model's own error.
    assert stall.gain.ms == pytest.approx(17.25, abs=0.6)
    rule = rule_of("data.stall")
    assert rule is not None
    assert rule.error is not None
    error = rule.error.half_ms(18.75, 52.0, load=0.5)
    assert stall.gain.high == pytest.approx(17.25 + math.hypot(2.25, error), abs=0.6)
    assert stall.gain.low == pytest.approx(17.25 - math.hypot(2.25, error), abs=0.6)


def test_one_worker_on_the_one_free_core_saves_what_it_can() -> None:
    """60 ms a batch and 33 ms of the rest: three workers would do, but there is one core for them."""
    (stall,) = stalls(analyze(job(data=constant(60), cpus=bound_to(4)).trace()))
    assert stall.fixes[0].patch[0]["value"] == 1
    assert stall.gain.ms == pytest.approx(33, abs=2)


def test_loading_that_sleeps_gains_on_a_full_host_too() -> None:
    (stall,) = stalls(analyze(job(data=constant(30), data_cpu_share=0.02, cpus=bound_to(2)).trace()))
    assert stall.severity == "high"
    assert 20 < stall.gain.low < stall.gain.ms < 30
    assert stall.gain.ms < stall.gain.high < 33
    assert stall.fixes[0].title == (
        "DataLoader(num_workers=2, persistent_workers=True) (train.py:12); more than there are cores, as loading "
        "mostly sleeps"
    )


def test_starved_workers_with_a_core_each_are_not_joined_by_more() -> None:
    """Obeyed, and nothing gained: four workers a rank on two cores. Whether they sleep is not known."""
    slow = job(
        data=constant(12), data_cpu_share=0.0, core_wait=0.2, cpus=bound_to(2), facts=[dataloader(num_workers=4)]
    )
    (stall,) = stalls(analyze(slow.trace()))
    assert (stall.severity, stall.fixes) == ("info", ())
    assert stall.title.endswith("; no core is free for more workers")
    assert stall.gain.low == 0
    assert stall.gain.high == pytest.approx(11.5, abs=0.5)


def test_starved_workers_that_leave_the_cores_alone_are_too_few() -> None:
    """Ten threads on two cores, and none of the training threads ever waits for one: the workers sleep."""
    slow = job(data=constant(12), data_cpu_share=0.0, cpus=bound_to(2), facts=[dataloader(num_workers=4)])
    (stall,) = stalls(analyze(slow.trace()))
    assert stall.severity == "high"
    # Four workers that finish a batch every 45 ms take 182 for one; half as much again over 33 ms is nine.
    assert [entry["value"] for entry in stall.fixes[0].patch] == [9, True]


def test_starved_workers_beside_free_cores() -> None:
    slow = job(data=constant(12), data_cpu_share=0.0, cpus=bound_to(0, each=16), facts=[dataloader(num_workers=4)])
    (stall,) = stalls(analyze(slow.trace()))
    assert (stall.severity, stall.fixes[0].patch[0]["value"]) == ("high", 9)


def test_a_wait_that_workers_would_not_shorten_is_listed_without_a_fix() -> None:
    """0.5 ms is what it costs to be handed a batch."""
    (stall,) = stalls(analyze(job(data=constant(0.5)).trace()))
    assert (stall.severity, stall.fixes, stall.gain.ms) == ("info", (), 0.0)
    assert stall.title == "the loop waits 0.50 ms of each step for input; workers would hardly shorten it"


def test_a_wait_of_next_to_nothing_is_not_mentioned() -> None:
    assert stalls(analyze(job(data=constant(0.1)).trace())) == []


@pytest.mark.parametrize("seed", range(5))
def test_no_interval_is_without_width(seed: int) -> None:
    draw = random.Random(seed)
    slow = job(
        data=constant(draw.uniform(1, 40)), ranks=draw.randint(1, 4), cpus=bound_to(draw.randint(1, 8)),
        cpu_share=draw.uniform(0.2, 1), facts=[dataloader(num_workers=draw.choice([0, 0, 2, 6]))],
        restart=lambda rank, step: 20 * (step % 10 == 0), jitter=draw.choice([0.0, 0.05]), steps=60,
    )  # fmt: skip
    found = analyze(slow.trace()).findings
    for gain in (gain for finding in found for gain in (finding.gain, *(fix.gain for fix in finding.fixes))):
        assert gain is None or gain.ms == 0 or gain.low < gain.high
    assert widened(Gain(4.28, 12.0, 4.28, 4.28), 4.28, 4.28) == Gain(4.28, 12.0, 0.0, 4.28)


# --- workers started anew -------------------------------------------------------------------------


def restarting(**settings: Any) -> Job:
    usual: dict[str, Any] = {
        "data": constant(1), "restart": lambda rank, step: 150 * (step % 10 == 0), "first_wait": 250.0,
        "facts": [dataloader(rank, num_workers=2) for rank in (0, 1)],
    }  # fmt: skip
    return job(**{**usual, **settings})


def test_workers_started_anew_are_to_persist() -> None:
    analysis = analyze(restarting().trace())
    first = analysis.findings[0]
    assert (first.code, first.severity) == ("data.stall", "high")
    assert first.title.startswith("the DataLoader's 2 workers are started anew every 10 steps, 40")
    assert first.gain.method == "measured excess"
    # 400 ms in every tenth step; at worst the first batch takes as long as two workers may take for one and keep up.
    assert first.gain.ms == pytest.approx(40, abs=1)
    assert first.gain.percent == pytest.approx(100 * 40 / (34 + 40), abs=2)
    assert first.gain.low == pytest.approx(40 - 2 * 34 / 10, abs=2)
    assert first.fixes[0].title == "DataLoader(persistent_workers=True) (train.py:12)"
    assert first.fixes[0].patch == (
        {"file": "/home/me/train.py", "line": 12, "argument": "persistent_workers", "value": True},
    )
    assert all(finding.severity == "info" for finding in analysis.findings[1:])


@pytest.mark.parametrize("data", [1.0, 0.0])
def test_what_keeping_workers_saves_is_left_to_the_finding(data: float) -> None:
    """Ordinary steps have nothing of it: their what-if neither saves nothing, nor was no loader waited for."""
    whole = study(restarting(data=constant(data)).trace())
    (row,) = ask(whole, [[turned("loader.persistent_workers", True, "RUN")]]).rows
    assert row.gain is None
    assert "workers start anew during training, 40" in row.reason
    assert "what keeping them saves is in the finding data.stall" in row.reason


def test_ranks_that_start_workers_in_turn_cost_one_another() -> None:
    turns = restarting(restart=lambda rank, step: 150 * (step % 10 == 5 * rank), data=constant(0.1))
    first = analyze(turns.trace()).findings[0]
    assert "every 5 steps" in first.title
    assert first.gain.ms == pytest.approx(80, abs=3)


def test_one_restart_tells_nothing_about_the_next() -> None:
    once = restarting(restart=lambda rank, step: 150 * (step in (0, 70)))
    (stall, *_) = stalls(analyze(once.trace()))
    assert stall.severity == "info"
    assert "once in" in stall.title
    assert stall.gain.low <= 0 < stall.gain.ms


def test_workers_for_each_step() -> None:
    """`next(iter(loader))` in the loop."""
    each = restarting(restart=constant(60), first_wait=20.0)
    first = analyze(each.trace()).findings[0]
    assert "for each step" in first.title
    assert first.gain.ms == pytest.approx(81, abs=2)


@pytest.mark.parametrize("settings", [{"num_workers": 2, "persistent_workers": True}, {"num_workers": 0}])
def test_an_epoch_that_begins_without_starting_workers(settings: dict[str, Any]) -> None:
    begins = restarting(
        restart=lambda rank, step: 1 * (step % 10 == 0),
        first_wait=3.0,
        facts=[dataloader(**settings)],
        data=constant(0.1),
    )
    assert stalls(analyze(begins.trace())) == []


# --- which loader ---------------------------------------------------------------------------------


def with_evaluation(trace: Trace) -> Trace:
    """Forwards before the batch of a step are without gradients."""
    rows = trace.rows
    forwards = rows[(rows["kind"] == "phase") & (rows["name"] == "forward")]
    first = forwards.groupby(["rank", "step"])["start_ns"].transform("idxmin").eq(forwards.index)
    twice = forwards.groupby(["rank", "step"])["start_ns"].transform("size") > 1
    rows["grad"] = rows["grad"].astype("boolean")
    rows.loc[forwards.index, "grad"] = True
    rows.loc[forwards.index[first & twice], "grad"] = False
    return Trace.of(trace.run, rows)


def test_the_loader_of_an_evaluation_is_not_the_training_s() -> None:
    test = dataloader(number=2, num_workers=0, site="/home/me/train.py:30")
    both = job(data=constant(20), evaluation=lambda rank, step: 400 * (step % 4 == 0), facts=[dataloader(), test])
    (stall,) = stalls(analyze(with_evaluation(both.trace())))
    assert stall.title.startswith("the loop waits 20.")
    assert stall.fixes[0].patch[0]["line"] == 12


def test_a_loader_entered_before_capture_is_the_one_that_is_left() -> None:
    test = dataloader(number=2, num_workers=0, site="/home/me/train.py:30")
    both = job(data=constant(20), evaluation=lambda rank, step: 400 * (step % 4 == 0), facts=[dataloader(), test])
    trace = with_evaluation(both.trace())
    rows = trace.rows
    rows.loc[(rows["name"] == "data") & (rows["value"] == 1), "value"] = np.nan
    (stall,) = stalls(analyze(Trace.of(trace.run, rows)))
    assert stall.evidence[2].value == 0
    assert stall.fixes[0].patch[0]["line"] == 12


def test_a_loader_that_nothing_tells_of() -> None:
    (stall,) = stalls(analyze(job(data=constant(20), facts=[]).trace()))
    assert stall.evidence[2].value == "unknown"
    assert (
        stall.fixes[0].title == "DataLoader(num_workers=2, persistent_workers=True), where the training data are loaded"
    )
    assert stall.fixes[0].patch[0]["file"] is None


def test_without_a_dataloader_nothing_is_said_of_input() -> None:
    trace = job(data=constant(20)).trace()
    rows = trace.rows.astype({"name": object, "source": object})
    rows.loc[rows["name"] == "data", ["name", "source"]] = "between", "derived"
    analysis = analyze(Trace.of(trace.run, rows))
    assert stalls(analysis) == []
    assert "data.stall" not in analysis.passed
    assert "data.stall" not in analysis.not_judged


# --- what to type ---------------------------------------------------------------------------------


def fix_for(*facts: dict[str, Any]) -> Any:
    trace = job(data=constant(20), facts=list(facts)).trace()
    rows = trace.rows
    rows.loc[rows["name"] == "data", "value"] = float(facts[-1]["number"])
    return stalls(analyze(Trace.of(trace.run, rows)))[0].fixes[0]


def test_under_transformers_it_is_a_flag() -> None:
    fix = fix_for(dataloader(framework="transformers", site="/home/me/train.py:80"))
    assert fix.title == (
        "--dataloader_num_workers 2 --dataloader_persistent_workers True, or the same of TrainingArguments"
    )
    assert fix.patch == (
        {"file": None, "line": None, "argument": "--dataloader_num_workers", "value": 2},
        {"file": None, "line": None, "argument": "--dataloader_persistent_workers", "value": True},
    )


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_a_loader_that_a_framework_made_anew_is_the_user_s_own(framework: str) -> None:
    """Made of a batch sampler, so without a batch size; the second of two that were alike is of the second."""
    made: dict[str, Any] = {"framework": framework, "site": "/home/me/train.py:50", "batch_size": None}
    own = [dataloader(), dataloader(number=2, site="/home/me/train.py:20"), dataloader(number=3, num_workers=8)]
    fix = fix_for(*own, dataloader(number=4, **made), dataloader(number=5, **made))
    assert fix.patch[0] == {"file": "/home/me/train.py", "line": 20, "argument": "num_workers", "value": 2}
    alone = fix_for(dataloader(number=1, **made))
    assert alone.title == f"DataLoader(num_workers=2, persistent_workers=True), which {framework} prepares"
    assert alone.patch[0]["file"] is None


def test_deepspeed_makes_its_loader_in_deepspeed_io() -> None:
    fix = fix_for(dataloader(framework="deepspeed", site="/home/me/train.py:50"))
    assert fix.patch == ({"file": None, "line": None, "argument": "num_local_io_workers", "value": 2},)


GAIN = Gain(1.0, 1.0, 0.5, 1.5)


@pytest.mark.parametrize(("framework", "title", "entry"), [
    (None, "DistributedDataParallel(bucket_cap_mb=50) (train.py:9): two collectives a step",
     {"file": "/home/me/train.py", "line": 9, "argument": "bucket_cap_mb", "value": 50}),
    ("transformers",
     "--ddp_bucket_cap_mb 50, or TrainingArguments(ddp_bucket_cap_mb=50): two collectives a step",
     {"file": None, "line": None, "argument": "--ddp_bucket_cap_mb", "value": 50}),
    ("accelerate",
     "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50)]): two collectives a step",
     {"file": None, "line": None, "value": 50,
      "argument": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50)])"}),
    ("lightning", "Trainer(strategy=DDPStrategy(bucket_cap_mb=50)): two collectives a step",
     {"file": None, "line": None, "value": 50, "argument": "Trainer(strategy=DDPStrategy(bucket_cap_mb=50))"}),
    ("deepspeed", "DistributedDataParallel(bucket_cap_mb=50), which deepspeed makes: two collectives a step",
     {"file": None, "line": None, "argument": "bucket_cap_mb", "value": 50}),
])  # fmt: skip
def test_an_argument_of_ddp_is_set_where_its_user_can(framework: str | None, title: str, entry: dict[str, Any]) -> None:
    fact = {"fact": "ddp", "site": "/home/me/train.py:9", "framework": framework}
    fix = ddp_argument_fix(fact, "bucket_cap_mb", 50, GAIN, ": two collectives a step")
    assert (fix.kind, fix.title, fix.patch, fix.gain) == ("code", title, (entry,), GAIN)


def test_lengths_are_grouped_by_a_flag_of_transformers() -> None:
    luck = random.Random(1)
    tokens = {(rank, step): luck.randint(256, 1024) for rank in range(2) for step in range(60)}
    uneven = Job(steps=60, tokens=lambda rank, step: tokens[rank, step], loader=1)
    uneven.forward = lambda rank, step: tokens[rank, step] / 20
    trace = uneven.trace()
    facts = [dataloader(framework="transformers")]
    analysis = analyze(Trace.of(replace(trace.run, facts=[*trace.run.facts, *facts]), trace.rows))
    first = analysis.findings[0]
    assert first.code == "data.imbalance"
    assert first.fixes[0].patch == (
        {"file": None, "line": None, "argument": "--train_sampling_strategy", "value": "group_by_length"},
    )


def unequal_lengths(length: Callable[[int, int], int]) -> MeshJob:
    """What comes before the first of two collectives in forward grows with the input; the rest of the step does not."""

    def program(rank: int, step: int) -> Program:
        size = length(rank, step)
        forward = Work(size / 20), Call("w", "all_reduce", 4096), Work(60), Call("w", "all_reduce", 4096)
        gradients = Call("w", "all_reduce", 65536, "gradient")
        return Phase("forward", forward, inputs=size), Phase("backward", (Work(20), gradients)), Phase(
            "optimizer", (Work(2),)
        )  # fmt: skip

    return MeshJob(2, {"w": ((0, 1), "")}, program, steps=40)


def test_unequal_inputs_cost_where_the_work_grows_with_them() -> None:
    luck = random.Random(3)
    lengths = [(luck.randint(200, 1000), luck.randint(200, 1000)) for _ in range(40)]
    job = unequal_lengths(lambda rank, step: lengths[step][rank])
    equal = unequal_lengths(lambda rank, step: sum(lengths[step]) // 2)
    first = analyze(job.trace()).findings[0]
    assert first.code == "data.imbalance"
    saved = job.step_ms() - equal.step_ms()
    assert first.gain.ms == pytest.approx(saved, rel=0.06)
    assert first.gain.low < saved < first.gain.high


def unequal_micro_batches(length: Callable[[int, int], int]) -> MeshJob:
    """Four micro-batches a step, in the forward of each of which the ranks wait for each other, as FSDP's do. length:
    of the rank, and the micro-batch of the run."""

    def program(rank: int, step: int) -> Program:
        phases = []
        for number in range(4):
            size = length(rank, 4 * step + number)
            forward = Work(size / 40), Call("w", "all_reduce", 4096), Work(size / 60), Call("w", "all_reduce", 4096)
            gradients = [Call("w", "all_reduce", 65536, "gradient")] if number == 3 else []
            phases += [Phase("forward", forward, inputs=size), Phase("backward", (Work(size / 30), *gradients))]
        return *phases, Phase("optimizer", (Work(2),))

    return MeshJob(2, {"w": ((0, 1), "")}, program, steps=40)


def test_unequal_micro_batches_cost_where_ranks_wait_in_each_of_them() -> None:
    """Of a whole step the inputs are more alike than those of its micro-batches."""
    luck = random.Random(3)
    lengths = [(luck.randint(200, 1000), luck.randint(200, 1000)) for _ in range(160)]
    job = unequal_micro_batches(lambda rank, number: lengths[number][rank])
    equal = unequal_micro_batches(lambda rank, number: sum(lengths[number]) // 2)
    first = analyze(job.trace()).findings[0]
    assert first.code == "data.imbalance"
    assert "and what micro-batches take differs by 37 %" in first.title
    saved = job.step_ms() - equal.step_ms()
    assert first.gain.ms == pytest.approx(saved, rel=0.1)
    assert first.gain.low < saved < first.gain.high


def test_rows_of_ranks_that_only_load_are_no_error() -> None:
    trace = job(data=constant(20)).trace()
    rows = trace.rows[~((trace.rows["rank"] == 1) & trace.rows["name"].isin(["forward", "backward", "optimizer"]))]
    analysis = analyze(Trace.of(trace.run, pd.DataFrame(rows)))
    assert not any("failed" in reason for reason in analysis.not_judged.values())


def test_a_call_in_an_installed_package_is_not_for_the_user_to_change() -> None:
    site = "/v/lib/python3.12/site-packages/ultralytics/data/build.py:305"
    assert at(site) == " (ultralytics/data/build.py:305)"
    fix = settings_fix(f"DataLoader(num_workers=2){at(site)}", {"num_workers": 2}, site)
    assert fix.title.endswith("build.py:305); ultralytics makes this call: look for a setting of its own")
    assert fix.patch == ({"file": None, "line": None, "argument": "num_workers", "value": 2},)
    own = settings_fix("DataLoader(num_workers=2)", {"num_workers": 2}, "/home/me/train.py:7")
    assert (own.title, own.patch[0]["file"]) == ("DataLoader(num_workers=2)", "/home/me/train.py")


# --- several of its knobs at once -----------------------------------------------------------------


def asked(trace: Trace, **knobs: Any) -> Answered:
    questions = [turned(f"loader.{key}", value, "RUN") for key, value in knobs.items()]
    return ask(study(trace), [questions]).rows[0]


def epochs(**settings: Any) -> Job:
    """Loads 30 ms on the training thread, which has cores to spare; an epoch has ten steps."""
    starts: dict[str, Any] = {"restart": lambda rank, step: 1 * (step % 10 == 0), "first_wait": 30.0}
    return job(data=constant(30), cpus=bound_to(0, each=16), **{**starts, **settings})


def test_workers_that_stay_are_more_workers_and_nothing_else() -> None:
    trace = epochs().trace()
    (workers,) = {value for (_, value) in stalls(analyze(trace))[0].fixes[0].knobs if value is not True}
    alone = asked(trace, num_workers=workers)
    assert alone.gain is not None
    (note,) = alone.notes
    assert f"begun again in 9 of 90 steps, in each of which {workers} workers would be started anew" in note
    for beside in ({"persistent_workers": True}, {"persistent_workers": True, "prefetch_factor": 4}):
        both = asked(trace, num_workers=workers, **beside)
        assert both.gain is not None
        assert both.gain.ms == pytest.approx(alone.gain.ms)
        assert not any("anew: what that takes" in one for one in both.notes)
        assert both.asked[0] == f"loader.num_workers={workers}"


def test_in_one_epoch_no_workers_are_started_anew() -> None:
    trace = epochs(restart=constant(0)).trace()
    (workers,) = {value for (_, value) in stalls(analyze(trace))[0].fixes[0].knobs if value is not True}
    assert asked(trace, num_workers=workers).notes == ()


@pytest.mark.parametrize("beside", [{"persistent_workers": True}, {"prefetch_factor": 4}])
def test_a_loader_without_workers_has_none_that_stay_or_load_ahead(beside: dict[str, Any]) -> None:
    row = asked(epochs().trace(), **beside)
    assert (row.gain, row.reason) == (None, "the DataLoader has no workers; ask with loader.num_workers, too")
    assert asked(epochs().trace(), num_workers=0, **beside).gain is None


def test_loading_further_ahead_alone_is_not_predicted() -> None:
    few = job(data=constant(12), data_cpu_share=0.0, cpus=bound_to(0, each=16), facts=[dataloader(num_workers=4)])
    row = asked(few.trace(), prefetch_factor=8)
    assert row.gain is None
    assert "how long each takes in its worker was not captured" in row.reason
    assert asked(few.trace(), prefetch_factor=8, num_workers=9).gain is not None


def test_more_workers_that_stay_save_in_ordinary_steps_and_between_them() -> None:
    """Two workers are too few, and are started anew every tenth step, for 400 ms."""
    trace = restarting(data=constant(12), cpus=bound_to(0, each=16)).trace()
    offered = [one for one in stalls(analyze(trace)) if "waits" in one.title]
    (workers,) = {value for (_, value) in offered[0].fixes[0].knobs if value is not True}
    row = asked(trace, num_workers=workers, persistent_workers=True)
    assert row.gain is not None
    assert 5 < row.gain.ms < 13
    (note,) = row.notes
    assert note.startswith("this is of ordinary steps; between them workers that stay save what starting them anew")
