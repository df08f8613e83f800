"""Weight gradients put off: backward computes what the stage before waits for, and the rest when there is time.

The zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) divide a stage's backward into B, the gradients of its
inputs, and W, those of its weights. Here the weight gradients of every linear layer are put off, whatever its class;
other parameters have theirs computed in B: norms, embeddings and convolutions, what is inside torch's own attention and
LSTM, and everything under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..forward import Undo, last_first, wrap_forward
from ..zero.storage import no_torch_function

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


def puts_off() -> bool:
    """Whether the backward under way puts weight gradients off."""
    return bool(_put_off)


def give_gradients(pairs: Iterable[tuple[Tensor | None, Callable[[], Tensor]]]) -> None:
    """Give parameters the gradients that are computed for them; what is None, or wants none, is left out."""
    wanted = [(param, compute()) for param, compute in pairs if param is not None and param.requires_grad]
    with no_torch_function():  # stage 3 may have let go of the parameters, whose elements this does not look at
        torch.autograd.backward([param for param, _ in wanted], [gradient for _, gradient in wanted])


def install(root: nn.Module) -> Undo:
    """Have the linear layers of `root` put off their weight gradients when that is asked for; call the result to stop.

    Inside their calls, so recomputation does the same. torch.compile leaves linear layers out of what it compiles: a
    compiled backward is one graph, and puts nothing off.
    """
    within_mode = torch.compiler.disable(_within_mode)
    return last_first(
        [wrap_forward(module, within_mode, name, "its engine was made") for name, module in with_matrices(root)]
    )


def with_matrices(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have a matrix to multiply by, with their names, which are the same where torch.compile has
    wrapped one."""
    return [
        (".".join(part for part in name.split(".") if part != "_orig_mod"), module)
        for name, module in root.named_modules()
        if any(param is not None and param.dim() == 2 for param in module._parameters.values())
        and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]  # fmt: skip


def _within_mode(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _mode:
        return forward(*args, **kwargs)


class _Mode(TorchFunctionMode):
    """Has products with a weight computed by `_Linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = product_of(func, args, kwargs) if torch.is_grad_enabled() else None
        if product is not None and _can_wait(product):
            return _product(*product)
        return func(*args, **kwargs)


_mode: Final = _Mode()


class Product(NamedTuple):
    """A product with a weight that code asks for, plus a bias [out]."""

    inputs: Tensor
    """[..., in]"""
    weight: Tensor
    """[out, in], or [in, out] if it is `transposed`."""
    bias: Tensor | None
    transposed: bool


_transforms: Final[Callable[[], bool]] = getattr(torch._C, "_are_functorch_transforms_active", bool)
"""Whether code runs within `vmap`, `grad` or another of torch.func's; a torch that does not tell says no."""


def product_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The product that this call of torch's is: `F.linear`, or `torch.addmm` as transformers' Conv1D has it, its weight
    transposed. None for any other, and within torch.func's transforms, which take no autograd functions such as these.
    """
    if func is F.linear:
        return None if _transforms() else _of_linear(*args, **kwargs)
    if func is torch.addmm and not _transforms() and len(args) == 3 and not kwargs:
        bias, inputs, weight = args
        if isinstance(bias, Tensor) and bias.dim() == 1:
            return Product(inputs, weight, bias, True)
    return None


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
    return Product(input, weight, bias, False)


def _can_wait(product: Product) -> bool:
    """Whether the weight is a parameter that waits for its gradient, in the precision that the product is computed in,
    and the bias one that may."""
    inputs, weight, bias, _ = product
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and weight.dim() == 2
        and isinstance(inputs, Tensor)
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
        and (bias is None or bias.is_leaf)
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
            give_gradients([
                (weight, lambda: rows.t() @ out if transposed else out.t() @ rows), (bias, lambda: out.sum(0)),
            ])  # fmt: skip

        later(weights)
        return back, None, None, None


_product: Final[Callable[..., Tensor]] = _Linear.apply
