"""Weight gradients put off: backward computes what the stage before waits for, and the rest when there is time.

The zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) divide a stage's backward into B, the gradients of its
inputs, and W, those of its weights. Here the weight gradients of every linear layer are put off, whatever its class;
other parameters have theirs computed in B: norms, embeddings and convolutions, what is inside torch's own attention and
LSTM, and everything under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..forward import Undo, last_first, wrap_forward
from ..zero.placeholder import no_torch_function

Work = Callable[[], None]


_put_off: Final[list[list[Work]]] = []
"""What the backward under way puts off, in the last of them; there is one at a time in a process."""


@contextmanager
def deferring() -> Iterator[list[Work]]:
    """Put off what backward passes to `later` in this block; the list of it is to be called through afterwards."""
    works: list[Work] = []
    _put_off.append(works)
    try:
        yield works
    finally:
        _put_off.pop()


def later(work: Work) -> None:
    """For the backward of an autograd function of your own: do `work`, the gradients of weights, when there is time.

    At once if nothing is put off. `work` gives its gradients to `torch.autograd.backward([weight], [gradient])`, so
    that what waits for them is notified.
    """
    if _put_off:
        _put_off[-1].append(work)
    else:
        work()


def install(root: nn.Module) -> Undo:
    """Have the linear layers of `root` put off their weight gradients when that is asked for; call the result to stop.

    Inside their calls, so recomputation does the same. torch.compile leaves linear layers out of what it compiles: a
    compiled backward is one graph, and puts nothing off.
    """
    linear = [
        (name, module) for name, module in root.named_modules()
        if any(param is not None and param.dim() == 2 for param in module._parameters.values())
        and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]  # fmt: skip
    within_mode = torch.compiler.disable(_within_mode)
    return last_first([wrap_forward(module, within_mode, name, "its engine was made") for name, module in linear])


def _within_mode(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _mode:
        return forward(*args, **kwargs)


class _Mode(TorchFunctionMode):
    """Has products with a weight computed by `_Linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            inputs, weight, bias = _linear_arguments(*args, **kwargs)
            if _can_wait(inputs, weight) and (bias is None or bias.is_leaf):
                return _product(inputs, weight, bias, False)
        elif func is torch.addmm and torch.is_grad_enabled() and len(args) == 3 and not kwargs:
            bias, inputs, weight = args  # as transformers' Conv1D has it, its weight transposed
            if _can_wait(inputs, weight) and isinstance(bias, Tensor) and bias.is_leaf and bias.dim() == 1:
                return _product(inputs, weight, bias, True)
        return func(*args, **kwargs)


_mode: Final = _Mode()


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _can_wait(inputs: Any, weight: Any) -> bool:
    """Whether `weight` is a parameter that waits for its gradient, in the precision that the product is computed in."""
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and weight.dim() == 2
        and isinstance(inputs, Tensor)
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
    )


class _Linear(torch.autograd.Function):
    """inputs [..., in] times weight [out, in] (or [in, out], `transposed`), plus bias [out]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parameters = weight, bias
        ctx.transposed = transposed
        return F.linear(inputs, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        inputs, whole = ctx.saved_tensors
        weight, bias = ctx.parameters
        transposed = ctx.transposed
        back = grad @ (whole.t() if transposed else whole) if ctx.needs_input_grad[0] else None

        def weights() -> None:
            rows, out = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
            roots, gradients = [weight], [rows.t() @ out if transposed else out.t() @ rows]
            if bias is not None and bias.requires_grad:
                roots.append(bias)
                gradients.append(out.sum(0))
            with no_torch_function():  # stage 3 may have let go of the parameters, whose elements this does not look at
                torch.autograd.backward(roots, gradients)

        later(weights)
        return back, None, None, None


_product: Final[Callable[..., Tensor]] = _Linear.apply
