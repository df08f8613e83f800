"""How gradients come into the bucket that they travel in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsprof.engine.comm.comm import Rows, as_rows
from dsprof.engine.config import Config
from dsprof.engine.zero.bucket import Bucket
from dsprof.engine.zero.gradients import scales
from dsprof.engine.zero.shares import Partition, Shares, equal

VIEWS = ("view", "slice", "select", "reshape", "alias")


@dataclass(eq=False)
class Param:
    """As much of a parameter as a bucket looks at."""

    numel: int
    shares: Shares
    place: int = 0
    partition: Partition = field(init=False)

    def __post_init__(self) -> None:
        self.partition = Partition(self.numel, self.shares)


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
        bucket.add(Param(numel, equal(ranks)))  # type: ignore[arg-type]
    rows = torch.zeros(ranks, bucket.width, dtype=dtype)
    grads: list[Tensor] = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(0), torch.tensor([5.0, 6.0, 7.0])]
    with Passes() as passes:
        bucket.write(as_rows(rows), [1, 2, 3], grads, scale)
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
        bucket.add(Param(numel, equal(1)))  # type: ignore[arg-type]
    rows = torch.zeros(1, bucket.width, dtype=wire)
    weight = torch.arange(8.0).view(1, 2, 2, 2).to(first).to(memory_format=torch.channels_last)
    bucket.write(as_rows(rows), [0, 1], [weight, torch.arange(8.0, 11.0).to(second)], 1.0)
    assert rows.tolist() == [list(range(11))]


def test_each_rank_has_a_row_of_its_shards() -> None:
    rows, _ = written(2, torch.float32, 1.0)
    assert rows == [[0, 1, 2, 5, 6], [0, 3, 4, 7, 0]]


def test_rows_are_as_long_as_what_each_rank_holds() -> None:
    """Shares 1 : 1 : 2, and a rank with nothing; what two equal ranks get goes over the elements at once."""
    bucket = Bucket([], torch.float32)
    for numel in (8, 3):
        bucket.add(Param(numel, Shares([1, 1, 2, 0])))  # type: ignore[arg-type]
    assert bucket.shapes == [(2, 6), (1, 8), (1, 3)]
    rows = Rows(torch.zeros(23), bucket.shapes)
    bucket.write(rows, [0, 1], [torch.arange(8.0).view(2, 4), torch.arange(8.0, 11.0)], 1.0)
    bucket.absent = [1]
    bucket.flag(rows, False)
    assert [row.tolist() for row in rows.each()] == [
        [0, 1, 0, 1, 0, 0], [2, 3, 0, 1, 0, 0], [4, 5, 6, 7, 0, 1, 0, 0], [1, 0, 0],
    ]  # fmt: skip
    assert rows.of(3).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("numel", "parts", "expected"),
    [
        (7, [1, 2, 4], [(0, 1), (1, 3), (3, 7)]),
        (9, [1, 2], [(0, 3), (3, 9)]),
        (10, [1, 1, 1], [(0, 4), (4, 8), (8, 10)]),  # equal ones, the last shorter
        (10, [2, 2, 1, 0], [(0, 4), (4, 8), (8, 10), (10, 10)]),
        (1, [80, 40], [(0, 1), (1, 1)]),
        (0, [1, 2], [(0, 0), (0, 0)]),
    ],
)
def test_who_has_which_elements(numel: int, parts: list[float], expected: list[tuple[int, int]]) -> None:
    partition = Partition(numel, Shares(parts))
    assert [partition.bounds(rank) for rank in range(len(parts))] == expected
    whole = torch.arange(float(numel))
    rows = [block.to_shards(whole) for block in partition.blocks]
    back = torch.full_like(whole, -1)
    partition.from_shards(rows, back)
    assert back.tolist() == whole.tolist()


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
