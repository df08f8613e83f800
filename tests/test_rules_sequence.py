"""data.imbalance where sizes do not tell: packed sequences of equally many tokens, and causal shards of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Wait, Work
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.align.groups import Dimension, Mesh
from dsprof.analyzer.ask import ask
from dsprof.analyzer.columns import RankRows
from dsprof.analyzer.finding import Gain
from dsprof.analyzer.rules.data.sequence import rings, sequence_teams
from dsprof.analyzer.study import study
from dsprof.knobs import flags
from dsprof.knobs.predicted import turned

DRAW = np.random.default_rng(3)
COST = DRAW.choice([0.1, 0.25, 0.5, 1.0], (3, 60))
"""Of rank and step: the sum of squared lengths, of what one document as long as the row would have."""


def packed(cost: Callable[[int, int], float], **changes: object) -> Job:
    return Job(ranks=3, steps=60, forward=lambda rank, step: 12 + 36 * cost(rank, step),
               backward=lambda rank, step: 24 + 72 * cost(rank, step), **changes)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.plants("data.imbalance")
def test_packed_sequences_of_equally_many_tokens() -> None:
    analysis = analyze(packed(lambda rank, step: COST[rank, step]).trace())
    first = analysis.findings[0]
    assert first.code == "data.imbalance"
    saved = 108 * float((COST.max(axis=0) - COST.mean(axis=0))[15:].mean())
    assert first.gain.low <= saved <= first.gain.high
    assert first.gain.ms == pytest.approx(saved, rel=0.15)
    assert first.title.startswith("batches that are equally large take unequally long")
    assert "the sum of the squared lengths" in first.fixes[0].title
    assert of(analysis, "rank.straggler") is None


def test_sizes_that_do_tell_are_told_by() -> None:
    job = packed(lambda rank, step: COST[rank, step], tokens=lambda rank, step: int(4096 * COST[rank, step]) + 1024)
    found = of(analyze(job.trace()), "data.imbalance")
    assert found is not None
    assert found.title.startswith("ranks get unequal inputs")


def test_one_rank_that_is_slow_in_some_steps_is_no_input() -> None:
    """Nor is one that is slow in its forward only."""
    analysis = analyze(packed(lambda rank, step: 0.5 * (rank == 1 and step % 3 == 0)).trace())
    assert of(analysis, "data.imbalance") is None
    forward = Job(ranks=3, steps=60, forward=lambda rank, step: 12 + 36 * COST[rank, step])
    assert of(analyze(forward.trace()), "data.imbalance") is None


RANKS = 4


def ring(
    cost: Callable[[int, int], float], ms: Callable[[int], float] = lambda rank: 1.0, ranks: int = RANKS,
    extra: Callable[[int, float, int], float] = lambda rank, times, layer: 0.0, layers: int = 2, batches: int = 1,
    evaluated: Container[int] = (), called: str = "mesh_cp", **section: str,
) -> MeshJob:  # fmt: skip
    """Layers, in each of which ranks pass something around in as many turns, beside what they compute in each. In
    backward, gradients come back after the last one. section: `context_parallel` of the configuration, where dsprof's
    engine trains; it tells what its exchanges are for.

    extra: (rank, 1 in forward and 2 in backward, layer) -> ms more after the last exchange
    batches: micro-batches of a step; evaluated: steps without a backward; called: the group that exchanges
    """
    passed = ("all_to_all", 4096, "context-parallel") if section else ("all_gather", 4096, "other")

    def layer(rank: int, times: float, number: int) -> list[object]:
        parts: list[object] = [Work(6 * times * ms(rank))]
        for turn in range(ranks):
            last = turn == ranks - 1
            parts += [] if last else [Call("1", *passed, later="turn")]
            more = extra(rank, times, number) if last else 0.0
            parts.append(Work(10 * times * cost(rank, turn) * ms(rank) + more))
            parts += [] if last else [Wait("turn")]
        return [*parts, Call("1", *passed)] if times > 1 else parts

    def program(rank: int, step: int) -> list[object]:
        forward, backward = ([part for n in range(layers) for part in layer(rank, t, n)] for t in (1.0, 2.0))
        parts: list[object] = [Phase("forward", tuple(forward))]
        if step not in evaluated:
            parts = [*parts, Phase("backward", tuple(backward))] * batches
        return [*parts, Call("0", "all_reduce", 1 << 16, "gradient"), Phase("optimizer", (Work(2.0),))]

    groups = {"0": (tuple(range(ranks)), ""), "1": (tuple(range(ranks)), "" if section else called)}
    config = {"sequence_parallel_size": ranks, "context_parallel": section}
    facts = [{"fact": "config", "dialect": "dsprof", "path": "/home/me/ds.json", "content": config}] if section else []
    return MeshJob(ranks, groups, program, steps=24, jitter=0.004, facts=facts)


def contiguous(rank: int, turn: int) -> float:
    """Its own chunk, half of which is masked, and then those before it."""
    return 0.5 if turn == 0 else float(turn <= rank)


def test_causal_shards() -> None:
    job = ring(contiguous)
    first = analyze(job.trace()).findings[0]
    assert (first.code, first.where.ranks) == ("data.imbalance", (2, 3))
    saved = job.step_ms() - ring(lambda rank, turn: 0.5).step_ms()
    assert first.gain.low <= saved <= first.gain.high
    assert first.gain.ms == pytest.approx(saved, rel=0.15)
    assert "deal the sequence in zigzag" in first.fixes[0].title
    assert of(analyze(job.trace()), "rank.straggler") is None


def test_the_order_of_the_engines_ring_is_a_knob() -> None:
    """Its collectives say that they are of sequences, although the same ranks average gradients in another group."""
    job = ring(contiguous, attention="ring", order="contiguous")
    (fix,) = analyze(job.trace()).findings[0].fixes
    saved = job.step_ms() - ring(lambda rank, turn: 0.5).step_ms()
    assert fix.title == 'context_parallel.order: "zigzag", so that a causal mask leaves every rank as much'
    assert fix.patch == ({"op": "replace", "path": "/context_parallel/order", "value": "zigzag"},)
    assert flags(fix.knobs) == ["--set", "context_parallel.order=zigzag"]
    asked = asked_for(job, "zigzag")
    assert isinstance(asked, Gain)
    assert asked.low <= saved <= asked.high
    assert "is not told by a run with contiguous ones" in str(asked_for(job, "striped"))
    assert "the run has context_parallel.order=contiguous already" in str(asked_for(job, "contiguous"))
    assert "no ring of dsprof's engine" in str(asked_for(ring(contiguous), "zigzag"))


def asked_for(job: MeshJob, order: str) -> Gain | str:
    (row,) = ask(study(job.trace()), [[turned("context_parallel.order", order, "run")]]).rows
    return row.reason if row.gain is None else row.gain


@pytest.mark.parametrize("section", [{}, {"attention": "ring", "order": "contiguous"}])
def test_two_ranks_of_which_the_first_skips_what_is_masked(section: dict[str, str]) -> None:
    job = ring(contiguous, ranks=2, **section)
    analysis = analyze(job.trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("data.imbalance", (1,))
    assert (
        "rank 1 takes 1.9 times what rank 0 does, as rank 0 skips the keys that are masked; rank 1 has" in first.title
    )
    saved = job.step_ms() - ring(lambda rank, turn: 0.5, ranks=2).step_ms()
    assert first.gain.low <= saved <= first.gain.high
    assert first.gain.ms == pytest.approx(saved, rel=0.15)
    assert bool(first.fixes[0].knobs) == bool(section)
    assert of(analysis, "rank.straggler") is None


def test_a_slow_rank_beside_what_the_first_skips() -> None:
    """The second takes longer in forward than the attention that its backward tells of."""
    job, slow = (ring(contiguous, ranks=2, extra=more) for more in (lambda *_: 0.0, slow_in_forward))
    analysis = analyze(slow.trace())
    found, straggler = of(analysis, "data.imbalance"), of(analysis, "rank.straggler")
    assert found is not None
    assert straggler is not None
    saved = job.step_ms() - ring(lambda rank, turn: 0.5, ranks=2).step_ms()
    assert found.gain.low <= saved <= found.gain.high
    assert found.gain.ms == pytest.approx(saved, rel=0.15)
    assert "rank 1 takes 1.9 times what rank 0 does" in found.title
    assert straggler.gain.ms == pytest.approx(slow.step_ms() - job.step_ms(), rel=0.2)


def slow_in_forward(rank: int, times: float, layer: int) -> float:
    return 100.0 * (rank == 1 and times == 1.0 and layer == 0)


ONE_LAYER = {"layers": 1, "attention": "ring", "order": "contiguous"}


@pytest.mark.parametrize("changes", [{"evaluated": {7, 8, 16}}, {"batches": 3}, {"layers": 5}, ONE_LAYER])
def test_steps_of_two_ranks_of_other_kinds(changes: dict[str, Any]) -> None:
    job = ring(contiguous, ranks=2, **changes)
    found = of(analyze(job.trace()), "data.imbalance")
    assert found is not None
    saved = job.step_ms() - ring(lambda rank, turn: 0.5, ranks=2, **changes).step_ms()
    assert found.gain.ms == pytest.approx(saved, rel=0.15)


def at_one_exchange(rank: int, times: float, layer: int) -> float:
    return 40.0 * times * (rank == 1 and layer == 1)


def outside_of_attention(rank: int, turn: int) -> float:
    """Nothing is computed after the last exchange of a layer."""
    return float(turn == 0)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(ring(lambda rank, turn: 0.5, lambda rank: 1.0 + 3.5 * rank, 2), id="slow everywhere"),
        pytest.param(ring(outside_of_attention, ranks=2, extra=at_one_exchange), id="slow at one exchange"),
        pytest.param(ring(outside_of_attention, ranks=2, extra=at_one_exchange, layers=4), id="at one of four"),
        pytest.param(ring(contiguous, lambda rank: 1.0 + 0.6 * rank, 2), id="slow everywhere, and contiguous"),
        pytest.param(ring(contiguous, ranks=2, layers=1), id="one layer, which tells too little"),
        pytest.param(ring(lambda *_: 0.5, lambda rank: 1.0 + 3.5 * rank, 3), id="more than 1 : 3 : 5"),
        pytest.param(ring(contiguous, called="mesh_ulysses"), id="a mesh for Ulysses"),
        pytest.param(ring(contiguous, attention="ulysses", order="contiguous"), id="Ulysses"),
        pytest.param(ring(contiguous, order="contiguous"), id="the engine's default"),
        pytest.param(ring(contiguous, ranks=2, order="contiguous"), id="the engine's default of two ranks"),
    ],
)
def test_what_is_no_order_of_positions(job: MeshJob) -> None:
    """Of another kind: a slow rank, something that one rank does, or ranks that have all positions of some heads."""
    assert of(analyze(job.trace()), "data.imbalance") is None


def dimension(name: str, teams: tuple[tuple[int, ...], ...], purpose: str, stated: bool) -> Dimension:
    return Dimension(name, "cp", teams, frozenset({"1"}), frozenset({purpose}), whole=True, stated=stated)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (dimension("cp", ((0, 1), (2, 3)), "context-parallel", stated=False), [(0, 1), (2, 3)]),
        (dimension("cp", ((0, 1), (2, 3)), "messages", stated=True), [(0, 1), (2, 3)]),
        (dimension("cp", ((0, 1), (2, 3)), "messages", stated=False), []),  # as of neighbours in a grid
        (dimension("cp", ((0, 1, 2, 3),), "all_to_all", stated=False), []),  # as in Ulysses
        (dimension("ulysses", ((0, 1, 2, 3),), "all_to_all", stated=True), []),
    ],
)
def test_teams_that_share_sequences(one: Dimension, expected: list[tuple[int, ...]]) -> None:
    sent = pd.DataFrame({"group": pd.Series(dtype=str), "name": pd.Series(dtype=str), "step": pd.Series(dtype=int)})
    run: Any = SimpleNamespace(in_stages=False, judged_collectives=RankRows(sent), mesh=Mesh((one,)))
    assert [team.ranks for team in sequence_teams(run)] == expected


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_what_the_order_does_not_explain_is_not_laid_on_it(order: str) -> None:
    """Of two ranks a slow one, and ranks whose sequences are in zigzag."""
    slow = ring(lambda rank, turn: 0.5, lambda rank: 1.0 + 0.6 * rank, ranks=2, attention="ring", order=order)
    grows = ring(contiguous, attention="ring", order="zigzag")
    for job in (slow, grows):
        analysis = analyze(job.trace())
        assert of(analysis, "data.imbalance") is None
        assert of(analysis, "rank.straggler") is not None


@pytest.mark.parametrize(
    ("ranks", "slow", "each"), [(2, False, 0.5), (2, True, 1.0), (RANKS, False, 1.0), (RANKS, True, 0.5)]
)
def test_equal_shards(ranks: int, slow: bool, each: float) -> None:
    """Of zigzag, and of attention without a mask. With a slow machine, which is no matter of the sequence."""
    analysis = analyze(ring(lambda rank, turn: each, lambda rank: 1.0 + 0.6 * (slow and rank == 1), ranks).trace())
    assert of(analysis, "data.imbalance") is None
    assert (of(analysis, "rank.straggler") is not None) == slow


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["0>1", "1>2", "2>3", "3>0"], [(0, 1, 2, 3)]),
        (["0>2", "2>4", "4>0", "1>3", "3>5", "5>1"], [(0, 2, 4), (1, 3, 5)]),
        (["0>1", "1>2"], []),  # a chain
        (["0>1", "1>0"], []),  # two that exchange
        (["0>1", "0>2", "1>2", "0>3", "3>0"], []),
        ([], []),
    ],
)
def test_rings(pairs: list[str], expected: list[tuple[int, ...]]) -> None:
    assert rings(pd.Series([f"0 {pair}" for pair in pairs], dtype=object)) == expected
