"""What the stages of another layout compute for a micro-batch, and how much of the model each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsprof.engine.partition import balance

from ..rules.base import NotJudged
from ..work.stage_layers import StageLayer
from .layout_costs import LayoutCosts


@dataclass(frozen=True)
class StageWork:
    """Of each stage, as a rank of the run would have it.

    forward, backward: ms a micro-batch of the run, backward without computing activations again
    model_bytes:       of its parameters
    layers:            of the stages that ran, how many it is
    divided:           whether it is other stages than ran
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    model_bytes: tuple[float, ...]
    layers: tuple[float, ...]
    divided: bool

    def uneven(self, more: float) -> StageWork:
        """The first takes so much more, and the others as much less between them."""
        count = len(self.forward)
        if count < 2:
            return self
        share = [1 + more] + [1 - more / (count - 1)] * (count - 1)

        def of(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(value * times for value, times in zip(values, share, strict=True))

        return StageWork(of(self.forward), of(self.backward), self.model_bytes, self.layers, self.divided)


def stage_work(costs: LayoutCosts, stages: int, boundaries: Sequence[int] | None = None) -> StageWork:
    """Of so many stages, with these boundaries between layers. Without, those that ran; or of layers, divided so that
    the heaviest is lightest; or, where layers were not timed, even parts of those that ran or several of them together.
    Raises NotJudged."""
    count = costs.stage_count
    forward = [costs.taken[stage, "F"] for stage in range(count)]
    again = costs.computed_again if costs.ran.recompute else 0.0  # stages whose forwards are longer compute more again
    backward = [max(costs.taken[stage, "B"] - again * forward[stage], 0.0) for stage in range(count)]
    model = list(costs.model_bytes or [0.0] * count)
    if boundaries is not None:
        return _of_layers(costs, stages, forward, backward, model, boundaries)
    if stages == count:
        return StageWork(tuple(forward), tuple(backward), tuple(model), (1.0,) * count, False)
    if costs.layers is not None:
        return _of_layers(costs, stages, forward, backward, model)
    if stages % count and count % stages:
        raise NotJudged(
            f"{stages} stages can be told from the {count} that ran only with what each layer takes, which was not "
            "timed: run again with --level full"
        )

    def even(values: Sequence[float]) -> tuple[float, ...]:
        if stages % count == 0:
            parts = stages // count
            return tuple(value / parts for value in values for _ in range(parts))
        each = count // stages
        return tuple(sum(values[i * each : (i + 1) * each]) for i in range(stages))

    return StageWork(even(forward), even(backward), even(model), even([1.0] * count), True)


def _of_layers(
    costs: LayoutCosts,
    stages: int,
    forward: Sequence[float],
    backward: Sequence[float],
    model: Sequence[float],
    boundaries: Sequence[int] | None = None,
) -> StageWork:
    layers = costs.layers or ()
    if len(layers) < stages:
        raise NotJudged(f"{stages} stages for {len(layers)} layers; each needs one")
    bounds = boundaries or balance([layer.ms for layer in layers], stages)
    held = [sum(layer.stage == stage for layer in layers) for stage in range(costs.stage_count)]
    there = _with_rest([layer.forward_ms for layer in layers], layers, forward)
    back = _with_rest([layer.backward_ms for layer in layers], layers, backward)
    share = [1 / held[layer.stage] for layer in layers]
    size = [model[layer.stage] * part for layer, part in zip(layers, share, strict=True)]

    def of_stages(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[low:high]) for low, high in pairwise(bounds))

    return StageWork(of_stages(there), of_stages(back), of_stages(size), of_stages(share), True)


def _with_rest(ms: Sequence[float], layers: Sequence[StageLayer], taken: Sequence[float]) -> list[float]:
    """What each layer takes, so that those of a stage together take what it computed: where its calls took longer, they
    waited inside; where less, the rest, such as the loss, goes where the stage's last layer does."""
    found = list(ms)
    for stage, whole in enumerate(taken):
        mine = [number for number, layer in enumerate(layers) if layer.stage == stage]
        total = sum(ms[number] for number in mine)
        for number in mine:
            found[number] = ms[number] * min(1.0, whole / total if total else 1.0)
        if mine:
            found[mine[-1]] += max(whole - total, 0.0)
    return found
