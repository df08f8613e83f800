"""What a run tells of any layout of its job: what its stages and layers compute for a micro-batch, what each rank does
once a step, how large the model, its gradients and the activations between layers are, and how fast the links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pandas as pd

from dsprof.engine.schedule import make_plan

from ..align.groups import AVERAGED, CP, EP, TENSOR_PARALLEL, TP
from ..align.match import SEND_RECV
from ..align.topology import PIPELINE
from ..arrays import Float
from ..graph.link import LEAST_MS_PER_BYTE, Link, fit_link
from ..memory.use_by_step import main_place
from ..rules.base import NotJudged, sharded_stage
from ..rules.comm.dimensions import Domain, domains
from ..stage_costs import WeightShare, weight_share
from ..structure import pipeline_that_ran
from ..study import Study, once
from ..text import number
from ..work.fixed_part import UNTOLD, FixedWork, fixed_work, stage_parameters
from ..work.micro_batches import micro_batch_counts
from ..work.passes import FORWARD
from ..work.recomputed import recomputed_ms
from ..work.stage_layers import StageLayer, model_layers
from .job_layout import Layout

GUESSED: Final = 0.5
"""Relative error of a link that stands for another one, which was not measured."""
ONCE: Final = ("data", "offload", "pause", "other")
"""Parts of a step that a rank does beside its micro-batches and the optimizer."""


@dataclass(frozen=True)
class Wire:
    """What communications take among `ranks` of a run, as a ring does them: `latency_ms` each, and `ms_per_byte` of
    what is passed on, of which an all-reduce passes twice its size.

    spread: relative error; measured: whether the run communicated so, or another kind of link stands for it
    """

    latency_ms: float
    ms_per_byte: float
    ranks: int
    spread: float
    measured: bool = True

    def ms(self, passed: float, ranks: int, messages: float = 1.0) -> float:
        """Of so many messages, together so many bytes, among `ranks`: the latency grows with log2 of them, a byte's
        time with (n - 1) / n. Nothing among one."""
        if ranks < 2:
            return 0.0
        latency = self.latency_ms * math.log2(ranks) / math.log2(max(self.ranks, 2))
        per_byte = self.ms_per_byte * (1 - 1 / ranks) / (1 - 1 / max(self.ranks, 2))
        return messages * latency + passed * per_byte

    def times(self, factor: float) -> Wire:
        return replace(self, latency_ms=self.latency_ms * factor, ms_per_byte=self.ms_per_byte * factor)


@dataclass(frozen=True)
class LayoutCosts:
    """What a run tells. Bytes and times are of one rank, as the run was laid out.

    ran:          its layout; world: its ranks
    taken:        (stage, `F` or `B`) -> what it computes for a micro-batch, ms; B is all of the backward
    layers:       of the whole model, in order; None: they were not timed
    recompute_ms: of the backward what computes activations again, a micro-batch and stage; 0: nothing
    once_ms:      of a step, beside micro-batches and optimizer; data_ms, offload_ms: of that, what loads input, and
                  what waits for copies to and from the host's memory
    optimizer_ms: of a step
    waiting_ms:   that ranks of equal work wait for one another in a step
    step_ms:      mean ordinary step; steps: [S] of the replayed ones, by their mean
    noise_ms:     standard error of the mean step
    model_bytes:  of each measured stage, of a tensor-parallel rank's gradients as they are reduced; its parameters are
                  taken to be as large
    buckets:      messages in which a rank reduces its gradients
    units:        messages in which it gathers its parameters, where these are shared
    rounds:       how often a step reduces gradients: once, or with each micro-batch
    activation_bytes: that a stage hands on for a micro-batch; None: not known
    tensor_calls: all-reduces of a layer in forward and in backward, together for all layers
    weight:       of a backward, what only makes weights' gradients
    fixed:        of a forward and a backward, what goes not with the size of a micro-batch
    """

    ran: Layout
    taken: Mapping[tuple[int, str], float]
    layers: tuple[StageLayer, ...] | None
    recompute_ms: float
    once_ms: float
    data_ms: float
    offload_ms: float
    optimizer_ms: float
    waiting_ms: float
    step_ms: float
    steps: Float
    noise_ms: float
    model_bytes: tuple[float, ...]
    buckets: int
    units: int
    rounds: int
    replicas: Wire
    stages: Wire
    tensor: Wire
    activation_bytes: float | None
    tensor_calls: float
    on_gpu: bool
    weight: WeightShare = field(default_factory=WeightShare)
    fixed: FixedWork = UNTOLD

    @property
    def stage_count(self) -> int:
        return self.ran.pp * self.ran.chunks

    @property
    def divides_stages(self) -> bool:
        """Whether stages that did not run can be told: by layers that were timed, or as parts of several that ran."""
        return self.layers is not None or self.ran.pp > 1

    @property
    def computed_again(self) -> float:
        """Of a forward, what a backward computes again in a layout that does: as in the run, or all."""
        forward = sum(self.taken[stage, "F"] for stage in range(self.stage_count)) / self.stage_count
        return self.recompute_ms / forward if self.recompute_ms and forward else 1.0


@once
def layout_costs(study: Study) -> LayoutCosts:
    """Raises NotJudged with what the run does not tell."""
    if study.step_time is None or study.graph is None:
        raise NotJudged("the run has no ordinary step that all captured ranks completed: let it train a few steps more")
    for role, what in ((EP, "experts"), (CP, "sequences")):
        if any(one.role == role for one in study.mesh.dimensions):
            raise NotJudged(f"the job divides {what} over its ranks, which other layouts are not predicted with")
    if study.ranks_missing:
        raise NotJudged("not every rank was captured: what the others take is needed; capture all ranks")
    ran = _layout_that_ran(study)
    taken = _taken(study, ran)
    parts = {part: float(np.nanmean(study.work(part))) for part in ("compute", "optimizer", "peer_wait", *ONCE)}
    inside = _inside_passes(study)
    once_ms = sum(parts[part] for part in ONCE) + max(parts["compute"] - inside, 0.0)
    again = recomputed_ms(study)
    durations = study.graph.measured
    spread = (study.step_time.p90 - study.step_time.p10) / 2.56
    of_replicas, of_tensor = _of_roles(study, *AVERAGED, ""), _of_roles(study, TP)
    replicas, tensor = (
        _wire(of_replicas, ("gradient", "parameter"), ran.dp),
        _wire(of_tensor, (TENSOR_PARALLEL,), ran.tp),
    )
    stages, handed = _messages(study)
    standing = next((one for one in (replicas, tensor, stages) if one is not None), None) or Wire(
        0.1, LEAST_MS_PER_BYTE, 2, GUESSED, False
    )
    gradient = _a_step(study, of_replicas, "gradient")
    held = _parameters_held(study, ran)
    rounds = _rounds(ran, gradient, held)
    model = _model_bytes(ran, gradient.size / rounds, held)
    gathers = _a_step(study, of_replicas, "parameter")
    units = round(gathers.count / max(2 * ran.micro_batches, 1)) if ran.zero == 3 else 0
    layers = model_layers(study)
    calls = _a_step(study, of_tensor, TENSOR_PARALLEL)
    activation = calls.size / calls.count / ran.micro_batch if calls.size else handed
    return LayoutCosts(
        ran=ran, taken=taken, layers=layers,
        recompute_ms=0.0 if again is None else float(again.mean()) / ran.micro_batches / max(ran.chunks, 1),
        once_ms=once_ms, data_ms=parts["data"], offload_ms=parts["offload"], optimizer_ms=parts["optimizer"],
        waiting_ms=parts["peer_wait"],
        step_ms=study.step_ms, steps=durations / max(float(durations.mean()), 1e-9),
        noise_ms=spread / math.sqrt(max(len(study.step_numbers), 1)),
        model_bytes=model, buckets=max(round(gradient.count / rounds), 1),
        units=max(units, len(layers or ()) // ran.pp, 1), rounds=rounds,
        replicas=replicas or _standing(standing), stages=stages or _standing(standing),
        tensor=tensor or _standing(standing), activation_bytes=activation,
        tensor_calls=calls.count / ran.micro_batches * ran.pp, on_gpu=study.on_gpu,
        weight=weight_share(study.graph) if study.topology.stage_of else WeightShare(),
        fixed=fixed_work(stage_parameters(study, ran.chunks)),
    )  # fmt: skip


def _standing(wire: Wire) -> Wire:
    return replace(wire, spread=max(wire.spread, GUESSED), measured=False)


def _layout_that_ran(study: Study) -> Layout:
    world = study.run.world_size or len(study.ranks)
    replicas = study.mesh.data_parallel_size(study.ranks[0], world)
    staged = bool(study.topology.stage_of)
    plan = pipeline_that_ran(study) if staged else make_plan("1f1b", 1, _micro_batches(study))
    ranks, left = divmod(world, plan.ranks * replicas)
    if left:
        raise NotJudged(f"{world} ranks are no whole number of {replicas} replicas of {plan.ranks} stages")
    again = recomputed_ms(study)
    return Layout(
        pp=plan.ranks, dp=replicas, tp=ranks, zero=sharded_stage(study),
        micro_batches=plan.microbatches, recompute=again is not None and float(again.mean()) > 0,
        offload=float(np.nanmean(study.work("offload"))) > 0, schedule=plan.schedule, chunks=plan.virtual_stages,
    )  # fmt: skip


def _micro_batches(study: Study) -> int:
    counts = micro_batch_counts(study)
    if counts is None:
        raise NotJudged("the forwards and backwards of its micro-batches were not seen")
    if np.ptp(counts) > 0:
        raise NotJudged("not all ranks and steps have as many micro-batches")
    return int(counts.flat[0])


def _passes(study: Study) -> pd.DataFrame:
    return study.passes[study.passes["step"].isin(study.step_numbers)]


def _inside_passes(study: Study) -> float:
    """Of what a rank computes in a step, what is of forwards and backwards, mean, ms."""
    return float(_passes(study)["own_ns"].sum()) / 1e6 / max(len(study.ranks) * len(study.step_numbers), 1)


def _taken(study: Study, ran: Layout) -> Mapping[tuple[int, str], float]:
    table = _passes(study)
    op = np.where(table["name"] == FORWARD, "F", "B")
    total = table.groupby([table["stage"].astype(int), op])["own_ns"].sum() / 1e6
    ranks = dict.fromkeys(range(ran.pp * ran.chunks), 0)
    held = study.topology.stage_of or dict.fromkeys(study.ranks, (0,))
    for stages in held.values():
        for stage in stages:
            ranks[stage] = ranks.get(stage, 0) + 1
    every = len(study.step_numbers) * ran.micro_batches
    found = {(int(stage), str(op)): float(ms) / max(ranks[int(stage)] * every, 1) for (stage, op), ms in total.items()}
    wanted = {(stage, op) for stage in range(ran.pp * ran.chunks) for op in "FB"}
    if set(found) != wanted:
        raise NotJudged("not every stage's forwards and backwards were seen")
    if sum(found.values()) <= 0:
        raise NotJudged("what forwards and backwards compute was not seen")
    return found


def _of_roles(study: Study, *roles: str) -> list[Domain]:
    return [domain for domain in domains(study) if domain.role in roles]


@dataclass(frozen=True)
class _Exchanged:
    """Of a step and rank: messages, and their bytes."""

    count: float = 0.0
    size: float = 0.0


def _a_step(study: Study, of: list[Domain], *purposes: str) -> _Exchanged:
    count = size = 0.0
    for domain in of:
        table = domain.of(*purposes).table
        if table.empty:
            continue
        groups = max(table["group"].nunique(), 1) * len(study.step_numbers)
        count += len(table) / groups
        size += float(table["bytes"].sum()) / groups
    return _Exchanged(count, size)


def _passed(table: pd.DataFrame) -> Float:
    size = table["bytes"].to_numpy(np.float64)
    found: Float = np.where(table["name"] == "all_reduce", 2 * size, size)
    return found


def _wire(of: list[Domain], purposes: tuple[str, ...], ranks: int) -> Wire | None:
    """Of all these domains' communications; None: there are none."""
    chosen = [domain.of(*purposes) for domain in of]
    tables = [one.table for one in chosen if len(one.table)]
    if not tables or ranks < 2:
        return None
    table = pd.concat(tables, ignore_index=True)
    link = fit_link(table.assign(bytes=_passed(table)), on_device=chosen[0].on_device)
    return _wire_of(link, ranks)


def _wire_of(link: Link, ranks: int) -> Wire:
    return Wire(link.latency_ms, link.ms_per_byte, ranks, link.spread if link.fitted else max(link.spread, 0.3))


def _messages(study: Study) -> tuple[Wire | None, float | None]:
    """The link between stages, and the bytes of a message for a micro-batch; None: not known. Of messages whose sizes
    were not told, the link is how long they took."""
    every = study.collectives
    table = every[
        every["step"].isin(study.step_numbers) & (every["name"] == SEND_RECV) & (every["purpose"] == PIPELINE)
    ]
    if table.empty:
        return None, None
    sized = table[table["bytes"] > 0]
    if sized.empty:
        return Wire(float(table["transfer_ns"].median()) / 1e6, 0.0, 2, GUESSED), None
    return _wire_of(fit_link(sized, on_device=study.on_gpu), 2), float(sized["bytes"].median())


def _parameters_held(study: Study, ran: Layout) -> tuple[float, ...]:
    """Of each stage that ran, bytes of the parameters that a rank of it has; empty: not known."""
    held = study.topology.stage_of or dict.fromkeys(study.ranks, (0,))
    found: dict[int, float] = {}
    for rank, stages in held.items():
        place = main_place(study.memory_uses, rank)
        own = 0 if place is None else place.parts.get("parameters", 0)
        for stage in stages:
            found.setdefault(stage, own / len(stages))
    whole = len(found) == ran.pp * ran.chunks and all(size > 0 for size in found.values())
    return tuple(found[stage] for stage in sorted(found)) if whole else ()


def _rounds(ran: Layout, gradient: _Exchanged, held: tuple[float, ...]) -> int:
    """How often a step reduces its gradients. From stage 2 on no rank keeps whole ones from one micro-batch to the
    next; before, what is reduced is compared with how large parameters are."""
    if ran.zero >= 2 or not held:
        return ran.micro_batches if ran.zero >= 2 else 1
    return ran.micro_batches if gradient.size > 1.5 * sum(held) / ran.pp else 1


def _model_bytes(ran: Layout, reduced: float, held: tuple[float, ...]) -> tuple[float, ...]:
    """What is reduced once, divided among the stages as the parameters are that their ranks hold; without replicas what
    they hold. Empty: neither is known."""
    stages = ran.pp * ran.chunks
    if not reduced:
        return held
    share = [size / sum(held) for size in held] if held else [1 / stages] * stages
    return tuple(reduced * ran.pp * part for part in share)


def need_model(costs: LayoutCosts) -> tuple[float, ...]:
    """Raises NotJudged where the size of the model is not known."""
    if not costs.model_bytes:
        raise NotJudged("how large the model is was not recorded: let it train a few steps more, or capture again")
    return costs.model_bytes


def in_words(costs: LayoutCosts) -> str:
    """What was measured of the job, in a sentence."""
    layers = "layers not timed" if costs.layers is None else f"{len(costs.layers)} layers timed"
    size = sum(costs.model_bytes) / 2**20
    return f"{costs.ran.says}; {number(size)} MiB of parameters, {layers}"
