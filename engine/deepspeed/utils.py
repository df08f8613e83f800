"""Small things that DeepSpeed's tutorials call."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from ..tree import each_tensor
from .accelerator import get_accelerator, host_memory
from .start import last_engine


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's (if it is in use) and torch's random numbers."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of `item` with its tensors on `device`, however nested: a view would be saved with all it is a view of.
    Tied weights stay tied."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if not tensor.numel() or key not in copies:
            copies[key] = tensor.detach().to(device, copy=True)
        return copies[key]

    return each_tensor(item, copy)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`, however nested; with `criterion_func` those of which it is true."""
    wanted = criterion_func or (lambda tensor: True)
    return each_tensor(item, lambda tensor: tensor.to(device) if wanted(tensor) else tensor)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print memory in use on rank 0, if `force`d, as DeepSpeed does only then; peaks count from here on anew."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    sizes = {
        "MA": device.memory_allocated(), "Max_MA": device.max_memory_allocated(),
        "CA": device.memory_reserved(), "Max_CA": device.max_memory_reserved(),
    }  # fmt: skip
    total, available = host_memory()
    print(message)
    print("  ".join(f"{name} {size / 2**30:.2f} GB" for name, size in sizes.items()))
    used = total - available
    print(f"CPU Virtual Memory:  used = {used / 2**30:.2f} GB, percent = {100 * used / total:.1f}%")
    device.reset_peak_memory_stats()


def get_local_rank() -> int:
    """This process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup:
    """All ranks of the job. Raises RuntimeError before `init_distributed`."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("get_world_group: there is none yet; call deepspeed.init_distributed() first")
    return world


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Print the communications so far of the engine that was made last (`comms_logger`); with `show_straggler` on all
    ranks at once."""
    if return_dict:
        raise ValueError(
            "log_summary: return_dict is not supported; the run's trace has each communication (trace/*.parquet), and "
            "findings.json what to make of them"
        )
    last_engine("log_summary").log_summary(show_straggler)


FORMAT: Final = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


def _make() -> logging.Logger:
    """To standard output, from warnings on, as DeepSpeed's."""
    made = logging.getLogger("DeepSpeed")
    made.setLevel(logging.WARNING)
    made.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(FORMAT))
    made.addHandler(handler)
    return made


logger: Final = _make()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these `ranks`, or on all if there is -1 among them; on none if there are none."""
    text = _of_rank(message, ranks)
    if text is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print `message` on these `ranks`, whatever the logger's level."""
    text = _of_rank(message, ranks)
    if text is not None:
        print(text)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, the first time that it is called with these arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(message: str) -> None:
    """Log a warning, the first time that it is called with this text."""
    logger.warning(message)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    """The message as this rank says it; None if it does not. Without a process group it does."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    wanted = not dist.is_initialized() or (ranks is not None and (rank in ranks or -1 in ranks))
    return f"[Rank {rank}] {message}" if wanted else None


class OnDevice:
    """The block in which tensors are made on `device`, and those of fractions as `dtype`, unless they say otherwise.

    On `meta` they have no elements, and `initialize` refuses them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"OnDevice: dtype={dtype}; write torch.float32, torch.bfloat16 or torch.float16")
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._undo.enter_context(self.device)
            self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
