"""Which parameters a script has written to: by sums of each on a host, and of blocks of many at once on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsprof.engine.zero import write_check
from dsprof.engine.zero.write_check import BLOCK_BYTES, _OnGpu, _OnHost


@dataclass(eq=False)
class Sharded:
    """As much of a parameter as is looked at."""

    name: str
    shard: torch.Tensor


def shards(sizes: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    return [Sharded(str(at), torch.randn(size).to(dtype)) for at, size in enumerate(sizes)]


def differing(checksums: Any, before: torch.Tensor) -> list[str]:
    return [param.name for param in checksums.params_of((checksums.sums() != before).tolist())]


@pytest.mark.parametrize("kind", ["host", "gpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_those_that_were_written_to_and_no_others(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_check, "BATCH_BYTES", 4 * BLOCK_BYTES)
    draw = random.Random(0)
    stretch = BLOCK_BYTES // dtype.itemsize
    # Of one element, of none but whole stretches, of odd sizes, which are read in small words, and too large to be put
    # together with others.
    params = shards([1, stretch, stretch + 1, 3, 4 * stretch, 4 * stretch + 4, 10, 2 * stretch - 1, 8], dtype)
    checksums = _OnHost(params) if kind == "host" else _OnGpu(params, torch.device("cpu"))
    for _ in range(40):
        before = checksums.sums()
        assert differing(checksums, before) == []
        written = draw.sample(params, draw.randint(1, 3))
        for param in written:
            param.shard[draw.randrange(len(param.shard))].add_(1)
        assert sorted(differing(checksums, before)) == sorted(param.name for param in written)


class Launches(TorchDispatchMode):
    """Names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_many_small_ones_are_summed_up_by_two_kernels() -> None:
    checksums = _OnGpu(shards([1024, 1024 * 256] * 8), torch.device("cpu"))
    assert len(checksums._batches) == 1
    with Launches() as launches:
        checksums.sums()
    assert launches.names == ["cat", "sum", "cat"]  # the last, of all lists' sums, is small
    assert checksums.sums().numel() == sum(-(-2 * size // BLOCK_BYTES) for size in [1024, 1024 * 256] * 8)


def test_a_change_of_sign_is_seen_and_one_of_places_is_not() -> None:
    params = shards([6])
    params[0].shard.copy_(torch.arange(1, 7))  # of one sign: three of each would cancel
    for checksums in (_OnHost(params), _OnGpu(params, torch.device("cpu"))):
        before = checksums.sums()
        params[0].shard.neg_()
        assert differing(checksums, before) == ["0"]
        before = checksums.sums()
        params[0].shard.copy_(params[0].shard.flip(0))
        assert differing(checksums, before) == []
