"""What is of one rank, done by an executor: the same result, one rank's failure, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from multiprocessing import get_context
from pickle import PicklingError
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.map_ranks import map_ranks
from dsprof.analyzer.study import Study, study
from dsprof.trace import Trace
from dsprof.trace.load import EVERY_COLUMN


def job(ranks: int = 4) -> Job:
    return Job(ranks=ranks, steps=24, forward=lambda rank, step: 60 if rank == 1 else 40)


def assert_equal(one: Any, other: Any, where: str = "study") -> None:
    """Bit for bit, of whatever a study consists of."""
    assert type(one) is type(other), where
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_exact=True, obj=where)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        same = one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
        assert same, where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{where}[{number}]")
    elif is_dataclass(one):
        for item in fields(one):
            if item.name not in ("trace", "run", "kept", "origin"):
                assert_equal(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
    elif type(one).__module__.startswith("dsprof"):
        for name in vars(one):
            assert_equal(vars(one)[name], vars(other)[name], f"{where}.{name}")
    else:
        assert one == other or (one != one and other != other), where


def check_processes(count: int) -> None:
    trace = job().trace()
    alone = study(trace)
    with pytest.raises(AssertionError):
        assert_equal(alone.steps, alone.steps.assign(ordinary=False))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        together = study(trace, pool)
    assert_equal(alone, together)
    for rank in alone.trace.ranks:
        pd.testing.assert_frame_equal(alone.trace.read(rank), together.trace.read(rank), check_exact=True)


def test_two_processes_find_what_one_does() -> None:
    check_processes(2)


@pytest.mark.slow
def test_eight_processes_find_what_one_does() -> None:
    check_processes(8)


class Broken:
    """A source one of whose ranks cannot be read: it raises what nobody expects."""

    def __init__(self, trace: Trace, rank: int, columns: int) -> None:
        self._source, self._rank, self._columns = trace.source, rank, columns
        self.ranks = trace.ranks

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        if rank == self._rank and len(columns) >= self._columns:
            raise KeyError("damaged")
        return self._source.read(rank, columns)


@contextmanager
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("columns", "warning"), [
    (1, "rank 2: it could not be read and is left out (KeyError: 'damaged')"),
    (len(EVERY_COLUMN), "rank 2: it could not be analyzed and is left out (KeyError: 'damaged')"),
])  # fmt: skip
def test_one_broken_rank_costs_that_rank(columns: int, warning: str, pooled: bool) -> None:
    whole = job().trace()
    trace = replace(whole, source=Broken(whole, 2, columns))
    with threads() as pool:
        analysis = analyze(trace, pool if pooled else None)
    assert analysis.ranks_captured == (0, 1, 3)
    assert analysis.ranks_expected == 4
    assert warning in analysis.capture.warnings
    assert sorted(analysis.steps["rank"].unique()) == [0, 1, 3]


def double(rank: int) -> int:
    if rank == 5:
        raise ValueError("five")
    return 2 * rank


class KilledWorker(Exception):
    """What a cluster raises that gives a task up, as Dask does: no BrokenExecutor."""


class Dead(Executor):
    """Its processes are gone: at once, or when they are asked for the result."""

    def __init__(self, error: Exception, at_once: bool) -> None:
        self._error, self._at_once = error, at_once

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._at_once:
            raise self._error
        future: Future[Any] = Future()
        future.set_exception(self._error)
        return future


@pytest.mark.parametrize(("error", "at_once"), [
    (BrokenExecutor("gone"), False),
    (BrokenExecutor("gone"), True),
    (RuntimeError("cannot schedule new futures after shutdown"), True),
    (KilledWorker("given up after 3 tries"), False),
    (PicklingError("a result that cannot be sent"), False),
])  # fmt: skip
def test_what_a_failed_executor_was_to_do_is_done_here(error: Exception, at_once: bool) -> None:
    of_ranks = map_ranks(double, (3, 1, 5), Dead(error, at_once))
    assert of_ranks.found == {1: 2, 3: 6}
    assert list(of_ranks.found) == [1, 3]
    assert of_ranks.failed == {5: "ValueError: five"}


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    measured = study(job(2).trace(), observer=lambda *what: told.append(what))
    assert isinstance(measured, Study)
    assert told == [("read", 1, 2), ("read", 2, 2), ("summarize", 1, 2), ("summarize", 2, 2)]
