"""Each finding has a test that plants its cause: one that is marked so, and fails where the finding is not made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_tables import MadeUp, table_of
from planting import planted
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.rules.registry import all_rules
from dsprof.importers import import_trace

HERE = Path(__file__).parent


def codes_planted(source: str) -> Iterator[str]:
    """The codes of the marks `plants` in a test file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.plants":
            yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_rule_has_a_test_that_plants_its_cause() -> None:
    planted = {code for path in sorted(HERE.glob("test_*.py")) for code in codes_planted(path.read_text())}
    missing = {rule.code for rule in all_rules()} - planted
    assert not missing, f"mark a test of each with @pytest.mark.plants(code): {sorted(missing)}"
    assert planted <= {rule.code for rule in all_rules()}


@pytest.mark.parametrize(("slow", "fails"), [(60.0, False), (40.0, True)])
def test_a_mark_without_the_finding_fails(slow: float, fails: bool) -> None:
    job = Job(steps=12, forward=lambda rank, step: slow if rank else 40.0)
    if not fails:
        with planted({"rank.straggler"}):
            analyze(job.trace())
        return
    with (
        pytest.raises(pytest.fail.Exception, match=r"planted and not found: rank\.straggler"),
        planted({"rank.straggler"}),
    ):
        analyze(job.trace())


@pytest.mark.plants("eval.uneven")
def test_one_rank_evaluates() -> None:
    uneven = Job(ranks=3, steps=40, evaluation=lambda rank, step: 400.0 if rank == 0 and step % 8 == 7 else 0.0)
    first = analyze(uneven.trace()).findings[0]
    assert (first.code, first.where.ranks) == ("eval.uneven", (0,))


@pytest.mark.plants("pipeline.bubble")
def test_few_micro_batches_for_many_stages(tmp_path: Path) -> None:
    made = MadeUp((), 2, 4, 4, 16, (0, 0), 1.0, 0.0, 0.01, seed=3)
    table_of(made).to_parquet(tmp_path / "trace.parquet")
    analysis = analyze(import_trace(tmp_path / "trace.parquet"))
    bubble = next(finding for finding in analysis.findings if finding.code == "pipeline.bubble")
    assert bubble.is_problem
    assert bubble.title.endswith(": 4 micro-batches for 4 stages")
