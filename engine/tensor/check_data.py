"""Ranks that share layers must work on the same data: a loader that gives each rank its own would train on rubbish. And
classes and token ids must be there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.comm import Comm

_MULTIPLIER: Final = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed integer


def check_same(batch: Any, comm: Comm) -> None:
    """Raise ValueError on every rank of `comm`, naming those that differ, unless all pass the same `batch`.

    Tensors are compared by type, shape and a hash of their values, in whatever tuples, lists and dicts they lie; other
    values by their text, where they have one of their own. Costs a pass over the data and one small all-gather.
    """
    if comm.group is None:
        return
    tensors: list[Tensor] = []
    described = repr(list(_describe(batch, tensors)))
    shapes = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "little")
    rows = torch.zeros((comm.size, 2), dtype=torch.int64, device=comm.device)
    values = torch.zeros((), dtype=torch.int64, device=comm.device)
    for tensor in tensors:
        values = values * 31 + _hash(tensor).to(values.device)
    rows[comm.rank, 0] = shapes
    rows[comm.rank, 1] = values
    comm.all_gather(rows, "tensor-parallel").wait()
    answers = [tuple(answer) for answer in rows.tolist()]
    usual = Counter(answers).most_common(1)[0][0]
    different = [rank for rank, answer in enumerate(answers) if answer != usual]
    if different:
        what = "shapes" if any(answers[rank][0] != usual[0] for rank in different) else "values"
        listed = ", ".join(
            f"{dist.get_global_rank(comm.group, rank)} (tensor-parallel rank {rank})" for rank in different
        )
        raise ValueError(
            f"the data of global rank {listed} differs in its {what} from that of the others in its tensor-parallel "
            f"group of {comm.size}: these ranks share layers and must get the same batch; give the loader the "
            f"data-parallel rank and size, not the global ones (this rank has {described[:200]})"
        )


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


def _describe(value: Any, tensors: list[Tensor]) -> Iterator[str]:
    """What `value` consists of; its tensors go to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        yield f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif isinstance(value, Mapping):
        for key in value:
            yield f"{key}="
            yield from _describe(value[key], tensors)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"{len(value)} of"
        for item in value:
            yield from _describe(item, tensors)
    else:
        own = isinstance(value, str | bytes | int | float | complex | bool | type(None))
        yield repr(value) if own else type(value).__name__


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
