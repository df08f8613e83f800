"""A plan from a measured run: more replicas of what it does, each with the same batch (weak scaling) or all with the
same global batch (strong scaling), on the same devices or on others.

What a rank does by itself takes as long as it was measured (but for `changes`), and so do the communications of groups
that stay as they are (tensor parallel, pipeline). Over the data-parallel groups

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
from dsprof.data_sheets import Device

from .changes import Batch, CannotPlan, DeviceChange, batch_of, device_change
from .hardware import NETWORK_GB_S, NETWORK_REACHED
from .network import Network
from .spending import Spending, spending

PARTS: Final = ("compute", "optimizer", "data", "offload", "pause", "other", "bubble", "comm_exposed", "peer_wait")
"""Of a step's budget."""
DOUBLING: Final = 0.015
"""Relative error that is expected beside the rest, a doubling of the ranks."""
GUESSED: Final = 0.44
"""Relative error of transfers over a network that was never measured. A guess: a fit of one node misses whole steps of
several by 13 % (`benchmarks/plan.py`, one node tells several), of which transfers between nodes are a part."""
REPLICATED: Final = ("gradient", "parameter")


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
    replicas: data-parallel size of the run. memory_bytes: the most that a rank had, None: not recorded. scaling: weak
    or strong. spending: of the steps that were asked for."""

    measured: PlannedStep
    asked: PlannedStep
    curve: Sequence[PlannedStep]
    replicas: int
    memory_bytes: int | None
    scaling: str
    spending: Spending | None
    assumptions: Sequence[str]
    tells_most: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "interval": 0.95, **asdict(self)}


@dataclass(frozen=True)
class _Base:
    """What a run tells. world: its ranks. fixed: ranks of a replica. parts: budget part -> ms. latency, bytes_ms: what
    the data-parallel communications take, ms a step; hidden: of both. noise: standard error of the mean step. spread:
    relative error of the link."""

    world: int
    replicas: int
    fixed: int
    hosts: int
    parts: Mapping[str, float]
    step_ms: float
    latency: float
    bytes_ms: float
    traffic: float
    messages: float
    hidden: float
    noise: float
    spread: float
    fitted: bool
    on_gpu: bool

    @property
    def transfer(self) -> float:
        """Of the data-parallel communications, hidden or not, ms a step."""
        return self.latency + self.bytes_ms

    def crosses(self, ranks: int, network: Network) -> bool:
        """Whether so many ranks need a network between nodes that the run did not use. Its own ranks share a node."""
        return self.hosts == 1 and ranks > max(network.gpus_per_node, self.world)


@dataclass(frozen=True)
class _Change:
    """How the work of a rank differs from the run's, beside the number of ranks."""

    device: DeviceChange
    batch: Batch


def plan_from_run(
    study: Study, ranks: int, network: Network, gpu: Device | None = None, global_batch: int | None = None,
    same_batch: bool = False, steps: float | None = None, tokens: float | None = None, price: float | None = None,
) -> RunPlan:  # fmt: skip
    """What the run would do on `ranks` ranks. gpu: another device. global_batch, same_batch: strong scaling, with so
    many samples a step or with the run's. steps, tokens: of the whole training; price: of a rank's hour.
    Raises CannotPlan."""
    base = _base(study)
    if ranks % base.fixed:
        raise CannotPlan(
            f"--ranks {ranks} is not a multiple of the {base.fixed} ranks of a replica (tensor parallel and pipeline)"
        )
    rates = _rates(study, base.step_ms)
    of_run = rates["samples"] * base.step_ms / 1e3 if "samples" in rates else None
    change = _Change(device_change(study, gpu), batch_of(study, of_run, global_batch, same_batch))
    change.batch.check(ranks // base.fixed)
    asked, errors = _scale(base, ranks, network, rates, change)
    memory = [use.peak for use in study.memory_uses if not use.on_host] or [use.peak for use in study.memory_uses]
    most = max(memory, default=None)
    said = _assumptions(base, ranks, network, change)
    if gpu is not None and gpu.memory_gib and most is not None and most > gpu.memory_gib * 2**30:
        said.append(
            f"a rank of the run had more memory than the {gpu.memory_gib:.0f} GiB of {gpu.name}: it does not fit"
        )
    if tokens is not None:
        if asked.tokens is None:
            raise CannotPlan("how many tokens its step has is not recorded; give --steps, or capture with --level full")
        steps = tokens / (asked.tokens * asked.ms / 1e3)
    return RunPlan(
        measured=_scale(base, base.world, network, rates, _Change(DeviceChange(), Batch()))[0],
        asked=asked,
        curve=[_scale(base, count, network, rates, change)[0] for count in _counts(base, ranks, change.batch)],
        replicas=base.replicas,
        memory_bytes=most,
        scaling="strong" if change.batch.strong else "weak",
        spending=spending((asked.ms, asked.low, asked.high), ranks, steps, price),
        assumptions=said,
        tells_most=_tells_most(base, ranks, errors),
    )


def _counts(base: _Base, ranks: int, batch: Batch) -> list[int]:
    """Of the curve: the run's ranks, doubled until those that are asked for."""
    counts, count = {ranks}, base.world
    while count < 2 * ranks:
        counts.add(count)
        count *= 2
    counts.add(base.world)
    return [count for count in sorted(counts) if count == ranks or _divides(batch, count // base.fixed)]


def _divides(batch: Batch, replicas: int) -> bool:
    try:
        batch.check(replicas)
    except CannotPlan:
        return False
    return True


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
    latency = bytes_ms = traffic = messages = 0.0
    spread, fitted = 0.0, True
    for domain in (one.of(*REPLICATED) for one in replicated):
        groups = max(len(domain.groups), 1)
        link = fit_link(domain.table, on_device=domain.on_device)
        size = domain.table["bytes"].to_numpy(np.float64)
        took = _transfer_ms(domain) / steps
        model = float(link.transfer_ms(size).sum()) / steps / groups
        share = len(size) * link.latency_ms / steps / groups / model if model > 0 else 0.0
        latency += took * share
        bytes_ms += took * (1 - share)
        traffic += _ring_bytes(domain) / steps / groups
        messages += len(size) / steps / groups
        spread, fitted = max(spread, link.spread), fitted and link.fitted
    transfer = latency + bytes_ms
    every = sum(_transfer_ms(one) for one in domains(study)) / steps
    exposed = parts["comm_exposed"] * min(1.0, transfer / every if every > 0 else 1.0)
    deviation = (study.step_time.p90 - study.step_time.p10) / 2.56
    hosts = {process.host for process in study.run.ranks}
    return _Base(
        world=world, replicas=replicas, fixed=max(world // replicas, 1), hosts=max(len(hosts), 1), parts=parts,
        step_ms=sum(parts.values()), latency=latency, bytes_ms=bytes_ms, traffic=traffic, messages=messages,
        hidden=max(transfer - exposed, 0.0), noise=deviation / math.sqrt(max(steps, 1)), spread=spread, fitted=fitted,
        on_gpu=study.on_gpu,
    )  # fmt: skip


def _transfer_ms(domain: Domain) -> float:
    return float(np.nansum(domain.table["alone_ns"].to_numpy(np.float64))) / 1e6 / max(len(domain.groups), 1)


def _ring_bytes(domain: Domain) -> float:
    """What passes a rank's link, but for the factor (n - 1) / n: an all-reduce is a reduction and a gather."""
    size = domain.table["bytes"].to_numpy(np.float64)
    return float(np.where(domain.table["name"] == "all_reduce", 2 * size, size).sum())


def _scale(
    base: _Base, ranks: int, network: Network, rates: Mapping[str, float], change: _Change
) -> tuple[PlannedStep, Mapping[str, float]]:
    """The step, and the standard errors that its interval is made of, by what they come from."""
    device, replicas = change.device, ranks // base.fixed
    share = change.batch.share(replicas, base.replicas)
    work = device.compute * share
    grown = ranks / base.world
    # Inside one node the link is that of the devices; over nodes the network stays what it is.
    link = device.link if base.hosts == 1 else 1.0
    ring = (1 - 1 / replicas) / (1 - 1 / base.replicas)
    bytes_ms = base.bytes_ms * ring * link
    latency = base.latency * math.log2(max(replicas, 2)) / math.log2(base.replicas)
    crossing, gb_s = base.crosses(ranks, network), network.gb_s
    if crossing and gb_s is None and base.on_gpu:
        gb_s = NETWORK_GB_S
    if crossing and gb_s is not None:
        # Groups whose ranks lie in one node between them share its network.
        sharing = min(base.fixed, network.gpus_per_node)
        bytes_ms = max(bytes_ms, base.traffic * (1 - 1 / replicas) * sharing / (gb_s * NETWORK_REACHED) / 1e6)
    if crossing and network.latency_us is not None:
        latency += base.messages * math.log2(max(replicas, 2)) * network.latency_us / 1e3
    transfer = bytes_ms + latency if replicas > 1 else 0.0
    was = max(base.transfer - base.hidden, 0.0)
    exposed = max(transfer - base.hidden * work, 0.0)
    by_share = transfer * was / base.transfer if base.transfer > 0 else 0.0
    waited = base.parts["peer_wait"] * work
    waiting = waited * math.sqrt(math.log(max(ranks, 2)) / math.log(base.world)) if ranks > 1 else 0.0
    parts = {
        **base.parts,
        "compute": base.parts["compute"] * work,
        "data": base.parts["data"] * share,
        # As many stages wait for as many micro-batches at the begin and the end; only their size matters.
        "bubble": base.parts["bubble"] * device.compute * (share if change.batch.smaller(share) else 1.0),
        "optimizer": base.parts["optimizer"] * device.memory,
        # What is exposed beside the averaging of gradients: between layers and stages.
        "comm_exposed": max(base.parts["comm_exposed"] - was, 0.0) * share * link + exposed,
        "peer_wait": waiting,
    }
    ms = sum(parts.values())
    changed = abs(transfer - base.transfer)
    computed = parts["compute"] + parts["bubble"]
    unchanged = ranks == base.world and work == 1
    # Where each micro-batch gathers parameters or reduces gradients, fewer of them communicate less.
    fewer = share != 1 and not change.batch.smaller(share)
    of_work = {
        "the steps' own variation": base.noise * ms / base.step_ms,
        "what grows with the ranks unseen": DOUBLING * ms * abs(math.log2(grown)),
        "what another device does": math.hypot(
            device.uncertain[0] * computed,
            device.uncertain[1] * parts["optimizer"],
        ),
        "what another batch does": change.batch.uncertain(share) * computed,
    }
    # What an unchecked link adds is what it does not hide, of averaging and of what stays inside a node.
    unsure = device.uncertain[2] if base.hosts == 1 else 0.0
    most = transfer * (1 + (0.0 if crossing else 1.96 * unsure)) - base.hidden * work
    slower = (max(most, 0.0) - exposed) / 1.96 + unsure * (parts["comm_exposed"] - exposed)
    errors = {
        **of_work,
        "what another device does": math.hypot(of_work["what another device does"], slower),
        "what another batch does": transfer * abs(1 - share) / 2 if fewer else of_work["what another batch does"],
        "the link": base.spread * changed * (1.0 if exposed > 0 else 0.5),
        "the network between nodes": GUESSED * transfer if crossing else 0.0,
        "how much of the communication is hidden": 0.0 if unchanged else abs(exposed - by_share) / 2,
        "how far the ranks are apart": abs(waiting - waited) / 2,
    }
    wide = 1.96 * math.sqrt(sum(error**2 for error in errors.values()))
    own = share * base.step_ms / ms
    found = {what: rate * grown * own for what, rate in rates.items()}
    # Less than nothing is not communicated, so what is uncertain of that takes off no more.
    low = max(ms - wide, ms - parts["comm_exposed"] - waiting - 1.96 * sum(of_work.values()))
    return PlannedStep(
        ranks, ms, max(low, 0.0), ms + wide, parts, own, found.get("samples"), found.get("tokens"), transfer
    ), errors  # fmt: skip


def samples_of_step(study: Study) -> float | None:
    """Samples of the run's step, all ranks together; None: not recorded."""
    rate = _rates(study, study.step_ms).get("samples")
    return None if rate is None else rate * study.step_ms / 1e3


def _rates(study: Study, step_ms: float) -> Mapping[str, float]:
    """Samples and tokens a second of the run, where they are known."""
    work = {rank: one.work for rank, one in study.summaries.items() if one.work is not None}
    efficiency = judge_efficiency(study.run, work, step_ms, study.mesh, study.topology)
    every = efficiency.throughput if efficiency is not None else ()
    return {one.what: one.a_second for one in every if one.a_second is not None}


def _assumptions(base: _Base, ranks: int, network: Network, change: _Change) -> list[str]:
    replicas = ranks // base.fixed
    work = change.device.compute * change.batch.share(replicas, base.replicas)
    said = [
        change.batch.said(ranks, base.world, replicas, base.replicas),
        f"a replica stays as it is ({base.fixed} rank{'s' * (base.fixed > 1)}); {base.replicas} replicas become "
        f"{replicas}",
        f"of {base.transfer:.3g} ms of communication, {base.hidden:.3g} are hidden in the run"
        + (", and as much in the plan" if work == 1 else f", and {work:.3g} times as much in the plan"),
    ]
    said += change.device.said
    if base.crosses(ranks, network):
        if network.gb_s is not None:
            said.append("the network between nodes was never measured: its rate is the one given, and so a guess")
        elif base.on_gpu:
            said.append(
                f"the network between nodes was never measured and is not given: {NETWORK_GB_S:.0f} GB/s a node is a "
                "guess; give --bandwidth and --latency"
            )
        else:
            said.append(
                "the network between nodes was never measured and is not given: it is taken to be as fast as the run's "
                "own link, which is a guess; give --bandwidth and --latency"
            )
    elif network.gb_s is not None or network.latency_us is not None:
        why = f"the run used that of its own {base.hosts} hosts" if base.hosts > 1 else "the ranks share one node"
        said.append(f"--bandwidth and --latency are not used: {why}")
    if not base.fitted:
        said.append("all messages of the run had about one size, so latency and bandwidth are not told apart")
    return said


def _tells_most(base: _Base, ranks: int, errors: Mapping[str, float]) -> str:
    most = max(errors, key=lambda name: errors[name])
    how = {
        "the steps' own variation": "let the run train more steps",
        "the network between nodes": "run a few steps on two nodes",
        "what another device does": "run a few steps on that device",
        "what another batch does": "run a few steps with that batch of a rank",
    }.get(most, f"run a few steps on {2 * base.world} ranks")
    return f"{how}: most of the interval comes from {most}"
