"""A plan from a measured run: the same work on each rank, more replicas of it (weak scaling).

What a rank does by itself takes as long as it was measured, and so do the communications of groups that stay as they
are (tensor parallel, pipeline). Over the data-parallel groups

    transfer  each communication's latency grows with log2 of the group's size, the time a byte with the ring's
              (n - 1) / n; over a network that is given, a byte takes what that allows
    exposed   what is left when as much is hidden as was hidden in the run; at most it is as exposed as it was, by share
    waiting   for the slowest of n ranks grows as the expected maximum of n draws, sqrt(2 ln n)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from dsprof.analyzer.align.groups import AVERAGED
from dsprof.analyzer.graph.link import fit_link
from dsprof.analyzer.rules.comm.dimensions import Domain, domains
from dsprof.analyzer.study import Study
from dsprof.analyzer.work.mfu import judge_efficiency

PARTS: Final = ("compute", "optimizer", "data", "offload", "pause", "other", "bubble", "comm_exposed", "peer_wait")
"""Of a step's budget."""
REACHED: Final = 0.8
"""Share of a network's rate that large messages reach."""
DOUBLING: Final = 0.015
"""Relative error that is expected beside the rest, a doubling of the ranks."""
GUESSED: Final = 0.44
"""How far off a fit on one node was over several (vTrain's tables): the error of transfers over a network that was
never measured."""
REPLICATED: Final = ("gradient", "parameter")


class CannotPlan(Exception):
    """A run does not tell what it would do on other ranks; the message says why, and what to capture."""


@dataclass(frozen=True)
class Network:
    """gpus_per_node: ranks that share the run's link. gb_s: rate of a node's network, None: not told. latency_us."""

    gpus_per_node: int
    gb_s: float | None = None
    latency_us: float | None = None


@dataclass(frozen=True)
class PlannedStep:
    """A step on `ranks` ranks. low, high: the ends of its 95 % interval. parts: budget part -> ms. efficiency:
    throughput a rank, by that of the run. samples, tokens: a second, of all ranks, None where they are not known.
    transfer_ms: of the data-parallel communications of a step, hidden or not."""

    ranks: int
    ms: float
    low: float
    high: float
    parts: Mapping[str, float]
    efficiency: float
    samples: float | None
    tokens: float | None
    transfer_ms: float


@dataclass(frozen=True)
class RunPlan:
    """measured: the run itself. asked: of the ranks that were asked for. curve: of these and others, in order.
    replicas: data-parallel size of the run. memory_bytes: the most that a rank had, None: not recorded."""

    measured: PlannedStep
    asked: PlannedStep
    curve: Sequence[PlannedStep]
    replicas: int
    memory_bytes: int | None
    assumptions: Sequence[str]
    tells_most: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "scaling": "weak", "interval": 0.95, **asdict(self)}


@dataclass(frozen=True)
class _Base:
    """What a run tells. world: its ranks. fixed: ranks of a replica. parts: budget part -> ms. transfer: of the
    data-parallel communications, ms a step; latency, bytes_ms: how that divides. hidden: of it. noise: standard error
    of the mean step. spread: relative error of the link."""

    world: int
    replicas: int
    fixed: int
    hosts: int
    parts: Mapping[str, float]
    step_ms: float
    transfer: float
    latency: float
    bytes_ms: float
    traffic: float
    messages: float
    hidden: float
    noise: float
    spread: float
    fitted: bool


def plan_from_run(study: Study, ranks: int, network: Network) -> RunPlan:
    """What the run would do on `ranks` ranks. Raises CannotPlan."""
    base = _base(study)
    if ranks % base.fixed:
        raise CannotPlan(
            f"--ranks {ranks} is not a multiple of the {base.fixed} ranks of a replica (tensor parallel and pipeline)"
        )
    counts = {base.world, ranks}
    count = base.world
    while count < 2 * ranks:
        counts.add(count)
        count *= 2
    rates = _rates(study, base)
    scaled = {count: _scale(base, count, network, rates)[0] for count in sorted(counts)}
    asked, errors = _scale(base, ranks, network, rates)
    memory = [use.peak for use in study.memory_uses if not use.on_host] or [use.peak for use in study.memory_uses]
    return RunPlan(
        measured=scaled[base.world],
        asked=asked,
        curve=list(scaled.values()),
        replicas=base.replicas,
        memory_bytes=max(memory, default=None),
        assumptions=_assumptions(base, ranks, network),
        tells_most=_tells_most(base, ranks, errors),
    )


def _base(study: Study) -> _Base:
    if study.step_time is None or not study.ranks:
        raise CannotPlan("the run has no ordinary training step: let it train a few steps more")
    world = study.run.world_size or len(study.ranks)
    replicas = study.mesh.data_parallel_size(study.ranks[0], world)
    parts = {part: float(np.nanmean(study.work(part))) for part in PARTS}
    replicated = [
        domain for domain in domains(study) if domain.role in (*AVERAGED, "") and len(domain.of(*REPLICATED).table)
    ]
    if world == 1 or replicas == 1 or not replicated:
        raise CannotPlan(
            "the run averages no gradients over replicas, so nothing tells what that costs: run it on at least 2 "
            "data-parallel ranks for a few steps"
        )
    steps = len(study.step_numbers)
    transfer = latency = bytes_ms = traffic = messages = 0.0
    spread, fitted = 0.0, True
    for domain in (one.of(*REPLICATED) for one in replicated):
        groups = max(len(domain.groups), 1)
        link = fit_link(domain.table, on_device=domain.on_device)
        size = domain.table["bytes"].to_numpy(np.float64)
        took = float(np.nansum(domain.table["transfer_ns"].to_numpy(np.float64))) / 1e6 / steps / groups
        model = float(link.transfer_ms(size).sum()) / steps / groups
        share = len(size) * link.latency_ms / steps / groups / model if model > 0 else 0.0
        transfer += took
        latency += took * share
        bytes_ms += took * (1 - share)
        traffic += _ring_bytes(domain) / steps / groups
        messages += len(size) / steps / groups
        spread, fitted = max(spread, link.spread), fitted and link.fitted
    every = sum(_transfer_ms(one) for one in domains(study)) / steps
    exposed = parts["comm_exposed"] * min(1.0, transfer / every if every > 0 else 1.0)
    deviation = (study.step_time.p90 - study.step_time.p10) / 2.56
    hosts = {process.host for process in study.run.ranks}
    return _Base(
        world=world, replicas=replicas, fixed=max(world // replicas, 1), hosts=max(len(hosts), 1), parts=parts,
        step_ms=sum(parts.values()), transfer=transfer, latency=latency, bytes_ms=bytes_ms, traffic=traffic,
        messages=messages, hidden=max(transfer - exposed, 0.0), noise=deviation / math.sqrt(max(steps, 1)),
        spread=spread, fitted=fitted,
    )  # fmt: skip


def _transfer_ms(domain: Domain) -> float:
    return float(np.nansum(domain.table["transfer_ns"].to_numpy(np.float64))) / 1e6 / max(len(domain.groups), 1)


def _ring_bytes(domain: Domain) -> float:
    """What passes a rank's link, but for the factor (n - 1) / n: an all-reduce is a reduction and a gather."""
    size = domain.table["bytes"].to_numpy(np.float64)
    return float(np.where(domain.table["name"] == "all_reduce", 2 * size, size).sum())


def _scale(
    base: _Base, ranks: int, network: Network, rates: Mapping[str, float]
) -> tuple[PlannedStep, Mapping[str, float]]:
    """The step, and the standard errors that its interval is made of, by what they come from."""
    replicas = ranks // base.fixed
    grown = ranks / base.world
    hops = math.log2(max(replicas, 2)) / math.log2(base.replicas)
    ring = (1 - 1 / replicas) / (1 - 1 / base.replicas) if replicas > 1 else 0.0
    crossing = ranks > network.gpus_per_node and base.hosts == 1
    bytes_ms, latency = base.bytes_ms * ring, base.latency * hops
    if crossing and network.gb_s is not None:
        # Groups whose ranks lie in one node between them share its network.
        sharing = min(base.fixed, network.gpus_per_node)
        bytes_ms = max(bytes_ms, base.traffic * (1 - 1 / replicas) * sharing / (network.gb_s * REACHED) / 1e6)
    if crossing and network.latency_us is not None:
        latency += base.messages * math.log2(max(replicas, 2)) * network.latency_us / 1e3
    transfer = bytes_ms + latency if replicas > 1 else 0.0
    before = base.parts["comm_exposed"]
    was = max(base.transfer - base.hidden, 0.0)
    exposed = max(transfer - base.hidden, 0.0)
    by_share = transfer * was / base.transfer if base.transfer > 0 else 0.0
    waiting = base.parts["peer_wait"] * math.sqrt(math.log(max(ranks, 2)) / math.log(base.world))
    parts = {**base.parts, "comm_exposed": max(before - was, 0.0) + exposed, "peer_wait": waiting}
    ms = sum(parts.values())
    changed = abs(transfer - base.transfer)
    errors = {
        "the steps' own variation": base.noise,
        "the link": base.spread * changed * (1.0 if exposed > 0 else 0.5),
        "the network between nodes": GUESSED * transfer if crossing else 0.0,
        "how much of the communication is hidden": abs(exposed - by_share) / 2 if ranks != base.world else 0.0,
        "how far the ranks are apart": abs(waiting - base.parts["peer_wait"]) / 2,
        "what grows with the ranks unseen": DOUBLING * ms * abs(math.log2(grown)),
    }
    wide = 1.96 * math.sqrt(sum(error**2 for error in errors.values()))
    own = base.step_ms / ms
    found = {what: rate * grown * own for what, rate in rates.items()}
    low = max(ms - wide, ms - parts["comm_exposed"] - waiting - 1.96 * base.noise - errors[list(errors)[-1]] * 1.96)
    return PlannedStep(
        ranks, ms, max(low, 0.0), ms + wide, parts, own, found.get("samples"), found.get("tokens"), transfer
    ), errors  # fmt: skip


def _rates(study: Study, base: _Base) -> Mapping[str, float]:
    """Samples and tokens a second of the run, where they are known."""
    work = {rank: one.work for rank, one in study.summaries.items() if one.work is not None}
    efficiency = judge_efficiency(study.run, work, base.step_ms, study.mesh, study.topology)
    every = efficiency.throughput if efficiency is not None else ()
    return {one.what: one.a_second for one in every if one.a_second is not None}


def _assumptions(base: _Base, ranks: int, network: Network) -> list[str]:
    said = [
        f"weak scaling: each rank keeps its batch, so the global batch is {ranks / base.world:g} times the run's",
        f"a replica stays as it is ({base.fixed} rank{'s' * (base.fixed > 1)}); {base.replicas} replicas become "
        f"{ranks // base.fixed}",
        f"as much communication is hidden as in the run: {base.hidden:.3g} of {base.transfer:.3g} ms",
    ]
    if ranks > network.gpus_per_node and base.hosts == 1:
        if network.gb_s is None:
            said.append(
                "the network between nodes was never measured and is not given: it is taken to be as fast as the run's "
                "own link, which is a guess; give --bandwidth and --latency"
            )
        else:
            said.append("the network between nodes was never measured: its rate is the one given, and so a guess")
    if not base.fitted:
        said.append("all messages of the run had about one size, so latency and bandwidth are not told apart")
    return said


def _tells_most(base: _Base, ranks: int, errors: Mapping[str, float]) -> str:
    most = max(errors, key=lambda name: errors[name])
    how = {
        "the steps' own variation": "let the run train more steps",
        "the network between nodes": "run a few steps on two nodes",
    }.get(most, f"run a few steps on {2 * base.world} ranks")
    return f"{how}: most of the interval comes from {most}"
