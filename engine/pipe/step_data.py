"""What a run of a pipeline reads, on the ranks that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..tree import to_device
from .p2p import PipelineError


class StepData:
    """The micro-batches of one run, read when they are needed, and released when they have been used."""

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device,
        wanted: tuple[bool, bool],
        make: Callable[[Any], Any],
        caller: str,
        check: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        """`wanted`: whether inputs are used here, and whether labels are; what is not stays where it is. `make` makes
        both of what is read. `caller` is whom errors are about."""
        self._caller = caller
        self._source = source
        self._device = device
        self._wanted = wanted
        self._make = make
        self._check = check
        self._read = 0
        self._unused: dict[tuple[int, int], Any] = {}

    def inputs(self, microbatch: int) -> Any:
        """What the first stage gets."""
        return self._part(microbatch, 0)

    def labels(self, microbatch: int) -> Any:
        """What the loss is taken against."""
        return self._part(microbatch, 1)

    def _part(self, number: int, part: int) -> Any:
        if not self._wanted[part]:
            return None
        while self._read <= number:
            batch = self._make(self._next())
            self._check(batch)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                raise PipelineError(
                    f"{self._caller}: the iterator gave {kind}; a pipeline takes (inputs, labels), each a tensor or a "
                    "tuple of tensors"
                )
            for at in (0, 1):
                if self._wanted[at]:
                    self._unused[self._read, at] = to_device(batch[at], self._device)
            self._read += 1
        return self._unused.pop((number, part))

    def _next(self) -> Any:
        if not isinstance(self._source, Iterator):
            raise PipelineError(
                f"{self._caller}: data_iter is a {type(self._source).__name__}, and not an iterator; pass "
                "iter(deepspeed.utils.RepeatingLoader(loader)), or set engine.set_dataloader(loader) once"
            )
        try:
            return next(self._source)
        except StopIteration:
            raise PipelineError(
                f"{self._caller}: the iterator ended after {self._read} micro-batches of the step; it must give "
                "gradient_accumulation_steps of them for each"
            ) from None
