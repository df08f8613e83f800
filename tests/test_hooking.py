"""The wrapper around what is timed, and looking on as objects are made: nothing of ours reaches the job."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from dsprof.collectors.hooking import constructors, timed
from dsprof.collectors.hooking.constructors import after_init, before_init, is_watched

Counted = list[tuple[str, str]]
Wrap = Callable[[Callable[..., Any], Callable[..., Any], Callable[..., object]], Callable[..., Any]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Where an error was counted, and its text."""
    found: Counted = []
    for module in (timed, constructors):
        monkeypatch.setattr(module, "count_error", lambda where, error: found.append((where, str(error))))
    return found


def plain(original: Callable[..., Any], begin: Callable[..., Any], end: Callable[..., object]) -> Callable[..., Any]:
    return timed.timed(original, lambda: begin((), {}), end, "a test")


def by_arguments(
    original: Callable[..., Any], begin: Callable[..., Any], end: Callable[..., object]
) -> Callable[..., Any]:
    return timed.timed_by_arguments(original, begin, end, "a test")


both = pytest.mark.parametrize("wrap", [plain, by_arguments])


@both
def test_what_began_ends_however_the_call_ends(wrap: Wrap, counted: Counted) -> None:
    seen: list[Any] = []

    def divide(one: int, other: int = 1) -> float:
        """Quotient."""
        seen.append("called")
        return one / other

    call = wrap(divide, lambda args, kwargs: "begun", seen.append)
    assert call(6, other=3) == 2
    with pytest.raises(ZeroDivisionError):
        call(1, 0)
    assert seen == ["called", "begun"] * 2
    assert (call.__name__, call.__doc__, inspect.signature(call)) == ("divide", "Quotient.", inspect.signature(divide))
    assert counted == []


def test_a_beginning_that_wants_them_gets_the_arguments() -> None:
    given: list[Any] = []
    call = by_arguments(lambda *args, **kwargs: None, lambda args, kwargs: given.append((args, kwargs)), id)
    call(1, 2, three=3)
    assert given == [((1, 2), {"three": 3})]


@both
def test_where_it_cannot_begin_the_call_is_made_all_the_same(wrap: Wrap, counted: Counted) -> None:
    ended: list[Any] = []

    def fails(args: Any, kwargs: Any) -> int:
        raise ValueError("ours")

    assert wrap(lambda: "the job's", fails, ended.append)() == "the job's"
    assert (ended, counted) == ([], [("a test", "ours")])


@both
def test_what_a_signals_handler_raises_as_it_begins_is_the_jobs(wrap: Wrap) -> None:
    def interrupted(args: Any, kwargs: Any) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wrap(lambda: "the job's", interrupted, id)()


class Made:
    def __init__(self, size: int, *, name: str = "") -> None:
        self.size, self.name = size, name


def test_looks_come_before_and_after_an_object_is_made(counted: Counted) -> None:
    seen: list[Any] = []
    undo = [
        before_init(Made, lambda made, *args, **kwargs: seen.append((hasattr(made, "size"), args, kwargs)), "before"),
        after_init(Made, lambda made, *args, **kwargs: seen.append((made.size, args, kwargs)), "after"),
    ]
    assert is_watched(Made)
    assert Made(3, name="three").name == "three"
    assert seen == [(False, (3,), {"name": "three"}), (3, (3,), {"name": "three"})]
    while undo:
        undo.pop()()
    assert not is_watched(Made)
    assert Made(1).size == 1
    assert len(seen) == 2
    assert counted == []


@pytest.mark.parametrize("watch", [before_init, after_init])
def test_a_look_that_fails_is_counted_and_the_object_made(watch: Callable[..., Any], counted: Counted) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("ours")

    undo = watch(Made, fails, "a test")
    try:
        assert Made(2).size == 2
        with pytest.raises(TypeError):
            Made()  # type: ignore[call-arg]
    finally:
        undo()
    assert counted == [("a test", "ours")] * (2 if watch is before_init else 1)
