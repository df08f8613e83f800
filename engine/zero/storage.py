"""The memory of a parameter that comes and goes, and which are there.

In host memory, malloc maps 32 MiB or more anew each time, and to have that page by page costs several times what is
written to it. Where the kernel gives huge pages to who asks (`/sys/kernel/mm/transparent_hugepage/enabled` says
`madvise`), ask.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .placeholder import Absent

LEAST: Final = 32 << 20
"""Bytes. What is smaller lies among other things, whose pages are not to be changed (M_MMAP_THRESHOLD, mallopt(3))."""
_ADVICE: Final = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise: Final = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def use_huge_pages(storage: torch.UntypedStorage) -> None:
    """Of a storage in host memory, before it is first written to. Where it is small nothing happens."""
    if _madvise is None or _ADVICE is None or storage.nbytes() < LEAST:
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = storage.data_ptr() + storage.nbytes() - begin
    _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _ADVICE)  # advice: that it is not taken is no error


class Storage:
    """A parameter's own memory, full or emptied, and with it all views of it that autograd saved. It does not keep the
    parameter alive."""

    def __init__(self, param: nn.Parameter) -> None:
        self.whole = param.data
        """The parameter's elements, wherever `param.data` leads in the meantime."""
        self._nbytes = self.whole.nbytes
        self._stand_in: Tensor | None = None

    @property
    def key(self) -> int:
        """Its identity."""
        return int(self.whole.untyped_storage()._cdata)

    def holds(self, data: Tensor) -> bool:
        """Whether `data` is this memory, in this order."""
        return data.data_ptr() == self.whole.data_ptr() and data.stride() == self.whole.stride()

    def take(self) -> None:
        """Have memory, its contents undefined, if it was emptied."""
        storage = self.whole.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self._nbytes)
            if self.whole.device.type == "cpu":
                use_huge_pages(storage)

    def show(self, param: nn.Parameter) -> None:
        """Have the elements of `param` here."""
        self.take()
        if type(param) is Absent:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
        param.data = self.whole

    def empty(self, param: nn.Parameter) -> int | None:
        """Free the memory, and have `param` be `Absent`. If a numpy array, or another process, shares the memory it
        stays theirs, and there is another: the key that it had until now, else None."""
        if self._stand_in is None:
            # What a parameter of a class of the script's own, which cannot be made Absent, reads as: not the emptied
            # storage, since to read that is to read anything, or the end of the process.
            nothing = float("nan") if self.whole.is_floating_point() or self.whole.is_complex() else 0
            self._stand_in = torch.full((), nothing, dtype=self.whole.dtype, device=self.whole.device)
        if type(param) is not Absent:
            param.data = self._stand_in.expand(self.whole.shape)
        if type(param) is nn.Parameter:
            param.__class__ = Absent  # as torch does with lazy ones, the other way round
        if self.whole.is_cuda:  # it may have been used on another stream than the one its memory is of
            self.whole.record_stream(torch.cuda.current_stream())
        left, storage = None, self.whole.untyped_storage()
        if not storage.resizable():
            left = self.key
            with torch.inference_mode(False):
                self.whole = torch.empty_like(self.whole)
            storage = self.whole.untyped_storage()
        storage.resize_(0)
        return left


class HasElements(Protocol):
    """Something with elements."""

    numel: int


T = TypeVar("T", bound=HasElements)


class LiveParams(Generic[T]):
    """Which parameters are whole at this moment, or on their way to be. Sizes in elements."""

    def __init__(self) -> None:
        self._whole: dict[T, bool] = {}
        """Those that count, the one that came first before the others, and whether they have come."""
        self.coming = 0
        self.live = 0
        """Whole and coming."""

    def __contains__(self, param: T) -> bool:
        return param in self._whole

    def __iter__(self) -> Iterator[T]:
        """Those that are whole, first come first."""
        return (param for param, whole in self._whole.items() if whole)

    def expect(self, param: T) -> None:
        """`param` is on its way."""
        if param not in self._whole:
            self._whole[param] = False
            self.coming += param.numel
            self.live += param.numel

    def arrive(self, param: T) -> None:
        """`param` has its storage."""
        if param not in self._whole:
            self.expect(param)
        if not self._whole[param]:
            self._whole[param] = True
            self.coming -= param.numel

    def leave(self, param: T) -> None:
        """The storage of `param` is free."""
        whole = self._whole.pop(param, None)
        if whole is not None:
            self.live -= param.numel
            self.coming -= 0 if whole else param.numel
