"""Functions in the place of torch's: what they record, and that nobody sees them otherwise."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import open_recorder, read_rows

from dsprof.collectors.communication.purposes import for_purpose
from dsprof.collectors.hooking.timed import timed
from dsprof.collectors.hooking.uninstall import replace_attribute
from dsprof.collectors.recorder.record import Recorder
from dsprof.ondisk import State
from dsprof.schema import SHARDING, Kind


@pytest.fixture
def recorder(kind: str, tmp_path: Path) -> Iterator[Recorder]:
    opened = open_recorder(kind, tmp_path / "capture")
    yield opened
    opened.close()


class Unit:
    """A class whose methods are recorded."""

    factor = 2

    def scaled(self, number: int, *more: int, by: int = 1) -> tuple[int, ...]:
        """Scale."""
        return tuple(self.factor * by * each for each in (number, *more))

    def fails(self) -> None:
        raise KeyError("the job's")

    def doubled(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2


ORIGINAL = Unit.scaled


@pytest.fixture
def uninstall(recorder: Recorder) -> Iterator[Any]:
    """Has calls of the methods recorded, until it is called or the test is over."""
    begin = partial(recorder.begin, int(Kind.MODULE), recorder.intern(SHARDING))
    undo = [
        replace_attribute(Unit, method, timed(getattr(Unit, method), begin, recorder.end, "a unit"))
        for method in ("scaled", "fails", "doubled")
    ]

    def every() -> None:
        while undo:
            undo.pop()()

    yield every
    every()


def test_a_method_gets_what_it_is_given_and_each_call_is_a_row(uninstall: Any, tmp_path: Path) -> None:
    unit = Unit()
    bound = unit.scaled
    assert unit.scaled(1) == (2,)
    assert unit.scaled(1, 3, by=5) == (10, 30)
    assert bound(*[1, 2], by=2) == (4, 8)
    assert Unit.scaled(unit, 4) == (8,)
    rows = read_rows(tmp_path / "capture")
    assert [(row.kind, row.name, row.state) for row in rows] == [(Kind.MODULE, SHARDING, State.DONE)] * 4
    assert all(row.end_ns >= row.start_ns > 0 for row in rows)
    uninstall()
    assert Unit.scaled is ORIGINAL


def test_what_a_call_raises_is_the_jobs_and_its_row_ends(uninstall: Any, recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the job's"):
        Unit().fails()
    (row,) = read_rows(tmp_path / "capture")
    assert (row.state, recorder.errors) == (State.DONE, 0)


def test_it_looks_like_the_original(uninstall: Any) -> None:
    recorded = Unit.scaled
    assert recorded is not ORIGINAL
    assert (recorded.__name__, recorded.__qualname__, recorded.__doc__) == ("scaled", "Unit.scaled", "Scale.")
    assert recorded.__module__ == __name__
    assert inspect.signature(recorded) == inspect.signature(ORIGINAL)
    assert inspect.isroutine(recorded)
    assert copy.deepcopy(recorded) is recorded
    assert pickle.loads(pickle.dumps(recorded)) is recorded


def test_one_of_a_capture_that_is_over_calls_its_function(uninstall: Any, recorder: Recorder, tmp_path: Path) -> None:
    purpose = for_purpose(recorder, "gradient", lambda: "called")
    recorder.close()
    assert (Unit().scaled(1), purpose()) == ((2,), "called")
    assert read_rows(tmp_path / "capture") == []


def test_what_is_called_has_its_purpose_and_the_caller_its_own(recorder: Recorder) -> None:
    gradient, parameter = recorder.intern("gradient"), recorder.intern("parameter")
    context, own = recorder.context, recorder.make_context(1, 2, 0, parameter)
    before = context()
    recorder.set_context(own)
    try:
        assert for_purpose(recorder, "gradient", context)() == recorder.make_context(-1, -1, 0, gradient)
        assert context() == own
        with pytest.raises(ZeroDivisionError):
            for_purpose(recorder, "gradient", lambda: 1 / 0)()
        assert context() == own
    finally:
        recorder.set_context(before)


def test_what_a_handler_raises_once_a_purpose_is_set_leaves_the_callers(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs a handler between two of its instructions: here behind the call that sets the purpose."""
    own, set_context = recorder.context(), recorder.set_context
    raised = []

    def interrupted(new: object) -> None:
        set_context(new)
        if not raised:
            raised.append(new)
            raise TimeoutError("a handler's")

    monkeypatch.setattr(recorder, "set_context", interrupted)
    called = for_purpose(recorder, "gradient", lambda: "called")
    with pytest.raises(TimeoutError):
        called()
    assert (len(raised), recorder.context()) == (1, own)
    assert called() == "called"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_step_that_calls_one_computes_the_same(uninstall: Any, recorder: Recorder, fullgraph: bool) -> None:
    halved, unit = for_purpose(recorder, "gradient", lambda tensor: tensor / 2), Unit()

    def step(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = halved(unit.doubled(tensor + 1)) * 2
        return found.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=fullgraph)
    for _ in range(3):
        assert compiled(torch.ones(3)).item() == 12
    assert recorder.errors == 0
