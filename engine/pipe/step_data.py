"""What a run of a pipeline reads, on the ranks that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..tree import to_device
from .p2p import PipelineError


@dataclass(eq=False, slots=True)
class StepData:
    """The micro-batches of one run, read when they are needed, and released when they have been used."""

    source: Iterator[Any]
    device: torch.device
    wanted: tuple[bool, bool]
    """Whether inputs are used here, and whether labels are; what is not stays where it is."""
    make: Callable[[Any], Any]
    """Makes both of what is read."""
    caller: str
    """Whom errors are about."""
    check: Callable[[Any], None] = lambda batch: None
    _read: int = field(default=0, init=False)
    _unused: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)

    def inputs(self, microbatch: int) -> Any:
        """What the first stage gets."""
        return self._part(microbatch, 0)

    def labels(self, microbatch: int) -> Any:
        """What the loss is taken against."""
        return self._part(microbatch, 1)

    def _part(self, number: int, part: int) -> Any:
        if not self.wanted[part]:
            return None
        while self._read <= number:
            batch = self.make(self._next())
            self.check(batch)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                raise PipelineError(
                    f"{self.caller}: the iterator gave {kind}; a pipeline takes (inputs, labels), each a tensor or a "
                    "tuple of tensors"
                )
            for at in (0, 1):
                if self.wanted[at]:
                    self._unused[self._read, at] = to_device(batch[at], self.device)
            self._read += 1
        return self._unused.pop((number, part))

    def _next(self) -> Any:
        if not isinstance(self.source, Iterator):
            raise PipelineError(
                f"{self.caller}: data_iter is a {type(self.source).__name__}, and not an iterator; pass "
                "iter(deepspeed.utils.RepeatingLoader(loader)), or set engine.set_dataloader(loader) once"
            )
        try:
            return next(self.source)
        except StopIteration:
            raise PipelineError(
                f"{self.caller}: the iterator ended after {self._read} micro-batches of the step; it must give "
                "gradient_accumulation_steps of them for each"
            ) from None
