"""Which kernels of a device communicate, what collectives are called, and how many bytes they move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class CommPattern:
    """library: whose kernels these are. pattern: a regular expression that is found in their names. collective: what
    they all are, in the trace's words; empty: what the kernel's name says."""

    library: str
    pattern: str
    collective: str = ""


COMM_KERNELS: Final = (
    CommPattern("NCCL, and RCCL since it has taken the names over", r"nccl\w*Kernel|ncclSymk?|ncclGeneric"),
    CommPattern("RCCL", r"\brccl"),
    CommPattern("MSCCL, MSCCL++", r"\bmsccl(Kernel|pp|::)"),
    CommPattern("NVSHMEM", r"nvshmem"),
    CommPattern("DeepEP", r"\b(deep|hybrid)_ep::|\bdeepep", "all_to_all"),
    CommPattern("PPLX, UCCL, MORI", r"\bpplx|\buccl|\bmori(::|_)", "all_to_all"),
    CommPattern("oneCCL", r"oneccl|\bccl(::|_)|\bsycl_(all|reduce_scatter|broadcast)"),
    CommPattern("HCCL", r"(?i:\bhccl|\bhcom_)"),
    CommPattern("gloo", r"\bgloo::"),
    CommPattern("custom all-reduce of vLLM, SGLang, aiter", r"cross_device_reduce|quick_?reduce::|allreduce_prototype",
                "all_reduce"),
    CommPattern("TensorRT-LLM, FlashInfer", r"allreduce_fusion_kernel", "all_reduce"),
    CommPattern("all-reduces within a host, TensorRT-LLM's and torch's own",
                r"(?i:(one|two)_?shot_?all_?reduce)|hybridCubeMeshAllReduce", "all_reduce"),
    CommPattern("TensorRT-LLM's experts", r"(?i:moe_?a2a|moe_?all_?to_?all)", "all_to_all"),
    CommPattern("TransformerEngine", r"\buserbuffers_"),
    CommPattern("torch's symmetric memory", r"multimem_(all|one|two|reduce)|(?i:\ball_?to_?all_?v)"),
    CommPattern("Flux, Triton-distributed", r"\bflux::|triton_dist"),
)  # fmt: skip
"""Kernels that communicate. The first that fits says which collective it is."""
COMPUTATION: Final = re.compile(
    r"gemm|gemv|matmul|cutlass|cublas|cudnn|cusparse|cufft|nvjet|xmma|ampere_|hopper_|sm\d\d_|volta_|turing_|maxwell_|"
    r"Cijk_|miopen|rocblas|hipblas|rocprim|hipcub|\bck::|onednn|dnnl|\bat::|\bc10::|at_cuda_detail|\bcub::|thrust::|"
    r"triton_|elementwise|vectorized|unrolled|reduce|softmax|norm|conv|wgrad|dgrad|implicit|winograd|im2col|fft|flash|"
    r"fmha|attention|attn|mha|mla_|rope|rotary|embed|index|gather|scatter|dropout|pool|adam|sgd|lamb|optim|multi_tensor|"
    r"fill|zero|copy|cat|transpose|permute|stack|sort|topk|scan|cumsum|loss|entropy|nll|gelu|silu|relu|glu|sigmoid|tanh|"
    r"activation|bias|expert|router|quant|cast|convert|scale|mask|arange|random|uniform|philox|distribution|pad|"
    r"upsample|interpolate|grid|bernoulli|where|foreach|sum|mean|mul|add|pow|sqrt|exp|log|max|min|compare|clamp",
    re.IGNORECASE,
)
"""What the names of kernels say that compute."""
EXCHANGE: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a|send_?recv|p2p|peer|halo|exchange|\bring|_ring|barrier|"
    r"signal|dispatch_?(tokens|kernel)|combine_?(tokens|kernel)|one_?shot|two_?shot|lamport|nvls|symm_?mem",
    re.IGNORECASE,
)
"""Words in names of kernels that may well communicate, whatever else the name says. That of a kernel with one of them
and no pattern of COMM_KERNELS, like that of one without any word of COMPUTATION, does not tell its kind."""
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
COLLECTIVES: Final = tuple(dict.fromkeys(name for _, name in WORDS))
"""What a pattern of the user's may name."""


def comm_pattern(text: str) -> CommPattern:
    """A pattern as the user writes it: `REGEX`, or `COLLECTIVE:REGEX` such as `all_reduce:mine::ring_`. Raises
    ValueError that says what to write instead."""
    name, colon, rest = text.partition(":")
    known = bool(colon) and name in COLLECTIVES and not rest.startswith(":")
    pattern = rest if known else text
    if not pattern.strip():
        raise ValueError(f"{text!r} names no kernel; write part of the kernel's name, or COLLECTIVE:part of it")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error}); write part of the kernel's name") from error
    if compiled.search(""):
        raise ValueError(f"{pattern!r} fits every kernel; write part of the name of those that communicate")
    return CommPattern("yours", pattern, name if known else "")


class CommNames:
    """`more`: patterns of further kernels that communicate (`comm_pattern`), which come before those that are known.
    Raises ValueError for one that is none."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        known = (*map(comm_pattern, more), *COMM_KERNELS)
        self._patterns = [(re.compile(one.pattern), one.collective) for one in known]

    def collective(self, kernel: str) -> str | None:
        """What a kernel that communicates is by its pattern, empty: that does not say; None: it does not
        communicate."""
        return next((name for pattern, name in self._patterns if pattern.search(kernel)), None)


def is_computation(kernel: str) -> bool:
    """Whether a kernel's name says that it computes. Of one that does not, and has no pattern, the kind is unknown."""
    return COMPUTATION.search(kernel) is not None and EXCHANGE.search(kernel) is None


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
