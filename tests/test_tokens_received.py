"""What comes in an exchange of tokens, of which only the larger of what was sent and what came is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from made_up_mesh import Mesh, MeshPlant, MeshTimeline, make_mesh_run

from dsprof import trace
from dsprof.analyzer import analyze
from dsprof.analyzer.graph.step_graph import PARTS
from dsprof.analyzer.rules.data.pieces import follows, given_in_steps, pieces_that_follow
from dsprof.analyzer.rules.data.routed_tokens import _received
from dsprof.run import RunFolder

SENT = 100.0


def seen(came: np.ndarray) -> np.ndarray:
    return np.maximum(came, SENT)


def received(ranks: tuple[int, ...], every: np.ndarray) -> np.ndarray:
    dimension = cast(Any, SimpleNamespace(teams=((0, 1, 2, 3),)))
    return _received(cast(Any, SimpleNamespace(ranks=ranks)), dimension, every)


def test_ranks_that_get_less_than_they_send_share_what_is_left() -> None:
    came = np.array([[160.0, 40.0], [110.0, 90.0], [70.0, 200.0], [60.0, 70.0]])[:, :, None]
    found = received((0, 1, 2, 3), seen(came))[..., 0]
    assert found[:, 0] == pytest.approx([160, 110, 65, 65])
    assert found[:, 1] == pytest.approx([200 / 3, 200 / 3, 200, 200 / 3])


def test_ranks_that_were_not_captured_have_their_part_of_it() -> None:
    """Rank 3 gets 60 and 70."""
    came = np.array([[160.0, 40.0], [110.0, 90.0], [70.0, 200.0]])[:, :, None]
    found = received((0, 1, 2), seen(came))[..., 0]
    assert found[:, 0] == pytest.approx([160, 110, 65])
    assert found[:, 1] == pytest.approx([200 / 3, 200 / 3, 200])


def test_small_exchanges_stay_as_they_are() -> None:
    every = np.stack([np.full((4, 5), 1000.0), np.tile([[1.0], [2.0], [3.0], [4.0]], (1, 5))], axis=2)
    assert np.array_equal(received((0, 1, 2, 3), every), every)


def test_how_much_less_a_rank_got_its_work_tells() -> None:
    """But no rank that got less is made faster, whatever else it is slow for."""
    drawn = np.random.default_rng(3)
    came = drawn.uniform(40, 160, (4, 1, 60))
    came *= 4 * SENT / came.sum(axis=0)
    work = 0.05 * came + drawn.normal(0, 0.02, came.shape)
    each = received((0, 1, 2, 3), np.moveaxis(seen(came), 1, 2))
    shares = np.moveaxis(each, 2, 1)
    unseen = shares < SENT
    gone, _ = follows(work, shares - SENT, shares, unseen)
    assert np.abs(work - gone - 0.05 * SENT).max() < 0.4
    work[2] += 3.0
    assert (follows(work, shares - SENT, shares, unseen)[0][unseen] <= 0).all()


def test_the_gain_of_equal_shares_is_the_true_one(tmp_path: Path) -> None:
    mesh, steps, seed = Mesh(tp=1, ep=4, replicas=1, pp=2, microbatches=6), 14, 4
    shares = np.random.default_rng(seed).uniform(0.4, 1.6, (2, 1, 4, steps, 6))
    tokens = (4 * shares / shares.sum(axis=2, keepdims=True)).reshape(-1, steps, 6)
    plants = [MeshPlant(work=np.ones((mesh.ranks, steps)), tokens=each) for each in (tokens, np.ones_like(tokens))]
    make_mesh_run(tmp_path / "run", mesh, steps, seed, plants[0], ())
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    judged = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    now, then = (MeshTimeline(mesh, steps, seed, plant).lasted_ms()[judged].mean() for plant in plants)
    (found,) = [one for one in analysis.findings if one.code == "moe.imbalance"]
    assert found.gain.ms == pytest.approx(now - then, rel=0.12)
    assert found.gain.low < now - then < found.gain.high


@pytest.mark.parametrize(("missing", "told"), [(1, 0.75), (0, 0.6)])
def test_a_rank_that_waits_for_one_without_a_trace_is_compared_all_the_same(
    missing: int, told: float, tmp_path: Path
) -> None:
    """Of the second stage the first experts, of ranks 8 and 12, are asked more. Of what rank 8, or one beside it,
    waits for, nothing was seen: so what its program has is not what the others' have."""
    mesh, steps, seed = Mesh(tp=1, ep=4, replicas=2, pp=2, microbatches=6), 14, 4
    tokens = np.ones((mesh.ranks, 1, 1))
    tokens[8:] = np.tile([1.6, 0.8, 0.8, 0.8], 2)[:, None, None]
    tokens = tokens * np.random.default_rng(1).uniform(0.9, 1.1, (mesh.ranks, steps, 6))
    plants = [MeshPlant(work=np.ones((mesh.ranks, steps)), tokens=each) for each in (tokens, np.ones_like(tokens))]
    make_mesh_run(tmp_path / "run", mesh, steps, seed, plants[0], (missing,))
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    judged = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    now, then = (MeshTimeline(mesh, steps, seed, plant).lasted_ms()[judged].mean() for plant in plants)
    assert "rank.straggler" not in [one.code for one in analysis.findings]
    (found,) = [one for one in analysis.findings if one.code == "moe.imbalance"]
    assert found.where.ranks == (8, 12)
    assert told * (now - then) < found.gain.ms < now - then


def team_of(work: np.ndarray) -> Any:
    """What `_PiecesOfTemplate` knows of several teams of four, [teams * 4, W, S], of one program."""
    ranks, pieces, steps = work.shape
    thread = np.repeat(np.arange(ranks), pieces)
    structure = SimpleNamespace(
        programs=[b"p"] * ranks, of_thread=lambda of: slice(of * pieces, (of + 1) * pieces), thread=thread
    )
    parts = np.zeros((ranks * pieces, steps, len(PARTS)))
    parts[..., PARTS.index("compute")] = work.reshape(ranks * pieces, steps)
    template = SimpleNamespace(structure=structure, work=parts, began=np.zeros(parts.shape[:2]))
    graph = SimpleNamespace(
        templates=[template], ranks=tuple(range(ranks)), leads=ranks, judged=np.ones(steps, bool),
        columns_of=lambda _: np.arange(steps), judged_steps=np.arange(steps),
    )  # fmt: skip
    return SimpleNamespace(need_graph=lambda: graph, ranks=tuple(range(ranks)), step_numbers=np.arange(steps))


def test_what_a_team_tells_is_not_said_of_one_whose_ranks_say_otherwise() -> None:
    """Of each team the first rank is given most. In the first team it takes longer in one piece; in the second it does
    not; and in the third all are given as much but one, which is another program's."""
    drawn = np.random.default_rng(2)
    work = drawn.normal(10.0, 0.05, (12, 3, 20))
    given = np.tile([1.6, 0.8, 0.8, 0.8], 3)[:, None] * drawn.uniform(0.98, 1.02, (12, 20))
    given[9:] = 0.8
    work[:4, 1] += 5.0 * (given[:4] - 1)
    study = team_of(work)
    study.need_graph().templates[0].structure.programs[8] = b"q"
    teams = [range(4), range(4, 8), range(8, 12)]
    found = pieces_that_follow(study, teams, given_in_steps(given - 1, given))
    assert found is not None
    mean = found.excess.mean(axis=1)
    assert mean[:4] == pytest.approx([3.0, -1.0, -1.0, -1.0], abs=0.2)
    assert mean[4:8] == pytest.approx(0.0, abs=0.01)
    assert mean[8] == pytest.approx(3.0, abs=0.2)


def test_of_a_program_that_no_other_team_has_nothing_is_said_where_its_ranks_say_nothing() -> None:
    """It has other pieces than the program of the team that tells, and one of its ranks has that one's."""
    drawn = np.random.default_rng(2)
    work = drawn.normal(10.0, 0.05, (8, 3, 20))
    given = np.tile([1.6, 0.8, 0.8, 0.8], 2)[:, None] * drawn.uniform(0.98, 1.02, (8, 20))
    work[:4, 1] += 5.0 * (given[:4] - 1)
    study = team_of(work)
    study.need_graph().templates[0].structure.programs[5:] = [b"longer"] * 3
    found = pieces_that_follow(study, [range(4), range(4, 8)], given_in_steps(given - 1, given))
    assert found is not None
    assert found.excess[:4].mean(axis=1) == pytest.approx([3.0, -1.0, -1.0, -1.0], abs=0.2)
    assert not found.excess[4:].any()
