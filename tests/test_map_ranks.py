"""What is of one rank, done by an executor: the same result, one rank's failure, and progress."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_up_device import DeviceJob
from pandas.api.extensions import ExtensionArray
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analyze import explain
from dsprof.analyzer.budget.step_budget import time_of_parts
from dsprof.analyzer.rules.run.slow_chain import device_phases
from dsprof.analyzer.study import Study, study
from dsprof.schema import COLUMNS
from dsprof.trace import Trace, concat_rows
from dsprof.trace.load import EVERY_COLUMN
from dsprof.trace.map_ranks import map_ranks
from dsprof.trace.packed_table import PackedTable
from dsprof.trace.process_pool import jobs_for, processes, usable_cores


def job(ranks: int = 4) -> Job:
    return Job(ranks=ranks, steps=24, forward=lambda rank, step: 60 if rank == 1 else 40)


def assert_equal(one: Any, other: Any, where: str = "study") -> None:
    """Bit for bit, of whatever a study consists of."""
    assert type(one) is type(other), where
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_exact=True, check_column_type=False, obj=where)
    elif isinstance(one, PackedTable):
        assert_equal(one.table(), other.table(), where)  # however many blocks it lies in
    elif isinstance(one, ExtensionArray):
        pd.testing.assert_extension_array_equal(one, other, check_exact=True, obj=where)
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


class Counted:
    """Twice a rank; a line in a file whenever it is pickled or made again."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, rank: int) -> int:
        return 2 * rank

    def __getstate__(self) -> dict[str, Any]:
        self._note("pickled")
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._note("made")

    def _note(self, what: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{what} {os.getpid()}\n")


def check_processes(count: int, log: Path) -> None:
    trace = job(count).trace()
    alone = study(trace)
    with pytest.raises(AssertionError):
        assert_equal(alone.steps, alone.steps.assign(ordinary=False))
    with processes(count, traced_bytes=0, ranks=count) as pool:
        assert isinstance(pool, ProcessPoolExecutor)
        together = study(trace, pool)
        for _ in range(2):
            log.unlink(missing_ok=True)
            doubled = map_ranks(Counted(log), range(400), pool)
            noted = log.read_text().splitlines()
            assert doubled.found == {rank: 2 * rank for rank in range(400)}
            assert [line for line in noted if "pickled" in line] == [f"pickled {os.getpid()}"]
            assert len(noted) == len(set(noted)) <= 1 + count, "what the ranks have in common is made once a process"
    assert_equal(alone, together)
    for rank in alone.trace.ranks:
        pd.testing.assert_frame_equal(alone.trace.read(rank), together.trace.read(rank), check_exact=True)


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    check_processes(2, tmp_path / "log")


def test_a_small_trace_is_analyzed_in_one_process() -> None:
    cores = usable_cores()
    assert jobs_for(None, traced_bytes=100_000, ranks=8) == 1
    assert jobs_for(None, traced_bytes=60_000_000, ranks=512) == cores
    assert jobs_for(3, traced_bytes=100_000, ranks=8) == 3
    assert jobs_for(16, traced_bytes=100_000, ranks=8) == 8
    with processes(None, traced_bytes=100_000, ranks=8) as pool:
        assert pool is None


def test_parts_of_several_ranks_find_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more ranks than there are parts, what is found of a part is joined before it is joined with that of others."""
    trace = job(7).trace()
    alone = study(trace)
    monkeypatch.setattr("dsprof.trace.map_ranks.FEWEST_PARTS", 3)
    with processes(2, traced_bytes=0, ranks=7) as pool:
        assert_equal(alone, study(trace, pool))


@pytest.mark.slow
def test_eight_processes_find_what_one_does(tmp_path: Path) -> None:
    check_processes(8, tmp_path / "log")


class Broken:
    """A source one of whose ranks cannot be read: it raises what nobody expects."""

    def __init__(self, trace: Trace, rank: int, columns: int) -> None:
        self._source, self._rank, self._columns = trace.source, rank, columns
        self.ranks = trace.ranks

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        if rank == self._rank and len(columns) >= self._columns:
            raise KeyError("damaged")
        return self._source.read(rank, columns)


class Long:
    """A source whose ranks have so many rows of modules, made anew whenever they are read."""

    def __init__(self, ranks: int, modules: int) -> None:
        self._source, self._modules = job(ranks).trace().source, modules
        self.ranks = tuple(range(ranks))

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        rows = self._source.read(rank)
        forward = rows[(rows["kind"] == "phase") & (rows["name"] == "forward")]
        module = forward.loc[forward.index.repeat(self._modules // len(forward))].assign(kind="module", name="block")
        return concat_rows([rows, module.astype(COLUMNS)])[list(columns)]


def peak_bytes(source: Long) -> int:
    """The most that is held while these ranks are studied."""
    run = job(len(source.ranks)).trace().run
    tracemalloc.start()
    try:
        study(Trace(run, source))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_process_holds_the_rows_of_all_ranks() -> None:
    of_a_rank = int(Long(1, 20_000).read(0).memory_usage(deep=True).sum())
    assert of_a_rank > 2_000_000
    few, many = (peak_bytes(Long(ranks, 20_000)) for ranks in (2, 10))
    assert many - few < of_a_rank, "eight ranks more take less than the rows of one"


class Noting:
    """A source that notes which ranks are read."""

    def __init__(self, trace: Trace) -> None:
        self._source, self.ranks = trace.source, trace.ranks
        self.read_ranks: list[int] = []

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        self.read_ranks.append(rank)
        return self._source.read(rank, columns)


def test_rows_are_read_twice_and_then_of_suspects_alone() -> None:
    whole = job(20).trace()
    source = Noting(whole)
    measured = study(Trace(whole.run, source))
    assert set(source.read_ranks) == {*range(20)}
    assert len(source.read_ranks) <= 2 * 20
    source.read_ranks.clear()
    analysis = explain(measured)
    assert analysis.findings[0].where.ranks == (1,)
    assert len(set(source.read_ranks)) <= 8, "the rows of suspects are read, and of no others"


def test_of_a_late_device_the_rows_of_a_few_ranks_are_read() -> None:
    job = DeviceJob(ranks=20, steps=12, forward=lambda rank, step: {13: 40.0, 17: 30.0}.get(rank, 20.0))
    whole = job.run()[0]
    source = Noting(whole)
    measured = study(Trace(whole.run, source))
    source.read_ranks.clear()
    others = [rank for rank in range(20) if rank not in (13, 17)]
    phases = device_phases(measured, [13, 17], others)
    assert source.read_ranks == [13, 17, 0, 3, 6, 9, 12, 16]
    assert phases["forward"] == pytest.approx((35.0, 20.0))
    source.read_ranks.clear()
    device_phases(measured, others, [13, 17])
    assert source.read_ranks == [*others[:6], 13, 17], "of many that are late, the latest"


def test_the_two_passes_keep_no_communications() -> None:
    measured = study(job().trace())
    assert {kind for kind, of in measured.tables.activity.items() if len(of)} == {"step", "phase", "gauge"}
    arrivals = [item for item in vars(measured.aligned).values() if isinstance(item, pd.DataFrame)]
    assert arrivals == []


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


def test_a_rank_whose_time_cannot_be_told_costs_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what is worked out is worked out of several ranks at once."""

    def told(times: Any, steps: pd.DataFrame) -> pd.DataFrame:
        if 2 in times:
            raise KeyError("two")
        return time_of_parts(times, steps)

    monkeypatch.setattr("dsprof.analyzer.rank_summary.time_of_parts", told)
    monkeypatch.setattr("dsprof.trace.map_ranks.FEWEST_PARTS", 2)
    analysis = analyze(job().trace())
    assert analysis.ranks_captured == (0, 1, 3)
    assert "rank 2: it could not be analyzed and is left out (KeyError: 'two')" in analysis.capture.warnings
    assert sorted(analysis.steps["rank"].unique()) == [0, 1, 3]
    assert sorted(analysis.waits["rank"].unique()) == [0, 1, 3]


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
