"""moe.imbalance, on made-up jobs of 2 x 2 ranks whose tokens are exchanged among the experts of a row."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Work

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.trace import Trace

Share = Callable[[int, int], float]
"""(rank, step) -> its part of the tokens of its row, of the mean."""
MEAN = 1 << 16
"""Bytes of an exchange of equal shares."""


def groups() -> dict[str, tuple[tuple[int, ...], str]]:
    rows = {f"r{row}": ((2 * row, 2 * row + 1), "ep") for row in (0, 1)}
    columns = {f"c{column}": ((column, column + 2), "") for column in (0, 1)}
    return {**rows, **columns, "w": ((0, 1, 2, 3), "")}


def job(
    share: Share, slower: Share = lambda rank, step: 1.0, works: Share | None = None, batches: int = 1,
    second: Share | None = None, **more: Any,
) -> MeshJob:  # fmt: skip
    """Two layers: dense work, tokens there, the experts' work, tokens back; backward takes twice as long. The same of
    each of several micro-batches.

    slower: by how much a rank is, in everything; works: the part of the experts' work, where it is not the tokens';
    second: the part of the second layer's tokens, where it is another one.
    """

    def program(rank: int, step: int) -> Program:
        def layer(ms: float, share: Share = share) -> tuple[Any, ...]:
            size, slow = int(MEAN * max(share(rank, step), 1.0)), slower(rank, step)
            exchange = Call(f"r{rank // 2}", "all_to_all", size)
            return Work(ms * slow), exchange, Work(ms * slow * (works or share)(rank, step)), exchange

        gradients = Call("w", "all_reduce", 65536, "gradient"), Call(f"c{rank % 2}", "all_reduce", 16384, "gradient")
        other = second or share
        forward, backward = (*layer(10), *layer(10, other)), (*layer(20, other), *layer(20))
        passes = (Phase("forward", forward), Phase("backward", backward)) * batches
        return (*passes, *gradients, Phase("optimizer", (Work(1),)))

    return MeshJob(4, groups(), program, **{"steps": 40, **more})


def drawn(seed: int, spread: float) -> Share:
    draw = random.Random(seed)
    table = [[draw.uniform(-spread, spread) for _ in range(2)] for _ in range(40)]
    return lambda rank, step: 1 + table[step][rank // 2] * (1 if rank % 2 == 0 else -1)


def always(rank_most: int, by: float, seed: int = 1, spread: float = 0.02) -> Share:
    """One rank's experts are asked more than its neighbour's, by about the same in each step."""
    draw = random.Random(seed)
    table = [draw.uniform(-spread, spread) for _ in range(40)]

    def share(rank: int, step: int) -> float:
        if rank // 2 != rank_most // 2:
            return 1.0
        return 1 + (by + table[step]) * (1 if rank == rank_most else -1)

    return share


def above_info(analysis: Analysis) -> list[str]:
    return [finding.code for finding in analysis.findings if finding.is_problem]


def equal(rank: int, step: int) -> float:
    return 1.0


def check_gain(finding: Finding, share: Share, **more: Any) -> None:
    true = job(share, **more).step_ms() - job(equal, **{**more, "second": equal}).step_ms()
    assert finding.gain.ms == pytest.approx(true, rel=0.15)
    assert finding.gain.low <= true <= finding.gain.high


@pytest.mark.plants("moe.imbalance")
def test_another_rank_gets_more_tokens_each_step() -> None:
    share = drawn(3, 0.5)
    analysis = analyze(job(share).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.op, first.where.dimension) == ("moe.imbalance", "all_to_all", "ep")
    assert "on another rank each step" in first.title
    check_gain(first, share)
    assert "a balancing loss" in first.fixes[0].title
    assert not any("length" in fix.title for finding in analysis.findings for fix in finding.fixes)
    assert above_info(analysis) == ["moe.imbalance"]


def test_one_rank_has_the_experts_that_are_asked_most() -> None:
    share = always(2, 0.4)
    analysis = analyze(job(share).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("moe.imbalance", (2,))
    check_gain(first, share)
    assert (
        first.title == "experts get unequal shares of the tokens: rank 2 (dp-of-2 1 ep 0) gets 40 % more than the mean"
    )
    assert any("place experts anew" in fix.title for fix in first.fixes)
    assert of(analysis, "rank.straggler") is None


def test_experts_of_many_micro_batches_are_told_from_a_slow_rank() -> None:
    """Each piece of work is a small part of the step, and shares hardly change from step to step."""
    share = always(2, 0.4, spread=0.01)
    analysis = analyze(job(share, batches=8, steps=24).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("moe.imbalance", (2,))
    check_gain(first, share, batches=8, steps=24)
    slow = analyze(job(always(2, 0.06, spread=0.01), lambda rank, step: 1.5 if rank == 2 else 1.0, works=equal,
                       batches=8, steps=24).trace())  # fmt: skip
    assert (slow.findings[0].code, slow.findings[0].where.ranks) == ("rank.straggler", (2,))


@pytest.mark.plants("moe.imbalance")
def test_all_ranks_with_the_experts_that_are_asked_most_are_named() -> None:
    both = always(2, 0.4), always(0, 0.4, seed=2)
    analysis = analyze(job(lambda rank, step: both[rank < 2](rank, step)).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("moe.imbalance", (0, 2))
    assert first.title.endswith("ranks 0, 2 (ep 0) get 40 % more than the mean")


@pytest.mark.plants("moe.imbalance")
@pytest.mark.parametrize("spread", [0.01, 0.05])
def test_each_layer_asks_the_experts_of_another_rank_more(spread: float) -> None:
    """Each rank gets as many tokens in a step, and waits for the other in every second layer."""
    first, second = always(0, 0.4, spread=spread), always(1, 0.4, seed=2, spread=spread)
    analysis = analyze(job(first, second=second).trace())
    found = analysis.findings[0]
    assert (found.code, found.where.op, found.where.dimension) == ("moe.imbalance", "all_to_all", "ep")
    assert found.title.endswith(
        "the largest of an exchange is 40 % above the mean, on another rank from exchange to exchange"
    )
    check_gain(found, first, second=second)
    assert any("place experts anew" in fix.title for fix in found.fixes)
    assert above_info(analysis) == ["moe.imbalance"]


def test_layers_whose_exchanges_are_unequal_and_cost_nothing_are_no_finding() -> None:
    analysis = analyze(job(always(0, 0.4), second=always(1, 0.4, seed=2), works=equal).trace())
    assert "moe.imbalance" not in above_info(analysis)


def test_a_slow_rank_whose_layers_ask_in_turn_is_a_slow_rank() -> None:
    first, second = always(2, 0.08), always(3, 0.08, seed=2)
    slow = job(first, lambda rank, step: 1.5 if rank == 2 else 1.0, works=equal, second=second)
    found = analyze(slow.trace()).findings[0]
    assert (found.code, found.where.ranks) == ("rank.straggler", (2,))


def test_megatron_is_told_its_own_flags() -> None:
    trace = job(drawn(3, 0.5)).trace()
    trace.run.command[:] = ["dsprof", "run", "pretrain_gpt.py", "--num-experts", "8"]
    first = analyze(trace).findings[0]
    assert first.code == "moe.imbalance"
    assert first.fixes[0].patch[0]["argument"] == "--moe-router-load-balancing-type"
    assert first.fixes[1].title.startswith("or cap what an expert takes: --moe-expert-capacity-factor 1.25")


def test_equal_shares_are_no_finding() -> None:
    analysis = analyze(job(equal).trace())
    assert of(analysis, "moe.imbalance") is None
    assert above_info(analysis) == []


def test_a_slow_rank_among_experts_is_a_slow_rank() -> None:
    """It even gets more of the tokens, always, but is slower with everything."""
    share = always(2, 0.06)
    analysis = analyze(job(share, lambda rank, step: 1.5 if rank == 2 else 1.0, works=equal).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (2,))
    assert "moe.imbalance" not in above_info(analysis)


def test_shares_whose_work_costs_nothing_are_no_finding() -> None:
    analysis = analyze(job(drawn(3, 0.5), works=equal).trace())
    assert "moe.imbalance" not in above_info(analysis)


def test_what_is_divided_unevenly_for_good_is_not_called_experts() -> None:
    """As tables of embeddings are, whose rows are exchanged all-to-all."""
    analysis = analyze(job(lambda rank, step: 1.4 if rank % 2 else 0.6).trace())
    assert of(analysis, "moe.imbalance") is None
    assert "the same ones in every step" in analysis.not_judged["moe.imbalance"]


def embeddings(lengths: tuple[float, ...], elements: bool = False) -> MeshJob:
    """Tables of embeddings of unequal sizes, whose work and exchange follow a batch as large on all ranks."""

    def program(rank: int, step: int) -> Program:
        batch = lengths[step % len(lengths)]
        mine = batch * (1.4 if rank % 2 else 0.6)
        exchange = Call(f"r{rank // 2}", "all_to_all", int(MEAN * mine))
        gradients = Call("w", "all_reduce", 65536, "gradient")
        forward = (Work(10 * mine), exchange, Work(10 * batch))
        backward = (Work(20 * batch), exchange, Work(20 * mine))
        phase = Phase("forward", forward, int(4096 * batch)) if elements else Phase("forward", forward)
        return (phase, Phase("backward", backward), gradients, Phase("optimizer", (Work(1),)))

    return MeshJob(4, groups(), program, steps=40)


@pytest.mark.parametrize("elements", [True, False])
def test_batches_of_other_sizes_do_not_make_experts_of_tables(elements: bool) -> None:
    """Each rank's part stays the same, however large a batch is."""
    analysis = analyze(embeddings((0.8, 1.1, 0.95, 1.2, 1.0), elements).trace())
    assert of(analysis, "moe.imbalance") is None
    assert "the same ones in every step" in analysis.not_judged["moe.imbalance"]


def test_samples_that_are_dealt_out_anew_before_forward_are_not_called_experts() -> None:
    share = drawn(3, 0.4)

    def program(rank: int, step: int) -> Program:
        deal = Call(f"r{rank // 2}", "all_to_all", int(MEAN * share(rank, step)))
        gradients = Call("w", "all_reduce", 65536, "gradient")
        work = 20 * share(rank, step)
        return (deal, Phase("forward", (Work(work),)), Phase("backward", (Work(2 * work),)), gradients,
                Phase("optimizer", (Work(1),)))  # fmt: skip

    analysis = analyze(MeshJob(4, groups(), program, steps=40).trace())
    assert of(analysis, "moe.imbalance") is None
    assert "not in forward and in backward" in analysis.not_judged["moe.imbalance"]


def longer_sequences(batches: int) -> MeshJob:
    """Each rank sends its own tokens, of which some have more: what it exchanges follows from its input."""
    shares = [drawn(3 + batch, 0.4) for batch in range(batches)]

    def program(rank: int, step: int) -> Program:
        passes: list[Phase] = []
        for share in shares:
            exchange, mine = Call(f"r{rank // 2}", "all_to_all", int(MEAN * share(rank, step))), share(rank, step)
            forward, backward = (Work(20 * mine), exchange, Work(2), exchange), (Work(40 * mine), exchange, Work(4))
            passes += [Phase("forward", forward, int(4096 * mine)), Phase("backward", backward)]
        return (*passes, Call("w", "all_reduce", 65536, "gradient"), Phase("optimizer", (Work(1),)))

    return MeshJob(4, groups(), program, steps=40)


def test_more_tokens_of_longer_sequences_are_the_inputs_doing() -> None:
    assert above_info(analyze(longer_sequences(1).trace())) == ["data.imbalance"]


@pytest.mark.parametrize("batches", [2, 4])
def test_longer_sequences_of_some_micro_batches_are_not_laid_to_routing(batches: int) -> None:
    """Which rank has more is another one from micro-batch to micro-batch, as from layer to layer of experts."""
    assert of(analyze(longer_sequences(batches).trace()), "moe.imbalance") is None


@pytest.mark.parametrize("lost", ["a record", "a size"])
def test_an_exchange_that_was_lost_does_not_hide_what_the_others_tell(lost: str) -> None:
    trace = job(always(0, 0.4), second=always(1, 0.4, seed=2)).trace()
    rows = trace.rows.copy()
    exchanges = rows.index[(rows["kind"] == "comm") & (rows["name"] == "all_to_all") & (rows["rank"] == 0)]
    if lost == "a size":
        rows.loc[exchanges[80], "bytes"] = pd.NA
    else:
        rows = rows.drop(exchanges[80])
    assert of(analyze(Trace.of(trace.run, rows)), "moe.imbalance") is not None


def test_small_exchanges_of_counts_are_not_looked_at() -> None:
    """How many tokens will come, before they do: a few bytes, of which ranks have different numbers."""
    first, second = always(0, 0.4), always(1, 0.4, seed=2)
    made = job(first, second=second)
    draw = random.Random(5)
    counts = {key: draw.randrange(8, 64) for key in ((rank, step) for rank in range(4) for step in range(40))}

    def program(rank: int, step: int) -> Program:
        before = Call(f"r{rank // 2}", "all_to_all", counts[rank, step])
        return tuple(
            Phase(part.name, (before, *part.parts)) if isinstance(part, Phase) and part.name != "optimizer" else part
            for part in made.program(rank, step)
        )

    assert above_info(analyze(MeshJob(4, groups(), program, steps=40).trace())) == ["moe.imbalance"]


def test_where_inputs_are_not_known_who_sends_more_is_not_laid_to_routing() -> None:
    """As in a trace that was imported: each rank sends its own tokens, and some have more."""
    share = drawn(3, 0.4)

    def program(rank: int, step: int) -> Program:
        exchange, mine = Call(f"r{rank // 2}", "all_to_all", int(MEAN * share(rank, step))), share(rank, step)
        forward, backward = (Work(10 * mine), exchange, Work(12 * mine), exchange), (Work(40 * mine), exchange, Work(4))
        gradients = Call("w", "all_reduce", 65536, "gradient")
        return (Phase("forward", forward), Phase("backward", backward), gradients, Phase("optimizer", (Work(1),)))

    analysis = analyze(MeshJob(4, groups(), program, steps=40).trace())
    assert of(analysis, "moe.imbalance") is None
    assert "whether routing or inputs differ is not known" in analysis.not_judged["moe.imbalance"]
