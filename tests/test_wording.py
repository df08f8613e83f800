"""The words and numbers shared by the reports."""

from __future__ import annotations

from dataclasses import replace

import factories
import pytest

from dsprof.analyzer import text
from dsprof.analyzer.align.steps import StepTime
from dsprof.analyzer.analysis import kind_of, part_of
from dsprof.analyzer.finding import Fix, Gain, Severity, Where
from dsprof.reports import edits, palette, wording
from dsprof.run import RankExit


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"), (0.004, "0"), (0.43, "0.43"), (4.206, "4.21"), (9.996, "10.0"), (38.24, "38.2"), (99.96, "100"),
        (1234.5, "1,234"), (-38.24, "-38.2"), (float("nan"), "?"), (float("inf"), "?"),
    ],
)  # fmt: skip
def test_number(value: float, words: str) -> None:
    assert text.number(value) == words


def test_units() -> None:
    assert text.ms(38.2) == "38.2 ms"
    durations = (0.0, 0.0043, 0.43, 999.4, 999.6, 12_345.0, 26_156.3, 999_400.0, 1.8e6, 9e6)
    assert [text.ms(value) for value in durations] == [
        "0 ms", "4.30 us", "0.43 ms", "999 ms", "1.00 s", "12.3 s", "26.2 s", "999 s", "30.0 min", "2.50 h",
    ]  # fmt: skip
    assert [text.percent(value) for value in (0, 0.01, 6.12, 17.9)] == ["0 %", "<0.1 %", "6.1 %", "18 %"]
    assert [text.size(value) for value in (512, 10_000, 26_214_400, 200 << 20, 3 << 40)] == [
        "512 B", "9.77 KiB", "25.0 MiB", "200 MiB", "3.00 TiB",
    ]  # fmt: skip
    assert text.quantity(310.0, "count") == "310"
    assert text.quantity("none", "") == "none"
    assert [text.quantity(12_345.0, unit) for unit in ("us", "s", "KiB")] == ["12.3 ms", "3.43 h", "12.1 MiB"]
    assert [text.count(number, "unit") for number in (0, 1, 1200)] == ["0 units", "1 unit", "1,200 units"]
    assert [text.count(number, "micro-batch", "es") for number in (1, 4)] == ["1 micro-batch", "4 micro-batches"]
    assert text.quantity(12.345, "GB/s") == "12.3 GB/s"


def test_ranks() -> None:
    assert text.ranks((3,)) == "rank 3"
    assert text.ranks((7, 0, 1, 2, 3)) == "ranks 0-3, 7"


def test_gain() -> None:
    assert wording.gain(Gain(38.2, 18.0, 31.0, 45.4)) == "saves 38.2 ms a step (18 %) [31.0, 45.4]"
    assert wording.gain(Gain(54.0, 56.0, 40.0, 68.0, method="measured excess")) == (
        "saves 54.0 ms a step on average (56 % of the run's time per step) [40.0, 68.0]"
    )
    assert wording.gain(Gain(12_345.0, 18.0, 9_000.0, 15_000.0)) == "saves 12.3 s a step (18 %) [9.00, 15.0]"
    assert wording.gain(Gain(4.28, 11.0, 4.28, 4.28)) == "saves 4.28 ms a step (11 %)"
    assert wording.gain(Gain(0.0, 0.0, -1.0, 1.0)) == ""


def test_how_a_gain_was_found() -> None:
    assert wording.how(Gain(3.0, 9.0, 1.0, 5.0)) == "95 % interval 1.00 to 5.00 ms, predicted by replay"
    assert wording.how(Gain(3.0, 9.0, 3.0, 3.0, method="simulation")) == "predicted by simulation"
    excess = Gain(3.0, 9.0, 9_000.0, 11_000.0, method="measured excess")
    assert wording.how(excess) == "95 % interval 9.00 to 11.0 s, measured as excess over ordinary steps"


def test_mean_and_quantiles_share_a_unit() -> None:
    assert wording.spread(StepTime(212.0, 212.4, 208.0, 219.6)) == "median 212, p10-p90 208-220"
    assert wording.spread(StepTime(12_000.0, 11_900.0, 9_900.0, 14_100.0)) == "median 11.9, p10-p90 9.90-14.1"


def test_steps_judged() -> None:
    assert wording.steps_judged(factories.healthy()) == "35 ordinary steps of 40"
    assert wording.steps_judged(factories.build(factories.Job(steps=4))) == "4 steps"
    assert wording.steps_judged(factories.wide(ranks=2, steps=1200)) == "1,050 ordinary steps of 1,200"


def test_durations() -> None:
    assert [wording.duration(value) for value in (0.06, 6.14, 99.94, 212.3, 700.0, 7_100.0, 18_756.0)] == [
        "0.1 s", "6.1 s", "99.9 s", "212 s", "11.7 min", "118 min", "5.21 h",
    ]  # fmt: skip


def test_kinds_of_time() -> None:
    time = {"training": 48.0, "evaluation": 6.1, "checkpointing": 3.2, "compilation": 0.04, "startup": 4.1, "rest": 0.7}
    assert wording.time_spent(time) == (
        "training 48.0 s (77 %), evaluation 6.1 s, checkpointing 3.2 s, start-up 4.1 s, rest 0.7 s"
    )
    assert wording.time_spent({}) == ""
    assert wording.time_spent(dict.fromkeys(time, 0.0)) == ""


@pytest.mark.parametrize(("severity", "tone"), [("high", "high"), ("medium", "medium"), ("low", "low")])
def test_a_bottleneck_has_the_tone_of_its_worst_finding(severity: Severity, tone: str) -> None:
    findings = (replace(factories.STRAGGLER, severity=severity), factories.SMALL_MESSAGES)
    assert replace(factories.straggler(), findings=findings).tone == tone


def test_tones() -> None:
    runs = (factories.healthy(), factories.inconclusive(), factories.dead_rank())
    assert [analysis.tone for analysis in runs] == ["good", "unsure", "high"]


def test_where() -> None:
    place = Where(ranks=(1, 2), stage=3, group="dp", op="all_reduce", module="blocks.3", steps=(5, 5))
    assert wording.where(place) == "ranks 1-2, stage 3, all_reduce, group dp, module blocks.3, step 5"
    assert wording.where(Where()) == ""


def changes(kind: str, entry: dict[str, object]) -> list[str]:
    fix = Fix(kind=kind, title="", patch=(entry,))  # type: ignore[arg-type]
    return [str(change) for change in edits.changes(fix, "/home/ada")]


def test_changes() -> None:
    assert changes("config", {"op": "replace", "path": "/zero_optimization/reduce_bucket_size", "value": 5e7}) == [
        "zero_optimization.reduce_bucket_size = 50000000.0"
    ]
    assert changes("config", {"op": "remove", "path": "/comms_logger"}) == ["remove comms_logger"]
    assert changes("env", {"name": "OMP_NUM_THREADS", "value": "1"}) == ["export OMP_NUM_THREADS=1"]
    call = {"file": "/home/ada/train.py", "line": 7, "argument": "num_workers", "value": 4}
    assert changes("code", call) == ["train.py:7  num_workers=4"]
    assert changes("code", {**call, "file": None, "line": None}) == ["num_workers=4"]
    assert changes("code", {**call, "file": "/opt/x.py", "line": None}) == ["/opt/x.py  num_workers=4"]
    assert changes("code", {**call, "argument": "gc.freeze()", "value": True}) == ["train.py:7  gc.freeze()"]


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (0, None, "exit status 0"),
        (7, None, "exit status 7"),
        (None, 9, "killed by SIGKILL (137)"),
        (None, 64, "killed by SIGRTMAX (192)"),
        (None, 99, "killed by signal 99 (227)"),
        (None, None, "running or unknown"),
    ],
)
def test_ended(code: int | None, signal: int | None, words: str) -> None:
    assert wording.ended(RankExit(rank=0, host="a", pid=1, code=code, signal=signal, ended_ns=None)) == words


def test_only_the_last_attempt_of_an_elastic_job_counts() -> None:
    analysis = factories.healthy()
    first = [replace(item, signal=9, code=None) for item in analysis.run.exits]
    analysis.run.exits = [*first, *(replace(item, restart=1) for item in analysis.run.exits)]
    assert wording.capture_warnings(analysis) == ["the job was restarted 1 time; this is the last attempt"]


def test_ranks_that_dsprof_ended_are_not_said_to_be_killed() -> None:
    analysis = factories.healthy()
    analysis.run.exits = [replace(item, signal=15, code=None, stopped=True) for item in analysis.run.exits]
    (killed,) = wording.capture_warnings(analysis)
    assert killed == "ranks 0-1 killed by SIGTERM (143), last complete step 39"
    analysis.run.hangs = [{"aborted": True, "went_on": False}]
    (ended,) = wording.capture_warnings(analysis)
    assert ended == "ranks 0-1 ended by dsprof, since the job hung (--on-hang abort; SIGTERM), last complete step 39"


def test_a_launch_hint_that_is_not_the_headline_is_told() -> None:
    analysis = factories.dead_rank()
    analysis.run.hints += [analysis.verdict.headline, "the script may want to be one process: dsprof run train.py"]
    assert wording.capture_warnings(analysis)[0] == "the script may want to be one process: dsprof run train.py"
    assert analysis.verdict.headline not in wording.capture_warnings(analysis)


def test_clean() -> None:
    assert text.clean("a\x1b[31m\r\nb\u202ec\ttab") == "a [31m b c tab"
    assert text.clean("x" * 400) == "x" * 299 + "…"


def test_numbers_stay_with_their_units() -> None:
    words = "saves 38.2 ms of each 2 s step (18 %), 3 steps, 25.0 MiB"
    assert wording.unbroken(words, "_") == "saves 38.2_ms of each 2_s step (18_%), 3 steps, 25.0_MiB"
    assert wording.unbroken("more than on rank 0 and ranks 2-3", "_") == "more than on rank_0 and ranks_2-3"


def test_moment() -> None:
    assert wording.moment("2026-11-20T12:02:38.536+01:00") == "2026-11-20 11:02:38 UTC"
    assert wording.moment("yesterday\x1b") == "yesterday"


def test_a_command_reads_back() -> None:
    assert wording.command(["train.py", "--name", "a b", "$HOME"]) == "train.py --name 'a b' '$HOME'"


def test_findings_point_at_budget_parts() -> None:
    assert part_of("rank.straggler") == "peer_wait"
    assert part_of("data.stall") == "data"
    assert part_of("comm.exposed") == "comm_exposed"
    assert part_of("comm.unheard-of") is None
    assert part_of("pipeline.bubble") == "bubble"
    assert part_of("pipeline.imbalance") == "bubble"
    assert part_of("pause.gc") == "pause"
    beside = ("eval.uneven", "checkpoint.stall", "pause.stop", "run.hang")
    assert [part_of(code) for code in beside] == [None] * 4
    assert [kind_of(code) for code in beside] == ["evaluation", "checkpointing", None, None]
    assert palette.part("unheard_of").label == "unheard of"


def test_the_next_commands_are_those_that_a_finding_of_the_run_can_take() -> None:
    run = factories.straggler()
    slow = replace(run.findings[0], replayed=True)
    run = replace(run, findings=(slow,))
    whatif = ("dsprof whatif RUN --without rank.straggler", "what other changes would save beside it")
    assert wording.next_commands(run, "RUN") == [whatif]
    fix = Fix("code", "larger buckets", knobs=(("ddp.bucket_cap_mb", 25), ("ddp.comm_hook", "bf16")))
    run = replace(run, findings=(replace(slow, fixes=(fix,)),))
    shown = ("dsprof fix RUN", "the change as a diff; --verify runs the job with and without it")
    assert wording.next_commands(run, "RUN") == [shown, whatif]
    assert wording.next_commands(replace(run, findings=(replace(slow, severity="info"),)), "RUN") == []
    assert edits.applied_by(fix) == "dsprof run --set ddp.bucket_cap_mb=25 --set ddp.comm_hook=bf16 ..."
    assert edits.applied_by(Fix("code", "look")) == ""


def test_a_word_that_reads_as_a_number_is_typed_as_a_word() -> None:
    fix = Fix("config", "as the optimizer has it", knobs=(("gradient_clipping", "1"), ("optimizer.type", "Adam")))
    assert edits.applied_by(fix) == ("dsprof run --set 'gradient_clipping=\"1\"' --set optimizer.type=Adam ...")
