"""How the layers of a model are divided among the stages of a pipeline, each of which gets consecutive ones.

What is divided evenly is a weight that each layer has, by one of DeepSpeed's methods or from measured costs. The
heaviest stage is as light as it can be: it sets the pace of all. Among divisions that are equal in that, the one with
the smallest sum of squares, so that the others are even too; among these, the one whose boundaries are as late as can
be, the first one first. So with `uniform` the first stages have one layer more, as in DeepSpeed, and a layer without
weight stays with the one before it.

Where ranks are of unequal speed, what is as light as it can be is the heaviest weight / speed; the smallest sum of
squares is of these, too.

With virtual stages the parts are ranks * virtual_stages, and part s goes to rank s % ranks. Parts are balanced one by
one: no rank then has more than virtual_stages times the heaviest part.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from dsprof.words import did_you_mean

METHODS: Final = ("parameters", "uniform", "type:REGEX", "measured")
"""What `partition` takes besides explicit boundaries."""


def partition(
    method: str | Sequence[int],
    parts: int,
    classes: Sequence[str],
    *,
    parameters: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[int]:
    """Boundaries of `parts` stages: stage s has layers bounds[s] up to, without, bounds[s + 1]. At least one each.

    `speeds` are those of the ranks, part s being on rank s % len(speeds); by default all are equally fast.

    - `uniform`: as many layers for each.
    - `parameters`: as many parameters; `parameters` has each layer's count. If none has any, as `uniform`.
    - `type:REGEX`: as many layers whose name has a match of REGEX in it, upper or lower case.
    - `measured`: as much time; `costs` has what each layer takes, in seconds (`read_costs`).
    - a list [0, ..., layers] of parts + 1 numbers: these boundaries.

    `classes` has each layer's name: its class, or what a function was defined as. Raises ValueError, with what to write
    instead, for a method that there is not or that lacks what it divides by, more stages than layers, boundaries that
    are none, and a REGEX that is none or matches fewer layers than there are stages.
    """
    layers = len(classes)
    if parts < 1:
        raise ValueError(f"a pipeline of {parts} stages; it needs at least 1")
    if layers < parts:
        raise ValueError(f"{parts} stages for {layers} layers; each needs one, so write at most {layers} stages")
    if not isinstance(method, str):
        return _explicit(method, parts, layers)
    kind, _, pattern = method.partition(":")
    if method.lower() == "uniform":
        return balance([1] * layers, parts, speeds)
    if method.lower() == "parameters":
        weights = _weights("parameters", "parameter counts", parameters, layers)
        return balance(weights if any(weights) else [1] * layers, parts, speeds)
    if method.lower() == "measured":
        weights = _weights("measured", "measured costs", costs, layers)
        if not any(weights):
            raise ValueError('partition method "measured": all costs are 0; measure again, or write "parameters"')
        return balance(weights, parts, speeds)
    if kind.lower() == "type" and pattern:
        return balance(_matches(pattern, classes, parts), parts, speeds)
    raise ValueError(_unknown(method, parts))


def balance(weights: Sequence[float], parts: int, speeds: Sequence[float] | None = None) -> list[int]:
    """Boundaries of `parts` runs of weights, at least one each, of which the heaviest is as light as it can be, each
    divided by its speed: run s has speeds[s % len(speeds)].

    Ties as said above. Weights are finite and at least 0, parts at most as many as weights; sums are exact.
    """
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    prefix = [0, *accumulate(int(weight * unit) for weight in exact)]
    slowness = [1 / Fraction(speed) for speed in speeds or (1,)]
    unit = math.lcm(*(each.denominator for each in slowness))
    factors = [int(slowness[part % len(slowness)] * unit) for part in range(parts)]
    limit = _bottleneck(prefix, factors)
    count = len(weights)
    # least[i]: the smallest sum of squares of dividing what begins at i into the stages that remain; and the latest
    # end of the first of these for which it is reached.
    least: list[int | None] = [None] * count + [0]
    ends: list[list[int]] = []
    for remaining, factor in enumerate(reversed(factors), 1):
        after, least, end = least, [None] * (count + 1), [0] * count
        most = limit // factor
        for start in range(count - remaining, -1, -1):
            for stop in range(start + 1, bisect_right(prefix, prefix[start] + most)):
                rest = after[stop]
                if rest is None:
                    continue
                squares = ((prefix[stop] - prefix[start]) * factor) ** 2 + rest
                best = least[start]
                if best is None or squares <= best:
                    least[start], end[start] = squares, stop
        ends.append(end)
    bounds = [0]
    for end in reversed(ends):
        bounds.append(end[bounds[-1]])
    return bounds


def _bottleneck(prefix: Sequence[int], factors: Sequence[int]) -> int:
    """The smallest that the largest of weight x factor can be, of as many runs as `factors`, at least one weight each.

    Where all factors are equal, more parts than needed can always be made."""
    count, equal = len(prefix) - 1, len(set(factors)) == 1

    def suffices(limit: int) -> bool:
        ends = [0]
        for part, factor in enumerate(factors, 1):
            starts, ends, reached = ends, [], 0
            most, last = limit // factor, count - len(factors) + part  # each of the parts behind it needs one weight
            for start in starts:
                stop = min(bisect_right(prefix, prefix[start] + most) - 1, last)
                ends += range(max(start, reached) + 1, stop + 1)
                reached = max(reached, stop)
            if equal:  # a part that ends as late as it can leaves no more to the others
                del ends[:-1]
        return count in ends

    low, high = 0, prefix[-1] * max(factors)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def read_costs(path: str | Path, names: Sequence[str] | None = None) -> list[float]:
    """What each layer takes, in seconds, from a JSON file: forward and backward together.

    The file has `[0.012, 0.034, ...]`, or what a profile writes,
    `{"layers": [{"name": "blocks.0", "forward_s": 0.004, "backward_s": 0.008}, ...]}`, one for each layer in order;
    `name` may be left out, other keys are passed over. `names` are the model's layers: as many there must be, and where
    the file names one, it is to be that. Raises ValueError for a file that is none of this, or another model's.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"costs of layers: cannot read {path}: {error}") from error
    layers = content.get("layers") if isinstance(content, dict) else content
    if not isinstance(layers, list):
        raise ValueError(
            f"costs of layers: {path} has neither a list of seconds nor "
            f'{{"layers": [{{"name": ..., "forward_s": ..., "backward_s": ...}}, ...]}}'
        )
    if names is not None and len(layers) != len(names):
        raise ValueError(f"costs of layers: {path} has {len(layers)} layers, and the model {len(names)}; measure again")
    for index, layer in enumerate(layers):
        name = layer.get("name") if isinstance(layer, dict) else None
        if names is not None and name is not None and name != names[index]:
            raise ValueError(
                f'costs of layers: {path} has "{name}" as layer {index}, the model "{names[index]}"; measure again'
            )
    return [_seconds(layer, index, path) for index, layer in enumerate(layers)]


def _seconds(layer: Any, index: int, path: str | Path) -> float:
    """The cost of one layer as the file has it."""
    values: list[Any] = [layer.get("forward_s"), layer.get("backward_s")] if isinstance(layer, dict) else [layer]
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(
                f"costs of layers: layer {index} in {path} is {json.dumps(layer)}; "
                f"write seconds, or forward_s and backward_s in seconds"
            )
    return float(sum(values))


def _explicit(bounds: Sequence[int], parts: int, layers: int) -> list[int]:
    numbers = all(isinstance(bound, int) for bound in bounds)
    ends = numbers and len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == layers
    if not ends or any(start >= stop for start, stop in pairwise(bounds)):
        raise ValueError(
            f"partition boundaries {list(bounds)} do not divide {layers} layers into {parts} stages; "
            f"write {parts + 1} rising numbers, the first 0 and the last {layers}"
        )
    return list(bounds)


def _weights(method: str, what: str, weights: Sequence[float] | None, layers: int) -> Sequence[float]:
    """`weights` if there is one for each layer, and none is negative, infinite or NaN."""
    if weights is None:
        raise ValueError(f'partition method "{method}" needs {what} of the layers, and there are none')
    if len(weights) != layers:
        raise ValueError(f'partition method "{method}": {len(weights)} {what} for {layers} layers; give one for each')
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f'partition method "{method}": layer {index} has {weight}; {what} are at least 0')
    return weights


def _matches(pattern: str, classes: Sequence[str], parts: int) -> list[int]:
    """1 for each class that matches, else 0."""
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f'partition method "type:{pattern}": not a regular expression: {error}') from None
    matches = [int(regex.search(name) is not None) for name in classes]
    if sum(matches) < parts:
        number = {name: classes.count(name) for name in classes}
        there = ", ".join(f"{name} ({count})" for name, count in number.items())
        raise ValueError(
            f'partition method "type:{pattern}": matches {sum(matches)} layers for {parts} stages; the classes of '
            f"layers are {there}"
        )
    return matches


def _unknown(method: str, parts: int) -> str:
    if method.lower() == "profile":
        return 'partition method "profile": DeepSpeed has only the name; write "measured"'
    return (
        f'there is no partition method "{method}"; write one of {", ".join(METHODS)}, or a list of {parts + 1} '
        f"boundaries{did_you_mean(method, METHODS)}"
    )
