"""Which jobs `scale.py` makes: what is wrong with each is drawn, and so is known, as is what mending it would save.

That is told by making the same job without what is wrong, from the same draws: by nothing that the analyzer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from made_up_mesh import ELEMENTS, Mesh, MeshPlant, MeshTimeline
from made_up_run import LATER_OF_ALL, RANKS_A_HOST, Plant, Timeline

STEPS, ROWS = 20, 50
FLAT, MESH = "dp x tp", "dp x tp x pp x ep"
CAUSES: Final = {
    FLAT: (
        "straggler", "two stragglers", "lengths", "slow loader", "garbage collector", "straggler for a while",
        "stragglers in turn", "slow link", "slow link for a while", "slow links in turn", "straggler and slow loader",
    ),
    MESH: (
        "slow stage", "straggler", "lengths", "experts asked more", "few micro-batches", "slow messages", "slow link",
        "experts asked in turn", "straggler for a while", "stragglers in turn", "lengths with experts",
        "straggler and slow loader", "slow loader", "garbage collector", "two stragglers",
    ),
}  # fmt: skip
"""By layout, in the order of seeds."""
CODES: Final = {
    "lengths": "data.imbalance", "lengths with experts": "data.imbalance", "slow loader": "data.stall",
    "garbage collector": "pause.gc", "slow link": "comm.slow-link", "slow link for a while": "comm.slow-link",
    "slow links in turn": "comm.slow-link", "slow stage": "pipeline.imbalance", "few micro-batches": "pipeline.bubble",
    "slow messages": "pipeline.stall", "experts asked more": "moe.imbalance", "experts asked in turn": "moe.imbalance",
}  # fmt: skip
"""Of the findings that are to come first; of the others it is rank.straggler."""
TAKING_TURNS = 3
"""Ranks that are slow one after the other."""
ONE_IN = 500
"""Ranks, of which one has no trace and one a torn one."""
STAGES, MICROBATCHES = 4, 16


@dataclass(frozen=True)
class Truth:
    """code: of the finding that is to come first; ranks: who it is to name, none: whoever, several: one of these;
    among: whether it may also name some of them; when: what it is to say of when, `transient` or `rotating`, empty:
    nothing, and steps: which it is to name; stage: which it is to name; missing: ranks without a trace; torn: with half
    of one; tail_us: by how much one rank may leave what hosts share later than another, as paths are unequal, at most;
    others: codes of what else is wrong, which is to come next; may_decline: whether it may also say that it does not
    judge it, and why."""

    code: str
    ranks: tuple[int, ...] | tuple[tuple[int, ...], ...]
    when: str
    steps: tuple[int, int] | None
    missing: tuple[int, ...]
    torn: tuple[int, ...]
    tail_us: float
    others: tuple[str, ...] = ()
    stage: int | None = None
    among: bool = False
    may_decline: bool = False


@dataclass(frozen=True)
class Job:
    """plant: what is wrong; mended: what is left of it once what the first finding is to name is not; None: that is no
    matter of a rank's time, and what it saves is not told."""

    cause: str
    plant: Plant
    mended: Plant | None
    truth: Truth
    mesh: Mesh | None = None

    def line(self, ranks: int, seed: int, plant: Plant | None = None) -> Timeline | MeshTimeline:
        """When what happens; with another plant, in the same job with that."""
        chosen = plant or self.plant
        if self.mesh is None:
            return Timeline(ranks, STEPS, ROWS, seed, chosen)
        assert isinstance(chosen, MeshPlant)
        return MeshTimeline(self.mesh, STEPS, seed, chosen)


def draw(ranks: int, seed: int, layout: str = FLAT) -> Job:
    """A job of so many ranks."""
    drawn = np.random.default_rng([ranks, seed, *([1] if layout == MESH else [])])
    cause = CAUSES[layout][seed % len(CAUSES[layout])]
    hosts = -(-ranks // RANKS_A_HOST)
    who = drawn.choice(ranks, TAKING_TURNS, replace=False)
    others = np.setdiff1d(drawn.permutation(ranks)[: 2 * (ranks // ONE_IN) + 2], who)[: 2 * (ranks // ONE_IN)]
    found = _draw_mesh(drawn, cause, ranks, who) if layout == MESH else _draw_flat(drawn, cause, ranks, who)
    if CODES.get(cause) == "comm.slow-link":
        others = others[:0]  # without every rank's capture, waiting for a late peer looks like a slow link
    tail_ns = drawn.uniform(5e3, 40e3, (ranks, 1))
    offset, drift = drawn.uniform(-50e6, 50e6, hosts), drawn.uniform(-50, 50, hosts)
    offset[0] = drift[0] = 0.0  # what the others are compared with
    clocks = {"offset_ns": offset, "drift_ppm": drift, "tail_ns": tail_ns}
    half = len(others) // 2
    missing, torn = tuple(others[:half].tolist()), tuple(others[half:].tolist())
    truth = replace(
        found.truth, missing=missing, torn=torn, tail_us=LATER_OF_ALL * float(tail_ns.max()) / 1e3,
        ranks=_without(found.truth.ranks, {*missing, *torn}),
    )  # fmt: skip
    mended = None if found.mended is None else replace(found.mended, **clocks)
    return replace(found, plant=replace(found.plant, **clocks), mended=mended, truth=truth)


def _without(
    ranks: tuple[int, ...] | tuple[tuple[int, ...], ...], lost: set[int]
) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """Those that have a whole trace."""
    if ranks and isinstance(ranks[0], tuple):
        return ranks
    return tuple(rank for rank in ranks if rank not in lost)  # type: ignore[return-value]


def _truth(
    cause: str, ranks: tuple[int, ...] | tuple[tuple[int, ...], ...] = (), when: str = "", **more: object
) -> Truth:
    return Truth(CODES.get(cause, "rank.straggler"), ranks, when, None, (), (), 0.0, **more)  # type: ignore[arg-type]


def _spell(drawn: np.random.Generator) -> tuple[int, int]:
    """The steps of a while: of those that are judged less than half."""
    first = int(drawn.integers(5, 9))
    return first, first + int(drawn.integers(6, 9))


def _draw_flat(drawn: np.random.Generator, cause: str, ranks: int, who: np.ndarray) -> Job:
    hosts = -(-ranks // RANKS_A_HOST)
    work = np.ones((ranks, STEPS))
    spell = _spell(drawn)
    while_ = slice(spell[0], spell[1] + 1)
    healthy, one = Plant(work=np.ones((ranks, STEPS))), int(who[0])
    if cause == "straggler":
        work[one] = drawn.uniform(1.1, 1.4)
        return Job(cause, replace(healthy, work=work), healthy, _truth(cause, (one,)))
    if cause == "straggler for a while":
        work[one, while_] = drawn.uniform(1.3, 1.5)
        truth = replace(_truth(cause, (one,), "transient"), steps=spell)
        return Job(cause, replace(healthy, work=work), healthy, truth)
    if cause == "two stragglers":
        work[who[:2]] = drawn.uniform(1.2, 1.3, (2, 1))
        return Job(cause, replace(healthy, work=work), healthy, _truth(cause, tuple(sorted(who[:2].tolist()))))
    if cause == "stragglers in turn":
        work[who[np.arange(STEPS) % TAKING_TURNS], np.arange(STEPS)] = drawn.uniform(1.3, 1.4, STEPS)
        return Job(cause, replace(healthy, work=work), healthy, _truth(cause, tuple(sorted(who.tolist())), "rotating"))
    if cause == "lengths":
        elements = 512.0 * drawn.integers(2, 16, (ranks, STEPS))
        equal = np.broadcast_to(elements.mean(axis=0), elements.shape)  # an equal share of the step's
        plants = [Plant(work=each / elements.mean(), elements=each) for each in (elements, equal)]
        return Job(cause, plants[0], plants[1], _truth(cause))
    if cause == "slow loader":
        return Job(cause, replace(healthy, data_ms=np.full((1, 1), drawn.uniform(40, 90))), healthy, _truth(cause))
    if cause == "straggler and slow loader":
        work[one] = drawn.uniform(1.3, 1.4)
        loads = replace(healthy, data_ms=np.full((1, 1), drawn.uniform(40, 60)))
        return Job(cause, replace(loads, work=work), loads, _truth(cause, (one,), others=("data.stall",)))
    if cause == "garbage collector":
        pause_ms = np.zeros((ranks, 1))
        pause_ms[one] = drawn.uniform(40, 90)
        return Job(cause, replace(healthy, pause_ms=pause_ms), healthy, _truth(cause, (one,)))
    link, host = np.ones((hosts, STEPS)), one // RANKS_A_HOST
    truth = _truth(cause, _ranks_of(host, ranks))
    if cause == "slow links in turn":
        turns = np.append(host, drawn.choice(np.setdiff1d(np.arange(hosts), host), TAKING_TURNS - 1, replace=False))
        link[turns[np.arange(STEPS) % TAKING_TURNS], np.arange(STEPS)] = drawn.uniform(100, 150, STEPS)
        truth = _truth(cause, tuple(_ranks_of(int(of), ranks) for of in turns), "rotating")
    elif cause == "slow link":
        link[host] = drawn.uniform(60, 120)
    else:
        link[host, while_] = drawn.uniform(100, 150)
        truth = replace(truth, when="transient", steps=spell)
    mended = None if truth.when == "rotating" else healthy  # each link is a finding of its own
    return Job(cause, replace(healthy, link=link), mended, truth)


def _ranks_of(host: int, ranks: int) -> tuple[int, ...]:
    return tuple(range(host * RANKS_A_HOST, min((host + 1) * RANKS_A_HOST, ranks)))


def _draw_mesh(drawn: np.random.Generator, cause: str, ranks: int, who: np.ndarray) -> Job:
    """Of a pipeline of STAGES; without experts where `lengths` are planted without them."""
    ep = 1 if cause == "lengths" else 4
    per_replica = 2 * ep * STAGES
    if ranks % (STAGES * RANKS_A_HOST):
        raise SystemExit(f"{ranks} ranks are no multiple of {STAGES * RANKS_A_HOST}")
    few = cause == "few micro-batches"
    mesh = Mesh(2, ep, ranks // per_replica, STAGES, STAGES if few else MICROBATCHES)
    healthy = MeshPlant(work=np.ones((ranks, STEPS)))
    job = Job(cause, healthy, healthy, _truth(cause), mesh)
    planters: dict[str, Callable[[], Job]] = {
        "few micro-batches": lambda: replace(job, mended=None),
        "slow stage": lambda: _slow_stage(job, drawn),
        "slow messages": lambda: _slow_messages(job, drawn, who),
        "lengths": lambda: _lengths(job, drawn),
        "lengths with experts": lambda: _lengths(job, drawn),
        "experts asked more": lambda: _tokens(job, drawn),
        "experts asked in turn": lambda: _tokens(job, drawn),
    }
    if cause in planters:
        return planters[cause]()
    work, one, spell = np.ones((ranks, STEPS)), int(who[0]), _spell(drawn)
    truth = _truth(cause, (one,))
    if cause == "slow loader":
        return replace(
            job, plant=replace(healthy, data_ms=np.full((1, 1), drawn.uniform(90, 140))), truth=_truth(cause)
        )
    if cause == "garbage collector":
        pause_ms = np.zeros((ranks, 1))
        pause_ms[one] = drawn.uniform(90, 140)
        return replace(job, plant=replace(healthy, pause_ms=pause_ms), truth=truth)
    if cause == "slow link":
        link, host = np.ones((ranks // RANKS_A_HOST, STEPS)), one // RANKS_A_HOST
        link[host] = drawn.uniform(6, 12)
        return replace(job, plant=replace(healthy, link=link), truth=_truth(cause, _ranks_of(host, ranks), among=True))
    if cause == "straggler and slow loader":
        loads = replace(healthy, data_ms=np.full((1, 1), drawn.uniform(90, 140)))
        work[one] = drawn.uniform(1.5, 1.6)
        truth = replace(truth, others=("data.stall",))
        return replace(job, plant=replace(loads, work=work), mended=loads, truth=truth)
    if cause == "straggler":
        work[one] = drawn.uniform(1.3, 1.5)
    elif cause == "two stragglers":
        work[who[:2]] = drawn.uniform(1.4, 1.5)
        truth = _truth(cause, tuple(sorted(who[:2].tolist())))
    elif cause == "straggler for a while":
        work[one, spell[0] : spell[1] + 1] = drawn.uniform(1.5, 1.7)
        truth = replace(_truth(cause, (one,), "transient"), steps=spell)
    else:
        work[who[np.arange(STEPS) % TAKING_TURNS], np.arange(STEPS)] = drawn.uniform(1.4, 1.5, STEPS)
        truth = _truth(cause, tuple(sorted(who.tolist())), "rotating")
    return replace(job, plant=replace(healthy, work=work), truth=truth)


def _of_stage(mesh: Mesh, stage: int) -> tuple[int, ...]:
    return tuple(range(stage * mesh.of_stage, (stage + 1) * mesh.of_stage))


def _slow_stage(job: Job, drawn: np.random.Generator) -> Job:
    """One stage has more of the layers' time, which an even division gives to all."""
    mesh, stage, times = job.mesh, int(drawn.integers(STAGES)), drawn.uniform(1.25, 1.5)
    assert mesh is not None
    work = np.ones((mesh.ranks, STEPS))
    ranks = _of_stage(mesh, stage)
    work[list(ranks)] = times
    even = np.full_like(work, work.mean())
    return replace(
        job, plant=MeshPlant(work=work), mended=MeshPlant(work=even), truth=_truth(job.cause, ranks, stage=stage)
    )


def _slow_messages(job: Job, drawn: np.random.Generator, who: np.ndarray) -> Job:
    """What goes between a host and that of the next stage."""
    mesh = job.mesh
    assert mesh is not None
    rank = int(who[0]) % (mesh.ranks - mesh.of_stage)
    host = _ranks_of(rank // RANKS_A_HOST, mesh.ranks)
    message = np.ones((mesh.ranks, 1))
    message[list(host)] = drawn.uniform(40, 60)
    both = (*host, *(one + mesh.of_stage for one in host))
    return replace(job, plant=MeshPlant(message=message), truth=_truth(job.cause, both, among=True))


def _lengths(job: Job, drawn: np.random.Generator) -> Job:
    """Each replica is given micro-batches of its own, which all stages and tensor-parallel ranks have in common."""
    mesh = job.mesh
    assert mesh is not None
    batches = mesh.of_stage // mesh.tp
    lengths = drawn.integers(2, 16, (batches, STEPS, mesh.microbatches)) / 8.5
    lengths = np.round(ELEMENTS * lengths) / ELEMENTS
    of_ranks = np.tile(np.repeat(lengths, mesh.tp, axis=0), (mesh.pp, 1, 1))
    equal = np.broadcast_to(of_ranks.mean(axis=(0, 2), keepdims=True), of_ranks.shape)
    # With experts, what a micro-batch takes may be its router's doing as well.
    truth = _truth(job.cause, may_decline=mesh.ep > 1)
    return replace(job, plant=MeshPlant(lengths=of_ranks), mended=MeshPlant(lengths=equal), truth=truth)


def _tokens(job: Job, drawn: np.random.Generator) -> Job:
    """Experts of a stage that are asked more than the others of their layer, by all replicas; or, each time, others."""
    mesh = job.mesh
    assert mesh is not None
    shape = mesh.pp, mesh.replicas, mesh.ep, STEPS, mesh.microbatches
    truth = _truth(job.cause)
    if job.cause == "experts asked in turn":
        shares = drawn.uniform(0.4, 1.6, shape)
    else:
        stage, expert = int(drawn.integers(mesh.pp)), int(drawn.integers(mesh.ep))
        shares = 1 + 0.02 * drawn.standard_normal(shape)
        shares[stage, :, expert] *= drawn.uniform(1.7, 2.0)
        first = stage * mesh.of_stage + expert * mesh.tp
        asked = (
            first + replica * mesh.tp * mesh.ep + part for replica in range(mesh.replicas) for part in range(mesh.tp)
        )
        truth = _truth(job.cause, tuple(asked))
    shares = mesh.ep * shares / shares.sum(axis=2, keepdims=True)
    tokens = np.repeat(shares.reshape(-1, STEPS, mesh.microbatches), mesh.tp, axis=0)
    return replace(job, plant=MeshPlant(tokens=tokens), truth=truth)
