"""What is said of made-up jobs whose ranks form a mesh: each dimension is judged by itself."""

from __future__ import annotations

from typing import Any

import pytest
from meshes import Call, MeshJob, Phase, Program, Wait, Work

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.analyze import analyze
from dsprof.analyzer.finding import Finding

ROWS = {"r0": ((0, 1), ""), "r1": ((2, 3), "")}
COLUMNS = {"c0": ((0, 2), ""), "c1": ((1, 3), "")}
WORLD = {"w": ((0, 1, 2, 3), "")}


def row_of(rank: int) -> str:
    return f"r{rank // 2}"


def column_of(rank: int) -> str:
    return f"c{rank % 2}"


def above_info(analysis: Analysis) -> list[str]:
    return [finding.code for finding in analysis.findings if finding.severity != "info"]


def found(code: str, analysis: Analysis) -> Finding:
    (finding,) = [one for one in analysis.findings if one.code == code]
    return finding


OPTIMIZER = (Phase("optimizer", (Work(1),)), Work(0.2))
STEPS = 16

# --- two models, each with a backward of its own --------------------------------------------------


def two_models(critic: list[int], generator: list[int], through_critic: bool = False) -> MeshJob:
    """A critic and a generator, each in one bucket, of tensors of so many MiB. through_critic: the generator's backward
    reduces the critic's gradients, too."""
    facts = [
        {"fact": "ddp", "rank": rank, "site": f"gan.py:{line}", "gradient_bytes": [mib << 20 for mib in sizes]}
        for rank in range(2)
        for line, sizes in ((10, generator), (11, critic))
    ]

    def trained(ms: float, *sizes: list[int]) -> Program:
        buckets = [Call("w", "all_reduce", sum(of) << 20, "gradient", later=str(i)) for i, of in enumerate(sizes)]
        work = [part for bucket in buckets for part in (Work(ms / len(buckets)), bucket)]
        waits = [Wait(str(i)) for i in range(len(buckets))]
        return Phase("forward", (Work(ms / 2),)), Phase("backward", (*work, *waits))

    def program(rank: int, step: int) -> Program:
        second = (critic, generator) if through_critic else (generator,)
        return *trained(20, critic), *trained(10, *second), *OPTIMIZER

    return MeshJob(2, {"w": ((0, 1), "")}, program, steps=24, latency_ms=0.1, facts=facts)


def test_each_of_two_models_is_cut_into_buckets_of_its_own() -> None:
    """16 MiB of the critic wait 16 ms after its backward, 8 of the generator 8 ms; the last bucket of each stays."""
    analysis = analyze(two_models([1] * 16, [1] * 8).trace())
    exposed = found("comm.large-bucket", analysis)
    assert above_info(analysis) == ["comm.large-bucket"]
    assert exposed.gain.ms == pytest.approx(21, abs=1.5)
    assert dict(exposed.fixes[0].knobs) == {"ddp.bucket_cap_mb": 1}
    assert exposed.fixes[0].title.endswith("(gan.py:11): 24 collectives a step")


@pytest.mark.parametrize("through_critic", [False, True])
def test_two_models_of_one_bucket_each_are_as_they_can_be(through_critic: bool) -> None:
    """No cap divides a single tensor: it is how many bytes they have."""
    analysis = analyze(two_models([8], [8], through_critic).trace())
    assert above_info(analysis) == ["comm.volume"]
    assert {"comm.exposed", "comm.small-messages"} <= {*analysis.passed}
    assert "no other bucket size would hide more" in found("comm.exposed", analysis).title


# --- shards beside tensor parallelism -----------------------------------------------------------


def sharded(
    layers: int = 4,
    every: int = 1,
    together: int = 1,
    size: int = 65536,
    replicas: bool = False,
    slow: int | None = None,
) -> MeshJob:
    """2 x 2: parameters are sharded in columns, `together` layers a unit. In rows activations are reduced after every
    few layers; or, with replicas, the gradients of each unit once more."""

    def program(rank: int, step: int) -> Program:
        column, row, slower = column_of(rank), row_of(rank), 1.5 if rank == slow else 1.0
        forward: list[Any] = []
        backward: list[Any] = []
        for i in range(layers):
            if i % together == 0:
                gather = Call(column, "all_gather", size * together, "parameter")
                forward.append(gather)
                backward.append(gather)
            forward.append(Work(20 / layers * slower))
            backward.append(Work(40 / layers * slower))
            if (i + 1) % together == 0:
                backward.append(Call(column, "reduce_scatter", size * together, "gradient"))
                if replicas:
                    backward.append(Call(row, "all_reduce", size * together // 2, "gradient"))
            if not replicas and (i + 1) % every == 0:
                forward.append(Call(row, "all_reduce", 2048))
                backward.append(Call(row, "all_reduce", 2048))
        return (Phase("forward", tuple(forward)), Phase("backward", tuple(backward)), *OPTIMIZER)

    return MeshJob(4, {**ROWS, **COLUMNS}, program, steps=STEPS, latency_ms=0.2)


@pytest.mark.parametrize("replicas", [False, True])
def test_shards_of_a_mesh_without_a_fault_are_healthy(replicas: bool) -> None:
    analysis = analyze(sharded(replicas=replicas).trace())
    assert above_info(analysis) == []
    assert analysis.verdict.status == "healthy", analysis.verdict.headline
    assert {"comm.small-messages", "comm.exposed"} <= set(analysis.passed)


def test_small_units_are_those_of_the_data_parallel_dimension() -> None:
    analysis = analyze(sharded(layers=32, every=8, size=4096).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.dimension) == ("comm.small-messages", "dp")
    assert "96 all-gathers and reduce-scatters a step" in first.title
    assert first.title.endswith("in dimension dp")
    true = sharded(layers=32, every=8, size=4096).step_ms() - sharded(32, 8, together=16, size=4096).step_ms()
    assert first.gain.ms == pytest.approx(true, rel=0.1)
    assert first.gain.low <= true <= first.gain.high
    layers = found("comm.tensor-parallel", analysis)
    assert (layers.severity, layers.where.dimension) == ("info", "tp")


def test_reductions_over_replicas_are_fewer_where_units_are() -> None:
    first = analyze(sharded(layers=32, size=4096, replicas=True).trace()).findings[0]
    assert (first.code, first.where.dimension) == ("comm.small-messages", "shard")
    many, few = (sharded(layers=32, together=together, size=4096, replicas=True).step_ms() for together in (1, 16))
    assert first.gain.ms == pytest.approx(many - few, rel=0.1)


@pytest.mark.parametrize("replicas", [False, True])
def test_a_slow_rank_of_a_mesh_is_named_with_its_coordinate(replicas: bool) -> None:
    analysis = analyze(sharded(replicas=replicas, slow=3).trace())
    assert above_info(analysis) == ["rank.straggler"]
    where = analysis.findings[0].where
    assert (where.ranks, where.coordinate) == ((3,), {"replicate": 1, "shard": 1} if replicas else {"dp": 1, "tp": 1})
    true = sharded(replicas=replicas, slow=3).step_ms() - sharded(replicas=replicas).step_ms()
    assert analysis.findings[0].gain.ms == pytest.approx(true, rel=0.05)


def gathered(ahead: bool) -> MeshJob:
    """2 x 2 with large units, gathered when they are needed, or one ahead."""

    def program(rank: int, step: int) -> Program:
        def units(ms: float, reduces: bool) -> tuple[Any, ...]:
            gathers = [Call(column_of(rank), "all_gather", 4 << 20, "parameter", f"unit {i}") for i in range(4)]
            parts: list[Any] = [gathers[0]]
            for i in range(4):
                parts += [gathers[i + 1]] if ahead and i < 3 else []
                parts += [Wait(f"unit {i}"), Work(ms)]
                parts += [Call(row_of(rank), "all_reduce", 2048)]
                parts += [Call(column_of(rank), "reduce_scatter", 16384, "gradient")] if reduces else []
                parts += [gathers[i + 1]] if not ahead and i < 3 else []
            return tuple(parts)

        return (Phase("forward", units(6, False)), Phase("backward", (Work(0.1), *units(12, True))), *OPTIMIZER)

    return MeshJob(4, {**ROWS, **COLUMNS}, program, steps=STEPS, latency_ms=0.2)


@pytest.mark.plants("comm.exposed")
def test_gathers_that_could_be_hidden_are_exposed_in_their_dimension() -> None:
    analysis = analyze(gathered(ahead=False).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.dimension, first.where.op) == ("comm.exposed", "dp", "all_gather")
    true = gathered(ahead=False).step_ms() - gathered(ahead=True).step_ms()
    assert true > 15
    assert first.gain.ms == pytest.approx(true, rel=0.1)
    assert above_info(analyze(gathered(ahead=True).trace())) == []


# --- layers that ranks share --------------------------------------------------------------------


def layered(ms: float, divided: bool = True, parameters: int = 1 << 20, sequence: bool = False) -> MeshJob:
    """Two ranks that share eight layers, of this many ms each; or have a part of the batch each, and whole layers."""
    calls = (
        (Call("0", "all_gather", 8192), Call("0", "reduce_scatter", 8192))
        if sequence
        else (Call("0", "all_reduce", 8192),)
    )

    def program(rank: int, step: int) -> Program:
        shared = calls if divided else ()
        forward = [part for _ in range(8) for part in (Work(ms), *shared)]
        backward = [part for _ in range(8) for part in (Work(2 * ms), *shared)]
        reduced = () if divided else (Call("0", "all_reduce", 2 * parameters, "gradient"),)
        return (Phase("forward", tuple(forward)), Phase("backward", tuple(backward)), *reduced, *OPTIMIZER)

    return MeshJob(2, {"0": ((0, 1), "")}, program, steps=STEPS, parameters=parameters)


@pytest.mark.plants("comm.tensor-parallel")
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_collectives_that_take_much_of_the_step(sequence: bool) -> None:
    analysis = analyze(layered(1, sequence=sequence).trace())
    first = analysis.findings[0]
    assert first.code == "comm.tensor-parallel"
    assert above_info(analysis) == ["comm.tensor-parallel"]
    true = layered(1, sequence=sequence).step_ms() - layered(1, divided=False).step_ms()
    assert first.gain.low <= true <= first.gain.high
    assert first.gain.ms == pytest.approx(true, rel=0.25)
    assert "tensor-parallel size 1" in first.fixes[0].title


def test_tensor_parallel_collectives_that_take_little_are_told_and_no_more() -> None:
    analysis = analyze(layered(10).trace())
    assert above_info(analysis) == []
    assert analysis.verdict.status == "healthy"
    assert "comm.tensor-parallel" in analysis.passed
    assert "16 tensor-parallel collectives a step" in found("comm.tensor-parallel", analysis).title


def test_without_memory_it_is_not_known_what_whole_layers_would_save() -> None:
    analysis = analyze(layered(1, parameters=0).trace())
    assert "was not captured (memory)" in analysis.not_judged["comm.tensor-parallel"]
    assert analysis.verdict.status == "inconclusive"


def test_layers_whose_division_may_cost_much_or_nothing_are_not_called_healthy() -> None:
    """Undivided, their gradients may take as long as what is waited for now, or be hidden."""

    def program(rank: int, step: int) -> Program:
        layers = tuple(
            part for _ in range(8) for part in (Work(2), Call("0", "all_reduce", 2 << 20, "tensor-parallel"))
        )
        return (Phase("forward", layers), Phase("backward", layers), *OPTIMIZER)

    job = MeshJob(2, {"0": ((0, 1), "")}, program, steps=STEPS, parameters=1 << 24)
    analysis = analyze(job.trace())
    layers = found("comm.tensor-parallel", analysis)
    assert layers.gain.percent < 1
    assert layers.gain.high > job.step_ms() / 4
    assert analysis.verdict.status == "inconclusive"


# --- sequences that ranks share, stages, gradients by hand ---------------------------------------


def by_hand(gradients: int, size: int, exchanges: bool = False) -> MeshJob:
    """2 x 2: gradients are reduced over all ranks when backward is over; in rows sequences are exchanged."""

    def program(rank: int, step: int) -> Program:
        exchange = (Call(row_of(rank), "all_to_all", 4096),) if exchanges else ()
        parts = [Phase("forward", (Work(20), *exchange)), Phase("backward", (Work(40), *exchange))]
        group = "w" if exchanges else column_of(rank)
        reduced = [Call(group, "all_reduce", size, "gradient") for _ in range(gradients)]
        metrics = () if exchanges else (Call(row_of(rank), "all_reduce", 64),)
        return (*parts, *reduced, *metrics, *OPTIMIZER)

    return MeshJob(4, {**ROWS, **COLUMNS, **WORLD}, program, steps=STEPS)


def test_sequences_that_are_exchanged_are_of_their_own_dimension() -> None:
    analysis = analyze(by_hand(1, 65536, exchanges=True).trace())
    assert above_info(analysis) == []
    assert analysis.verdict.status == "healthy"


@pytest.mark.parametrize("exchanges", [False, True])
def test_gradients_reduced_one_by_one_are_small_messages_of_their_dimension(exchanges: bool) -> None:
    first = analyze(by_hand(30, 2048, exchanges).trace()).findings[0]
    assert (first.code, first.where.dimension) == ("comm.small-messages", "dp")
    true = by_hand(30, 2048, exchanges).step_ms() - by_hand(1, 30 * 2048, exchanges).step_ms()
    assert first.gain.ms == pytest.approx(true, rel=0.1)


# --- experts ------------------------------------------------------------------------------------


def experts(skew: float, slow: int | None = None) -> MeshJob:
    """2 x 2: tokens are exchanged in rows; of dense layers all average gradients, of experts those of a column do."""

    def program(rank: int, step: int) -> Program:
        share = 1 + skew if rank % 2 == 0 else 1 - skew
        slower = 1.5 if rank == slow else 1.0
        size = int(4096 * max(share, 1.0))

        def layer(ms: float) -> tuple[Any, ...]:
            exchange = Call(row_of(rank), "all_to_all", size)
            return Work(ms * slower), exchange, Work(ms * share * slower), exchange

        gradients = Call("w", "all_reduce", 65536, "gradient"), Call(column_of(rank), "all_reduce", 16384, "gradient")
        parts = Phase("forward", layer(10)), Phase("backward", layer(20)), *gradients, Phase("optimizer", (Work(1),))
        return (*parts, Work(0.2))

    return MeshJob(4, {**ROWS, **COLUMNS, **WORLD}, program)


@pytest.mark.parametrize("skew", [0.2, 0.5])
def test_unequal_shares_of_tokens_are_neither_a_slow_rank_nor_unequal_inputs(skew: float) -> None:
    analysis = analyze(experts(skew).trace())
    assert above_info(analysis) == []
    assert "rank.straggler" in analysis.passed
    assert "unequal shares of tokens (all_to_all in dimension ep" in analysis.not_judged["data.imbalance"]
    assert "bucket" not in analysis.verdict.headline


def test_a_slow_rank_among_equal_experts_is_named_with_its_coordinate() -> None:
    analysis = analyze(experts(0.0, slow=2).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (2,))
    assert first.where.coordinate == {"dp-of-2": 1, "ep": 0}
    assert first.title.startswith("rank 2 (dp-of-2 1 ep 0) arrives")


def test_gathers_of_shards_that_are_whole_are_nothing_to_wait_for() -> None:
    """HSDP whose shard dimension has size 1: each rank gathers in a group of its own."""

    def program(rank: int, step: int) -> Program:
        forward: list[Any] = []
        backward: list[Any] = []
        for _ in range(3):
            gather = Call(f"s{rank}", "all_gather", 65536, "parameter")
            forward += [gather, Work(7)]
            backward += [gather, Work(14), Call(f"s{rank}", "reduce_scatter", 65536, "gradient")]
            backward += [Call("r", "all_reduce", 65536, "gradient")]
        return (Phase("forward", tuple(forward)), Phase("backward", tuple(backward)), *OPTIMIZER)

    groups = {"r": ((0, 1), ""), "s0": ((0,), ""), "s1": ((1,), "")}
    analysis = analyze(MeshJob(2, groups, program, steps=STEPS, latency_ms=0.2).trace())
    assert [f.code for f in analysis.findings if f.where.op == "all_gather"] == []
    assert "waited for before anything else is done" in analysis.not_judged["comm.exposed"]


def test_what_is_waited_for_is_named_where_no_gradients_are_reduced() -> None:
    def program(rank: int, step: int) -> Program:
        exchange = Call("w", "all_to_all", 1 << 23)
        return (Phase("forward", (Work(5), exchange)), Phase("backward", (Work(10), exchange)), *OPTIMIZER)

    analysis = analyze(MeshJob(4, WORLD, program, steps=STEPS).trace())
    assert analysis.verdict.status == "inconclusive"
    assert "ranks wait for all_to_all, for which no change is tried" in analysis.verdict.headline
