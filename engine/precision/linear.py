"""A linear layer's three products in float8, in the place of torch's `linear` and `addmm`, whatever the layer's class.

What autograd saves is what torch's layer saves, the inputs and the weight as they are; so memory, stage 3 of ZeRO and
recomputation are as without float8. They are cast again for backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..forward import Undo, last_first, wrap_forward
from ..pipe.split_backward import Product, give_gradients, later, product_of, puts_off, with_matrices
from .gain import Recipe
from .scaling import E4M3, E5M2, Scaled, padded, product
from .scaling import cast as plain_cast

Cast = Callable[..., Scaled]


@dataclass(frozen=True)
class Arithmetic:
    """How products are computed in float8.

    `tensorwise` has one scale for a tensor, so gradients, whose elements differ by more, take the format of the wider
    range, and so torchao's recipe of this name has it. `rowwise` has one for each row of what is multiplied, by which
    the range suffices, and all three take the format of the finer mantissa.
    """

    recipe: Recipe
    cast: Cast = plain_cast
    turned: Callable[[Scaled], Scaled] = Scaled.turned
    emulated: bool = False
    fused: bool = False
    """Whether a cast is one kernel."""

    @property
    def of_gradients(self) -> torch.dtype:
        """The format of output gradients."""
        return E5M2 if self.recipe == "tensorwise" else E4M3

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, forward: bool) -> Tensor:
        """a [rows, inner] times the transpose of b [columns, inner].

        Devices sum up in fewer bits in forward, and by rows, where torch has nothing else that is fast."""
        quick = forward or self.recipe == "rowwise"
        return product(a, b, dtype, quick=quick and a.data.is_cuda, emulated=self.emulated)


def install(root: nn.Module, arithmetic: Arithmetic, takes: Callable[[str, int, int, int], bool]) -> Undo:
    """Have the products of `root`'s linear layers computed in float8; call the result to stop.

    `takes(name, m, k, n)`: whether the layer of this name does, of inputs [m, k] and a weight [n, k]. Inside the calls
    of modules, so recomputation does the same; torch.compile leaves these layers out of what it compiles.
    """
    undos = []
    for name, module in with_matrices(root):
        within = torch.compiler.disable(_Within(name, arithmetic, takes))
        undos.append(wrap_forward(module, within, name, "its engine was made"))
    return last_first(undos)


_running: Final = threading.local()
"""The modules whose forward runs on this thread, the innermost last: autograd has threads of its own."""


@dataclass(frozen=True)
class _Within:
    name: str
    arithmetic: Arithmetic
    takes: Callable[[str, int, int, int], bool]

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stack = _running.__dict__.setdefault("modules", [])
        stack.append(self)
        try:
            with _mode:
                return forward(*args, **kwargs)
        finally:
            stack.pop()

    def computes(self, found: Product) -> bool:
        inputs, weight, _, transposed = found
        if not isinstance(inputs, Tensor) or weight.dim() != 2 or not inputs.numel() or inputs.dim() < 2:
            return False
        if not all(factor.dtype in _PRECISE for factor in (inputs, weight)):
            return False
        if inputs.dtype is not weight.dtype and not torch.is_autocast_enabled(inputs.device.type):
            return False  # torch says so
        n, k = reversed(weight.shape) if transposed else weight.shape
        return self.takes(self.name, inputs.numel() // k, k, n)


_PRECISE: Final = (torch.bfloat16, torch.float16, torch.float32)


class _Float8Mode(TorchFunctionMode):
    """Has products with a weight computed by `_Float8Linear`, where the innermost module's layer takes float8."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = product_of(func, args, kwargs or {})
        within: _Within = _running.modules[-1]
        if found is not None and within.computes(found):
            return _linear(*found, within.arithmetic)
        return func(*args, **(kwargs or {}))


_mode: Final = _Float8Mode()


class _Float8Linear(torch.autograd.Function):
    """inputs [..., in] times weight [out, in] (or [in, out], `transposed`), plus bias [out]: as a matrix, since what
    it returns may be written to, as by `nn.ReLU(inplace=True)`, and a view could not."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, by: Arithmetic
    ) -> Tensor:
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        rows = by.cast(inputs.reshape(-1, inputs.shape[-1]), E4M3, by.recipe)
        matrix = by.cast(weight.t() if transposed else weight, E4M3, by.recipe)
        found = by.product(rows, matrix, dtype, forward=True)
        if bias is not None:
            found += bias
        ctx.save_for_backward(inputs, weight)
        ctx.parameters = weight, bias
        ctx.how = transposed, by
        # Of a whole tensor it serves the transpose, too.
        ctx.scales = (rows.scale, matrix.scale) if by.recipe == "tensorwise" else (None, None)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        inputs, whole = ctx.saved_tensors
        weight, bias = ctx.parameters
        transposed, by = ctx.how
        dtype = whole.dtype
        of_inputs, of_weight = ctx.scales
        cast_out = by.cast(out, by.of_gradients, by.recipe)
        back = None
        if ctx.needs_input_grad[0]:
            columns = by.cast(whole if transposed else whole.t(), E4M3, by.recipe, of_weight)
            back = by.product(cast_out, columns, inputs.dtype, forward=False).view(inputs.shape)

        def of_the_weight() -> Tensor:
            rows = inputs.reshape(-1, inputs.shape[-1])
            features = _turned(by, rows, E4M3, of_inputs)
            outputs = by.turned(cast_out) if of_inputs is not None else _turned(by, out, by.of_gradients, None)
            pair = (features, outputs) if transposed else (outputs, features)
            found: Tensor = by.product(*pair, dtype, forward=False)
            return found

        def of_the_bias() -> Tensor:
            return out.sum(0).to(bias.dtype)

        if puts_off() and all(param is None or param.is_leaf for param in ctx.parameters):
            later(lambda: give_gradients([(weight, of_the_weight), (bias, of_the_bias)]))
            return back, None, None, None, None
        return (
            back, of_the_weight() if ctx.needs_input_grad[1] else None,
            of_the_bias() if ctx.needs_input_grad[2] else None, None, None,
        )  # fmt: skip


def _turned(by: Arithmetic, x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Scaled:
    """The transpose of `x` in float8, with zeros behind its columns."""
    found = by.cast(x.t(), dtype, by.recipe, scale)
    return Scaled(padded(found.data), found.scale)


_matrix: Final[Callable[..., Tensor]] = _Float8Linear.apply


def _linear(inputs: Tensor, *others: Any) -> Tensor:
    found = _matrix(inputs, *others)
    return found if inputs.dim() == 2 else found.view(*inputs.shape[:-1], found.shape[-1])
