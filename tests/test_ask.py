"""`dsprof whatif`: what changes would save, alone and together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from synthetic import Job, constant, write_capture

from dsprof.analyzer.analyze import explain
from dsprof.analyzer.ask import Misasked, Request, Scaled, Without, ask
from dsprof.analyzer.candidate import Candidate, Excess, OneOf, Price
from dsprof.analyzer.finding import Finding, Gain
from dsprof.analyzer.judge import Looked, judge
from dsprof.analyzer.study import Study, study
from dsprof.cli import main
from dsprof.knobs import KnobError
from dsprof.knobs.predicted import CHANGES, turned
from dsprof.knobs.questions import NotAnswered, answer_questions, read_questions
from dsprof.knobs.registry import find
from dsprof.reports.answers import render
from dsprof.trace import Trace

SMALL = (2048, 4096, 512, 8192) * 20
DDP = {"fact": "ddp", "rank": 0, "site": "train.py:9", "gradient_bytes": list(SMALL)}
BY_NAME: dict[str, Callable[[], Job]] = {
    "straggler": lambda: Job(forward=lambda rank, step: 90 if rank == 1 else 40),
    "two stragglers": lambda: Job(ranks=8, steps=24, forward=lambda rank, step: 70 if rank in (2, 5) else 40),
    "two faults": lambda: Job(
        forward=lambda rank, step: 70 if rank == 1 else 40, gc=lambda rank, step: 30 if rank == 0 else 0
    ),
    "stall": lambda: Job(
        data=constant(300), facts=[{"fact": "dataloader", "rank": 0, "num_workers": 0, "site": "train.py:12"}]
    ),
    "small": lambda: Job(buckets=SMALL, latency_ms=4.0, facts=[DDP]),
    "link": lambda: Job(backward=constant(200), buckets=(8 << 20, 24 << 20), latency_ms=4, jitter=0.0),
}


@cache
def measured(name: str) -> Study:
    return study(BY_NAME[name]().trace())


@cache
def findings(name: str) -> dict[str, Finding]:
    return {finding.code: finding for finding in explain(measured(name)).findings}


def saved(name: str, *requests: Request) -> Gain:
    (row,) = ask(measured(name), [requests]).rows
    assert row.gain is not None, row.reason
    return row.gain


def close(one: Gain, other: Gain) -> bool:
    pairs = ((one.ms, other.ms), (one.low, other.low), (one.high, other.high), (one.percent, other.percent))
    return all(a == pytest.approx(b, rel=1e-6, abs=1e-5) for a, b in pairs)


# --- without


@pytest.mark.parametrize(("name", "code"), [("straggler", "rank.straggler"), ("stall", "data.stall")])
def test_a_fault_taken_away_saves_what_its_finding_says(name: str, code: str) -> None:
    assert findings(name)[code].gain.ms > 40
    assert close(saved(name, Without(code)), findings(name)[code].gain)


def test_of_one_rank_alone_it_saves_what_the_finding_says_of_that_rank() -> None:
    finding = findings("two stragglers")["rank.straggler"]
    assert finding.title.startswith("ranks 2, 5 arrive ")
    assert set(finding.by_rank) == {2, 5}
    for rank, gain in finding.by_rank.items():
        assert close(saved("two stragglers", Without("rank.straggler", (rank,))), gain)
    both = saved("two stragglers", Without("rank.straggler", (2, 5)))
    assert close(both, finding.gain)
    assert both.ms > 25


def test_two_that_hide_each_other_save_together_what_their_shares_sum_to() -> None:
    found = findings("two faults")
    late, collector = found["rank.straggler"], found["pause.gc"]
    assert late.share is not None
    assert collector.share is not None
    both = saved("two faults", Without("rank.straggler"), Without("pause.gc"))
    assert both.ms == pytest.approx(late.share.ms + collector.share.ms, abs=0.01)
    assert both.ms > 5 * saved("two faults", Without("pause.gc")).ms


def test_what_a_run_does_not_have_is_said() -> None:
    with pytest.raises(Misasked, match="this run has no such finding"):
        saved("straggler", Without("pause.gc"))
    with pytest.raises(Misasked, match="it is not of rank 0, but of rank 1"):
        saved("straggler", Without("rank.straggler", (0,)))
    with pytest.raises(Misasked, match=r"rank 9 is none of the run's \(ranks 0-1\)"):
        saved("straggler", Without("rank.straggler", (9,)))
    (row,) = ask(measured("small"), [[Without("comm.small-messages")]]).rows
    assert row.gain is None
    assert "ask with --set ddp.bucket_cap_mb=" in row.reason


@pytest.mark.parametrize(("change", "says"), [
    (OneOf((Excess(np.ones(3), "step"),)), "it may be mended in several ways, which gain differently"),
    (Excess(np.ones(3), "step"), "was measured, not replayed"),
    (Excess(np.ones(3), "occasion"), "it costs time outside ordinary steps"),
])  # fmt: skip
def test_a_cost_that_is_no_change_of_the_steps_says_what_it_is(
    change: Excess | OneOf, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(price: Price) -> Finding:
        raise AssertionError

    looked = Looked((Candidate("pipeline.bubble", change, never),), (), "")
    monkeypatch.setattr("dsprof.analyzer.ask.look_for", lambda study, code: looked)
    (row,) = ask(measured("straggler"), [[Without("pipeline.bubble")]]).rows
    assert row.gain is None
    assert says in row.reason


# --- scaled


def test_a_link_takes_what_its_parts_take() -> None:
    """Of two transfers the step waits for the second: 4 ms of latency, and 24 MiB at 1 ms each."""
    assert measured("link").step_ms == pytest.approx(1 + 40 + 200 + 28 + 5)
    for part, factor, expected in [
        ("link.bandwidth", 2, 12), ("link.latency", 0.5, 2), ("link", 2, 14), ("link", 1e6, 28), ("link", 0.5, -28),
        ("link.latency", 3, -8),
    ]:  # fmt: skip
        gain = saved("link", Scaled(part, factor))
        assert gain.ms == pytest.approx(expected, abs=0.01)
        assert gain.low < gain.ms < gain.high
    both = saved("link", Scaled("link.bandwidth", 4), Scaled("link.latency", 0.25), Scaled("data", 0.0))
    assert both.ms == pytest.approx(0.75 * 28 + 1, abs=0.01)


def test_links_that_are_scaled_twice_are_scaled_once() -> None:
    one = saved("link", Scaled("link", 10), Scaled("link.latency", 10))
    assert one.ms == pytest.approx(saved("link", Scaled("link.bandwidth", 10)).ms)


def test_work_takes_so_many_times_as_long() -> None:
    half = saved("straggler", Scaled("compute", 0.5))
    assert half.ms == pytest.approx((90 + 80) / 2, rel=0.03)
    assert half.low < half.ms < half.high
    assert saved("straggler", Scaled("compute", 1.5)).ms == pytest.approx(-half.ms, rel=0.03)
    nothing = saved("stall", Scaled("data", 0.0))
    assert nothing.ms == pytest.approx(300, rel=0.03)


@pytest.mark.parametrize(("part", "factor", "says"), [
    ("lnk", 2.0, "did you mean link?"), ("compte", 2.0, "did you mean compute?"),
    ("zzz", 2.0, "there are link, link.bandwidth"), ("link", 0.0, "write a factor above 0"),
    ("compute", -1.0, "write a factor"), ("compute", float("nan"), "write a factor"),
])  # fmt: skip
def test_what_cannot_be_scaled(part: str, factor: float, says: str) -> None:
    with pytest.raises(Misasked, match=says.replace("?", r"\?")):
        Scaled(part, factor)


# --- knobs


def test_another_bucket_size_saves_what_the_finding_says_of_it() -> None:
    finding = findings("small")["comm.small-messages"]
    ((key, value),) = finding.fixes[0].knobs
    assert key == "ddp.bucket_cap_mb"
    assert close(saved("small", turned(key, value, "RUN")), finding.gain)


def test_a_knob_and_a_link_compose() -> None:
    """Fewer buckets save little where a bucket costs next to nothing anyway; and as many as there are, nothing."""
    larger, quick = turned("ddp.bucket_cap_mb", 25, "RUN"), Scaled("link", 1e3)
    alone = saved("small", quick)
    assert alone.ms > 40
    assert saved("small", larger).ms > 40
    assert saved("small", larger, quick).ms == pytest.approx(alone.ms, abs=4)
    smallest = turned("ddp.bucket_cap_mb", 0.001, "RUN")
    present = saved("small", smallest).ms
    assert saved("small", smallest, Scaled("data", 0.0)).ms == pytest.approx(present + 1, abs=0.1)


def test_workers_are_predicted_as_far_as_the_run_tells() -> None:
    finding = findings("stall")["data.stall"]
    workers = dict(finding.fixes[0].knobs)["loader.num_workers"]
    assert close(saved("stall", turned("loader.num_workers", workers, "RUN")), finding.gain)
    (row,) = ask(measured("stall"), [[turned("loader.num_workers", workers + 7, "RUN")]]).rows
    assert row.gain is None
    assert f"from the run's 0; {workers} can be predicted" in row.reason


def test_a_frozen_heap_saves_the_pauses() -> None:
    assert close(saved("two faults", turned("gc.freeze", True, "RUN")), findings("two faults")["pause.gc"].gain)
    assert close(saved("two faults", turned("gc.every", 0, "RUN")), findings("two faults")["pause.gc"].gain)


def test_each_knob_that_is_predicted_is_one() -> None:
    assert all(find(key).key == key for key in CHANGES)


def test_buckets_of_a_run_without_them() -> None:
    for key, value in (("ddp.bucket_cap_mb", 5), ("zero_optimization.reduce_bucket_size", 1000)):
        (row,) = ask(measured("straggler"), [[turned(key, value, "RUN")]]).rows
        assert row.gain is None
        assert "DistributedDataParallel" in row.reason or "ZeRO" in row.reason


def sharded() -> Study:
    """A step gathers 40 parameters and scatters 40 gradients, one at a time."""
    fsdp = {"fact": "fsdp", "rank": 0, "version": 2, "units": 40, "site": "train.py:9"}
    trace = Job(steps=30, buckets=(4096,) * 80, latency_ms=3.6, facts=[fsdp]).trace()
    rows = trace.rows.astype({"name": object, "purpose": object})
    comm = rows["kind"] == "comm"
    gathers = comm & (rows["seq"] % 80 < 40)
    rows.loc[comm, ["name", "purpose"]] = ["reduce_scatter", "gradient"]
    rows.loc[gathers, ["name", "purpose"]] = ["all_gather", "parameter"]
    return study(Trace.of(trace.run, rows))


def test_coarser_units_save_what_the_finding_says_of_them() -> None:
    whole = sharded()
    (finding,) = [one for one in judge(whole).findings if one.code == "comm.small-messages"]
    ((key, together),) = finding.fixes[0].knobs
    assert key == "fsdp2.modules_per_unit"
    present, coarser = ask(whole, [[turned(key, 1, "RUN")], [turned(key, together, "RUN")]]).rows
    assert present.gain is not None
    assert coarser.gain is not None
    assert present.gain.ms == 0
    assert close(coarser.gain, finding.gain)


def test_smaller_reductions_are_not_told_by_larger_ones() -> None:
    """Of DeepSpeed, whose backward waits for each."""
    deepspeed = {"fact": "deepspeed", "rank": 0, "zero_stage": 2, "reduce_bucket_size": 512}
    whole = study(Job(buckets=(2048,) * 8, facts=[deepspeed]).trace())
    key = "zero_optimization.reduce_bucket_size"
    smaller, larger, wrong = ask(whole, [[turned(key, value, "RUN")] for value in (100, 5000, "much")]).rows
    assert "the run's buckets hold 512 elements" in smaller.reason
    assert "backward goes on while a bucket is under way" in larger.reason
    assert "much is no number of elements" in wrong.reason


# --- questions


def test_changes_are_asked_alone_and_together() -> None:
    asked = read_questions(["rank.straggler:2, 3", "data.stall"], ["link=10"], ["ddp.bucket_cap_mb=50"], [], "RUN")
    assert [[one.says for one in question] for question in asked] == [
        ["without rank.straggler:2,3"],
        ["without data.stall"],
        ["link x 10"],
        ["ddp.bucket_cap_mb=50"],
        ["without rank.straggler:2,3", "without data.stall", "link x 10", "ddp.bucket_cap_mb=50"],
    ]


def test_a_sweep_has_a_row_for_each_value() -> None:
    asked = read_questions([], ["link=1"], [], ["ddp.bucket_cap_mb=0.01,1,25"], "RUN")
    answers = answer_questions(measured("small"), asked)
    assert [row.asked[-1] for row in answers.rows] == [
        "link x 1", "ddp.bucket_cap_mb=0.01", "ddp.bucket_cap_mb=1", "ddp.bucket_cap_mb=25",
    ]  # fmt: skip
    nothing, smaller, one, most = (row.gain for row in answers.rows)
    assert nothing is not None
    assert smaller is not None
    assert one is not None
    assert most is not None
    assert nothing.ms == 0
    assert smaller.ms > 40
    assert smaller.ms != one.ms
    assert most.ms == pytest.approx(one.ms)  # all of it is in one bucket


def test_lists_are_swept_as_they_are() -> None:
    asked = read_questions([], [], [], ["pipeline.partition_method=[0,4,8], [0,5,8],[0,4,8]"], "RUN")
    assert [one.says for (one,) in asked] == [
        "pipeline.partition_method=[0, 4, 8]",
        "pipeline.partition_method=[0, 5, 8]",
    ]


def test_a_knob_of_what_the_run_does_not_have_is_not_to_be_measured_there() -> None:
    (row,) = answer_questions(
        measured("small"), read_questions([], [], ["fsdp2.reshard_after_forward=true"], [], "RUN")
    ).rows
    assert row.reason == "no call of fully_shard was seen in this run"


@pytest.mark.parametrize(("words", "says"), [
    (([], [], [], []), "nothing to ask: give --without"),
    ((["rank.stragler"], [], [], []), "did you mean rank.straggler?"),
    ((["rank.straggler:x"], [], [], []), "write CODE or CODE:RANK,RANK"),
    ((["rank.straggler:"], [], [], []), "write CODE or CODE:RANK,RANK"),
    ((["pause.gc", "pause.gc"], [], [], []), "without pause.gc: given twice"),
    (([], ["link"], [], []), "write PART=FACTOR"),
    (([], ["link=fast"], [], []), "write PART=FACTOR"),
    (([], [], ["ddp.bucket_cap=3"], []), "did you mean ddp.bucket_cap_mb?"),
    (([], [], ["ddp.bucket_cap_mb=-3"], []), "write a number"),
    (([], [], ["ddp.static_graph=true"], []),
     "not predicted yet; `dsprof fix RUN --set ddp.static_graph=true --verify` measures it"),
    (([], [], ["env.HF_TOKEN=hunter2hunter2x"], []), "--set env.HF_TOKEN=[redacted]: what"),
    (([], [], [], ["ddp.bucket_cap_mb="]), "write KEY=VALUE,VALUE"),
    (([], [], [], ["ddp.bucket_cap_mb=1,x"]), "write a number"),
    (([], [], ["ddp.bucket_cap_mb=25"], ["ddp.bucket_cap_mb=1,5"]),
     "--sweep ddp.bucket_cap_mb: --set gives it a value, too"),
])  # fmt: skip
def test_what_is_no_question_says_what_to_write(words: tuple[list[str], ...], says: str) -> None:
    with pytest.raises(KnobError) as raised:
        read_questions(*words, "RUN")
    assert says in str(raised.value)


# --- where steps cannot be replayed


def test_steps_that_cannot_be_replayed_say_why() -> None:
    whole = measured("straggler")
    with pytest.raises(NotAnswered, match="no step was completed on all captured ranks"):
        answer_questions(replace(whole, graph=None), read_questions([], ["link=2"], [], [], "RUN"))
    assert whole.checked is not None
    doubtful = replace(whole, checked=replace(whole.checked, error=0.5))
    with pytest.raises(NotAnswered, match="replaying the measured steps misses them by 50 %"):
        answer_questions(doubtful, read_questions([], ["link=2"], [], [], "RUN"))


# --- the verb


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whatif") / "run"
    for capture in BY_NAME["straggler"]().captures().values():
        write_capture(capture, folder / "capture")
    return folder


def test_the_verb_prints_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(run), "--without", "rank.straggler:1", "--scale", "compute=0.5"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["asked", "step", "now", "then", "saved", "a", "step,", "with", "95", "%", "interval"]
    assert [line.split("  ")[0] for line in table[1:4]] == [
        "without rank.straggler:1", "compute x 0.5", "without rank.straggler:1 + compute x 0.5",
    ]  # fmt: skip
    assert table[5].startswith("replayed: ")
    assert "steps held out were missed by" in table[5]


def test_the_verb_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(run), "--without", "rank.straggler", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["answers"]
    assert row["saved"]["ms"] == pytest.approx(50, abs=1.5)
    assert row["then_ms"] == pytest.approx(told["step_ms"] - row["saved"]["ms"])
    assert row["saved"]["low"] < row["saved"]["ms"] < row["saved"]["high"]
    assert (row["asked"], row["reason"]) == (["without rank.straggler"], "")
    assert told["steps_replayed"] > 20


@pytest.mark.parametrize(("words", "status", "says"), [
    (["--without", "rank.stragler"], 2, "did you mean rank.straggler?"),
    (["--without", "rank.straggler:0"], 2, "but of rank 1"),
    (["--without", "pause.gc"], 2, "this run has no such finding"),
    (["--set", "loader.pin_memory=true"], 2, "--set loader.pin_memory=true --verify` measures it"),
    ([], 2, "nothing to ask"),
])  # fmt: skip
def test_mistakes_in_the_call(
    run: Path, words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(run), *words]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(tmp_path), "--scale", "link=2"]) == 3
    assert str(tmp_path) in capsys.readouterr().err


def test_what_cannot_be_told_is_a_row_and_a_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(run), "--set", "ddp.bucket_cap_mb=50"]) == 4
    assert "not predicted: no DistributedDataParallel was seen" in capsys.readouterr().out


def test_a_row_of_what_costs_time() -> None:
    answers = ask(measured("straggler"), [[Scaled("compute", 2)]])
    (row,) = [line for line in render(answers).splitlines() if line.startswith("compute x 2")]
    assert "(-" in row
    assert np.sign(answers.rows[0].gain.ms if answers.rows[0].gain else 0) == -1
