"""Keep torch.compile away from our hooks: traced, they would cut the user's graph and put warnings on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiling() -> bool:
    """Whether Dynamo is tracing through the caller: then a hook must do nothing but what it wraps."""
    import torch

    return torch.compiler.is_compiling()


def skip(*functions: Callable[..., Any]) -> None:
    """Have Dynamo run these as they are when C++ calls them inside a compiled region."""
    try:
        from torch._C._dynamo.eval_frame import skip_code  # type: ignore[attr-defined]
    except ImportError:  # private to torch, so it may go: then the hooks are traced, which costs but does no harm
        return
    for function in functions:
        skip_code(function.__code__)
