"""Two production pipeline jobs that others recorded, replayed: what their authors and a constant reach, and better."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dsprof.analyzer import analyze
from dsprof.analyzer.align.match import Matches
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.graph.build_graph import build_graph
from dsprof.analyzer.graph.chains_of_ranks import PackedChains
from dsprof.analyzer.graph.step_graph import PARTS, StepGraph
from dsprof.analyzer.graph.validate import check
from dsprof.analyzer.rank_summary import summarize_ranks
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.schedule import makespan
from dsprof.analyzer.whatif.typical import GAPS, Typical, without_gaps
from dsprof.importers import import_trace

FOLDER = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared/data/traces"))
TABLES = FOLDER / "straggler_analysis"
pytestmark = pytest.mark.skipif(not TABLES.is_dir(), reason="the real traces are not here")

EVERY_PART = slice(0, len(PARTS))
OF_GAPS = slice(PARTS.index(GAPS[0]), PARTS.index(GAPS[-1]) + 1)


@cache
def analyzed(name: str) -> Analysis:
    return analyze(import_trace(TABLES / f"trace-{name}.parquet"))


@cache
def graph_of(name: str) -> StepGraph:
    analysis = analyzed(name)
    measured = summarize_ranks(analysis.trace, analysis.collectives, Matches(analysis.collectives))
    chains = PackedChains(measured.chains)
    graph = build_graph(chains, analysis.collectives, analysis.steps, analysis.run)
    assert graph is not None
    return graph


def measured_ms(graph: StepGraph) -> np.ndarray:
    return (graph.start + graph.duration).max(axis=0)


def held_out_errors(name: str, parts: slice, transfers: bool) -> np.ndarray:
    """Of each step, its share of error: with the means of these parts, and of the transfers, over every second step."""
    graph = graph_of(name)
    (steps,) = graph.templates
    errors = np.empty(len(steps.numbers))
    for half in (0, 1):
        into, of = np.arange(len(errors))[half::2], np.arange(len(errors))[1 - half :: 2]
        work, transfer = steps.work.copy(), steps.transfer.copy()
        work[:, into, parts] = steps.work[:, of, parts].mean(axis=1, keepdims=True)
        if transfers:
            transfer[:, into] = steps.transfer[:, of].mean(axis=1, keepdims=True)
        changed = graph.with_templates((steps.with_costs(work=work, transfer=transfer),))
        errors[into] = np.abs(makespan(changed) / measured_ms(graph) - 1)[into]
    return errors


def constant_errors(name: str) -> np.ndarray:
    """The same of the median of every second step."""
    measured = measured_ms(graph_of(name))
    errors = np.empty(len(measured))
    for half in (0, 1):
        errors[half::2] = np.abs(np.median(measured[1 - half :: 2]) / measured[half::2] - 1)
    return errors


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_the_graph_agrees_with_what_was_measured(name: str) -> None:
    graph = graph_of(name)
    found = check(graph)
    assert len(graph.templates) == 1
    assert found.error < 1e-9
    assert found.contradicted == 0
    assert found.held_out is not None
    assert found.held_out.missed < 0.005
    assert found.held_out.differs < 0.05


@pytest.mark.parametrize(("name", "percent"), [("AR", 0.3), ("ST", 0.1)])
def test_steps_follow_from_their_operations_and_the_gaps_of_others(name: str, percent: float) -> None:
    assert 100 * held_out_errors(name, OF_GAPS, transfers=False).mean() <= percent


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_costs_of_other_steps_tell_more_than_a_constant(name: str) -> None:
    assert held_out_errors(name, EVERY_PART, transfers=True).mean() < constant_errors(name).mean()


@pytest.mark.parametrize(("name", "slowdown"), [("AR", 1.973), ("ST", 1.179)])
def test_the_slowdown_is_the_authors(name: str, slowdown: float) -> None:
    graph = without_gaps(graph_of(name))
    own, ideal = makespan(graph).mean(), makespan(apply(graph, [Typical()])).mean()
    assert own / ideal == pytest.approx(slowdown, rel=0.01)
    authors = json.loads((TABLES / f"result-{name}.json").read_text())
    assert own / 1e3 == pytest.approx(np.mean(list(authors["step_t_nodelay"].values())), rel=0.01)


def test_the_slow_worker_comes_first_and_explains_all() -> None:
    """The authors: replacing its operations by typical ones wins 1.00 of what is lost."""
    analysis = analyzed("AR")
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (0,))
    assert [finding.code for finding in analysis.findings if finding.is_problem] == ["rank.straggler"]
    assert first.gain.ms / 1e3 == pytest.approx(46.336 - 23.485, rel=0.03)
    graph = graph_of("AR")
    plain = without_gaps(graph)
    own, ideal = makespan(plain).mean(), makespan(apply(plain, [Typical()])).mean()
    shares = [(own - makespan(apply(plain, [Typical((rank,))])).mean()) / (own - ideal) for rank in range(16)]
    assert shares[0] == pytest.approx(1.0, abs=0.03)
    assert max(shares[1:]) < 0.01


def test_the_long_last_stage_comes_first() -> None:
    analysis = analyzed("ST")
    first = analysis.findings[0]
    assert (first.code, first.where.stage, first.where.ranks) == ("pipeline.imbalance", 3, (6, 7))
    assert "rank.straggler" not in [finding.code for finding in analysis.findings if finding.is_problem]
