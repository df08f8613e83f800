"""Random numbers under tensor parallelism: what all ranks hold alike drops alike, what is sharded drops for itself.

All ranks of a group draw from the same stream (`same_random_numbers`), so dropout on a replicated activation agrees.
Where activations are sharded, the generator is set aside and goes on from a seed made of that stream and the rank
(`RankStream`). Nothing else is remembered: a recomputation, which begins with the generator of the forward, draws the
same again.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor

from ..comm.comm import Comm

_MASK: Final = (1 << 63) - 1


def same_random_numbers(comm: Comm, device: torch.device) -> None:
    """Have every rank of `comm` go on with the first one's random numbers, on the CPU and on `device`."""
    if comm.group is None:
        return
    for generator in {id(g): g for g in (_generator(torch.device("cpu")), _generator(device))}.values():
        seed = torch.tensor([_next_seed(generator)], dtype=torch.int64, device=comm.device)
        comm.broadcast(seed, 0, "tensor-parallel").wait()
        generator.manual_seed(int(seed.item()))


class RankStream:
    """Random numbers of this rank's own, between `enter` and `leave`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: tuple[torch.Generator, Tensor] | None = None
        self._entered: set[str] = set()

    def enter(self, device: torch.device, by: str) -> None:
        """Leave the stream of all ranks, unless that has been done. `by`: the layer at which this happens.

        One that comes here twice without a `leave` is in a new pass, and the last was broken off: by an error, or by a
        recomputation that had all it needed.
        """
        if self._shared is not None and by not in self._entered:
            self._entered.add(by)
            return
        generator = _generator(device)
        seed = _next_seed(generator)
        self._shared = generator, generator.get_state()
        self._entered = {by}
        generator.manual_seed(_mix(seed, self._rank + 1))

    def leave(self, *, forget: bool = True) -> None:
        """Go on with the stream of all ranks. Without `forget`, the next `leave` goes on from there again."""
        if self._shared is not None:
            generator, state = self._shared
            generator.set_state(state)
        if forget:
            self._shared = None


def _generator(device: torch.device) -> torch.Generator:
    """The one that dropout uses."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _next_seed(generator: torch.Generator) -> int:
    """A number from the stream, which moves on by it."""
    if generator.device.type == "cpu":
        return int(torch.randint(_MASK, (), generator=generator, dtype=torch.int64).item())
    offset = generator.get_offset()  # to draw one and read it would wait for the device
    generator.set_offset(offset + 4)
    return _mix(generator.initial_seed(), offset)


def _mix(a: int, b: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{a} {b}".encode(), digest_size=8).digest(), "little") & _MASK
