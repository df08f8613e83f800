"""The flame graph of a difference: which lines, how long on whom, in which colours, and the table behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import Job
from test_stacks import facts

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.work.stack_difference import StackDifference
from dsprof.reports import flame
from dsprof.reports.sections import report_of
from dsprof.reports.sections.section import Figure, Table

MODEL, COMPILED, BACKWARD = "/home/me/model.py:12", "/home/me/model.py:31", "torch/_tensor.py:backward"


def samples(rank: int, step: int) -> list[tuple[float, int]]:
    """Every 5 ms of a step: of rank 1's forward of 90 ms, 50 are compilation; others take 40, and wait in the end."""
    forward = 90 if rank == 1 else 40
    found = [(ms + 0.5, 2 if rank == 1 and ms < 50 else 1) for ms in range(2, forward, 5)]
    return [*found, *[(ms + 0.5, 3) for ms in range(forward, 177, 5)]]


@pytest.fixture(scope="module")
def late() -> Analysis:
    job = Job(ranks=2, steps=24, forward=lambda rank, _: 90.0 if rank else 40.0, stacks=samples, facts=facts(2))
    return analyze(job.trace())


def difference(analysis: Analysis) -> StackDifference:
    assert analysis.stack_difference is not None
    return analysis.stack_difference


def test_the_lines_of_the_late_rank_beside_those_of_the_other(late: Analysis) -> None:
    found = difference(late)
    assert (found.ranks, found.others) == ((1,), (0,))
    of = {node.path[-1]: node for node in found.nodes}
    assert of[COMPILED].ms == pytest.approx(50, rel=0.1)
    assert of[COMPILED].others_ms == 0
    assert of[MODEL].ms == pytest.approx(of[MODEL].others_ms, rel=0.15)
    # One below the other, from the left: what is called lies within what calls it.
    called = [node for node in found.nodes if len(node.path) == 2 and node.path[0] == "/home/me/train.py:40"]
    assert [node.path[-1] for node in called] == [MODEL, COMPILED]
    assert called[0].start_ms == 0
    assert called[1].start_ms == pytest.approx(called[0].ms)
    assert sum(node.ms for node in called) == pytest.approx(of["/home/me/train.py:40"].ms)


def test_the_colour_says_how_a_line_differs(late: Analysis) -> None:
    found = difference(late)
    looks = {node.path[-1]: flame.look_of(node, found) for node in found.nodes}
    assert (looks[COMPILED], looks[MODEL], looks[BACKWARD]) == ("most", "alike", "alike")
    figure = flame.difference(found)
    assert [trace.name for trace in figure.data] == [flame.LOOKS["most"][0], flame.LOOKS["alike"][0]]
    assert "model.py:31" in figure.data[0].text
    assert any("50." in told and "more" in told for told in figure.data[0].hovertext)
    assert figure.layout.meta["note"].startswith("rank 1 beside rank 0; ")


def test_the_section_and_its_table(late: Analysis) -> None:
    (section,) = report_of(late, ["stacks"]).sections
    figure, table = section.blocks
    assert isinstance(figure, Figure)
    assert isinstance(table, Table)
    assert [column.title for column in table.columns] == ["line", "called by", "on rank 1", "on rank 0", "difference"]
    (row,) = table.rows  # of the lines that surely differ, the innermost
    assert row.cells[:2] == ("torch/_dynamo/eval_frame.py:compile_wrapper", "model.py:31")
    assert row.cells[4].startswith("+")
    assert row.swatch == flame.LOOKS["most"][1]


def test_a_single_rank_has_its_lines_and_no_difference() -> None:
    alone = analyze(Job(ranks=1, steps=24, stacks=lambda rank, step: samples(1, step), facts=facts(1)).trace())
    found = difference(alone)
    assert (found.ranks, found.others) == ((0,), ())
    figure = flame.difference(found)
    assert [trace.name for trace in figure.data] == ["time in the line"]
    (section,) = report_of(alone, ["stacks"]).sections
    assert "while it waits for nobody" in section.lead


def test_without_samples_there_is_no_section() -> None:
    analysis = analyze(Job(ranks=2, steps=24).trace())
    assert analysis.stack_difference is None
    assert not report_of(analysis, ["stacks"]).sections


def test_names_of_files_cannot_become_markup(late: Analysis) -> None:
    found = difference(late)
    nodes = tuple(replace(node, path=(*node.path[:-1], "/x/<b>evil</b>.py:1")) for node in found.nodes)
    for trace in flame.difference(replace(found, nodes=nodes)).data:
        assert not any("<b>evil" in told for told in (*trace.text, *trace.hovertext))
        assert all("&lt;b&gt;evil" in told for told in trace.hovertext)
