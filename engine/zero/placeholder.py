"""What a parameter of stage 3 is between its uses: it has its shape, and is fetched, or refuses, when it is used.

What ZeRO has of a parameter stands in a mapping beside it, so that it can be copied and saved like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

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
