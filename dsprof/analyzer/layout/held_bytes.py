"""What each rank of a pipeline holds in another layout, in bytes, beside what it held in the run.

Parameters, gradients and the optimizer's states are those of its stages, shared by the replicas as the ZeRO stage says,
of ranks of unequal memory (`heterogeneous.memory`) in its proportion, with the buffers that its engine communicates
through (`dsprof.engine.config.held`, where the configuration that ran is known). Activations are what was measured of a
micro-batch, times those that the schedule holds at once. What is left of the rank's peak, such as the process itself,
stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dsprof.engine.config import ELEMENT_BYTES, Config, as_far_as_known, held, replica_memory
from dsprof.engine.schedule import peak_activations

from ..memory.use_by_step import MemoryUse, main_place
from ..rules.base import configurations, engine_config
from ..study import Study
from .job_layout import Layout
from .layout_costs import LayoutCosts
from .stage_work import stage_work
from .step_lowered import plan_of, short_plan

CHECKPOINTED: Final = 0.15
"""What is kept of a layer's activations that are computed again: its input, and the one layer that is computed. A
guess."""


@dataclass(frozen=True)
class RankBytes:
    """states: parameters, gradients, optimizer and buffers; activations: None: not known; rest: of the peak, that is
    neither. capacity: of the device; None: not known, or the host's, which ranks share."""

    states: float
    activations: float | None
    rest: float
    capacity: int | None

    @property
    def total(self) -> float:
        return self.states + (self.activations or 0.0) + self.rest

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity


class HeldBytes:
    """What ranks of a run's job hold in any layout."""

    def __init__(self, study: Study, costs: LayoutCosts) -> None:
        self._costs, self._content = costs, next(iter(configurations(study)), None)
        self._deepspeed = engine_config(study) is None
        trained = [] if self._deepspeed else study.facts.get("trained", [])
        self._largest = max((float(fact.get("largest") or 0) for fact in trained), default=0.0)
        self._frozen = sum(fact.get("frozen") or 0 for fact in trained) / max(sum(f["elements"] for f in trained), 1)
        self._configs: dict[tuple[int, int, bool], Config] = {}
        self._uses = _by_stage_rank(study, costs)
        self._on_host = any(use.on_host for use in self._uses)
        self._known = bool(costs.model_bytes) and len(self._uses) == costs.ran.pp
        self._known &= self._share(costs.ran) is not None
        self._optimizer = self._optimizer_times()
        self._rest = [self._rest_of(use, at) for at, use in enumerate(self._uses)] if self._known else []

    def of(self, layout: Layout) -> tuple[RankBytes, ...] | None:
        """Of each rank of a pipeline, that of its replicas which would hold most; None: memory was not recorded, or not
        how large the model is, or how it would be shared is not known."""
        share = self._share(layout)
        if not self._known or share is None:
            return None
        same = layout.pp == self._costs.ran.pp
        capacity = min((use.capacity for use in self._uses if use.capacity and not use.on_host), default=None)
        return tuple(
            RankBytes(states, activations, self._rest[rank] if same else max(self._rest), capacity)
            for rank, (states, activations) in enumerate(self._modelled(layout, share))
        )

    def of_rank(self, layout: Layout, use: MemoryUse, position: int) -> float:
        """Bytes of a rank of the run, which has this place in its pipeline, in a layout of as many stages that `of`
        knows."""
        states, activations = self._modelled(layout, self._share(layout, use.rank) or 0.0)[position]
        return states + (activations or 0.0) + self._rest_of(use, position)

    def most(self, layout: Layout) -> RankBytes | None:
        """The rank that would hold most."""
        return max(self.of(layout) or (), key=lambda one: one.total, default=None)

    def _rest_of(self, use: MemoryUse, position: int) -> float:
        """What a rank of the run held that is neither states nor activations."""
        ran = self._costs.ran
        states, activations = self._modelled(ran, self._share(ran, use.rank) or 0.0)[position]
        return max(use.peak - states - (activations or 0.0), 0.0)

    def _share(self, layout: Layout, rank: int | None = None) -> float | None:
        """What part a rank, or the one that has most, has of what replicas share; None: not known, as of memory that is
        measured at the start, or of other ranks than the configuration's."""
        memory = None
        if self._content is not None and layout.zero:
            memory = self._config(self._content, layout).heterogeneous.memory
        if memory is None:
            return 1 / layout.dp
        if memory == "measure" or len(memory) != layout.ranks:
            return None
        parts = replica_memory(memory, layout.pp, layout.tp)
        mine = max(parts) if rank is None else parts[rank // layout.tp % len(parts)]
        return mine / sum(parts) if any(parts) else None

    def _modelled(self, layout: Layout, share: float) -> list[tuple[float, float | None]]:
        """Bytes of states and of activations of each rank of a pipeline. share: of what replicas share."""
        costs, ran = self._costs, self._costs.ran
        plan = short_plan(layout)
        work = stage_work(costs, plan.stages, layout.boundaries)
        at_once = activations_at_once(layout)
        each = self._of_a_micro_batch()
        found: list[tuple[float, float | None]] = []
        for rank in range(layout.pp):
            mine = [stage for stage in range(plan.stages) if plan.owner(stage) == rank]
            model = sum(work.model_bytes[stage] for stage in mine) * ran.tp / layout.tp
            layers = sum(work.layers[stage] for stage in mine) / len(mine)
            activations = None
            if each is not None:
                times = layout.micro_batch * ran.tp / layout.tp * at_once[rank] * layers
                kept = (CHECKPOINTED if layout.recompute else 1.0) / (CHECKPOINTED if ran.recompute else 1.0)
                activations = each * times * kept
            found.append((self._states(model, layout, share), activations))
        return found

    def _of_a_micro_batch(self) -> float | None:
        """Activations of a stage of the run and one micro-batch, mean over the ranks; None: not known. Of a host it is
        what the process had grown by, which says nothing."""
        told = [use.parts.get("activations") for use in self._uses]
        if self._on_host or None in told:
            return None
        at_once = activations_at_once(self._costs.ran)
        return sum((one or 0) / held for one, held in zip(told, at_once, strict=True)) / len(told)

    def _states(self, model: float, layout: Layout, share: float) -> float:
        """Of a rank whose parameters are so large, and which has this part of what replicas share."""
        if self._content is not None:
            config = self._config(self._content, layout)
            elements = model / ELEMENT_BYTES[config.communication_type]
            return held(
                config, elements, share, layout.dp, deepspeed=self._deepspeed, on_host=self._on_host,
                largest=self._largest * self._costs.ran.tp / layout.tp, frozen=self._frozen * elements,
            ).total  # fmt: skip
        shared = layout.share(3) + layout.share(2) + self._optimizer * layout.share(1)
        gathered = 2 / max(self._costs.units, 1) if layout.zero == 3 else 0.0
        return model * (shared + gathered)

    def _config(self, content: Mapping[str, Any], layout: Layout) -> Config:
        key = layout.zero, layout.micro_batches, layout.offload
        if key not in self._configs:
            section = content.get("zero_optimization")
            zero = {**(section if isinstance(section, Mapping) else {}), "stage": layout.zero}
            if not layout.offload or self._on_host:
                zero |= {"offload_optimizer": None, "offload_param": None}
            sizes = {"train_batch_size": None, "gradient_accumulation_steps": layout.micro_batches}
            self._configs[key] = as_far_as_known({**content, **sizes, "zero_optimization": zero})
        return self._configs[key]

    def _optimizer_times(self) -> float:
        """What an optimizer keeps, times its parameters, as was measured; two of each where that is not known."""
        ran = self._costs.ran
        states = sum(use.parts.get("optimizer_states", 0) for use in self._uses) / ran.share(1)
        own = sum(self._costs.model_bytes)
        return states / own if states and own else 2.0


def activations_at_once(layout: Layout) -> list[float]:
    """The most activations of a micro-batch and stage that each rank of a pipeline holds at once. Of many micro-batches
    the plan is not made: each more adds what the last ones did, nothing in 1F1B and itself in GPipe."""
    most = 4 * layout.pp * layout.chunks
    peaks = peak_activations(plan_of(replace(layout, micro_batches=min(layout.micro_batches, most))), "B")
    if layout.micro_batches <= most:
        return [float(peak) for peak in peaks]
    before = peak_activations(plan_of(replace(layout, micro_batches=most - layout.pp)), "B")
    more = (layout.micro_batches - most) / layout.pp
    return [peak + more * (peak - less) for peak, less in zip(peaks, before, strict=True)]


def _by_stage_rank(study: Study, costs: LayoutCosts) -> list[MemoryUse]:
    """Of each rank of a pipeline, that of its replicas which took most."""
    held = study.topology.stage_of or dict.fromkeys(study.ranks, (0,))
    found: dict[int, MemoryUse] = {}
    for rank, stages in held.items():
        use, position = main_place(study.memory_uses, rank), min(stages) % costs.ran.pp
        if use is not None and (position not in found or found[position].peak < use.peak):
            found[position] = use
    return [found[position] for position in sorted(found)]
