"""Where the training loop is: waiting for data, or in backward. (Forward: `modules`. Optimizer: `optimizers`.)

These hook points run a few times a step, so they are Python on both recorders.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsprof.schema import Kind

from . import dynamo, facts

if TYPE_CHECKING:
    from .record import Recorder

Uninstall = Callable[[], None]


def install(recorder: Recorder) -> list[Uninstall]:
    """Hook data loading and backward."""
    return [_data(recorder), _backward(recorder)]


def _data(recorder: Recorder) -> Uninstall:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    name = recorder.intern("data")
    load, start = _BaseDataLoaderIter.__next__, DataLoader.__iter__

    @functools.wraps(load)
    def __next__(self: Any) -> Any:
        if dynamo.compiling():
            return load(self)
        handle = recorder.begin(Kind.PHASE, name, -1, getattr(self, facts.LOADER, None))
        try:
            return load(self)
        finally:
            recorder.end(handle)

    @functools.wraps(start)
    def __iter__(self: Any) -> Any:  # starting the workers anew each epoch is a stall like any other
        number = getattr(self, facts.LOADER, None)
        handle = recorder.begin(Kind.PHASE, name, -1, number)
        try:
            iterator = start(self)
            with contextlib.suppress(AttributeError):
                setattr(iterator, facts.LOADER, number)
            return iterator
        finally:
            recorder.end(handle)

    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]
    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]

    def uninstall() -> None:  # somebody may have wrapped ours since: then it stays, and records nothing
        if _BaseDataLoaderIter.__next__ is __next__:
            _BaseDataLoaderIter.__next__ = load  # type: ignore[method-assign]
        if DataLoader.__iter__ is __iter__:
            DataLoader.__iter__ = start  # type: ignore[method-assign]

    return uninstall


def _backward(recorder: Recorder) -> Uninstall:
    """`torch.autograd.backward` and `.grad` both end here; torch binds the function under two names."""
    import torch.autograd as autograd
    from torch.autograd import graph

    run = graph._engine_run_backward
    name = recorder.intern("backward")

    @functools.wraps(run)
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if dynamo.compiling():
            return run(*args, **kwargs)
        if recorder.enter_backward() > 1:  # re-entrant checkpointing: part of the outer one
            try:
                return run(*args, **kwargs)
            finally:
                recorder.leave_backward()
        handle = recorder.begin(Kind.PHASE, name)
        try:
            return run(*args, **kwargs)
        finally:
            recorder.end(handle)
            recorder.leave_backward()

    graph._engine_run_backward = engine_run_backward
    autograd._engine_run_backward = engine_run_backward  # type: ignore[attr-defined]

    def uninstall() -> None:
        if graph._engine_run_backward is engine_run_backward:
            graph._engine_run_backward = run
        if autograd._engine_run_backward is engine_run_backward:  # type: ignore[attr-defined]
            autograd._engine_run_backward = run  # type: ignore[attr-defined]

    return uninstall
