"""DeepSpeed's logger and its functions that log on some ranks only."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

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
