"""What of a model no engine can train: parameters without a shape, two in one memory, those that came later."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from itertools import chain, compress, pairwise
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


class WriteCheck:
    """Looks whether the script has written to parameters where torch does not count it: to their `.data`, as
    `param.data.clamp_(...)` does, or through numpy. Only those whose masters are apart: others are written with their
    parameters. A sum over the bits of this rank's shard of each, so what only changes places is not seen.

    On a GPU, where the host would have to wait for the answer, it is asked for when a step's first forward begins, and
    read at the step: a host that is ahead then waits for the beginning of the step, and its device has work meanwhile.
    """

    def __init__(self, params: Iterable[ShardedParam]) -> None:
        self._params = [p for p in params if p.persistent and p.trainable and not p.master_is_shard and p.shard.numel()]
        self._sums = self._present()
        self._on_gpu = any(param.shard.is_cuda for param in self._params)
        self._asked: tuple[_Sums, _Answer] | None = None
        """The sums when a forward began, and which of them were no longer the engine's."""
        self._since: tuple[_Answer, set[ShardedParam]] | None = None
        """Which were written to between the forward of the last step and that, and which of these were overlooked if
        they were."""

    def ask(self) -> None:
        """A step's forward begins: have a GPU say at the step what has been written since the last one."""
        if self._on_gpu:
            now = self._present()
            self._asked = now, _Answer(self._sums, now)

    def mark(self, *, step: bool = False) -> None:
        """Before masters are stepped or saved: have `take_edits` look at what was written to.

        Raises RuntimeError if the last `step` could not know in time of what was written."""
        since, self._since = self._since, None
        lost = [] if since is None else [param.name for param in since[0].written() if param in since[1]]
        if lost:
            raise RuntimeError(
                f"{lost[0]} was written to through .data, or another tensor of the same memory, between the "
                "forward of the last step and that, which has gone over it: write to the parameter itself, under "
                "torch.no_grad(), or between a step and the next forward"
            )
        now = self._present()
        asked, self._asked = self._asked if step else None, None
        for param in (_Answer(self._sums, now) if asked is None else asked[1]).written():
            param.written()
        if asked is not None:
            self._since = _Answer(asked[0], now), {param for param in self._params if not param.edited}

    def note(self) -> None:
        """After masters have come to their parameters: these are as they should be."""
        self._sums = self._present()

    def _present(self) -> _Sums:
        """The parameters on each device, and the sums of their bits."""
        places: dict[torch.device, list[ShardedParam]] = {}
        for param in self._params:
            places.setdefault(param.shard.device, []).append(param)
        return [(here, torch.stack([_bits(param.shard) for param in here])) for here in places.values()]


_Sums = list[tuple[list[ShardedParam], torch.Tensor]]
"""Parameters of one device each, and a number for each of them."""


class _Answer:
    """Of which parameters two sums differ; of those on a GPU it can be read when that has come to it."""

    def __init__(self, before: _Sums, now: _Sums) -> None:
        self._differ = [(params, _to_host(old != new)) for (params, old), (_, new) in zip(before, now, strict=True)]
        self._there = [torch.cuda.Event() for _, sums in now if sums.is_cuda]
        for event in self._there:
            event.record()

    def written(self) -> list[ShardedParam]:
        """Waits until it is there."""
        for event in self._there:
            event.synchronize()
        return [param for params, flags in self._differ for param in compress(params, flags.tolist())]


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """They are there when their device has come to it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values, non_blocking=True)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Their bits as integers, summed up: 8 bytes at once where they are aligned, which is forty times as fast."""
    size = values.element_size()
    aligned = all(number * size % 8 == 0 for number in (values.numel(), values.storage_offset()))
    return values.view(torch.int64 if aligned else {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).sum()


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
