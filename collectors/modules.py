"""Forward: the outermost module call of each thread, as a phase whose value is the number of input elements, and which
says whether gradients were on.

The native helper hooks the call itself (`native/modules.hpp`); here is its twin, a wrapper in Python.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from dsprof.schema import Flag, Kind

from .native import NativeRecorder
from .record import PyRecorder, Recorder

FAKE_TENSORS: Final = ("FakeTensor", "FunctionalTensor")
"""What a compiler traces with: such a call is no forward."""


def install(recorder: Recorder) -> Callable[[], None]:
    """Record forwards from now on, until the returned function is called."""
    if isinstance(recorder, NativeRecorder):
        recorder.install_modules()
        uninstall_native: Callable[[], None] = recorder.uninstall_modules
        return uninstall_native
    if not isinstance(recorder, PyRecorder):
        raise TypeError(f"cannot record modules with a {type(recorder).__name__}")

    import torch

    original = torch.nn.Module.__call__
    replacement = _wrapper(original, recorder)
    torch.nn.Module.__call__ = replacement  # type: ignore[method-assign]

    def uninstall() -> None:
        if torch.nn.Module.__call__ is replacement:
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    return uninstall


def _wrapper(original: Callable[..., Any], recorder: PyRecorder) -> Callable[..., Any]:
    import torch

    name = recorder.intern("forward")
    phase, gradients_on = int(Kind.PHASE), int(Flag.GRAD)
    thread = threading.local()
    is_compiling = torch.compiler.is_compiling
    graph_task = torch._C._current_graph_task_id
    grad_enabled = torch.is_grad_enabled

    def begin(size: tuple[int, int]) -> int:
        flags = gradients_on if grad_enabled() else 0
        now = time.perf_counter_ns()
        # What `recorder.begin` writes, but for the flags.
        return recorder.span(phase, name, now, 0, 0, float(size[0]), size[1], 0, 0, 0, flags, -1, -1, 0)

    @functools.wraps(original)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Dynamo takes the first way out and so traces torch's own code only. A module called
        # by the backward pass (a graph task is under way) is a recomputation, not a forward.
        if is_compiling() or getattr(thread, "inside", False) or graph_task() != -1:
            return original(self, *args, **kwargs)
        try:
            size = count_inputs((*args, *kwargs.values()))
            handle = 0 if size is None else begin(size)
        except Exception:
            recorder.count_error()
            handle = 0
        thread.inside = True
        try:
            return original(self, *args, **kwargs)
        finally:
            thread.inside = False
            recorder.end(handle)

    return __call__


def count_inputs(inputs: tuple[Any, ...]) -> tuple[int, int] | None:
    """Elements and bytes of all tensors in `inputs`, one level of list, tuple or dict down; None where one is fake."""
    import torch

    elements = nbytes = 0
    for value in inputs:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for tensor in inner:
            if not isinstance(tensor, torch.Tensor):
                continue
            if type(tensor).__name__ in FAKE_TENSORS:
                return None
            try:
                size = tensor.nbytes
            except Exception:  # a tensor without a plain size, such as a nested one
                continue
            nbytes += size
            elements += size // tensor.itemsize  # numel() would be recorded by torch.jit.trace
    return elements, nbytes
