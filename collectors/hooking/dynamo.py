"""Keep torch.compile away from our hooks: traced, they would cut the user's graph and put warnings on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from . import private

FAKE_TENSORS: Final = ("FakeTensor", "FunctionalTensor")
"""Classes that a compiler traces with."""
STRATEGY: Final = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
"""By which Dynamo is told what to do with a function."""


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


def any_fake(tensors: Iterable[object]) -> bool:
    """`fake`, of any of them. Backward asks at each step, of its one loss: `any` with `map` would take longer."""
    for tensor in tensors:  # noqa: SIM110
        if type(tensor).__name__ in FAKE_TENSORS:
            return True
    return False


def skip(*functions: Callable[..., Any]) -> None:
    """Have Dynamo run these and all that they call as they are, where C++ calls them inside a compiled region or Python
    between two of its parts."""
    _mark(functions, and_callees=True)


def skip_frame(*functions: Callable[..., Any]) -> None:
    """`skip`, but for what they call."""
    _mark(functions, and_callees=False)


def _mark(functions: tuple[Callable[..., Any], ...], and_callees: bool) -> None:
    # Part of torch itself: torch._dynamo need not be loaded.
    found: list[Any] = [private.find(f"torch._C._dynamo.eval_frame:{name}") for name in STRATEGY]
    action, strategy, set_strategy = found
    if action is None or strategy is None or set_strategy is None:  # the hooks are traced: it costs but does no harm
        return
    strategy = strategy(action.SKIP, action.SKIP if and_callees else action.DEFAULT)
    for function in functions:
        set_strategy(function.__code__, strategy)
