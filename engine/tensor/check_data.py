"""Ranks that share layers must work on the same data: a loader that gives each rank its own would train on rubbish. And
classes and token ids must be there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dsprof.words import joined

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..tree import leaves

_MULTIPLIER: Final = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed integer


def check_same(
    batch: Any, comm: Comm, kind: Literal["tensor-parallel", "context-parallel"] = "tensor-parallel"
) -> None:
    """Raise ValueError on every rank of `comm`, naming those that differ, unless all pass the same `batch`.

    Tensors are compared by type, shape and a hash of their values, in whatever tuples, lists and dicts they lie; other
    values by their text, where they have one of their own. Costs a pass over the data and one small all-gather.
    """
    if comm.group is None:
        return
    found = list(leaves(batch))
    described = ", ".join(f"{joined(*path)}: {_described(leaf)}".removeprefix(": ") for path, leaf in found)
    shapes = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "little")
    rows = torch.zeros((comm.size, 2), dtype=torch.int64, device=comm.device)
    values = torch.zeros((), dtype=torch.int64, device=comm.device)
    for tensor in (leaf for _, leaf in found if isinstance(leaf, Tensor)):
        values = values * 31 + _hash(tensor).to(values.device)
    rows[comm.rank, 0] = shapes
    rows[comm.rank, 1] = values
    comm.all_gather(rows, kind).wait()
    answers = [tuple(answer) for answer in rows.tolist()]
    usual = Counter(answers).most_common(1)[0][0]
    different = [rank for rank, answer in enumerate(answers) if answer != usual]
    if different:
        what = "shapes" if any(answers[rank][0] != usual[0] for rank in different) else "values"
        listed = ", ".join(f"{dist.get_global_rank(comm.group, rank)} ({kind} rank {rank})" for rank in different)
        raise ValueError(
            f"the data of global rank {listed} differs in its {what} from that of the others in its {kind} group of "
            f"{comm.size}: these ranks share {'layers' if kind == 'tensor-parallel' else 'sequences'} and must get the "
            f"same batch; give the loader the data-parallel rank and size, not the global ones (this rank has "
            f"{described[:200]})"
        )


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Of the tensors in a batch, however nested."""
    return [tuple(leaf.shape) for _, leaf in leaves(batch) if isinstance(leaf, Tensor)]


def check_shares(shapes: list[tuple[int, ...]], shares: Sequence[int], comm: Comm) -> None:
    """Raise ValueError on all ranks of `comm` where two that are to have unequally many samples, `shares` of each, have
    the same `shapes`: those of their batches. On all of them."""
    of_ranks = gather_objects(shapes, comm)
    for rank, other in equal_batches(of_ranks, shares):
        if not shares[rank] or not shares[other]:
            continue
        raise ValueError(
            f"the batches of the data-parallel ranks {rank} and {other} have the same shapes, {of_ranks[rank]}, "
            f"and by heterogeneous.speeds they are to have {shares[rank]} and {shares[other]} samples: pass "
            "training_data to initialize and train on the loader it returns, or make batches of "
            "engine.train_micro_batch_size_per_gpu() samples on each rank"
        )


def equal_batches(shapes: Sequence[list[tuple[int, ...]]], shares: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each two ranks that are to have unequally many samples, `shares` of each, and one where that is 0, and whose
    batches have the same `shapes`."""
    for rank, other in combinations(range(len(shares)), 2):
        alike = any(shapes[rank]) and shapes[rank] == shapes[other]
        if alike and max(1, shares[rank]) != max(1, shares[other]):
            yield rank, other


def check_range(numbers: Tensor, limit: int, said: str) -> None:
    """Raise IndexError unless all `numbers` are from 0 to before `limit`; on a device it is the device that stops.

    `said` has places for the lowest and the highest."""
    if not numbers.numel():
        return
    lowest, highest = numbers.aminmax()
    if numbers.device.type != "cpu":
        torch._assert_async((lowest >= 0) & (highest < limit))
    elif lowest < 0 or highest >= limit:
        raise IndexError(said.format(int(lowest), int(highest)))


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    own = isinstance(leaf, str | bytes | int | float | complex | bool | type(None))
    return repr(leaf) if own else type(leaf).__name__


@torch.no_grad()
def _hash(tensor: Tensor) -> Tensor:
    """A number that depends on every value and its place: a sum of products modulo 2**64, on the tensor's device."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if not plain.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = plain.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    numbers = plain.view(bits).to(torch.int64)
    places = torch.arange(1, numbers.numel() + 1, device=tensor.device) * _MULTIPLIER
    return ((numbers + 1) * (places ^ (places >> 29) | 1)).sum()
