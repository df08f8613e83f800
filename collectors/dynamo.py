"""Keep torch.compile away from our hooks: traced, they would cut the user's graph and put warnings on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

FAKE_TENSORS: Final = ("FakeTensor", "FunctionalTensor")
"""Classes that a compiler traces with."""


def compiling() -> bool:
    """Whether Dynamo is tracing through the caller: then a hook must do nothing but what it wraps."""
    import torch

    return torch.compiler.is_compiling()


def check() -> Callable[[], bool]:
    """`compiling`, for hooks that are called dozens of times a step: the way there took longer than their record."""
    import torch

    is_compiling: Callable[[], bool] = torch.compiler.is_compiling
    return is_compiling


def fake(tensor: object) -> bool:
    """Whether a compiler traces with it: what is done with it is not done now. Not every torch says of all its tracing
    that it compiles."""
    return type(tensor).__name__ in FAKE_TENSORS


def skip(*functions: Callable[..., Any]) -> None:
    """Have Dynamo run these and all that they call as they are, where C++ calls them inside a compiled region or Python
    between two of its parts."""
    _mark(functions, and_callees=True)


def skip_frame(*functions: Callable[..., Any]) -> None:
    """`skip`, but for what they call."""
    _mark(functions, and_callees=False)


def _mark(functions: tuple[Callable[..., Any], ...], and_callees: bool) -> None:
    try:
        # Part of torch itself: torch._dynamo need not be loaded.
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # private to torch, so they may go: then the hooks are traced, which costs but does no harm
        return
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP if and_callees else _FrameAction.DEFAULT)
    for function in functions:
        set_code_exec_strategy(function.__code__, strategy)
