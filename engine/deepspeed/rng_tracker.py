"""`deepspeed.checkpointing.get_cuda_rng_tracker` and what seeds it: random numbers for what each rank has a part of.

A stream is made anew at each `fork`, of the generator's next number and of the stream's seed. Nothing is remembered, so
what activation checkpointing computes again draws the same numbers again. They are not those that DeepSpeed draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from ..activation_checkpoint import model_parallel_rank
from ..tensor.rng import RankStream
from .accelerator import get_accelerator

MODEL_PARALLEL: Final = "model-parallel-rng"
OFFSET: Final = 2718
"""Megatron's and DeepSpeed's, between the seed of what ranks have alike and the seed of what they divide."""


class RandomStreams:
    """Streams by name, each with a seed of its own."""

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget them."""
        self._seeds = {}

    def get_states(self) -> dict[str, int]:
        """Name -> seed, which is all there is of a stream; for a checkpoint."""
        return dict(self._seeds)

    def set_states(self, states: Mapping[str, int]) -> None:
        """What `get_states` gave."""
        self._seeds = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new stream. Raises ValueError if there is one of that name, or seed."""
        if name in self._seeds or seed in self._seeds.values():
            raise ValueError(f"get_cuda_rng_tracker().add({name!r}, {seed}): there is one with it, of {self._seeds}")
        self._seeds[name] = seed

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """The block whose random numbers are this stream's. Raises ValueError if there is none of that name."""
        if name not in self._seeds:
            raise ValueError(
                f"get_cuda_rng_tracker().fork({name!r}): there is no such stream; call "
                "deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed) first, or add it"
            )
        stream = RankStream(self._seeds[name])
        stream.enter(torch.device(get_accelerator().current_device_name()), name)
        try:
            yield
        finally:
            stream.leave()


STREAMS: Final = RandomStreams()


def get_cuda_rng_tracker() -> RandomStreams:
    """The process's streams."""
    return STREAMS


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, on all ranks alike, and the stream of what the ranks of `configure`'s mpu divide, each anew."""
    STREAMS.reset()
    get_accelerator().manual_seed(seed)
    STREAMS.add(MODEL_PARALLEL, seed + OFFSET + model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed that stream alone."""
    STREAMS.set_states({**STREAMS.get_states(), MODEL_PARALLEL: seed + OFFSET + model_parallel_rank()})
