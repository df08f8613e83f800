"""Jobs of which a rank has no trace: what is common to all ranks is told to save as much as where all have one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import graph_of, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from made_up_run import Plant, Timeline, make_run

from dsprof import trace
from dsprof.analyzer import analyze
from dsprof.analyzer.arrays import Float
from dsprof.analyzer.graph import segment_work
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import Task
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.uncaptured import waits_for_uncaptured
from dsprof.analyzer.whatif.work import Change, LessWork
from dsprof.run import RunFolder
from dsprof.trace import packed_table

RANKS, STEPS, ROWS, SEED = 32, 14, 50, 5


def lengths() -> tuple[Plant, Plant]:
    elements = 512.0 * np.random.default_rng(SEED).integers(2, 16, (RANKS, STEPS))
    equal = np.broadcast_to(elements.mean(axis=0), elements.shape)
    planted, mended = (Plant(work=each / elements.mean(), elements=each) for each in (elements, equal))
    return planted, mended


def slow_loader() -> tuple[Plant, Plant]:
    healthy = Plant(work=np.ones((RANKS, STEPS)))
    return Plant(work=healthy.work, data_ms=np.full((1, 1), 60.0)), healthy


@pytest.mark.parametrize("missing", [(), (3, 21)], ids=["whole", "two without a trace"])
@pytest.mark.parametrize(
    ("plants", "code"), [(lengths, "data.imbalance"), (slow_loader, "data.stall")], ids=["lengths", "loader"]
)
def test_the_gain_is_the_true_one(
    tmp_path: Path, plants: Callable[[], tuple[Plant, Plant]], code: str, missing: tuple[int, ...]
) -> None:
    planted, mended = plants()
    make_run(tmp_path / "run", RANKS, STEPS, ROWS, SEED, planted, missing)
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    steps = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    now, then = (Timeline(RANKS, STEPS, ROWS, SEED, plant).lasted_ms()[steps].mean() for plant in (planted, mended))
    assert analysis.findings[0].code == code
    assert analysis.findings[0].gain.ms == pytest.approx(now - then, rel=0.05)


def waits_of(members: dict[str, list[int] | None], transfers: np.ndarray, sizes: np.ndarray, most_ms: float) -> Float:
    """Of groups that communicate once a step, [C, S] ms. The ranks 0 to 2 were captured."""
    steps = transfers.shape[1]
    tasks = [Task(group, "all_reduce tensor-parallel") for group in members]
    programs = [f"5 I{c} 0 W{c} 1" for c in range(len(tasks))]
    of = steps_of(programs, [0.0] * len(tasks), tasks, steps)
    of = replace(of, costs=replace(of.costs, transfer=transfers, size=sizes))
    (found,) = waits_for_uncaptured(graph_of(of), members.__getitem__, np.full(steps, most_ms))
    return found


USUAL = np.tile([2.0, 2.2, 2.1], (2, 4))
WAITED = np.tile([2.0, 10.0, 2.1], (1, 4))
BYTES = np.full((3, 12), 4096.0)
GROUPS: dict[str, list[int] | None] = {"a": [0, 1], "b": [1, 2], "c": [1, 9]}


def test_what_takes_longer_than_like_groups_that_are_whole_has_waited() -> None:
    found = waits_of(GROUPS, np.concatenate([USUAL, WAITED]), BYTES, 20.0)
    assert found == pytest.approx(np.concatenate([0 * USUAL, np.tile([0, 7.9, 0], (1, 4))]))


@pytest.mark.parametrize(
    ("groups", "bytes_", "slower", "most_ms", "wanted"),
    [
        (GROUPS, BYTES, 1.0, 3.0, 3.0),
        (GROUPS, np.concatenate([BYTES[:2], 2 * BYTES[:1]]), 1.0, 20.0, 0.0),
        ({**GROUPS, "c": [1, 8, 9]}, BYTES, 1.0, 20.0, 0.0),
        ({**GROUPS, "c": None}, BYTES, 1.0, 20.0, 0.0),
        ({**GROUPS, "c": [0, 2]}, BYTES, 1.0, 20.0, 0.0),
        (GROUPS, BYTES, 5.0, 20.0, 40.0 - 2.1 * 5 + 0.5),
    ],
    ids=["as late as captured ones", "other bytes", "a larger group", "unknown members", "a whole group", "always"],
)  # fmt: skip
def test_nothing_else_has(
    groups: dict[str, list[int] | None], bytes_: np.ndarray, slower: float, most_ms: float, wanted: float
) -> None:
    """Nor what a group waits in every step: it may be a slow rank, or a slow link."""
    transfers = np.concatenate([USUAL, slower * WAITED])
    found = waits_of(groups, transfers, bytes_, most_ms)
    assert found[2, 1] == pytest.approx(min(wanted, most_ms))
    assert not found[:2].any()


def test_what_was_waited_goes_with_the_work() -> None:
    graph = graph_of(steps_of(["5 I0 0 W0 1", "5 I1 0 W1 1"], [2.0, 10.0], [Task("a"), Task("b")]))
    change = Change({"compute": np.full((2, 1), 1.0)}, waits=(np.array([[0.0], [8.0]]),))
    took = replay(apply(graph, [LessWork("data.imbalance", change, [np.ones(2, bool)])]))
    assert (took.end - took.start)[:, 0] == pytest.approx([7.0, 7.0])


def test_large_jobs_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose work is float32, and whose waits lie in blocks."""
    work = np.ones((RANKS, STEPS))
    work[5] = 1.3
    make_run(tmp_path / "run", RANKS, STEPS, ROWS, SEED, Plant(work=work), (3,))
    loaded = trace.load(RunFolder(tmp_path / "run"))
    usual = analyze(loaded)
    monkeypatch.setattr(segment_work, "MANY", 0)
    monkeypatch.setattr(packed_table, "ROWS", 700)
    large = analyze(loaded)
    assert len([*large.packed_waits.blocks()]) > 3
    for one, other in zip(usual.findings, large.findings, strict=True):
        assert (one.code, one.title, one.severity) == (other.code, other.title, other.severity)
        assert other.gain.ms == pytest.approx(one.gain.ms, rel=1e-5, abs=1e-5)
    assert usual.verdict.headline == large.verdict.headline
