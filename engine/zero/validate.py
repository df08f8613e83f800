"""What of a model no engine can train: parameters without a shape, two in one memory, those that came later."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from itertools import chain, pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .shard import ShardedParam, find_sharded
from .storage import Absent, no_torch_function

UNCOMPILED: Final = (
    "ZeRO stage 3 fetches parameters while modules run, which torch.compile cannot follow: use stage 0, 1 or 2, or "
    "leave it out"
)


class NewParameterCheck:
    """Looks for parameters of `model` that are not `known`. Going through a model takes long, so that is done only when
    a dict of one of its modules has changed."""

    def __init__(self, model: nn.Module, known: Container[nn.Parameter]) -> None:
        self._model = model
        self._known = known
        self._found: list[tuple[str, nn.Parameter]] = []
        self._dicts: list[dict[str, Any]] = []
        self._contents: list[int] = []
        self._go_through()

    def check(self) -> None:
        """Before a step: raise RuntimeError if one of them has a gradient."""
        if self._present() != self._contents:
            self._go_through()
        for name, param in self._found:
            if param.grad is not None:
                raise RuntimeError(
                    f"engine.step: {name} came into the model after the engine was made, and has a gradient, which "
                    "nothing would use: build the whole model before initialize, or call engine.destroy and initialize "
                    "anew"
                )

    def _present(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _go_through(self) -> None:
        self._dicts = [each for module in self._model.modules() for each in (module._modules, module._parameters)]
        self._contents = self._present()
        self._found = [(name, param) for name, param in self._model.named_parameters() if param not in self._known]


class StorageCheck:
    """Looks whether parameters that stay whole are still where ZeRO has them, and in that order: what a module's
    `.to()`, `.half()` or a new `.data` puts elsewhere, no step would reach. A read of a pointer and of strides each, of
    no attribute."""

    def __init__(self, params: Iterable[ShardedParam]) -> None:
        self._params = [param for param in params if param.persistent]
        self._tensors = [param.param for param in self._params]
        self._places, self._strides = self._present()

    def check(self, doing: str) -> None:
        """Before a step: have them there again, with the values that they have now.

        Raises RuntimeError for one that is trained and has another dtype, device or shape."""
        for param in self._moved():
            param.moved_back(doing)

    def check_kept(self) -> None:
        """The same before a checkpoint, which has the engine's weights of what has another dtype, device or shape."""
        for param in self._moved():
            with contextlib.suppress(RuntimeError):
                param.moved_back("save_checkpoint")

    def reset(self) -> None:
        """Before a load: have them there again, in their own dtype and on their device, to be written to."""
        for param in self._moved():
            param.take_back(param.param.data)

    def _present(self) -> tuple[list[int], list[tuple[int, ...]]]:
        with no_torch_function():
            return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(torch.Tensor.stride, self._tensors))

    def _moved(self) -> list[ShardedParam]:
        places, strides = self._present()
        if places == self._places and strides == self._strides:
            return []
        return [
            param for at, param in enumerate(self._params)
            if places[at] != self._places[at] or strides[at] != self._strides[at]
        ]  # fmt: skip


def abandoned(model: nn.Module) -> str | None:
    """The name of a parameter that is sharded (ZeRO stage 3), of an engine that is gone; None if there is none."""
    named = model.named_parameters()
    return next((name for name, param in named if type(param) is Absent and find_sharded(param) is None), None)


def refuse_lazy(model: nn.Module) -> None:
    """Raise ValueError for parameters and buffers that get their shape when the model first runs."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"initialize: {name} has no shape yet: run the lazy module's forward once before, or give it its sizes"
            )


def is_compiled(module: nn.Module) -> bool:
    """Whether it is by `torch.compile(module)`, `module.compile()` or `module.forward = torch.compile(...)`."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def compiled_module(model: nn.Module) -> str | None:
    """The first module with parameters that is compiled, in words; None if there is none."""
    for name, module in model.named_modules():
        if is_compiled(module) and next(module.parameters(), None) is not None:
            return name.replace("._orig_mod", "") or "the model"
    return None


def refuse_overlaps(model: nn.Module) -> None:
    """Raise ValueError for two that have elements in common, as `b.weight = nn.Parameter(a.weight.data)` makes them:
    torch trains these as one, and an engine, which moves them, as two."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        elsewhere = is_lazy(param) or param.is_meta or param.layout != torch.strided or find_sharded(param) is not None
        if elsewhere or param.numel() == 0:
            continue
        start = param.data_ptr()
        stop = start + param.numel() * param.element_size()
        spans.setdefault(param.untyped_storage()._cdata, []).append((start, stop, name, param))
    for same in spans.values():
        same.sort(key=lambda span: span[:2])
        for (start, stop, name, param), (other_start, _, other_name, other) in pairwise(same):
            # Rows and columns of one tensor lie between each other's without having any in common.
            dense = param.is_contiguous() and other.is_contiguous()
            if not (start == other_start or (dense and other_start < stop)):
                continue
            if param.requires_grad or other.requires_grad:
                raise ValueError(
                    f"initialize: {name} and {other_name} are two parameters in the same memory, which the engine "
                    "would train apart: tie them as one (b.weight = a.weight), or give each its own (.detach().clone())"
                )
