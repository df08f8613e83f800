"""Another layout as a what-if, and as a user asks for it: `--zero-stage 2 --tp 4 --dp 8 --recompute full`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from ..effect import Effect
from ..graph.step_graph import StepGraph
from ..memory.rank_memory import RankMemory
from ..memory.use_by_step import main_place
from ..rules.base import NotJudged
from ..study import Study
from ..text import count, number
from ..whatif import Turn, WhatIf
from .alternatives import alternatives, in_words
from .held_bytes import HeldBytes
from .job_layout import Layout
from .layout_costs import LayoutCosts, layout_costs, need_model
from .stage_work import stage_work
from .step_lowered import Assumed, lowered, plan_of, step_of

FULL, NONE, SELECTIVE = "full", "none", "selective"
RECOMPUTE: Final = (NONE, SELECTIVE, FULL)
OFFLOAD: Final = (NONE, "optimizer", "parameters")


@dataclass(frozen=True, eq=False)
class Relayout(WhatIf):
    """All steps as the model of a layout has them."""

    costs: LayoutCosts
    layout: Layout
    assumed: Assumed
    turn = Turn.SCHEDULE

    @property
    def name(self) -> str:
        return f"layout {self.layout.says}"

    def against(self, other: WhatIf) -> str | None:
        return "another layout is a model of the whole step, in which nothing else is changed: ask about it by itself"

    def change(self, graph: StepGraph) -> StepGraph:
        return lowered(self.costs, self.layout, self.assumed)


@dataclass(frozen=True)
class LayoutWanted:
    """What of a layout is another one; None: as it ran. recompute: one of RECOMPUTE; offload: one of OFFLOAD."""

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    zero_stage: int | None = None
    recompute: str | None = None
    offload: str | None = None
    schedule: str | None = None
    micro_batches: int | None = None
    chunks: int | None = None

    @property
    def says(self) -> str:
        names = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"{name.replace('_', '-')}={value}" for name, value in names.items())

    def layout(self, costs: LayoutCosts) -> Layout:
        """Raises NotJudged for what cannot be told, or be."""
        ran, offload = costs.ran, costs.ran.offload
        if self.recompute == SELECTIVE:
            raise NotJudged(
                "what selective recomputation computes again was not timed by itself; ask with --recompute full or none"
            )
        if self.offload == NONE and not offload:
            raise NotJudged("nothing is offloaded in this run")
        if self.offload not in (None, NONE):
            raise NotJudged("how fast a rank copies to its host's memory is only told by a run that offloads")
        changed: dict[str, Any] = {
            "pp": self.pp, "dp": self.dp, "tp": self.tp, "zero": self.zero_stage, "chunks": self.chunks,
            "micro_batches": self.micro_batches, "schedule": self.schedule,
            "recompute": None if self.recompute is None else self.recompute == FULL,
            "offload": None if self.offload is None else False,
        }  # fmt: skip
        found = replace(ran, **{name: value for name, value in changed.items() if value is not None})
        if found.pp == 1:
            found = replace(found, schedule="1f1b", chunks=1)
        if found.dp == 1 and self.zero_stage:
            raise NotJudged("without replicas (dp 1) there is nothing that ZeRO could share")
        if found.tp != ran.tp and costs.activation_bytes is None:
            raise NotJudged(
                "what layers hand on was not seen, so what tensor parallelism would exchange is not known: only a run "
                "with a pipeline or with tensor parallelism tells"
            )
        if found.tp != ran.tp and costs.layers is None and not costs.tensor_calls:
            raise NotJudged("how many layers would exchange something was not seen: run again with --level full")
        if not costs.divides_stages and found.pp != ran.pp:
            raise NotJudged(
                "stages of a job that ran without a pipeline are told by what each layer takes, which was not timed: "
                "run again with --level full"
            )
        try:
            stage_work(costs, plan_of(found).stages)
        except ValueError as wrong:
            raise NotJudged(str(wrong)) from None
        if found.dp > 1 and (found.dp, found.zero) != (ran.dp, ran.zero):
            need_model(costs)
        return found

    def effect(self, study: Study) -> Effect:
        costs = layout_costs(study)
        return effect_of(costs, self.layout(costs))

    def memory(self, study: Study) -> tuple[RankMemory, ...]:
        """Of each rank, where it is known. Raises NotJudged as `layout` does."""
        return memory_of(study, self.layout(layout_costs(study)))


def effect_of(costs: LayoutCosts, layout: Layout) -> Effect:
    """A layout's, beside that of the layout that ran."""
    ran, base = costs.ran, Assumed()
    # What the model lacks of the step that was measured is there in every layout.
    lacks = costs.step_ms - step_of(costs, ran)
    costs = replace(costs, once_ms=costs.once_ms + lacks)

    def pair(assumed: Assumed) -> tuple[tuple[WhatIf, ...], tuple[WhatIf, ...]]:
        return (Relayout(costs, ran, assumed),), (Relayout(costs, layout, assumed),)

    now, then = pair(base)
    waited = costs.waiting_ms * (waiting_times(ran, layout) - 1)
    ranks = f": {count(layout.ranks, 'rank')}, and the run had {ran.ranks}" if layout.ranks != ran.ranks else ""
    notes = [f"{layout.says}{ranks}", *in_words(costs, layout)]
    times = layout.batch / ran.batch
    if times != 1:
        notes.append(f"the batch is {number(times)} times as large, and what is said is of a batch of the run's")
    return Effect(
        "pipeline.bubble",
        then=then,
        now=now,
        others=tuple(pair(one) for ends in alternatives(costs, layout) for one in ends),
        costs_ms=waited,
        per_batch=times,
        counts_cores=True,
        notes=tuple(notes),
    )


def waiting_times(ran: Layout, layout: Layout) -> float:
    """How many times as long the slowest of other many ranks is waited for: as the largest of so many draws."""
    if layout.ranks < 2:
        return 0.0
    return math.sqrt(math.log(layout.ranks) / math.log(max(ran.ranks, 2)))


def memory_of(study: Study, layout: Layout) -> tuple[RankMemory, ...]:
    """What each rank takes, and would take: of as many stages each rank of the run; else a rank of each stage, beside
    the one that took most. Empty: not known."""
    costs = layout_costs(study)
    held = HeldBytes(study, costs)
    then = held.of(layout)
    if then is None or (then[0].activations is None and _other_activations(costs.ran, layout)):
        return ()
    places = [(rank, place) for rank in study.ranks if (place := main_place(study.memory_uses, rank)) is not None]
    if layout.pp == costs.ran.pp:
        stages = study.topology.stage_of or dict.fromkeys(study.ranks, (0,))
        position = {rank: min(stages[rank]) % layout.pp for rank, _ in places}
        return tuple(
            RankMemory(rank, use.place, use.peak, held.of_rank(layout, use, position[rank]), use.capacity)
            for rank, use in places
        )
    most = max((use for _, use in places), key=lambda use: use.peak)
    return tuple(
        RankMemory(position, most.place, most.peak, one.total, most.capacity) for position, one in enumerate(then)
    )


def _other_activations(ran: Layout, layout: Layout) -> bool:
    """Whether ranks hold others at once, or larger or smaller ones."""
    same = ("pp", "tp", "micro_batch", "recompute", "boundaries")
    if any(getattr(ran, name) != getattr(layout, name) for name in same):
        return True
    return ran.pp > 1 and any(
        getattr(ran, name) != getattr(layout, name) for name in ("schedule", "chunks", "micro_batches")
    )
