"""Functions in the place of others: what they record, and that nobody sees them otherwise, in C++ and in Python."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import open_recorder, read_rows

from dsprof.collectors.record import CallContext, Recorder
from dsprof.collectors.wrappers import for_purpose, recorded
from dsprof.ondisk import State
from dsprof.schema import SHARDING, Kind


@pytest.fixture
def recorder(kind: str, tmp_path: Path) -> Iterator[Recorder]:
    opened = open_recorder(kind, tmp_path / "capture")
    yield opened
    opened.close()


class Unit:
    """A class whose methods are wrapped."""

    factor = 2

    def scaled(self, number: int, *more: int, by: int = 1) -> tuple[int, ...]:
        """Scale."""
        return tuple(self.factor * by * each for each in (number, *more))

    def fails(self) -> None:
        raise KeyError("the job's")


def watched(recorder: Recorder, original: Any = Unit.scaled) -> Any:
    return recorded(recorder, original, int(Kind.MODULE), recorder.intern(SHARDING))


def test_a_method_gets_what_it_is_given_and_each_call_is_a_row(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unit, "scaled", watched(recorder))
    unit = Unit()
    bound = unit.scaled
    assert unit.scaled(1) == (2,)
    assert unit.scaled(1, 3, by=5) == (10, 30)
    assert bound(*[1, 2], by=2) == (4, 8)
    assert Unit.scaled(unit, 4) == (8,)
    rows = read_rows(tmp_path / "capture")
    assert [(row.kind, row.name, row.state) for row in rows] == [(Kind.MODULE, SHARDING, State.DONE)] * 4
    assert all(row.end_ns >= row.start_ns > 0 for row in rows)


def test_what_a_call_raises_is_the_jobs_and_its_row_ends(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unit, "fails", watched(recorder, Unit.fails))
    with pytest.raises(KeyError, match="the job's"):
        Unit().fails()
    (row,) = read_rows(tmp_path / "capture")
    assert (row.state, recorder.errors) == (State.DONE, 0)


def test_a_call_inside_a_call_ends_first(recorder: Recorder, tmp_path: Path) -> None:
    inner = watched(recorder, lambda: None)
    watched(recorder, inner)()
    outside, inside = read_rows(tmp_path / "capture")
    assert outside.start_ns <= inside.start_ns <= inside.end_ns <= outside.end_ns


def test_it_looks_like_the_original(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Unit.scaled
    bound = inspect.signature(Unit().scaled)
    wrapper = watched(recorder)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__doc__) == ("scaled", "Unit.scaled", "Scale.")
    assert (wrapper.__module__, wrapper.__wrapped__) == (__name__, original)
    assert inspect.signature(wrapper) == inspect.signature(original)
    assert inspect.isroutine(wrapper)
    monkeypatch.setattr(Unit, "scaled", wrapper)
    assert copy.deepcopy(wrapper) is wrapper
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    assert inspect.signature(Unit().scaled) == bound


def test_it_goes_with_whoever_had_it(recorder: Recorder) -> None:
    def original() -> None:
        pass

    wrapper = watched(recorder, original)
    wrapper.itself = wrapper
    gone, original_gone = weakref.ref(wrapper), weakref.ref(original)
    del wrapper, original
    gc.collect()
    assert (gone(), original_gone()) == (None, None)


def test_one_of_a_capture_that_is_over_calls_its_function(kind: str, tmp_path: Path) -> None:
    first = open_recorder(kind, tmp_path / "first")
    wrapper, purpose = watched(first), for_purpose(first, "gradient", lambda: "called")
    first.close()
    assert (wrapper(Unit(), 1), purpose()) == ((2,), "called")
    assert read_rows(tmp_path / "first") == []


def test_what_is_called_has_its_purpose_and_the_caller_its_own(recorder: Recorder) -> None:
    def context() -> CallContext:
        now = CallContext(*recorder.context(-1, -1, 0, 0))
        recorder.context(*now)
        return now

    gradient, parameter = recorder.intern("gradient"), recorder.intern("parameter")
    own = CallContext(1, 2, 0, parameter)
    before = recorder.context(*own)
    try:
        assert for_purpose(recorder, "gradient", context)() == CallContext(-1, -1, 0, gradient)
        assert context() == own
        with pytest.raises(ZeroDivisionError):
            for_purpose(recorder, "gradient", lambda: 1 / 0)()
        assert context() == own
    finally:
        recorder.context(*before)


def test_a_compiled_step_that_calls_one_computes_the_same(recorder: Recorder, tmp_path: Path) -> None:
    called = watched(recorder, lambda tensor: tensor * 2)

    def step(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = called(tensor + 1)
        return found.sum()

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(3)).item() == 12
    assert recorder.errors == 0
