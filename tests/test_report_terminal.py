"""The terminal verdict, against literal text."""

from __future__ import annotations

import io
from dataclasses import replace
from textwrap import dedent
from typing import Any

import factories
import pytest
from rich.console import Console

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding, Gain, Where
from dsprof.reports import terminal
from dsprof.reports.sections.section import Row
from dsprof.reports.sections.time_and_step import of_a_step


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def text_of(analysis: Analysis, **options: Any) -> str:
    file = io.StringIO()
    terminal.render(analysis, file, **options)
    return file.getvalue()


def literal(text: str) -> str:
    return dedent(text).lstrip("\n")


def test_healthy() -> None:
    assert text_of(factories.healthy()) == literal("""
        [dsprof] verdict: healthy ────────────────── train_gpt-20261120T101500Z-a1b2c3 ─
        nothing found that is sure to shorten the 175 ms step

        run 11.4 s  training 7.0 s (61 %), start-up 4.0 s, rest 0.4 s
        step 175 ms  median 175, p10-p90 174-175, 35 ordinary steps of 40, 2 ranks
        ├─ compute       140.0 ms  80.2 %  ████████████████
        ├─ exposed comm   12.0 ms   6.9 %  █▍
        ├─ peer wait       0.2 ms   0.1 %
        ├─ data            4.4 ms   2.5 %  ▌
        ├─ optimizer      16.0 ms   9.2 %  █▉
        └─ other           2.0 ms   1.1 %  ▎

        info      comm.exposed: the last all-reduce is not overlapped; saves 1.10 ms a
                  step (0.6 %) [0.20, 2.00], not certain: it may be no more than noise
        capture   6 checks passed; 2/2 ranks, overhead est. 0.2 %, noise 0.60 ms
        """)


def test_straggler() -> None:
    assert text_of(factories.straggler()) == literal("""
        [dsprof] verdict: bottleneck ─────────────── train_gpt-20261120T101500Z-a1b2c3 ─
        rank 1 arrives late in every step: its forward takes longer; fixing it saves
        37.9 ms of each 212 ms step (18 %)
        fix  the slow part is called here; move it off the training thread
               examples/train_gpt.py:112  slow_rank=None

        run 12.9 s  training 8.5 s (66 %), start-up 4.0 s, rest 0.4 s
        step 212 ms  median 212, p10-p90 212-213, 35 ordinary steps of 40, 2 ranks
        ├─ compute       159.0 ms  74.9 %  ███████████████
        ├─ exposed comm   12.0 ms   5.6 %  █▏ ◀ comm.small-messages
        ├─ peer wait      19.0 ms   8.9 %  █▊ ◀ rank.straggler
        │  ├─ rank 0      38.0 ms          own work 162.4 ms
        │  └─ rank 1       0.0 ms          own work 200.4 ms
        ├─ data            4.4 ms   2.1 %  ▍
        ├─ optimizer      16.0 ms   7.5 %  █▌
        └─ other           2.0 ms   0.9 %  ▎

        1. high  rank.straggler  rank 1 arrives late in every step: its forward takes
           longer
           gain   saves 37.9 ms a step (18 %) [31.2, 44.6], confidence 97 %
           where  rank 1, all_reduce, group 0, steps 0-39
           why    forward on rank 1: 88.0 ms (expected 50.0 ms)
                  steps in which it is last: 40 of 40 (expected 20 of 40)
           fix    as said above
                  or leave it the cores
                    export OMP_NUM_THREADS=1

        2. low  comm.small-messages  all-reduces of 9.8 KiB are bound by latency
           gain   saves 4.20 ms a step (2.0 %) [2.60, 5.90], confidence 80 %
           where  all_reduce, group 0
           why    all-reduces a step: 310 (expected 4)
                  median size: 9.77 KiB (expected 25.0 MiB)
           fix    larger buckets in DistributedDataParallel
                    bucket_cap_mb=25

        capture   5 checks passed; 2/2 ranks, overhead est. 0.2 %, noise 0.60 ms
        """)


def test_many_findings_of_one_part_take_no_room_from_its_numbers() -> None:
    """They go on in a second line."""
    file = io.StringIO()
    codes = ("compute.host-work", "compute.host-sync", "compute.launch-bound")
    rows = (
        Row(("compute", "22.96 ms", "46.1 %", ""), codes=codes, share=46.1),
        Row(("other", "25.34 ms", "50.8 %", ""), share=50.8),
    )
    terminal._tree(Console(file=file, width=80), terminal.UNICODE, rows)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "├─ compute  22.96 ms  46.1 %  █████████▎ ◀ compute.host-work, compute.host-sync,",
        "                              compute.launch-bound",
        "└─ other    25.34 ms  50.8 %  ██████████▏",
    ]


def test_dead_rank() -> None:
    assert text_of(factories.dead_rank()) == literal("""
        [dsprof] verdict: failed ─────────────────── train_gpt-20261120T101500Z-a1b2c3 ─
        rank 1 was killed by SIGKILL in step 12, during forward
        fix  the kernel log says whether memory ran out: dmesg | grep -i oom

        run 6.5 s  training 2.1 s (32 %), start-up 4.0 s, rest 0.4 s
        step 175 ms  median 175, p10-p90 174-175, 11 ordinary steps of 12, 2 ranks
        ├─ compute       140.0 ms  80.2 %  ████████████████
        ├─ exposed comm   12.0 ms   6.9 %  █▍
        ├─ peer wait       0.2 ms   0.1 %
        ├─ data            4.4 ms   2.5 %  ▌
        ├─ optimizer      16.0 ms   9.2 %  █▉
        └─ other           2.0 ms   1.1 %  ▎

        1. high  run.rank-died  rank 1 was killed by SIGKILL in step 12, during
           forward
           where  rank 1, forward, step 12
           why    exit status: 137 (expected 0)
                  last complete step: 11 (expected 39)
           fix    as said above

        passed    comm.exposed, comm.small-messages, data.imbalance, data.stall,
                  pause.gc, rank.straggler
        capture   2/2 ranks, overhead est. 0.2 %, 0 records dropped, clocks within
                  3.00 us, noise 0.60 ms
        warning   rank 0 killed by SIGTERM (143), last complete step 11
        warning   rank 1: 1 record torn
        """)


def test_a_cost_beside_the_ordinary_steps() -> None:
    assert text_of(factories.evaluates()) == literal("""
        [dsprof] verdict: bottleneck ─────────────── train_gpt-20261120T101500Z-a1b2c3 ─
        rank 0 alone evaluates and the others wait; it takes 42.0 ms of each step
        fix  shard the evaluation over the ranks, or let it run in a job of its own

        run 18.5 s  training 12.6 s (68 %), evaluation 1.3 s ◀ eval.uneven,
            checkpointing 0.2 s, start-up 4.0 s, rest 0.4 s
        step 175 ms  median 175, p10-p90 174-175, 44 ordinary steps of 60, 2 ranks
             a step is an iteration of 6 optimizer steps: 5 of Adam 1, 1 of Adam 2
        ├─ compute       140.0 ms  80.2 %  ████████████████
        ├─ exposed comm   12.0 ms   6.9 %  █▍
        ├─ peer wait       0.2 ms   0.1 %
        ├─ data            4.4 ms   2.5 %  ▌
        ├─ optimizer      16.0 ms   9.2 %  █▉
        └─ other           2.0 ms   1.1 %  ▎

        1. high  eval.uneven  rank 0 alone evaluates and the others wait
           gain   saves 42.0 ms a step on average (17 % of the run's time per step)
                  [38.1, 45.9], confidence 98 %
           where  rank 0, steps 9-59
           why    evaluation on rank 0: 420 ms (expected 0 ms)
                  steps with evaluation: 6 of 60 (expected 0 of 60)
           fix    as said above

        unjudged  rank.straggler: the ranks do different work
        note      steps are slower from step 41 on
        capture   6 checks passed; 2/2 ranks, overhead est. 0.2 %, noise 0.60 ms
        """)


def test_a_run_whose_kinds_of_time_are_not_known_shows_none() -> None:
    assert "\nrun " not in text_of(replace(factories.healthy(), time={}))


@pytest.mark.parametrize(
    ("analysis", "status", "style"),
    [
        (factories.healthy(), "healthy", "1;32"),
        (factories.inconclusive(), "inconclusive", "1;33"),
        (factories.straggler(), "bottleneck", "1;31"),
        (replace(factories.straggler(), findings=(factories.SMALL_MESSAGES,)), "bottleneck", "1;36"),
        (factories.dead_rank(), "failed", "1;31"),
        (factories.empty(), "failed", "1;31"),
    ],
)
def test_the_verdict_has_the_colour_of_its_status(
    analysis: Analysis, status: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    terminal.render(analysis, screen, width=400)
    head, headline = screen.getvalue().splitlines()[:2]
    assert f"\x1b[{style}m{status}\x1b[0m" in head
    assert headline == f"\x1b[{style}m{analysis.verdict.headline}\x1b[0m"


def test_a_gain_next_to_nothing_is_no_remark() -> None:
    tiny = replace(factories.EXPOSED_INFO, gain=Gain(ms=0.1, percent=0.06, low=0.0, high=0.2))
    text = text_of(factories.build(factories.Job(), findings=(tiny,), passed=factories.RULES))
    assert "info" not in text
    assert "passed    comm.exposed, comm.small-messages," in text
    without = replace(tiny, title="4.1 ms wait; no other size hides them", gain=Gain(0.0, 0.0, 0.0, 0.0))
    text = text_of(factories.build(factories.Job(), findings=(without,), passed=factories.RULES))
    assert "info      comm.exposed: 4.1 ms wait; no other size hides them\n" in text


def test_no_step() -> None:
    assert text_of(factories.empty()) == literal("""
        [dsprof] verdict: failed ─────────────────── train_gpt-20261120T101500Z-a1b2c3 ─
        no complete step was captured, so nothing can be said about its speed

        unjudged  7 checks: no complete step
        capture   2/2 ranks, overhead est. 0.2 %, 0 records dropped, clocks within
                  3.00 us
        """)


def test_in_a_notebook_it_shows_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to a file or a string is no output of the cell."""
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *what: shown.append(what))
    assert text_of(factories.healthy()).startswith("[dsprof] verdict: healthy")
    assert shown == []


def test_many_ranks_fit_on_a_page() -> None:
    text = text_of(factories.wide(ranks=64, steps=8))
    assert (
        literal("""
        ├─ peer wait               20.7 ms  10.6 %  ██▏ ◀ rank.straggler
        │  ├─ rank 2               21.1 ms          own work 162.3 ms
        │  ├─ rank 5                0.0 ms          own work 183.4 ms
        │  └─ 62 others (median)   21.0 ms          own work 162.4 ms
        """)
        in text
    )
    assert len(text.splitlines()) <= 30


def test_missing_ranks_are_named() -> None:
    analysis = factories.build(factories.Job(ranks=4, steps=8, captured=(0, 2)), passed=factories.RULES)
    assert "capture   2/4 ranks (missing 1, 3), " in text_of(analysis)


def test_the_noise_is_told_with_the_capture() -> None:
    text = text_of(replace(factories.healthy(), noise_ms=5.0))
    assert "nothing found that is sure to shorten the 175 ms step\n" in text
    assert "capture   6 checks passed; 2/2 ranks, overhead est. 0.2 %, noise 5.00 ms\n" in text


def test_one_step_has_no_noise_estimate() -> None:
    text = text_of(replace(factories.healthy(), noise_ms=float("inf")))
    assert "capture   6 checks passed; 2/2 ranks, overhead est. 0.2 %\n" in text
    assert "inf" not in text.replace("info", "")


def test_many_findings_are_cut_short_but_named() -> None:
    analysis = replace(factories.straggler(), findings=(factories.STRAGGLER,) * 5 + (factories.SMALL_MESSAGES,) * 2)
    assert "\nand 2 more findings: comm.small-messages, comm.small-messages\n" in text_of(analysis)


def test_ranks_that_ended_alike_share_a_line() -> None:
    analysis = factories.build(factories.Job(ranks=6, dies=(2, 4)), findings=())
    text = text_of(analysis)
    assert "warning   ranks 0-1, 3-5 killed by SIGTERM (143), last complete step 3\n" in text
    assert "warning   rank 2 killed by SIGKILL (137), last complete step 3\n" in text


def test_a_file_is_plain_and_a_terminal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in text_of(factories.straggler())
    screen = Terminal()
    terminal.render(factories.straggler(), screen)
    assert "\x1b[1;31mhigh\x1b[0m" in screen.getvalue()


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    terminal.render(factories.straggler(), screen, width=80)
    assert screen.getvalue() == text_of(factories.straggler())


def test_width() -> None:
    for width in (50, 80, 140):
        assert max(map(len, text_of(factories.straggler(), width=width).splitlines())) <= width


def test_no_line_begins_with_a_unit() -> None:
    for width in range(40, 110):
        lines = text_of(factories.evaluates(), width=width).splitlines()
        assert [line for line in lines if line.strip().partition(" ")[0].rstrip(",;") in ("ms", "s", "%", "%)")] == []


def test_an_ascii_file_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    analysis = factories.straggler()
    analysis.run.id = "naïve-run"
    terminal.render(analysis, file)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "|- peer wait      19.0 ms   8.9 %  ## <- rank.straggler\n" in text
    assert "na?ve-run" in text


def test_names_from_the_run_cannot_steer_the_terminal() -> None:
    finding = Finding(
        code="rank.straggler", title="evil \x1b[2J\x07 title\r\nsecond line", severity="high", confidence=0.5,
        where=Where(module="a\u202eb"), evidence=(), gain=Gain(1.0, 1.0, 0.5, 1.5),
    )  # fmt: skip
    text = text_of(factories.build(factories.Job(steps=4), findings=(finding,)))
    assert "1. high  rank.straggler  evil  [2J  title second line\n" in text
    assert "module a b" in text
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


@pytest.mark.parametrize("named", [(5,), (7,), (5, 7), (2, 5), tuple(range(8))])
def test_below_a_part_of_the_step_each_rank_is_told_once(named: tuple[int, ...]) -> None:
    analysis = factories.wide(steps=20)
    finding = analysis.findings[0]
    named_by = replace(analysis, findings=(replace(finding, where=Where(ranks=named)),))
    told = [rank for row in named_by.ranks_below("peer_wait") for rank in row.ranks]
    assert sorted(told) == list(range(8))


@pytest.mark.parametrize(
    ("value_ms", "step_ms", "words"),
    [
        (3.0, 2500.0, "3.00 ms"), (0.0421, 2500.0, "42.1 us"), (99.0, 2500.0, "99.0 ms"), (100.0, 2500.0, "0.10 s"),
        (1250.0, 2500.0, "1.25 s"), (0.0, 2500.0, "0.00 s"), (320.0, 150_000.0, "320 ms"), (0.04, 212.0, "0.0 ms"),
    ],
)  # fmt: skip
def test_a_small_part_of_a_long_step_has_a_unit_of_its_own(value_ms: float, step_ms: float, words: str) -> None:
    assert of_a_step(value_ms, step_ms) == words
