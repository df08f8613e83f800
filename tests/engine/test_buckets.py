"""How gradients come into the bucket that they travel in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsprof.engine.config import Config
from dsprof.engine.zero.bucket import Bucket, scales
from dsprof.engine.zero.shard import Partition

VIEWS = ("view", "slice", "select", "reshape", "alias")


@dataclass(eq=False)
class Param:
    """As much of a parameter as a bucket looks at."""

    numel: int
    ranks: int
    partition: Partition = field(init=False)

    def __post_init__(self) -> None:
        self.partition = Partition(self.numel, self.ranks)


class Passes(TorchDispatchMode):
    """The names of what goes over elements."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def written(ranks: int, dtype: torch.dtype, scale: float) -> tuple[list[list[float]], list[str]]:
    """The rows of a bucket of three gradients, one of them without elements and one beyond the bucket's first columns,
    and what went over elements on the way there."""
    bucket = Bucket([], dtype)
    for numel in (2, 4, 0, 3):
        bucket.add(Param(numel, ranks))  # type: ignore[arg-type]
    rows = torch.zeros(ranks, bucket.width, dtype=dtype)
    grads: list[Tensor] = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(0), torch.tensor([5.0, 6.0, 7.0])]
    with Passes() as passes:
        bucket.write(rows, [1, 2, 3], grads, scale)
    return rows.tolist(), passes.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_not_sharded_come_in_one_pass(dtype: torch.dtype) -> None:
    rows, passes = written(1, dtype, 1.0)
    assert rows == [[0, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert passes == ["cat"]


def test_each_rank_has_a_row_of_its_shards() -> None:
    rows, _ = written(2, torch.float32, 1.0)
    assert rows == [[0, 1, 2, 5, 6], [0, 3, 4, 7, 0]]


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, [[0, 0, 2, 4, 6, 8, 10, 12, 14]]), (2, [[0, 2, 4, 10, 12], [0, 6, 8, 14, 0]])]
)
def test_a_scale_goes_over_them_in_the_bucket(ranks: int, expected: list[list[float]]) -> None:
    rows, passes = written(ranks, torch.float32, 2.0)
    assert rows == expected
    assert passes[-1] == "mul_"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, (1.0, 0.25)),
        ({"prescale_gradients": True}, (0.25, 1.0)),
        ({"gradient_predivide_factor": 2.0}, (0.5, 0.5)),
    ],
)
def test_ranks_are_divided_by_where_it_is_said(section: dict[str, Any], expected: tuple[float, float]) -> None:
    assert scales(4, Config(**section)) == expected
