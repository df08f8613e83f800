"""How ZeRO's stage 3 fetches, in closed forms: three layers whose parameters are 10 elements each, gathered in 4 ms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import StepGraph, Task
from dsprof.analyzer.whatif import Refused, WhatIf, apply
from dsprof.analyzer.whatif.fetching import (
    DeepSpeedFetching,
    FetchedBy,
    Fetching,
    GatheredWhole,
    Need,
    OwnFetching,
    Starts,
    modules,
    passes,
)
from dsprof.analyzer.whatif.select import Communications
from dsprof.analyzer.whatif.waited_for import WaitedFor

GATHER = Task("0", "all_gather parameter", workers=1)
REDUCE = Task("0", "reduce_scatter gradient", gradient=True, workers=1)
GATHERS = Communications(purposes=("parameter",))
REDUCTIONS = Communications(purposes=("gradient",))
LINK = Link(1.0, 0.3, fitted=True)
PASS = "I0 W0 5 I1 W1 5 I2 W2 5 B I3 W3 7 I4 W4 7 I5 W5 7"
"""5 ms of each layer in forward, 7 in backward; 36 of work, and 24 of six gathers."""
NEEDS = [Need(task, unit, 10.0) for task, unit in enumerate((0, 1, 2, 2, 1, 0))]
ANY = 1e9


def whole_pass() -> StepGraph:
    return graph_of(steps_of([PASS] * 2, [4.0] * 6, [GATHER] * 6, sizes=[10.0] * 6))


@pytest.mark.parametrize(
    ("policy", "starts", "step_ms"),
    [
        # Each is gathered when it is needed; the last layer's are needed again at once.
        (OwnFetching(0, ANY, 0), [(0, [0]), (1, [1]), (2, [2]), (4, [4]), (5, [5])], 56.0),
        # All but the first are hidden by the layer before.
        (OwnFetching(10, ANY, 0), [(0, [0]), (0, [1]), (1, [2]), (2, [4]), (4, [5])], 40.0),
        # Two together take 7 ms, of which 4 of the first and 5 of a layer hide 2 less.
        (OwnFetching(20, ANY, 0), [(0, [0]), (0, [1, 2]), (1, [5]), (2, [4])], 42.0),
        # What is used again is kept as long as there is room.
        (OwnFetching(0, ANY, ANY), [(0, [0]), (1, [1]), (2, [2])], 48.0),
        (OwnFetching(0, 20, ANY), [(0, [0]), (1, [1]), (2, [2]), (5, [5])], 52.0),
        (OwnFetching(0, 10, ANY), [(0, [0]), (1, [1]), (2, [2]), (4, [4]), (5, [5])], 56.0),
        # DeepSpeed's last layer is gathered again; what prefetching comes to a second time is not.
        (DeepSpeedFetching(0, ANY, 0), [(n, [n]) for n in range(6)], 60.0),
        (DeepSpeedFetching(1, ANY, 0), [(0, [0]), (0, [1]), (1, [2]), (2, [4]), (3, [5])], 40.0),
        (DeepSpeedFetching(ANY, ANY, 0), [(0, [0]), (0, [1, 2])], 42.0),
        # It gathers ahead only while there are less than so many.
        (DeepSpeedFetching(ANY, 20, 0), [(0, [0]), (0, [1]), (1, [2]), (2, [4]), (4, [5])], 40.0),
        (DeepSpeedFetching(0, ANY, ANY), [(0, [0]), (1, [1]), (2, [2])], 48.0),
        # 1 ms and 30 elements' 9 before the first layer.
        (GatheredWhole(), [(0, [0, 1, 2])], 46.0),
    ],
)
def test_what_is_gathered_when(policy: Fetching, starts: Starts, step_ms: float) -> None:
    graph = whole_pass()
    assert passes(graph.templates[0], GATHERS) == [NEEDS]
    assert policy.starts(NEEDS) == starts
    assert replay(graph).durations.tolist() == [60.0]
    assert replay(apply(graph, [FetchedBy(GATHERS, LINK, policy, 1)])).durations == pytest.approx([step_ms])


APART = "I0 I1 W0 W1 5 I2 I3 W2 W3 5 B I4 I5 W4 W5 7 I6 I7 W6 W7 7"
"""As DeepSpeed gathers that prefetches weights and no biases: those of a module are in one order in both passes."""


def test_weights_and_biases_that_are_gathered_apart() -> None:
    sizes = [10.0, 1.0, 20.0, 2.0, 20.0, 2.0, 10.0, 1.0]
    graph = graph_of(steps_of([APART] * 2, [4.0] * 8, [GATHER] * 8, sizes=sizes))
    (needs,) = passes(graph.templates[0], GATHERS)
    assert [need.unit for need in needs] == [0, 1, 2, 3, 2, 3, 0, 1]
    assert [need.first for need in needs] == [True, False] * 4
    # What a module lacks is gathered together, and 20 elements ahead are those of the next one.
    assert DeepSpeedFetching(0, ANY, 0).starts(needs) == [(0, [0, 1]), (2, [2, 3]), (4, [4, 5]), (6, [6, 7])]
    assert DeepSpeedFetching(1, ANY, 0).starts(needs)[:3] == [(0, [0, 1]), (1, [2]), (2, [3])]
    assert OwnFetching(22, ANY, 0).starts(needs) == [(0, [0, 1]), (0, [2, 3]), (2, [6, 7])]


@pytest.mark.parametrize("policy", [OwnFetching(1e4, ANY, ANY), DeepSpeedFetching(1e4, ANY, ANY)])
def test_a_policy_looks_at_the_modules_once(policy: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def seen(needs: Sequence[Need]) -> list[range]:
        looked.append(len(needs))
        return modules(needs)

    monkeypatch.setattr("dsprof.analyzer.whatif.fetching.modules", seen)
    policy.starts([Need(n, unit, 10.0) for n, unit in enumerate([*range(50), *reversed(range(50))])])
    assert looked == [100]


def test_large_parameters_are_gathered_by_themselves() -> None:
    needs = [Need(n, n, size) for n, size in enumerate((10.0, float(1 << 22), 10.0))]
    assert OwnFetching(ANY, ANY, 0).starts(needs) == [(0, [0]), (0, [2]), (0, [1])]


def test_each_micro_batch_is_a_pass_and_an_update_is_none() -> None:
    """A third reduction, and behind it what the optimizer has updated is gathered."""
    program = "I0 W0 5 I1 W1 5 B I2 W2 7 I3 W3 7 I4 W4 5 I5 W5 5 B I6 W6 7 I7 W7 7 I8 W8 2 I9 W9 1"
    graph = graph_of(steps_of([program] * 2, [4.0] * 10, [*[GATHER] * 8, REDUCE, GATHER], sizes=[10.0] * 10))
    found = passes(graph.templates[0], GATHERS)
    assert [[need.task for need in of] for of in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [[need.unit for need in of] for of in found] == [[0, 1, 1, 0], [0, 1, 1, 0]]
    # 51 of work; the first pass gathers once, 7 ms; 4 each for the reduction and for what was updated.
    assert replay(apply(graph, [FetchedBy(GATHERS, LINK, GatheredWhole(), 1)])).durations == pytest.approx([66.0])


def test_what_was_prefetched_over_the_turn_is_of_backward() -> None:
    """Task 2 is issued in forward, and first needed in backward."""
    graph = graph_of(steps_of(["I0 W0 I2 5 I1 W1 5 B W2 7 I3 W3 7"] * 2, [4.0] * 4, [GATHER] * 4, sizes=[10.0] * 4))
    assert [need.task for need in passes(graph.templates[0], GATHERS)[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("program", "sizes", "why"),
    [
        ("I0 W0 5 I1 W1 5 B I2 W2 7 I3 W3 7", [10, 20, 10, 20], "backward does not gather what forward did"),
        ("5 B I0 W0 5 I1 W1 5 I2 W2 7 I3 W3 7", [10] * 4, "not all of a pass"),
        ("I0 W0 5 B I1 W1 5 I2 W2 7 I3 W3 7", [10] * 4, "not gathered alike in each forward"),
    ],
)
def test_an_order_that_is_not_told(program: str, sizes: list[float], why: str) -> None:
    graph = graph_of(steps_of([program] * 2, [4.0] * len(sizes), [GATHER] * len(sizes), sizes=sizes))
    with pytest.raises(Refused, match=why):
        apply(graph, [FetchedBy(GATHERS, LINK, OwnFetching(10, ANY, 0), 1)])


@pytest.mark.parametrize(
    ("program", "whatif", "step_ms"),
    [
        # 20 of work, 1 after it, and 16 of four reductions; beside backward the last of them is left.
        ("B 5 I0 W0 5 I1 W1 5 I2 W2 5 I3 W3 1", WaitedFor(REDUCTIONS, 0), 37.0),
        ("B 5 I0 W0 5 I1 W1 5 I2 W2 5 I3 W3 1", WaitedFor(REDUCTIONS, 2), 25.0),
        ("B 5 I0 5 I1 5 I2 5 I3 W0,1,2,3 1", WaitedFor(REDUCTIONS, 0), 37.0),
        ("B 5 I0 5 I1 5 I2 5 I3 W0,1,2,3 1", WaitedFor(REDUCTIONS, 2), 25.0),
        # 1 of work at a time: with two left under way, the link takes 4 each all the same.
        ("B 1 I0 W0 1 I1 W1 1 I2 W2 1 I3 W3 1", WaitedFor(REDUCTIONS, 2), 18.0),
    ],
)
def test_where_reductions_are_waited_for(program: str, whatif: WhatIf, step_ms: float) -> None:
    graph = graph_of(steps_of([program] * 2, [4.0] * 4, [REDUCE] * 4))
    assert replay(apply(graph, [whatif])).durations == pytest.approx([step_ms])
