"""The blocks in and between which activations are sharded along the sequence, and how a pass goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..pipe.module import Passage, PipelineModule


@dataclass(frozen=True)
class Stretch:
    """A stretch of a pipeline's layers, over however many stages: those from number `first` to `last`, of `count`."""

    first: int
    last: int
    count: int

    def arrives_sharded(self, start: int) -> bool:
        """Whether a stage that begins with layer `start` is sent parts of activations."""
        return start > 0 and self.first <= start <= self.last + 1


@dataclass(frozen=True)
class Stack:
    """The blocks in and between which activations are sharded along the sequence."""

    blocks: tuple[str, ...]
    dim: int
    stretch: Stretch | None = None
    """Where they are, in a pipeline."""

    @property
    def first(self) -> str:
        """The block that activations enter."""
        return self.blocks[0]

    @property
    def last(self) -> str:
        """The block that they leave."""
        return self.blocks[-1]

    def holds(self, module: str) -> bool:
        """Whether `module` is one of the blocks, or in one."""
        return any(module == block or module.startswith(f"{block}.") for block in self.blocks)


def on_first_activation(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block, or what it returned, with `function` of the first activation: floating point, and at least
    batch, sequence and features. A tuple may hold it."""
    done = False

    def visit(value: Any) -> Any:
        nonlocal done
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3 and not done:
            done = True
            return function(value)
        if type(value) in (tuple, list):
            return type(value)(map(visit, value))
        return value

    return tuple(map(visit, args)), {key: visit(value) for key, value in kwargs.items()}


class Edges:
    """What is done to activations at the edges of the blocks, and of a stage's share of them. Here, nothing."""

    def arrive(self, value: Any) -> Any:
        """A stage's input that comes sharded."""
        return value

    def split(self, value: Any) -> Any:
        """What the first block is to get."""
        return value

    def join(self, value: Any) -> Any:
        """What the last block gave."""
        return value

    def begin(self, value: Any) -> None:
        """The first block of a stage is about to get this."""

    def end(self) -> None:
        """The last block of a stage has returned."""


def passage(stretch: Stretch, start: int, stop: int, edges: Edges) -> Passage:
    """One pass through layers `start` to before `stop` of the row."""
    first_here, last_here = max(start, stretch.first), min(stop - 1, stretch.last)

    def call_layer(at: int, call: Callable[[Any], Any], value: Any) -> Any:
        if at == start and stretch.arrives_sharded(start):
            value = edges.arrive(value)
        if at == stretch.last + 1:
            value = edges.join(value)
        if at == stretch.first == 0:
            value = edges.split(value)
        if at == first_here <= last_here:
            edges.begin(value)
        value = call(value)
        if first_here <= last_here == at:
            edges.end()
        if at + 1 == stretch.first:
            value = edges.split(value)
        if at == stretch.last == stretch.count - 1:
            value = edges.join(value)
        return value

    return call_layer


@contextmanager
def passed_by(model: nn.Module, made: Callable[[int, int], Passage]) -> Iterator[None]:
    """Have the pipeline's layers called by what `made` makes, for a while."""
    assert isinstance(model, PipelineModule)
    before, model.passage = model.passage, made
    try:
        yield
    finally:
        model.passage = before


def of_first(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of its first activation."""
    return on_first_activation(function, (value,), {})[0][0]
