"""What tests of float8 share: counting its products, and a model in it without an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from dsprof.engine.precision import linear as module
from dsprof.engine.precision.gain import divides
from dsprof.engine.precision.linear import Arithmetic

ALONE: Final[dict[str, Any]] = {"dist_init_required": False}
RECIPES: Final = ("tensorwise", "rowwise")


def float8(**more: Any) -> dict[str, Any]:
    return {"fp8": {"enabled": True, "filter": "all", **more}}


@dataclass
class Counter:
    products: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts matrix products in float8, emulated ones too."""
    linear: Any = module
    counter, known = Counter(), linear.product

    def product(*args: Any, **kwargs: Any) -> Tensor:
        counter.products += 1
        return known(*args, **kwargs)

    linear.product = product
    try:
        yield counter
    finally:
        linear.product = known


def far(one: Tensor, other: Tensor) -> float:
    """The distance of a tensor from another, as a part of that."""
    distance: Tensor = (one.double() - other.double()).norm() / other.double().norm()
    return distance.item()


@contextlib.contextmanager
def in_float8(model: nn.Module, by: Arithmetic, parts: int = 1) -> Iterator[None]:
    """All layers of the model that 16 divides, or each of their `parts`."""

    def takes(name: str, m: int, k: int, n: int) -> bool:
        by_inputs = name.rpartition(".")[2] in ("out", "down")
        return divides(k // parts, n) if by_inputs else divides(k, n // parts)

    undo = module.install(model, by, takes)
    try:
        yield
    finally:
        undo()
