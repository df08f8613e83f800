"""The analyzer on simulated jobs whose faults are known to the millisecond."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pytest
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.columns import RankRows
from dsprof.analyzer.rules.comm.dimensions import waits_mostly_for_layers
from dsprof.analyzer.study import Study
from dsprof.run import RankExit, RunInfo
from dsprof.schema import BUDGET_PARTS, CALL_SITE
from dsprof.trace import Trace
from dsprof.trace.packed_table import PackedTable


def above_info(analysis: Analysis) -> list[str]:
    return [finding.code for finding in analysis.findings if finding.severity != "info"]


def no_overlap_to_gain(job: Job) -> Job:
    """A job whose only communication is too small to be worth a word."""
    job.buckets, job.ms_per_mib = (64 << 10, 256 << 10), 0.5
    return job


def test_a_healthy_job_has_nothing_above_info() -> None:
    analysis = analyze(no_overlap_to_gain(Job()).trace())
    assert above_info(analysis) == []
    assert set(analysis.passed) == {
        "rank.straggler", "data.stall", "data.imbalance", "pause.gc", "comm.small-messages", "comm.large-bucket",
            "comm.exposed",
        "eval.uneven", "checkpoint.stall", "pause.stop", "run.hang", "run.desync", "comm.redundant-reduce",
        "comm.buffers", "comm.volume", "compute.optimizer", "compute.recompile", "compute.no-core",
    }  # fmt: skip
    assert analysis.not_judged == {"run.rank-died": "no launcher recorded how the ranks ended"}


def test_a_rank_that_a_shrunken_job_no_longer_has_is_left_out() -> None:
    before, after = Job(ranks=3, steps=5).trace(), Job(ranks=2).trace()
    rows = pd.concat([before.rows, after.rows.assign(restart=np.int16(1))], ignore_index=True)
    run = replace(after.run, ranks=[*before.run.ranks, *(replace(item, restart=1) for item in after.run.ranks)])
    analysis = analyze(Trace.of(run, rows))
    assert analysis.ranks_captured == (0, 1)
    assert analysis.step_count == 40


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_budget_sums_to_the_step(ranks: int) -> None:
    analysis = analyze(Job(ranks=ranks, gc=lambda rank, step: 3 * (rank == 0)).trace())
    assert analysis.step_ms is not None
    assert list(analysis.budget) == list(BUDGET_PARTS)
    assert sum(analysis.budget.values()) == pytest.approx(analysis.step_ms.mean, rel=1e-9)
    by_step = analysis.steps[list(BUDGET_PARTS)].sum(axis=1)
    assert np.allclose(by_step, analysis.steps["dur_ns"] / 1e6, rtol=1e-9)
    assert analysis.budget["other"] < 0.05 * analysis.step_ms.mean
    assert analysis.steps["ordinary"].sum() == 30 * ranks


def test_replay_of_the_measured_job_gives_the_measured_steps() -> None:
    from dsprof.analyzer.align.match import Matches
    from dsprof.analyzer.graph.build_graph import build_graph
    from dsprof.analyzer.graph.chains_of_ranks import PackedChains
    from dsprof.analyzer.graph.replay import replay
    from dsprof.analyzer.graph.validate import check
    from dsprof.analyzer.rank_summary import summarize_ranks

    analysis = analyze(Job(jitter=0.05).trace())
    measured = summarize_ranks(analysis.trace, analysis.collectives, Matches(analysis.collectives))
    chains = PackedChains(measured.chains)
    graph = build_graph(chains, analysis.collectives, analysis.steps)
    assert graph is not None
    middle = analysis.steps[analysis.steps["ordinary"]].groupby("step")["dur_ns"].mean() / 1e6
    assert replay(graph).durations == pytest.approx(middle.to_numpy(), rel=1e-6)
    assert check(graph).contradicted == 0


def test_a_straggler_is_named_with_what_it_costs() -> None:
    analysis = analyze(Job(forward=lambda rank, step: 90 if rank == 1 else 40).trace())
    first = analysis.findings[0]
    assert (first.code, first.severity, first.where.ranks, first.where.op) == (
        "rank.straggler",
        "high",
        (1,),
        "forward",
    )
    assert first.gain.ms == pytest.approx(50, abs=1.5)
    assert first.gain.low <= first.gain.ms <= first.gain.high
    assert analysis.slowest_rank == 1


def test_a_few_worse_steps_do_not_hide_that_a_rank_is_late_in_every_one() -> None:
    slow = {10: 230, 20: 240, 30: 250}
    analysis = analyze(Job(forward=lambda rank, step: slow.get(step, 90) if rank == 1 else 40).trace())
    assert analysis.findings[0].code == "rank.straggler"
    assert "late in every step" in analysis.findings[0].title


@pytest.mark.plants("pause.stop")
@pytest.mark.parametrize(("core_wait", "said"), [(0.9, "give each rank cores of its own"), (0.1, "look for what rank")])
def test_a_stop_for_want_of_a_core_is_told_as_that(core_wait: float, said: str) -> None:
    job = Job(forward=lambda rank, step: 2_000 if (rank, step) == (1, 25) else 40, core_wait=core_wait)
    (finding,) = [finding for finding in analyze(job.trace()).findings if finding.code == "pause.stop"]
    assert said in finding.fixes[0].title


def test_two_stragglers_among_eight_are_one_finding() -> None:
    analysis = analyze(Job(ranks=8, forward=lambda rank, step: 70 if rank in (2, 5) else 40).trace())
    assert analysis.findings[0].where.ranks == (2, 5)
    assert analysis.findings[0].gain.ms == pytest.approx(30, abs=2)


def test_a_rank_that_is_late_by_chance_is_no_straggler() -> None:
    luck = random.Random(7)
    late = {(rank, step): luck.choice([0, 0, 0, 30]) for rank in range(4) for step in range(60)}
    analysis = analyze(Job(ranks=4, steps=60, forward=lambda rank, step: 40 + late[rank, step]).trace())
    assert "rank.straggler" not in above_info(analysis)


@pytest.mark.parametrize(
    ("rank_0_waits", "said"),
    [
        (
            0.0,
            "none of which is late on the whole: `dsprof run --level full` also tells what each module takes, and "
            "samples the stacks of all ranks",
        ),
        (
            25.0,
            "(a rank waits 8.33 ms of each step for a core, and what has theirs was not seen: run it with `dsprof run` "
            "where cores are free)",
        ),
    ],
)
def test_ranks_that_are_late_in_turn_may_wait_for_cores(rank_0_waits: float, said: str) -> None:
    """Three ranks on two cores, of which another one is late in each step."""
    draw = np.random.default_rng(1).exponential(25, (3, 40))
    job = Job(
        ranks=3, steps=40, forward=lambda rank, step: 40 + float(draw[rank, step]), cpu_share=0.2, cores=2,
        crowded=lambda rank, step: 0.0 if rank else rank_0_waits,
    )  # fmt: skip
    verdict = analyze(job.trace()).verdict
    assert verdict.status == "inconclusive"
    assert verdict.headline.endswith(said), verdict.headline


@pytest.mark.plants("data.stall")
def test_a_slow_loader_is_a_data_stall_with_a_number_of_workers() -> None:
    loader = {"fact": "dataloader", "rank": 0, "num_workers": 0, "site": "/home/me/train.py:12"}
    analysis = analyze(Job(data=constant(300), facts=[loader]).trace())
    first = analysis.findings[0]
    assert first.code == "data.stall"
    assert first.gain.ms == pytest.approx(300, rel=0.02)
    # 300 ms a batch beside 129 ms of the rest, half as much again to spare: 3.5 workers.
    assert first.fixes[0].patch[0] == {
        "file": "/home/me/train.py", "line": 12, "argument": "num_workers", "value": 4,
    }  # fmt: skip


def test_a_data_set_that_the_engine_was_given_is_told_where_it_was_given() -> None:
    loader = {"fact": "dataloader", "rank": 0, "num_workers": 2, "site": "/home/me/train.py:12", "by_engine": True}
    first = analyze(Job(data=constant(300), facts=[loader]).trace()).findings[0]
    assert first.code == "data.stall"
    (fix,) = first.fixes
    call = f"DataLoader(..., num_workers={first.evidence[2].expected}, persistent_workers=True)"
    assert (
        fix.title
        == f"initialize(training_data={call}) (train.py:12); of a data set it makes a DataLoader with 2 workers"
    )
    assert fix.patch[0] == {"file": "/home/me/train.py", "line": 12, "argument": "training_data", "value": call}


def test_a_loader_that_burns_cpu_gains_nothing_from_workers_where_no_core_is_idle() -> None:
    job = Job(data=constant(60), cpu_share=1.0)
    job.facts = [{"fact": "process", "rank": rank, "cores": 2, "threads": 1} for rank in range(2)]
    trace = job.trace()
    trace.run.facts[:] = job.facts
    stall = next(finding for finding in analyze(trace).findings if finding.code == "data.stall")
    assert stall.gain.ms < 6  # while the ranks wait for one another


@pytest.mark.plants("data.imbalance")
def test_uneven_inputs_are_an_imbalance_and_not_a_straggler() -> None:
    luck = random.Random(1)
    tokens = {(rank, step): luck.randint(256, 1024) for rank in range(4) for step in range(60)}
    job = Job(ranks=4, steps=60, tokens=lambda rank, step: tokens[rank, step])
    job.forward = lambda rank, step: tokens[rank, step] / 20
    job.backward = lambda rank, step: tokens[rank, step] / 10
    analysis = analyze(job.trace())
    assert above_info(analysis)[0] == "data.imbalance"
    assert "rank.straggler" not in above_info(analysis)
    expected = np.mean([
        (max(tokens[rank, step] for rank in range(4)) - sum(tokens[rank, step] for rank in range(4)) / 4) * 0.15
        for step in range(15, 45)
    ])  # fmt: skip
    assert analysis.findings[0].gain.ms == pytest.approx(expected, rel=0.1)


def test_a_rank_that_always_gets_more_is_an_imbalance_too() -> None:
    job = Job(tokens=lambda rank, step: 1024 if rank == 0 else 512)
    job.forward = lambda rank, step: 40 if rank == 0 else 20
    job.backward = lambda rank, step: 80 if rank == 0 else 40
    assert above_info(analyze(job.trace()))[0] == "data.imbalance"


@pytest.mark.plants("pause.gc")
def test_garbage_collection_on_one_rank() -> None:
    analysis = analyze(Job(gc=lambda rank, step: 50 if rank == 0 else 0).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("pause.gc", (0,))
    assert first.gain.ms == pytest.approx(50, abs=1.5)


def test_two_faults_on_different_ranks_share_what_they_cost() -> None:
    """Each hides the other: mending one alone gains next to nothing."""
    job = Job(forward=lambda rank, step: 70 if rank == 1 else 40, gc=lambda rank, step: 30 if rank == 0 else 0)
    analysis = analyze(job.trace())
    found = {finding.code: finding for finding in analysis.findings}
    late, collector = found["rank.straggler"], found["pause.gc"]
    assert set(above_info(analysis)) >= {"rank.straggler", "pause.gc"}
    assert late.share is not None
    assert collector.share is not None
    assert late.share.ms + collector.share.ms == pytest.approx(30, abs=1.5)
    assert late.gain.ms < 3
    assert collector.gain.ms < 3
    assert collector.fixes[0].gain == collector.gain
    assert late.together is not None
    assert late.together.code == "pause.gc"
    assert late.together.gain.ms == pytest.approx(30, abs=1.5)
    first, other = analysis.findings[0], analysis.findings[1].code
    assert f"alone saves next to nothing, as {other} holds the step up too; fixing both saves 30" in (
        analysis.verdict.headline
    )
    second = analysis.findings[1]
    assert first.weight.ms == pytest.approx(second.weight.ms, rel=0.1)
    assert first.weight.low > second.weight.low  # of two that weigh about as much the surer stands first


def test_what_no_other_fault_hides_gains_its_share_by_itself() -> None:
    """The collector stops the rank that is late anyway, so each fault gains what it costs."""
    job = Job(forward=lambda rank, step: 70 if rank == 1 else 40, gc=lambda rank, step: 30 if rank == 1 else 0)
    analysis = analyze(job.trace())
    for finding in analysis.findings[:2]:
        assert finding.together is None
        assert finding.gain.ms == pytest.approx(30, abs=1.5)
        assert finding.share is not None
        assert finding.share.ms == pytest.approx(finding.gain.ms, abs=1.0)
    assert "fixing it saves 30" in analysis.verdict.headline


@pytest.mark.plants("comm.small-messages")
def test_many_small_buckets_that_stand_in_the_way() -> None:
    sizes = (2048, 4096, 512, 8192) * 60
    ddp = {"fact": "ddp", "rank": 0, "site": "/home/me/train.py:9", "gradient_bytes": list(sizes)}
    job = Job(buckets=sizes, latency_ms=1.2, facts=[ddp])
    analysis = analyze(job.trace())
    first = analysis.findings[0]
    assert first.code == "comm.small-messages"
    # 240 collectives of 1.2 ms on two workers take 144 ms beside 80 ms of backward.
    assert first.gain.ms == pytest.approx(64, rel=0.1)
    assert first.fixes[0].patch[0]["argument"] == "bucket_cap_mb"


def test_a_group_of_one_rank_is_told_nothing_about_its_buckets() -> None:
    """It moves nothing: a device copies within its memory, where it does anything."""
    sizes = (2048, 4096, 512, 8192) * 60
    ddp = {"fact": "ddp", "rank": 0, "site": "/home/me/train.py:9", "gradient_bytes": list(sizes)}
    group = {"fact": "group", "rank": 0, "name": "0", "ranks": [0]}
    codes = [
        {finding.code for finding in analyze(Job(ranks=1, buckets=sizes, latency_ms=1.2, facts=facts).trace()).findings}
        for facts in ([ddp], [ddp, group])
    ]
    assert "comm.small-messages" in codes[0]
    assert not {code for code in codes[1] if code.startswith("comm.")}


@pytest.mark.plants("comm.large-bucket")
def test_one_huge_bucket_that_overlaps_nothing() -> None:
    ddp = {"fact": "ddp", "rank": 0, "site": None, "gradient_bytes": [1 << 20] * 60}
    analysis = analyze(Job(buckets=(60 << 20,), ms_per_mib=0.8, facts=[ddp]).trace())
    first = analysis.findings[0]
    assert first.code == "comm.large-bucket"
    assert first.gain.ms == pytest.approx(47, rel=0.1)
    assert first.fixes[0].patch[0]["value"] < 60


@pytest.mark.parametrize(
    ("facts", "settles"),
    [
        ([{"fact": "ddp", "rank": 0, "site": None, "gradient_bytes": [1 << 20] * 64}],
         "`dsprof fix --set ddp.bucket_cap_mb=5 --verify` measures it"),
        ([], "(all of one size, or always at once) do not tell what other sizes take; make the change"),
    ],
)  # fmt: skip
def test_one_huge_bucket_is_told_what_settles_how_much_could_be_gained(
    facts: list[dict[str, object]], settles: str
) -> None:
    """The link's latency and bandwidth do not come apart, however many steps there are: so the smallest buckets, which
    would gain most if there were no latency, are not what is proposed."""
    job = Job(
        buckets=(64 << 20,), ms_per_mib=0.8, forward=lambda rank, step: 250, backward=lambda rank, step: 12, facts=facts
    )
    analysis = analyze(job.trace())
    assert analysis.verdict.status == "inconclusive"
    assert settles in analysis.verdict.headline
    exposed = next(finding for finding in analysis.findings if finding.code == "comm.large-bucket")
    assert exposed.gain.low < 0 < exposed.gain.ms


@pytest.mark.parametrize(("tensor_parallel_ms", "judged"), [(9, True), (11, False)])
def test_waiting_for_tensor_parallelism_is_not_explained_by_buckets(tensor_parallel_ms: int, judged: bool) -> None:
    """Nor is waiting for a late rank, which is not the collective's."""
    waits = pd.DataFrame(
        [("0", 0, 0, 10, None), ("0", 1, 20, 110, 110), ("1", 0, 200, 200 + tensor_parallel_ms, None)],
        columns=["group", "seq", "start_ns", "end_ns", "arrival_ns"],
    )
    waits["arrival_ns"] = waits["arrival_ns"].astype("Int64")
    collectives = pd.DataFrame({
        "group": ["0", "0", "1"], "seq": [0, 1, 0], "step": 5,
        "purpose": ["gradient", "gradient", "tensor-parallel"],
    })  # fmt: skip
    found = {
        "waits": PackedTable(waits.assign(rank=0)), "judged_collectives": RankRows(collectives), "step_numbers": [5],
        "ranks": (0, 1), "kept": {},
    }  # fmt: skip
    assert waits_mostly_for_layers(cast(Study, SimpleNamespace(**found))) is not judged


def test_a_dead_rank_comes_first() -> None:
    job = Job(forward=lambda rank, step: 90 if rank == 1 else 40)
    job.exits = [
        RankExit(rank=0, host="host", pid=100, code=1, signal=None, ended_ns=2_000),
        RankExit(rank=1, host="host", pid=101, code=None, signal=9, ended_ns=1_000),
    ]
    analysis = analyze(job.trace())
    assert [finding.code for finding in analysis.findings[:2]] == ["run.rank-died", "rank.straggler"]
    assert analysis.findings[0].where.ranks == (1,)
    assert "SIGKILL" in analysis.findings[0].title


def test_a_dead_rank_says_which_exception_ended_it() -> None:
    fact = {"fact": "uncaught", "rank": 1, "type": "ValueError", "message": "bad batch", "site": "/home/me/train.py:31"}
    job = Job(facts=[fact])
    job.exits = [
        RankExit(rank=0, host="host", pid=100, code=1, signal=None, ended_ns=2_000),
        RankExit(rank=1, host="host", pid=101, code=1, signal=None, ended_ns=1_000),
    ]
    first = analyze(job.trace()).findings[0]
    last = job.steps - 1
    assert first.title == f"rank 1 ended by exit status 1 after step {last}: train.py:31: ValueError: bad batch"
    assert {item.metric: item.value for item in first.evidence}["exception"] == "train.py:31: ValueError: bad batch"
    assert first.fixes[0].title == (
        "ValueError was raised at /home/me/train.py:31: the rank's own output has the whole traceback"
    )


@pytest.mark.parametrize(
    ("world_size", "told", "title", "advice"),
    [
        (None, True, "the script ended by exit status 1 before it completed a step: train.py:3: KeyError: 'batch'",
         "KeyError was raised at /home/me/train.py:3: the rank's own output has the whole traceback"),
        (2, False, "rank 0 ended by exit status 1 before it completed a step",
         "see the rank's own output above for the exception or the call that ended it; dsprof can name an exception "
         "only once `import torch` has attached it"),
    ],
)  # fmt: skip
def test_a_script_that_died_at_start(world_size: int | None, told: bool, title: str, advice: str) -> None:
    fact = {"fact": "uncaught", "rank": 0, "type": "KeyError", "message": "'batch'", "site": "/home/me/train.py:3"}
    ends = [RankExit(rank=0, host="host", pid=100, code=1, signal=None, ended_ns=1_000)]
    run = RunInfo("a", "a", [], status=1, exits=ends, facts=[fact] if told else [], world_size=world_size)
    analysis = analyze(Trace.of(run, Job().trace().rows.iloc[:0]))
    (died,) = analysis.findings
    assert (died.code, died.title, died.fixes[0].title) == ("run.rank-died", title, advice)
    assert (analysis.verdict.status, analysis.verdict.headline) == ("failed", title)
    assert "was doing" not in {item.metric for item in died.evidence}, "nothing was captured"


def test_a_command_of_which_only_its_status_is_known() -> None:
    run = RunInfo("a", "a", [], status=3)
    reason = analyze(Trace.of(run, Job().trace().rows.iloc[:0])).not_judged["run.rank-died"]
    assert reason == "the command ended with status 3, and what it started does not tell how its ranks ended"


def test_that_a_line_issues_such_ones_is_nothing_that_a_rank_did() -> None:
    job = Job()
    job.exits = [RankExit(rank=0, host="host", pid=100, code=None, signal=9, ended_ns=1_000)]
    trace = job.trace()
    last = trace.rows[trace.rows["rank"] == 0].sort_values("start_ns").tail(1)
    mark = last.assign(kind="mark", name=CALL_SITE, start_ns=last["start_ns"] + 1, ended=True)
    found = analyze(Trace.of(trace.run, pd.concat([trace.rows, mark], ignore_index=True))).findings[0]
    assert {item.metric: item.value for item in found.evidence}["was doing"] == "after optimizer"


@pytest.mark.plants("run.rank-died")
def test_a_rank_that_nobody_watched_was_gone_before_the_one_that_waited_for_it() -> None:
    """Lightning starts the second rank itself; the first fails in a collective with it."""
    job = Job()
    job.exits = [RankExit(rank=0, host="host", pid=100, code=1, signal=None, ended_ns=9_000_000_000)]
    trace = job.trace()
    rows = trace.rows
    waiting = rows[(rows["kind"] == "comm") & (rows["rank"] == 0)].index[-1]
    rows.loc[waiting, "ended"] = False
    for info, closed_ns in zip(trace.run.ranks, (8_500_000_000, 8_000_000_000), strict=True):
        info.closed_ns = closed_ns
    first = analyze(Trace.of(trace.run, rows)).findings[0]
    assert first.code == "run.rank-died"
    assert first.title.startswith("rank 1 was gone first, 500 ms before rank 0 ended by exit status 1 after step ")
    assert first.where.ranks == (1,)
    assert "something else than dsprof started it" in first.fixes[0].title
    rows.loc[waiting, "ended"] = True
    assert analyze(Trace.of(trace.run, rows)).findings[0].where.ranks == (0,)
    rows.loc[waiting, "ended"] = False
    trace.run.ranks[1].closed_ns, trace.run.ranks[1].closed = None, False
    killed = analyze(Trace.of(trace.run, rows)).findings[0]
    assert killed.title.startswith("rank 1 was gone first, before rank 0 ended by exit status 1 after step ")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_run_of_hardly_any_steps_has_no_verdict_and_no_error(steps: int) -> None:
    analysis = analyze(Job(steps=steps).trace())
    assert analysis.step_count == steps
    assert above_info(analysis) in ([], ["comm.large-bucket"])
    assert not any("failed" in reason for reason in analysis.not_judged.values())
    json.dumps(analysis.to_dict(), allow_nan=False)


def test_findings_json_has_the_shape_of_the_design() -> None:
    analysis = analyze(Job(forward=lambda rank, step: 90 if rank == 1 else 40).trace())
    found = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    assert list(found) == [
        "schema", "run", "budget", "findings", "verdict", "time", "passed", "not_judged", "noise_ms", "notes",
        "memory", "critical_path", "capture",
    ]  # fmt: skip
    path = found["critical_path"]
    assert sum(path["by_kind"].values()) == pytest.approx(path["ms"])
    assert path["by_rank"]["1"] > 89  # the late rank sets the pace
    assert list(found["run"]) == [
        "id",
        "command",
        "ranks",
        "steps",
        "steps_judged",
        "step_is",
        "step_ms",
        "whole_step_ms",
    ]
    assert list(found["run"]["step_ms"]) == ["mean", "median", "p10", "p90"]
    assert list(found["findings"][0]) == [
        "code", "title", "severity", "confidence", "where", "evidence", "gain", "share", "together", "fixes",
        "verified",
    ]  # fmt: skip
    assert list(found["capture"]) == [
        "overhead_percent",
        "overhead_measured",
        "dropped",
        "clock_error_us",
        "warnings",
        "replay",
    ]
    assert list(found["capture"]["replay"]) == [
        "error_percent", "contradicted_percent", "held_out_error_percent", "halves_differ_percent"
    ]  # fmt: skip


def test_how_pandas_holds_strings_is_of_no_consequence() -> None:
    """Commands hold them as Python's own, a notebook as Arrow's."""
    job = Job(ranks=3, forward=lambda rank, step: 90 if rank == 1 else 40)
    with pd.option_context("mode.string_storage", "pyarrow"):
        trace = job.trace()
        assert trace.rows.columns.dtype.storage == "pyarrow"
        in_arrow = analyze(trace).to_dict()
    plain = job.trace()
    assert plain.rows.columns.dtype.storage == "python"
    assert analyze(plain).to_dict() == in_arrow
    assert above_info(analyze(trace))[0] == "rank.straggler"


def test_two_hosts_are_put_on_one_clock() -> None:
    trace = Job().trace()
    trace.run.ranks[1].host = "other"
    rows = trace.rows
    for when in ("start_ns", "issue_ns", "arrival_ns"):
        rows.loc[rows["rank"] == 1, when] += 5_000_000_000
    analysis = analyze(Trace.of(trace.run, rows))
    together = analyze(Job().trace())
    assert analysis.budget == pytest.approx(together.budget, abs=0.05)
    assert analysis.capture.clock_error_us < 1


def test_smaller_buckets_gain_nothing_where_there_is_nothing_to_hide_behind() -> None:
    """60 MiB at 0.8 ms a MiB behind 5 ms of backward: bandwidth is shared, however many collectives there are."""
    analysis = analyze(Job(buckets=(60 << 20,), ms_per_mib=0.8, backward=constant(5)).trace())
    large = next(finding for finding in analysis.findings if finding.code == "comm.large-bucket")
    assert large.gain.ms < 5
    assert above_info(analysis)[0] == "comm.volume"


def test_a_gpu_job_is_not_called_healthy() -> None:
    trace = Job(forward=lambda rank, step: 90 if rank == 1 else 40).trace()
    rows = trace.rows
    rows.loc[rows["kind"] == "comm", "dur_ns"] = pd.NA
    analysis = analyze(Trace.of(trace.run, rows[rows["kind"] != "wait"]))
    assert above_info(analysis) == []
    assert {"rank.straggler", "comm.exposed", "comm.small-messages", "data.stall"} <= set(analysis.not_judged)


def test_a_rank_whose_first_steps_are_lost_is_renumbered() -> None:
    trace = Job(steps=60, forward=lambda rank, step: 90 if rank == 1 else 40).trace()
    early = (trace.rows["rank"] == 1) & (trace.rows["step"] < 10)
    rows = trace.rows[~early].copy()
    rows.loc[rows["rank"] == 1, "step"] -= 10
    analysis = analyze(Trace.of(trace.run, rows))
    assert analysis.findings[0].code == "rank.straggler"
    assert analysis.findings[0].gain.ms == pytest.approx(50, abs=2)
    assert any("renumbered" in warning for warning in analysis.capture.warnings)


def test_a_rank_that_is_late_in_every_tenth_step_only() -> None:
    job = Job(steps=400, forward=lambda rank, step: 440 if rank == 0 and step % 10 == 0 else 40)
    first = analyze(job.trace()).findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (0,))
    assert first.gain.ms == pytest.approx(40, rel=0.1)


def test_buckets_of_all_groups_of_a_dimension_are_cut_alike() -> None:
    """Two replicas of two ranks each: as much is gained as by one of them."""
    sizes = (2048, 4096, 512, 8192) * 60
    ddp = {"fact": "ddp", "rank": 0, "site": None, "gradient_bytes": list(sizes)}
    trace = Job(ranks=4, steps=20, buckets=sizes, latency_ms=1.2, facts=[ddp]).trace()
    rows = trace.rows.astype({"group": object})
    rows.loc[(rows["kind"] == "comm") & (rows["rank"] >= 2), "group"] = "1"
    (one, two) = (analyze(each).findings[0] for each in (trace, Trace.of(trace.run, rows)))
    assert (one.code, two.code) == ("comm.small-messages",) * 2
    assert (one.where.dimension, two.where.dimension) == (None, "dp")
    assert two.gain.ms == pytest.approx(one.gain.ms, rel=0.02)
    assert two.evidence[0].value == one.evidence[0].value == 240


def test_the_loader_that_is_slow_is_the_one_named() -> None:
    validation = {"fact": "dataloader", "rank": 0, "number": 1, "num_workers": 4, "site": "train.py:30"}
    training = {"fact": "dataloader", "rank": 0, "number": 2, "num_workers": 0, "site": "train.py:20"}
    trace = Job(data=constant(100), facts=[validation, training]).trace()
    rows = trace.rows
    rows.loc[rows["name"] == "data", "value"] = 2.0
    assert analyze(Trace.of(trace.run, rows)).findings[0].fixes[0].patch[0]["line"] == 20


def test_a_gain_that_is_not_a_number_is_info() -> None:
    from dsprof.analyzer.finding import Gain, severity_of

    assert severity_of(Gain(10, 10, float("nan"), float("nan")), 1.0) == "info"


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_straggler_costs_the_same_wherever_in_the_step_it_is_late(phase: str) -> None:
    usual = {"data": 1, "forward": 40, "backward": 80, "optimizer": 5}[phase]
    job = Job(**{phase: lambda rank, step: usual + 30 * (rank == 1)}, buckets=(1 << 20,))  # type: ignore[arg-type]
    first = analyze(job.trace()).findings[0]
    assert first.code == ("data.stall" if phase == "data" else "rank.straggler")
    assert first.gain.ms == pytest.approx(30, abs=2)


@pytest.mark.plants("pipeline.imbalance")
def test_stages_of_a_pipeline_are_not_compared_as_if_they_did_the_same() -> None:
    trace = Job(forward=lambda rank, step: 90 if rank == 1 else 40).trace()
    phases = trace.rows[trace.rows["kind"] == "phase"].astype({"name": object})
    after_forward = phases[(phases["name"] == "forward") & (phases["rank"] == 0)].assign(peer=1)
    after_backward = phases[(phases["name"] == "backward") & (phases["rank"] == 1)].assign(peer=0)
    sends = pd.concat([after_forward, after_backward])
    sends["issue_ns"] = sends["start_ns"] = sends["start_ns"] + sends["dur_ns"]
    sends = sends.assign(kind="comm", name="send", group="0", seq=range(len(sends)), lane="comm.0", dur_ns=1000)
    analysis = analyze(Trace.of(trace.run, pd.concat([trace.rows, sends], ignore_index=True)))
    assert "rank.straggler" in analysis.not_judged
    assert above_info(analysis)[0] == "pipeline.imbalance"
    assert "data.imbalance" not in above_info(analysis)


@pytest.mark.parametrize("last", [512, 256])
def test_inputs_are_compared_between_replicas_of_a_stage(last: int) -> None:
    """Ranks 0 and 1 read tokens, 2 and 3 get activations, many times as large; rank 3 as many, or half as many."""
    sizes = [32, 32, 512, last]
    job = Job(ranks=4, tokens=lambda rank, step: sizes[rank], forward=lambda rank, step: 20 + sizes[rank] / 16)
    trace = job.trace()
    acted = trace.rows[(trace.rows["kind"] == "phase") & (trace.rows["name"] == "forward")].copy()
    acted["kind"], acted["name"], acted["stage"] = "pipe", "F", acted["rank"] // 2
    found = analyze(Trace.of(trace.run, pd.concat([trace.rows, acted], ignore_index=True)))
    assert ("data.imbalance" in above_info(found)) == (last == 256)


def test_a_worker_costs_something_too() -> None:
    """0.3 ms of loading a step is less than handing a batch over takes."""
    job = Job(data=constant(0.3), forward=constant(0.5), backward=constant(0.5), optimizer=constant(0.2), buckets=())
    (stall,) = [finding for finding in analyze(job.trace()).findings if finding.code == "data.stall"]
    assert (stall.severity, stall.gain.ms, stall.fixes) == ("info", 0.0, ())


@pytest.mark.parametrize("slow", [False, True])
def test_a_few_steps_are_no_reason_to_pass(slow: bool) -> None:
    analysis = analyze(Job(steps=3, forward=lambda rank, step: 80 if slow and rank else 40).trace())
    assert not {"rank.straggler", "data.imbalance", "comm.exposed", "data.stall"} & {*analysis.passed}
    reason = "3 ordinary steps cannot tell a gain from noise: profile at least 20"
    assert analysis.not_judged["rank.straggler"] == reason
    assert analysis.verdict.status == "inconclusive"
