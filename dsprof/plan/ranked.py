"""The layouts that a measured job may have on N ranks, the fastest first: each is lowered to the graph of a replica's
ranks and replayed (`dsprof.analyzer.layout`), beside the layout that ran.

Layouts are looked at in the order of a time that none of them can be faster than. As soon as that is longer than what
the best ones take, no later one can be among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from dsprof.analyzer.layout import DUAL_PIPE_V, Assumed, Layout, LayoutCosts, Wire, layout_costs, step_of
from dsprof.analyzer.layout.alternatives import alternatives, in_words
from dsprof.analyzer.layout.held_bytes import HeldBytes
from dsprof.analyzer.layout.relayout import LayoutWanted, waiting_times
from dsprof.analyzer.layout.stage_work import stage_work
from dsprof.analyzer.layout.step_lowered import short_plan, stage_times
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.study import Study
from dsprof.analyzer.text import size

from .changes import CannotPlan
from .hardware import NETWORK_GB_S, NETWORK_REACHED
from .layouts import Wanted, divisors
from .network import Network

BEST: Final = 3
SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of micro-batches, times those of the run."""
MOST_STAGES: Final = 64
MODEL: Final = 0.05
"""Relative error of a layout's step that is expected where the layout is another one."""
ALIKE: Final = 0.01
"""Layouts that differ in their ZeRO stage alone, and by no more than this share of the step, are as fast."""
CROSSES: Final = 0.44
"""Relative error of what goes over a network that was not measured."""


@dataclass(frozen=True)
class RankedLayout:
    """ms: of a step, with the ends of its 95 % interval. batch: of the step, times the run's. memory_bytes: of the rank
    that would have most; None: not known."""

    layout: Layout
    ms: float
    low: float
    high: float
    batch: float
    memory_bytes: float | None = None


@dataclass(frozen=True)
class RankedLayouts:
    """best: the first ones. tried, replayed, too_large: how many there were, were replayed, and do not fit. notes: what
    was assumed, or left out and why."""

    best: Sequence[RankedLayout]
    tried: int
    replayed: int
    too_large: int
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ranked_layouts(study: Study, ranks: int, batch: float, network: Network, wanted: Wanted) -> RankedLayouts:
    """batch: of a step, times the run's. Raises CannotPlan."""
    try:
        costs = layout_costs(study)
    except NotJudged as why:
        raise CannotPlan(str(why)) from None
    every = list(_layouts(study, costs, ranks, batch, wanted))
    if not every:
        raise CannotPlan(_none(costs, ranks, wanted))
    search = Search(costs, network)
    held = HeldBytes(study, costs)
    inside = [layout for layout in every if (most := held.most(layout)) is None or most.fits]
    if not inside:
        raise CannotPlan(_too_large(held, every))
    found = _fastest(search, inside)
    best = [search.ranked(layout, batch) for layout in _chosen(found, held)]
    best = [replace(one, memory_bytes=_most_bytes(held, one.layout)) for one in best]
    notes = [*search.notes(best), *_of_memory(held, best)]
    replayed = sum(map(len, found.values()))
    return RankedLayouts(best, len(every), replayed, len(every) - len(inside), notes)


Found = dict[Layout, list[tuple[float, Layout]]]
"""Layouts but for their ZeRO stage -> those that were replayed, and what they take."""


def _fastest(search: Search, layouts: Sequence[Layout]) -> Found:
    """Replay in the order of what none can be faster than, until none that is left can be among the first ones."""
    order = sorted((search.at_least(layout), number) for number, layout in enumerate(layouts))
    found: Found = {}
    for least, number in order:
        leading = sorted(min(ms for ms, _ in of) for of in found.values())
        if len(leading) >= BEST and least > leading[BEST - 1] * (1 + ALIKE):
            break
        layout = layouts[number]
        found.setdefault(replace(layout, zero=0), []).append((search.step_ms(layout), layout))
    return found


def _chosen(found: Found, held: HeldBytes) -> list[Layout]:
    """The fastest ones, each with the ZeRO stage that needs least memory of those that are as fast."""
    leading = sorted(found.values(), key=lambda of: min(ms for ms, _ in of))[:BEST]
    chosen = []
    for of in leading:
        fastest = min(ms for ms, _ in of)
        alike = [(layout, ms) for ms, layout in of if ms <= fastest * (1 + ALIKE)]
        chosen.append(min(alike, key=lambda one: (_most_bytes(held, one[0]) or 0.0, one[1]))[0])
    return chosen


def _most_bytes(held: HeldBytes, layout: Layout) -> float | None:
    most = held.most(layout)
    return None if most is None else most.total


def _too_large(held: HeldBytes, layouts: Sequence[Layout]) -> str:
    least = min(layouts, key=lambda layout: _most_bytes(held, layout) or 0.0)
    most = held.most(least)
    assert most is not None
    return (
        f"no layout fits into {size(most.capacity or 0)} a rank: the smallest of {len(layouts)} needs "
        f"{size(most.total)} ({least.says}); use more ranks, or a smaller batch"
    )


def _of_memory(held: HeldBytes, best: Sequence[RankedLayout]) -> list[str]:
    most = held.most(best[0].layout)
    if most is None:
        return ["memory is not told: what tensors are for was not recorded"]
    said = "memory of a rank: its peak in the run, and what its parameters, gradients and optimizer take more or less"
    if most.activations is None:
        return [f"{said}; activations are not known of ranks on a host, and stay"]
    return [f"{said}; activations by what the schedule holds at once"]


def _none(costs: LayoutCosts, ranks: int, wanted: Wanted) -> str:
    fixed = {name: value for name in ("tp", "dp", "pp") if (value := getattr(wanted, name)) is not None}
    words = ", ".join(f"{name} {value}" for name, value in fixed.items())
    of = f"no layout of {ranks} ranks{f' with {words}' if words else ''} can be told from the run's ({costs.ran.says})"
    if ranks % math.prod(fixed.values()):
        return f"{of}: {' x '.join(map(str, fixed.values()))} does not divide {ranks}"
    try:
        LayoutWanted(**fixed, zero_stage=wanted.zero).layout(costs)
    except NotJudged as why:
        return f"{of}: {why}"
    return f"{of}: it has to divide the ranks, the batch and the layers that were seen"


def _layouts(study: Study, costs: LayoutCosts, ranks: int, batch: float, wanted: Wanted) -> Iterator[Layout]:
    ran, whole = costs.ran, costs.ran.batch * batch
    # What layers exchange in tensor parallelism is known by what a stage hands on, or by tensor parallelism.
    told = costs.activation_bytes is not None and (costs.layers is not None or costs.tensor_calls > 0)
    for tp in divisors(ranks) if told else [ran.tp]:
        if wanted.tp not in (None, tp) or ranks % tp or (tp > ran.tp and tp & (tp - 1)):
            continue
        for pp in _stages(costs, ranks // tp):
            dp, left = divmod(ranks, tp * pp)
            if left or wanted.dp not in (None, dp) or wanted.pp not in (None, pp):
                continue
            for times in SIZES:
                count = whole / (dp * times)
                if count < 1 or count != int(count) or wanted.micro_batch not in (None, times):
                    continue
                base = replace(ran, pp=pp, dp=dp, tp=tp, micro_batch=times, micro_batches=int(count), chunks=1)
                yield from variants(costs, base, wanted)


def _stages(costs: LayoutCosts, ranks: int) -> Iterator[int]:
    for pp in divisors(ranks):
        if pp > MOST_STAGES:
            return
        try:
            stage_work(costs, pp)
        except NotJudged:
            continue
        if pp in (1, costs.ran.pp) or costs.divides_stages:
            yield pp


def variants(costs: LayoutCosts, base: Layout, wanted: Wanted) -> Iterator[Layout]:
    """Its ZeRO stages, schedules, and with activations computed again or not."""
    ran = costs.ran
    shared = (0,) if base.dp == 1 else tuple(sorted({0, 1, ran.zero})) if base.pp > 1 else (0, 1, 2, 3)
    schedules = [("1f1b", 1)]
    if base.pp > 1:
        schedules += [("zero-bubble", 1), ("gpipe", 1), *_in_parts(costs, base)]
    for zero in shared if wanted.zero is None else (wanted.zero,):
        for again in (False, True) if wanted.recompute is None else (wanted.recompute,):
            for schedule, chunks in schedules:
                yield replace(base, zero=zero, recompute=again, schedule=schedule, chunks=chunks)


def _in_parts(costs: LayoutCosts, base: Layout) -> list[tuple[str, int]]:
    """Schedules with two parts of the model on each rank, where there are layers and micro-batches for them."""
    try:
        stage_work(costs, 2 * base.pp)
    except NotJudged:
        return []
    fits = {"interleaved": base.micro_batches % base.pp == 0, DUAL_PIPE_V: base.micro_batches >= 2 * base.pp}
    return [(name, 2) for name, does in fits.items() if does]


class Search:
    """What layouts take, by the model, beside what the layout that ran takes by it."""

    def __init__(self, costs: LayoutCosts, network: Network) -> None:
        self._costs, self._network = costs, network
        self._unmodelled = costs.step_ms - step_of(costs, costs.ran)

    def step_ms(self, layout: Layout, assumed: Assumed | None = None, network: float = 1.0) -> float:
        """network: what the network between nodes takes, times what it is said to."""
        ran = self._costs.ran
        now = self._unmodelled if assumed is None else self._costs.step_ms - step_of(self._costs, ran, assumed)
        ms = step_of(self._on_wires(layout, network), layout, assumed) + now
        return max(ms + self._costs.waiting_ms * (waiting_times(ran, layout) - 1), 0.0)

    def at_least(self, layout: Layout) -> float:
        """A time that no order of its actions is faster than: the rank with most to do, and what comes before it."""
        plan = short_plan(layout)
        times = stage_times(self._costs, layout, plan, stage_work(self._costs, plan.stages), Assumed())
        own = [0.0] * layout.pp
        first = [0.0] * layout.pp
        reached = 0.0
        for stage, ops in enumerate(times.actions):
            rank = plan.owner(stage)
            if stage < layout.pp:
                first[rank] = reached
            own[rank] += (ops["F"] + ops["B"]) * layout.micro_batches
            reached += ops["F"]
        busiest = max(before + ms for before, ms in zip(first, own, strict=True))
        return busiest + self._costs.once_ms + times.optimizer + min(self._unmodelled, 0.0) - self._costs.waiting_ms

    def _on_wires(self, layout: Layout, times: float) -> LayoutCosts:
        """With the links that its groups have on the machine: tensor parallelism innermost, then replicas, then stages.
        The run's own ranks share a node, as far as is told."""
        node = max(self._network.gpus_per_node, 1)
        costs = self._costs

        def over(wire: Wire, sharing: int) -> Wire:
            gb_s = self._network.gb_s
            if gb_s is None and costs.on_gpu:
                gb_s = NETWORK_GB_S
            per_byte = 0.0 if gb_s is None else sharing * (1 - 1 / max(wire.ranks, 2)) / (gb_s * NETWORK_REACHED * 1e6)
            latency = (self._network.latency_us or 0.0) / 1e3
            crossed = replace(
                wire, ms_per_byte=max(wire.ms_per_byte, per_byte), latency_ms=wire.latency_ms + latency, measured=False
            )
            return crossed.times(times)

        if not self.crosses(layout):
            return costs
        inner = layout.tp * layout.dp
        return replace(
            costs,
            tensor=over(costs.tensor, 1) if layout.tp > node else costs.tensor,
            replicas=over(costs.replicas, min(layout.tp, node)) if inner > node and layout.dp > 1 else costs.replicas,
            stages=over(costs.stages, min(inner, node)),
        )

    def crosses(self, layout: Layout) -> bool:
        return layout.ranks > max(self._network.gpus_per_node, self._costs.ran.ranks)

    def ranked(self, layout: Layout, batch: float) -> RankedLayout:
        """With its interval: what is assumed is taken to its ends, and what was fitted is off by its error."""
        costs, ms = self._costs, self.step_ms(layout)
        below = above = 0.0
        for pair in alternatives(costs, layout):
            off = [self.step_ms(layout, one) - ms for one in pair]
            below, above = math.hypot(below, min(*off, 0.0)), math.hypot(above, max(*off, 0.0))
        if self.crosses(layout):
            off_network = self.step_ms(layout, network=1 + CROSSES) - ms
            below, above = math.hypot(below, 1.96 * off_network), math.hypot(above, 1.96 * off_network)
        of_model = 0.0 if layout == costs.ran else MODEL * ms + abs(self._unmodelled) / 2
        beside = math.hypot(1.96 * costs.noise_ms * ms / costs.step_ms, of_model)
        return RankedLayout(
            layout, ms, max(ms - math.hypot(below, beside), 0.0), ms + math.hypot(above, beside), batch
        )  # fmt: skip

    def notes(self, best: Sequence[RankedLayout]) -> list[str]:
        costs = self._costs
        told = 100 * (1 - self._unmodelled / costs.step_ms)
        said = [
            f"each is replayed beside the layout that ran ({costs.ran.says}), whose replay takes {told:.0f} % of what "
            "was measured"
        ]
        return [*said, *in_words(costs, *(one.layout for one in best))]
