"""The memory of a parameter that comes and goes, and which are there.

In host memory, malloc maps 32 MiB or more anew each time, and to have that page by page costs several times what is
written to it. Where the kernel gives huge pages to who asks (`/sys/kernel/mm/transparent_hugepage/enabled` says
`madvise`), ask.

Then: what a parameter of stage 3 is between its uses (`Absent`), and buffers that are used again (`BufferPool`).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

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


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """What stands for a tensor that is elsewhere: shape and dtype, one element of memory.

    Reading it gives NaN (0 for integers), and writing to it is an error.
    """
    nothing = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(shape)


class Storage:
    """A parameter's own memory, full or emptied, and with it all views of it that autograd saved. It does not keep the
    parameter alive."""

    def __init__(self, param: nn.Parameter) -> None:
        self.whole = param.data
        """The parameter's elements, wherever `param.data` leads in the meantime."""
        self._nbytes = self.whole.nbytes
        self._placeholder: Tensor | None = None

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
        if self._placeholder is None:
            # What a parameter of a class of the script's own, which cannot be made Absent, reads as: not the emptied
            # storage, since to read that is to read anything, or the end of the process.
            self._placeholder = placeholder(self.whole.shape, self.whole.dtype, self.whole.device)
        if type(param) is not Absent:
            param.data = self._placeholder
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


# --- What a parameter of stage 3 is between its uses: it has its shape, and is fetched, or refuses, when it is used

# What ZeRO has of a parameter stands in a mapping beside it, so that it can be copied and saved like any other.


METADATA: Final = frozenset({
    "size", "dim", "ndimension", "numel", "element_size", "stride", "storage_offset", "get_device", "dim_order",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__", "_has_compatible_shallow_copy_type",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "untyped_storage", "data_ptr",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor",
})  # fmt: skip
"""Functions that do not look at a tensor's elements."""

ELEMENTS: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that lead to them."""

CONVERSIONS: Final = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous"})
"""Functions that return the tensor itself where there is nothing to do, as `model.to(device)` may have."""


class Fetchable(Protocol):
    """A parameter that can be had whole: see `shard.ShardedParam`."""

    name: str

    def fetch(self) -> None:
        """Have the whole of it, if something runs that it can be fetched for."""


REGISTRY: Final[MutableMapping[Tensor, Callable[[], Fetchable | None]]] = WeakIdKeyDictionary()
"""Parameter -> finds what ZeRO has of it (`shard.find_sharded`). The values must not lead back to their parameters:
these would never be freed."""

no_torch_function: Final = torch._C.DisableTorchFunctionSubclass
"""A context in which attributes of many parameters are asked for faster, be they absent or not."""


class Absent(nn.Parameter):
    """A parameter whose elements are not here. Only the class of the script's own parameter is changed, and back.

    A use while a module runs, or a backward, fetches it: as of a reference that a module keeps in a list. At another
    time ranks may be at different places, so that raises RuntimeError.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name.startswith("__") else ""
        if attribute == "data" and name == "__set__" and args[1] is args[0]:
            return None  # model.to(device) with nothing to do
        with no_torch_function():
            if name in METADATA or (name in ("__get__", "__set__", "__delete__") and attribute not in ELEMENTS):
                return func(*args, **more)
            absent = [leaf for leaf in tree_leaves((args, more)) if isinstance(leaf, Absent)]
            for found in map(fetchable, absent):
                if found is not None:
                    found.fetch()
            left = [param for param in absent if isinstance(param, cls)]
            if not left:
                return func(*args, **more)
            if name in CONVERSIONS:
                result = func(*args, **more)
                if result is args[0] or not isinstance(result, Tensor):
                    return result
        raise _refusal(left[0], attribute or name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with no_torch_function():
            return f"Parameter {_name(self)}, sharded (ZeRO stage 3), shape {tuple(self.shape)}, {self.dtype}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _refusal(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal(self, "pickle")


def fetchable(param: Tensor) -> Fetchable | None:
    """What ZeRO has of a parameter; None for one that it has not, or no longer."""
    find = REGISTRY.get(param)
    return None if find is None else find()


def _name(param: Tensor) -> str:
    found = fetchable(param)
    return "of an engine that is gone" if found is None else found.name


def _refusal(param: Tensor, what: str) -> RuntimeError:
    return RuntimeError(
        f"the parameter {_name(param)} is sharded (ZeRO stage 3), and is fetched while the model's modules or a "
        f"backward run; `{what}` of it at another time takes `with zero.GatheredParameters(parameters):` around it, on "
        "all ranks, and modifier_rank=0 there to change it. engine.save_16bit_model saves the whole model"
    )


# --- Memory of communications that is used again


class BufferPool:
    """Memory that communications have used, for the next ones: on a CPU, fresh pages cost as much as these. Of what is
    given back, the `most` largest are kept; all, by default. Of one dtype and device there are no more buffers than
    were taken at once; but a GPU has the memory of one that was outgrown only when its stream has come past the last
    use of it, which may have been on another stream."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.free: list[Tensor] = []
        self._read: dict[int, torch.cuda.Event] = {}
        """By the storage of a free buffer on a GPU: what was given to the device before it was given back."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [size]: the smallest free one that holds it; or new, in the place of the largest free one."""
        alike = [b for b in self.free if b.dtype == dtype and b.device == device]
        fitting = [b for b in alike if b.numel() >= size]
        if not fitting:
            if alike:
                outgrown = max(alike, key=Tensor.numel)
                self.free = [buffer for buffer in self.free if buffer is not outgrown]
                self._drop(outgrown)
                del alike, outgrown  # freed before the new one is there
            with torch.inference_mode(False):  # it is used again, by training
                return torch.empty(size, dtype=dtype, device=device)
        best = min(fitting, key=Tensor.numel)
        self.free = [buffer for buffer in self.free if buffer is not best]
        event = self._read.pop(best.untyped_storage()._cdata, None)
        if event is not None:  # it may have been on another stream: a backward has its own
            torch.cuda.current_stream().wait_event(event)
        return best[:size]

    def give(self, buffer: Tensor) -> None:
        """Give back a buffer that was taken, or a view of it."""
        flat = buffer.view(-1)
        whole = torch.as_strided(flat, (flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
        if buffer.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._read[whole.untyped_storage()._cdata] = event
        kept = sorted([*self.free, whole], key=Tensor.numel, reverse=True)
        self.free = kept[: self._most]
        for dropped in kept[len(self.free) :]:
            self._drop(dropped)

    def clear(self) -> None:
        """Have no buffer any more."""
        for buffer in self.free:
            self._drop(buffer)
        self.free = []

    def _drop(self, buffer: Tensor) -> None:
        """Free a buffer, for the stream it was made for when this one is through with it."""
        event = self._read.pop(buffer.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            buffer.record_stream(torch.cuda.current_stream())
