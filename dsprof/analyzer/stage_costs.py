"""What the stages of another plan take, from what those that ran took and, where they were timed, from their layers;
and the boundaries between stages that make the shortest steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from dsprof.engine.partition import balance
from dsprof.engine.schedule import Action, Plan

from .graph.step_graph import StepGraph
from .rules.base import NotJudged
from .whatif.lowering import Stages, measured_plan
from .whatif.lowering.assemble import COMPUTED
from .whatif.lowering.recipe import WEIGHT_SHARE, source_stage
from .work.stage_layers import StageLayer

Taken = Mapping[tuple[int, str], float]
"""(stage, `F` or `B`) -> what it computes for one micro-batch, ms; a B is all of the backward."""

UNEVEN: Final = 0.15
"""Parts of a stage whose layers were not timed may take so much more or less than the mean of them."""
MOST_REPLAYED: Final = 40
"""Divisions into stages that are replayed: a pipeline of many stages has many that differ by a layer."""
LEAST_WEIGHT, MOST_WEIGHT = 0.0, 0.6
"""Of a backward that was not measured in two parts, what W may be: nothing where its layers have no weights, as in
attention alone; most where a layer's input needs no gradient. Of products with weights it is half."""
USUAL_WEIGHT: Final = 1 / 3
"""W of layers that are mostly products with weights is at least so much of their backward."""


@dataclass(frozen=True)
class WeightShare:
    """What W, which only makes weights' gradients, is of a backward, and the ends of what it may be."""

    typical: float = WEIGHT_SHARE
    least: float = LEAST_WEIGHT
    most: float = MOST_WEIGHT
    measured: bool = False

    @property
    def says(self) -> str:
        if not self.measured:
            return (
                "how long weight gradients take was not measured: between nothing, of layers without weights, and "
                f"{100 * self.most:.0f} % of a backward"
            )
        return f"weight gradients take {100 * self.typical:.0f} % of a backward, as where it ran in two parts"


def weight_share(graph: StepGraph) -> WeightShare:
    """As measured of backwards that ran in two parts, between the stages with least and most; else what it may be.
    Raises NotLowered."""
    parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for blocks in _computed(graph):
        for action, ms in blocks.items():
            if action.op == "W":
                parts[action.stage].append((ms, blocks[action._replace(op="B")]))
    if not parts:
        return WeightShare()
    every = [pair for of in parts.values() for pair in of]
    of_stages = [_share(of) for of in parts.values()]
    return WeightShare(_share(every), min(of_stages), max(of_stages), measured=True)


def _share(parts: Sequence[tuple[float, float]]) -> float:
    """Of pairs of W and B, together."""
    weight, whole = sum(w for w, _ in parts), sum(w + b for w, b in parts)
    return weight / whole if whole > 0 else 0.0


def _computed(graph: StepGraph) -> Iterator[Mapping[Action, float]]:
    """Of each pipeline of like-shaped steps, what its actions computed, mean over the judged ones, ms."""
    for steps in graph.templates:
        judged = np.isin(steps.numbers, graph.judged_steps)
        if not judged.any():
            continue
        computed = steps.work[:, judged][..., COMPUTED].sum(axis=-1, dtype=np.float64).mean(axis=1)
        total = np.append(0.0, np.cumsum(computed))
        for pipeline in measured_plan(steps.structure).pipelines:
            yield {action: float(total[block.ends] - total[block.begins]) for action, block in pipeline.blocks.items()}


def stage_ms(graph: StepGraph) -> Taken:
    """What stages took, mean over the judged steps, micro-batches and replicas. Raises NotLowered."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for blocks in _computed(graph):
        for action, ms in blocks.items():
            found[action.stage, action.op].append(ms)
    return {
        (stage, op): sum(of + (found[stage, "W"] if op == "B" and (stage, "W") in found else [])) / len(of)
        for (stage, op), of in found.items() if op != "W"
    }  # fmt: skip


def divided_alike(ran: Plan, plan: Plan, taken: Taken) -> tuple[Stages, ...]:
    """The stages of a plan whose stages are those that ran, whole parts of them or several together; of parts, whose
    layers were not timed, also as uneven ones. Raises NotJudged where they are neither."""
    if (plan.stages, plan.v_shaped) == (ran.stages, ran.v_shaped):
        return (Stages(),)
    if ran.stages % plan.stages == 0:
        each = ran.stages // plan.stages
        times = {
            (stage, op): sum(taken[stage * each + i, op] for i in range(each))
            for stage in range(plan.stages) for op in "FB"
        }  # fmt: skip
        return (_stages(ran, plan, taken, times),)
    if plan.stages % ran.stages:
        raise NotJudged(
            f"{plan.stages} stages can be told from the {ran.stages} that ran only with what each layer takes, which "
            "was not timed: run again with --level full"
        )
    parts = plan.stages // ran.stages

    def parted(more: float) -> Stages:
        # The first part of each stage takes more, and the others as much less between them.
        share = [1 + more] + [1 - more / (parts - 1)] * (parts - 1)
        return _stages(ran, plan, taken, {
            (stage, op): taken[stage // parts, op] * share[stage % parts] / parts
            for stage in range(plan.stages) for op in "FB"
        })  # fmt: skip

    return parted(0.0), parted(UNEVEN), parted(-UNEVEN)


def of_layers(ran: Plan, plan: Plan, taken: Taken, layers: Sequence[StageLayer], bounds: Sequence[int]) -> Stages:
    """Stages that begin at these layers. What a stage took beside its layers, as the last one's loss, stays with it."""
    times = {}
    for stage, (low, high) in enumerate(pairwise(bounds)):
        source = ran.stages - 1 if stage == plan.stages - 1 else source_stage(ran, plan, stage)
        stays = (source == ran.stages - 1) == (stage == plan.stages - 1)
        for op in "FB":
            rest = (
                taken[source, op] - sum(_ms(layer, op) for layer in layers if layer.stage == source) if stays else 0.0
            )
            times[stage, op] = max(sum(_ms(layer, op) for layer in layers[low:high]) + rest, 0.0)
    return _stages(ran, plan, taken, times)


def _ms(layer: StageLayer, op: str) -> float:
    return layer.forward_ms if op == "F" else layer.backward_ms


def _stages(ran: Plan, plan: Plan, taken: Taken, times: Taken) -> Stages:
    return Stages({
        (stage, op): ms / max(taken[source_stage(ran, plan, stage), op], 1e-9) for (stage, op), ms in times.items()
    })  # fmt: skip


def present_boundaries(layers: Sequence[StageLayer]) -> tuple[int, ...]:
    """Where the stages that ran begin, and the number of all layers."""
    stages = [layer.stage for layer in layers]
    return (*(stages.index(stage) for stage in sorted(set(stages))), len(stages))


def begins(layers: Sequence[StageLayer], bounds: Sequence[int]) -> str:
    """`layers 0, 4 (blocks.3), 8 (head)`: where stages with these boundaries begin."""
    return "layers " + ", ".join(["0", *(f"{number} ({layers[number].name})" for number in bounds[1:-1])])


def best_boundaries(
    layers: Sequence[StageLayer], parts: int, step_ms: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Those with the shortest step among the division whose heaviest part is lightest, the present one, and what comes
    of moving a boundary of the best by a layer as long as that helps. Raises NotJudged for fewer layers than parts.

    step_ms: what a step takes with boundaries, ms.
    """
    if len(layers) < parts:
        raise NotJudged(f"{parts} stages for {len(layers)} layers; each needs one")
    begin = [tuple(balance([layer.ms for layer in layers], parts))]
    if len(present_boundaries(layers)) == parts + 1:
        begin.append(present_boundaries(layers))
    known = {bounds: step_ms(bounds) for bounds in begin}
    best = min(known, key=lambda bounds: known[bounds])
    while len(known) < MOST_REPLAYED:
        moved = [bounds for bounds in _moved(best) if bounds not in known]
        known |= {bounds: step_ms(bounds) for bounds in moved[: MOST_REPLAYED - len(known)]}
        better = min(known, key=lambda bounds: known[bounds])
        if better == best:
            break
        best = better
    return best


def _moved(bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """With one boundary a layer earlier or later."""
    found = []
    for i in range(1, len(bounds) - 1):
        for step in (-1, 1):
            moved = (*bounds[:i], bounds[i] + step, *bounds[i + 1 :])
            if all(low < high for low, high in pairwise(moved)):
                found.append(moved)
    return found
