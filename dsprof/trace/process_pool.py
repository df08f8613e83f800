"""Processes of this machine to analyze ranks in, where a trace is large enough for that to pay.

with processes(jobs, traced_bytes=200_000_000, ranks=512) as pool:
    analysis = analyze(trace, pool)
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count as numbers
from multiprocessing import active_children, get_context
from typing import Any, Final

import pandas as pd
import pyarrow as pa

WORTH_BYTES: Final = 6_000_000
"""Of Parquet: 64 ranks of 10,000 rows each, whose analysis takes a core some 4 s. A process takes 0.5 s to start."""
STRINGS: Final = "mode.string_storage"
PRELOADED: Final = ("dsprof.analyzer.study",)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_for(jobs: int | None, traced_bytes: int, ranks: int) -> int:
    """In how many processes to analyze: as many as somebody asked for; else one for a small trace, and as many as there
    are cores for a large one. Never more than ranks."""
    wanted = jobs if jobs is not None else usable_cores() if traced_bytes >= WORTH_BYTES else 1
    return max(min(wanted, ranks), 1)


@contextmanager
def processes(jobs: int | None, traced_bytes: int, ranks: int) -> Iterator[Executor | None]:
    """A pool of `jobs_for` processes; None: this process is enough. What is left to do when the block is left by an
    exception, such as an interrupt, is not done."""
    count = jobs_for(jobs, traced_bytes, ranks)
    if count < 2:
        yield None
        return
    # The server forks them when it has imported what they need, and before it has threads.
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    others = set(active_children())
    pool = Processes(count, mp_context=context, initializer=_begin, initargs=(pd.get_option(STRINGS),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


class Processes(ProcessPoolExecutor):
    """Processes to which the first argument of what is submitted goes as it was pickled the first time, and in each of
    which it is made once, however often it is submitted: it holds what tasks have in common, such as the facts of all
    ranks and their matched communications. Tasks do not change it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = numbers()
        self._sent: tuple[Any, _PickledOnce | None] = None, None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not args:
            return super().submit(function, **kwargs)
        first, *rest = args
        if self._sent[0] is not first:
            self._sent = first, self._packed(first)
        if self._sent[1] is None:
            return super().submit(function, *args, **kwargs)
        return super().submit(_call, function, self._sent[1], *rest, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._sent = None, None
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _packed(self, first: Any) -> _PickledOnce | None:
        """None: it cannot be pickled, as the task's future will say."""
        try:
            return _PickledOnce(next(self._numbers), pickle.dumps(first, pickle.HIGHEST_PROTOCOL))
        except Exception:  # objects raise whatever they like
            return None


@dataclass(frozen=True)
class _PickledOnce:
    """A pickle, known by its number."""

    number: int
    packed: bytes = field(compare=False, repr=False)


def _call(function: Callable[..., Any], first: _PickledOnce, *args: Any, **kwargs: Any) -> Any:
    """In a process of the pool."""
    return function(_unpacked(first), *args, **kwargs)


@lru_cache(maxsize=1)
def _unpacked(sent: _PickledOnce) -> Any:
    return pickle.loads(sent.packed)


def _begin(strings: str) -> None:
    """An interrupt is for the process that asked: it tells the others to end. A process has one core, and holds strings
    as the one that asked does."""
    pd.set_option(STRINGS, strings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
