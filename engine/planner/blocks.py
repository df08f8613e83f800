"""The blocks in and between which activations are sharded along the sequence, and how a pass goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..pipe.module import Passage, PipelineModule
from .tracer import Trial


@dataclass(frozen=True)
class LayerSpan:
    """A span of a pipeline's layers, over however many stages: those from number `first` to `last`, of `count`."""

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
    span: LayerSpan | None = None
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


def of_first(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` of its first activation."""
    return on_first_activation(function, (value,), {})[0][0]


class Edges:
    """What is done to activations at the edges of the blocks, and of a stage's share of them. Here, nothing."""

    def arrive(self, x: Tensor) -> Tensor:
        """A stage's input that comes sharded."""
        return x

    def split(self, x: Tensor) -> Tensor:
        """What the first block is to get."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """What the last block gave."""
        return x

    def begin(self, x: Tensor) -> Tensor:
        """What the first block of a stage is about to get, or what is about to be split for it."""
        return x

    def end(self) -> None:
        """The last block of a stage has returned."""


def passage(span: LayerSpan, start: int, stop: int, edges: Edges) -> Passage:
    """One pass through layers `start` to before `stop` of a pipeline."""
    first_here, last_here = max(start, span.first), min(stop - 1, span.last)

    def call_layer(at: int, call: Callable[[Any], Any], value: Any) -> Any:
        if at == start and span.arrives_sharded(start):
            value = of_first(edges.arrive, value)
        if at == span.last + 1:
            value = of_first(edges.join, value)
        if at == span.first == 0:
            value = of_first(edges.split, value)
        if at == first_here <= last_here:
            value = of_first(edges.begin, value)
        value = call(value)
        if first_here <= last_here == at:
            edges.end()
        if at + 1 == span.first:
            value = of_first(edges.split, value)
        if at == span.last == span.count - 1:
            value = of_first(edges.join, value)
        return value

    return call_layer


def hook_edges(first: nn.Module, last: nn.Module, edges: Edges) -> list[RemovableHandle]:
    """Have activations split where they enter `first`, and joined where they leave `last`."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return on_first_activation(lambda x: edges.split(edges.begin(x)), args, kwargs)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        edges.end()
        return of_first(edges.join, output)

    return [first.register_forward_pre_hook(enter, with_kwargs=True), last.register_forward_hook(leave)]


@contextmanager
def passed_by(model: nn.Module, made: Callable[[int, int], Passage]) -> Iterator[None]:
    """Have the pipeline's layers called by what `made` makes, for a while."""
    assert isinstance(model, PipelineModule)
    before, model.passage = model.passage, made
    try:
        yield
    finally:
        model.passage = before


@contextmanager
def with_edges(trial: Trial, stack: Stack | None, edges: Edges) -> Iterator[None]:
    """Have `edges` done to activations in the tried module for a while, if it has the blocks, or is a pipeline's."""
    modules = trial.modules
    if stack is None or (stack.span is None and stack.first not in modules):
        yield
    elif stack.span is not None:
        span = stack.span
        with passed_by(trial.module, lambda start, stop: passage(span, start, stop, edges)):
            yield
    else:
        handles = hook_edges(modules[stack.first], modules[stack.last], edges)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
