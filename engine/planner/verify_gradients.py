"""What lies between layers is differentiated on every rank, too: an autograd function whose forward works on parts may
have a backward that does not, as one that counts the features it is given.

Each rank's trial gets its part of one gradient for the input of a layer. What comes out, for the layers before and the
parameters on the way, has to add up over the ranks to what the whole model gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .dependence import gradients, weights_like
from .tracer import Call, Trial

RTOL = 1e-3
"""Of the largest element of a gradient: what may come of computing in fp32 in another order."""

NotEqual = Callable[[int | None, str], Exception]
"""Makes what is raised: of the region in which a gradient differs, and which one it is, in words."""


@dataclass(eq=False)
class _Point:
    """The input of one call of a layer, of which each rank has a part."""

    region: int | None
    weights: Tensor
    """The gradient of the whole input."""
    expected: dict[str, Tensor] = field(default_factory=dict)
    """Of what the input depends on, without a layer in between: its name, and its gradient in the whole model."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """The same over the ranks so far."""


class GradientSums:
    """Gradients of one trial, summed over the ranks that it is run as."""

    def __init__(self, trial: Trial) -> None:
        self._sources = dict(_sources(trial))
        """What gradients lead back to: answers of layers, parameters and buffers."""
        self._points: dict[tuple[str, int], _Point] = {}
        self._seen: set[str] = set()

    def add(self, call: Call, number: int, region: int | None, part: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """`x` is what a rank has computed for the input of `call`, the layer's `number`-th: `part` of the whole.

        Between regions residual branches lead far back: there, each source is looked at once.
        """
        key = (call.module, number)
        if key not in self._points:
            self._points[key] = self._point(call, region)
        point = self._points[key]
        sources = {name: self._sources[name] for name in point.expected}
        for name, gradient in gradients(x, part(point.weights), sources).items():
            point.sums[name] = point.sums[name] + gradient if name in point.sums else gradient

    def check(self, error: NotEqual) -> None:
        """After the last rank: raise `error` for the first gradient that is not the whole model's."""
        for (module, _), point in self._points.items():
            for name, expected in point.expected.items():
                found = point.sums.get(name)
                allowed = RTOL * float(expected.abs().max())
                if found is None or not torch.allclose(found, expected, RTOL, allowed, equal_nan=True):
                    raise error(
                        point.region,
                        f"the gradient of {name} through the input of {module} is not what the whole model computes",
                    )

    def _point(self, call: Call, region: int | None) -> _Point:
        weights = weights_like(call.read)
        asked = {name: x for name, x in self._sources.items() if region is not None or name not in self._seen}
        found = gradients(call.read, weights, asked)
        self._seen.update(found)
        return _Point(region, weights, found)


def _sources(trial: Trial) -> Iterator[tuple[str, Tensor]]:
    for (module, number), call in trial.numbered().items():
        yield f"the output of {module}" + (f" (call {number + 1})" if number else ""), call.wrote
    for name, tensor in trial.stand_ins.items():
        if tensor.requires_grad:
            yield f"{trial.root}.{name}".strip("."), tensor
