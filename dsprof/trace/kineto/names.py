"""Which kernels of a device communicate, what collectives are called, and how many bytes they move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

COMM_KERNELS: Final = (
    r"nccl(Dev)?Kernel",  # NCCL before 2.19 and since, and RCCL, which took the names over
    r"\brccl|ncclGeneric|ncclSymk?",
    r"deep_ep::|mscclpp|nvshmem|cross_device_reduce|multimem_(all|one)|(one|two)_shot_all_reduce",
)
"""Of NCCL, RCCL, and libraries that bring kernels of their own."""
MEMORY_KERNELS: Final = ("Memcpy", "Memset")
"""How copies and fills begin."""
ANNOTATIONS: Final = ("nccl:", "gloo:", "mpi:", "ucc:", "xccl:")
"""How c10d's own annotations of collectives begin."""

WORDS: Final = (
    ("allreduce", "all_reduce"), ("allgather", "all_gather"), ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("sendrecv", "send_recv"),
    ("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce"), ("send", "send"), ("recv", "recv"),
    ("dispatch", "all_to_all"), ("combine", "all_to_all"),
)  # fmt: skip
"""Part of a name without its underscores -> the collective. The first that fits counts."""
MESSAGES: Final = ("send", "recv", "send_recv")
"""What goes between two ranks, or several at once: no collective of the group."""

ITEM_BYTES: Final = {
    "float": 4, "float32": 4, "int": 4, "uint32": 4, "half": 2, "float16": 2, "bfloat16": 2, "c10::half": 2,
    "c10::bfloat16": 2, "short": 2, "double": 8, "long": 8, "longint": 8, "long int": 8, "complexfloat": 8,
    "complexdouble": 16, "byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1,
}  # fmt: skip
DTYPES: Final = {
    "float": "float32", "double": "float64", "half": "float16", "c10::half": "float16", "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16", "long": "int64", "long int": "int64", "int": "int32", "short": "int16",
    "byte": "uint8", "unsigned char": "uint8", "char": "int8", "signed char": "int8", "bool": "bool",
    "complexfloat": "complex64", "complexdouble": "complex128",
}  # fmt: skip
"""As Kineto names types -> as `schema.DTYPES` does."""
LARGEST: Final = 1 << 50
"""Bytes of a collective."""


class CommNames:
    """`more`: regular expressions of further kernels that communicate. Raises ValueError for one that is none."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self.more = tuple(more)
        for pattern in self.more:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} is no regular expression ({error}); write part of the kernel's name"
                ) from error
        self._pattern = re.compile("|".join(f"(?:{one})" for one in (*COMM_KERNELS, *self.more)))

    def communicates(self, kernel: str) -> bool:
        return self._pattern.search(kernel) is not None


def collective_name(text: str) -> str | None:
    """What a kernel, an annotation or c10d calls a collective, in the trace's words; None where it does not say."""
    plain = text.partition("(")[0].replace("_", "").lower()
    return next((name for word, name in WORDS if word in plain), None)


def dtype_of(word: str) -> str | None:
    return DTYPES.get(word.lower())


def bytes_of(args: Mapping[str, Any]) -> int | None:
    """The larger of a collective's input and output, from the arguments of a kernel or an annotation; None where they
    do not say."""
    item = item_bytes(args.get("dtype"))
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    found = [count for count in counts if type(count) is int and count >= 0]
    if item and found:
        return _sane(max(found) * item)
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list)):
        return None
    total, known = 0, False
    for dim, kind in zip(dims, types, strict=False):
        item = item_bytes(kind)
        if item and isinstance(dim, list) and dim and all(type(size) is int and size >= 0 for size in dim):
            count = 1
            for size in dim[:16]:
                count = min(count * size, LARGEST)
            total, known = total + count * item, True
    return _sane(total) if known else None


def item_bytes(word: Any) -> int | None:
    if not isinstance(word, str):
        return None
    word = word.lower()
    return 1 if word.startswith("float8") else ITEM_BYTES.get(word)


def _sane(size: int) -> int | None:
    return size if size <= LARGEST else None
