"""The words and numbers shared by the reports."""

from __future__ import annotations

from dataclasses import replace

import factories
import pytest

from dsprof.analyzer import text
from dsprof.analyzer.finding import Fix, Where
from dsprof.analyzer.verdict import answer
from dsprof.reports import palette, wording
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
    assert text.ms(12_345.0) == "12.3 s"
    assert [text.percent(value) for value in (0, 0.01, 6.12, 17.9)] == ["0 %", "<0.1 %", "6.1 %", "18 %"]
    assert [text.size(value) for value in (512, 10_000, 26_214_400, 3 << 40)] == [
        "512 B", "9.8 KiB", "25.0 MiB", "3072.0 GiB",
    ]  # fmt: skip
    assert text.quantity(310.0, "count") == "310"
    assert text.quantity("none", "") == "none"
    assert text.quantity(12.345, "GB/s") == "12.3 GB/s"


def test_ranks() -> None:
    assert text.ranks((3,)) == "rank 3"
    assert text.ranks((7, 0, 1, 2, 3)) == "ranks 0-3, 7"


def test_where() -> None:
    place = Where(ranks=(1, 2), stage=3, group="dp", op="all_reduce", module="blocks.3", steps=(5, 5))
    assert wording.where(place) == "ranks 1-2, stage 3, all_reduce, group dp, module blocks.3, step 5"
    assert wording.where(Where()) == ""


def changes(kind: str, entry: dict[str, object]) -> list[str]:
    fix = Fix(kind=kind, title="", patch=(entry,))  # type: ignore[arg-type]
    return [str(change) for change in wording.changes(fix, "/home/ada")]


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


def test_clean() -> None:
    assert text.clean("a\x1b[31m\r\nb\u202ec\ttab") == "a [31m b c tab"
    assert text.clean("x" * 400) == "x" * 299 + "…"


def test_moment() -> None:
    assert wording.moment("2026-11-20T12:02:38.536+01:00") == "2026-11-20 11:02:38 UTC"
    assert wording.moment("yesterday\x1b") == "yesterday"


def test_a_command_reads_back() -> None:
    assert wording.command(["train.py", "--name", "a b", "$HOME"]) == "train.py --name 'a b' '$HOME'"


def test_findings_point_at_budget_parts() -> None:
    assert palette.part_of("rank.straggler") == "peer_wait"
    assert palette.part_of("data.stall") == "data"
    assert palette.part_of("comm.slow-link") == "comm_exposed"
    assert palette.part_of("run.hang") is None
    assert palette.part("unheard_of").label == "unheard of"


@pytest.mark.parametrize(
    ("part", "words"),
    [("bubble", "waiting for other stages of the pipeline"), ("peer_wait", "waiting for late ranks")],
)
def test_a_large_loss_that_no_rule_explains_is_not_healthy(part: str, words: str) -> None:
    analysis = factories.healthy()
    assert analysis.verdict.status == "healthy"
    assert analysis.step_ms is not None
    analysis.budget[part] = 0.4 * analysis.step_ms.mean
    assert answer(analysis).headline.endswith(f"but 40 % is {words}, which no rule here explains")
    assert answer(analysis).status == "inconclusive"
