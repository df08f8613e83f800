"""The rules' records: one of each code, and what is made from them."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import Job

import dsprof.analyzer.rules as package
from dsprof.analyzer import signals
from dsprof.analyzer.judge import judge
from dsprof.analyzer.rules.registry import all_rules, explaining, find_rules, rule_of
from dsprof.analyzer.rules.rule import Rule
from dsprof.analyzer.study import Study, study
from dsprof.schema import BUDGET_PARTS, TIME_KINDS
from dsprof.trace import Trace

ROOT = Path(__file__).parents[1]
SOURCES = [*(ROOT / "dsprof/analyzer").rglob("*.py")]
NAMED_ELSEWHERE = {"run.hang", "run.desync"}
"""Codes that `dsprof.live.waiting.Stall` names."""

ADDED = """
from dsprof.analyzer import signals
from dsprof.analyzer.finding import Evidence, Finding, Gain, Where
from dsprof.analyzer.rules.rule import Look, Rule


def gains(study):
    graph, sizes = signals.steps(study), signals.input_sizes(study)
    gain = Gain(20.0, 40.0, 19.0, 21.0)
    evidence = (Evidence("steps", len(graph.numbers), "count"),)
    return [Finding("made.up", f"{sizes.size} inputs", "info", Where(), evidence, gain)]


RULES = (Rule("made.up", "a rule that a test adds", explains=("data",), looks=(Look(gains),)),)
"""


def test_codes_and_places_are_of_one_rule_each() -> None:
    codes, places = [rule.code for rule in all_rules()], [rule.place for rule in all_rules()]
    assert len(codes) >= 22
    assert len(set(codes)) == len(codes)
    assert len(set(places)) == len(places)
    for rule in all_rules():
        assert rule.looks, rule.code
        assert {*rule.causes} <= {*codes} - {rule.code}, rule.code
        assert {*rule.exhausts} <= {*rule.explains}, rule.code
        assert set(rule.explains) <= {*BUDGET_PARTS, *TIME_KINDS}, rule.code
        assert {*rule.outranked_by} <= {*codes} - {rule.code}, rule.code
        assert rule.says, rule.code


def codes_in(source: str) -> Iterator[str]:
    """Codes that findings are made with: the first argument of a Finding."""
    tree = ast.parse(source)
    named = {
        node.target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding" and node.args:
            code = node.args[0]
            if isinstance(code, ast.Constant):
                yield str(code.value)
            elif isinstance(code, ast.Name) and code.id in named:
                yield str(named[code.id])


def test_a_code_has_a_rule() -> None:
    said = {code for path in SOURCES for code in codes_in(path.read_text())} | NAMED_ELSEWHERE
    assert len(said) > 18
    assert said == {rule.code for rule in all_rules()}


def test_the_catalogue_is_made_of_the_records() -> None:
    made = runpy.run_path(str(ROOT / "docs/findings_catalogue.py"))
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    assert made["with_catalogue"](page) == page, "python docs/findings_catalogue.py"
    for rule in all_rules():
        assert f"\n## {rule.code}\n" in page, rule.code


@pytest.fixture(scope="module")
def measured() -> Study:
    return study(Job(steps=24).trace())


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rule, ...]]:
    """All rules, with that of one more file."""
    name = "added_by_a_test"
    (tmp_path / f"{name}.py").write_text(ADDED)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield find_rules(package.__path__, f"{package.__name__}.")
    sys.modules.pop(f"{package.__name__}.{name}")


def test_a_rule_is_added_by_one_file_with_one_record(added: tuple[Rule, ...], measured: Study) -> None:
    assert [rule.code for rule in added if rule not in all_rules()] == ["made.up"]
    judgement = judge(measured, added)
    first = judgement.findings[0]
    assert (first.code, first.severity, first.title) == ("made.up", "high", "36 inputs")
    trace = Job(steps=24).trace()
    sizeless = study(Trace.of(trace.run, trace.rows.assign(value=float("nan"))))
    assert judge(sizeless, added).not_judged["made.up"] == "the sizes of the inputs to forward were not captured"
    assert "made.up" not in judge(measured).not_judged


def test_two_records_of_one_code_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "twice_one.py").write_text(ADDED)
    (tmp_path / "twice_two.py").write_text(ADDED)
    with pytest.raises(ValueError, match=r"twice_two: another rule has the code made\.up"):
        find_rules([str(tmp_path)], "")


def test_what_is_absent_is_said_by_the_signal_and_not_by_the_rule(measured: Study) -> None:
    assert isinstance(signals.kernels.look(measured), signals.Absent)
    with pytest.raises(signals.Missing) as raised:
        signals.kernels(measured)
    assert not raised.value.absent.concerns
    judgement = judge(measured)
    assert "compute.launch-bound" not in {*judgement.passed, *judgement.not_judged}
    assert signals.Absent("kernels were not traced", "--deep 20:24").reason == "kernels were not traced: --deep 20:24"


def test_who_explains_a_part() -> None:
    assert explaining("bubble") == ("pipeline.imbalance", "pipeline.stall", "pipeline.bubble")
    assert explaining("peer_wait") == ("rank.straggler", "data.imbalance", "moe.imbalance", "compute.recompile")
    assert explaining("memory") == ()
    assert rule_of("no.such") is None
