"""What a linear layer takes in float8, and what it takes as it is: a function of its shapes and of a device's rates.

A layer of inputs [M, K] and a weight [N, K] computes three products of 2 M K N operations: its outputs, the gradients
of its inputs, and those of its weight. In float8 these are faster, and casts come beside them, which read and write
each of inputs, weight and output gradients several times, at the rate of the memory. So large layers gain, and small
ones lose: casts grow with M K + K N + M N, products with M K N. Standard library only: `dsprof.analyzer` and
`dsprof doctor` ask it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from dsprof.data_sheets import find_device

Recipe = Literal["tensorwise", "rowwise"]

MULTIPLE: Final = 16
"""By which the sizes of a matrix must divide, so that devices multiply it in float8."""

CAPABILITY: Final = (8, 9)
"""Of a CUDA device that has float8, at least."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches, not what it could at most.

    flops: operations a second of products as they are; float8: of those in float8; bytes: a second, read or written
    launch: seconds that a small kernel takes at least
    item_bytes: of an element as it is
    fused: whether a cast is one kernel, or one for each operation
    """

    flops: float
    float8: float
    bytes: float
    launch: float
    item_bytes: int = 2
    fused: bool = True


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer for one micro-batch, forward and backward.

    as_is: its products as they are; products: the same in float8; casts: what comes beside them
    """

    as_is: float
    products: float
    casts: float

    @property
    def float8(self) -> float:
        """All that it takes in float8."""
        return self.products + self.casts

    @property
    def saved(self) -> float:
        """Negative: float8 is slower."""
        return self.as_is - self.float8


def layer_time(m: int, k: int, n: int, rates: Rates, recipe: Recipe = "tensorwise") -> LayerTime:
    """Of a layer whose inputs are [m, k] and whose weight is [n, k]."""
    inputs, weight, outputs = m * k, k * n, m * n
    operations, item = 2.0 * m * k * n, rates.item_bytes

    def products(flops: float, factor_bytes: int) -> float:
        total = 0.0
        for one, other, result in ((inputs, weight, outputs), (outputs, weight, inputs), (outputs, inputs, weight)):
            moved = factor_bytes * (one + other) + item * result
            total += max(operations / flops, moved / rates.bytes) + rates.launch
        return total

    moved, kernels = 0.0, 0
    for elements, turned_again in ((inputs, True), (weight, True), (outputs, recipe == "rowwise")):
        of_tensor, of_launches = _cast(recipe, item, rates.fused, turned_again)
        moved += elements * of_tensor
        kernels += of_launches
    casts = moved / rates.bytes + kernels * rates.launch
    return LayerTime(products(rates.flops, item), products(rates.float8, 1), casts)


def _cast(recipe: Recipe, item: int, fused: bool, turned_again: bool) -> tuple[int, int]:
    """Bytes moved for an element of a tensor that is cast, and kernels: for a product in forward, or of the gradient of
    inputs, and `turned` for another one. What is scaled as a whole needs its largest element once; by rows, those of
    its columns, too. `turned_again`: it is cast from the tensor itself; else what was cast is copied."""
    largest, of_largest = item, 3 if fused else 7
    cast, of_cast = (item + 1, 1) if fused else (3 * item + 1, 2)
    copied = 0 if fused and turned_again else 2
    turned, of_turned = (cast + copied, of_cast + copied // 2) if turned_again else (2, 1)
    times = 2 if recipe == "rowwise" else 1
    return times * largest + cast + turned, times * of_largest + of_cast + of_turned


def divides(*sizes: int) -> bool:
    """Whether devices multiply matrices of these sizes in float8."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


# --- rates of devices that are listed

REACHED: Final[Mapping[str, tuple[float, float, float]]] = {
    "as it is": (0.70, 0.70, 0.70),
    "float8": (0.50, 0.58, 0.70),
    "memory": (0.60, 0.75, 0.90),
}
"""What of a data sheet's peak is reached, at least, as expected and at most. From torchao's measurements on an H100 in
its own fused casts: 1.39 times as fast at M, K, N = 4096, 8192, 16384, and 0.80 at 1024, 2048, 1024."""

LAUNCH: Final = 2e-6
"""Seconds, of a kernel of one element on an H100, as torchao measured it."""


def listed_rates(name: str, dtype: str, *, tf32: bool = False, fused: bool = True) -> tuple[Rates, Rates, Rates] | None:
    """Rates of the device that torch calls `name`, for layers in `dtype`: those at which float8 gains least, as
    expected, and most. None for one that is not listed, or has no float8."""
    device = find_device(name)
    if device is None or device.tb_a_second is None:
        return None
    flops, float8 = device.flops(dtype, tf32), device.flops("float8", False)
    if flops is None or float8 is None:
        return None
    item = 4 if dtype == "float32" else 2
    least, expected, most = (
        Rates(flops * as_is, float8 * quick, device.tb_a_second * 1e12 * memory, LAUNCH, item, fused)
        for as_is, quick, memory in zip(REACHED["as it is"], REACHED["float8"], REACHED["memory"], strict=True)
    )
    return least, expected, most
