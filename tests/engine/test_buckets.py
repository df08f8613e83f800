"""How gradients come into the bucket that they travel in."""

from __future__ import annotations

import itertools
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


def test_gradients_of_the_buckets_dtype_come_in_one_pass() -> None:
    rows, passes = written(1, torch.float32, 1.0)
    assert rows == [[0, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert passes == ["cat"]


def test_gradients_of_another_dtype_are_turned_all_at_once() -> None:
    """A `cat` whose `out` is of another dtype turns each by itself, and takes four times as long."""
    rows, passes = written(1, torch.bfloat16, 1.0)
    assert rows == [[0, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert passes == ["cat", "copy_"]


@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=3)))
def test_gradients_of_several_dtypes_come_into_one_bucket(dtypes: tuple[torch.dtype, ...]) -> None:
    """As where some have been added up over micro-batches, in fp32, and some have come in the last one alone. That of
    a convolution may lie in memory by channels."""
    first, second, wire = dtypes
    bucket = Bucket([], wire)
    for numel in (8, 3):
        bucket.add(Param(numel, 1))  # type: ignore[arg-type]
    rows = torch.zeros(1, bucket.width, dtype=wire)
    weight = torch.arange(8.0).view(1, 2, 2, 2).to(first).to(memory_format=torch.channels_last)
    bucket.write(rows, [0, 1], [weight, torch.arange(8.0, 11.0).to(second)], 1.0)
    assert rows.tolist() == [list(range(11))]


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
