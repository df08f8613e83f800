"""What hooks replace is put back, as it was stored and where nobody has replaced it since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsprof.collectors.hooking.uninstall import Uninstall, in_reverse, replace_attribute


class Base:
    def method(self) -> str:
        return "base"


class Derived(Base):
    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def named(cls) -> str:
        return cls.__name__


def test_a_static_and_a_class_method_come_back_as_such() -> None:
    stored = {name: vars(Derived)[name] for name in ("static", "named")}
    undo = in_reverse(replace_attribute(Derived, name, lambda *_: "ours") for name in stored)
    assert Derived().static() == "ours"
    undo()
    assert {name: vars(Derived)[name] for name in stored} == stored
    assert (Derived().static(), Derived().named()) == ("static", "Derived")


def test_what_was_inherited_is_inherited_again() -> None:
    undo = replace_attribute(Derived, "method", lambda self: "ours")
    assert (Derived().method(), Base().method()) == ("ours", "base")
    undo()
    assert "method" not in vars(Derived)
    undo()
    assert Derived().method() == "base"


def test_what_somebody_has_put_over_it_stays() -> None:
    undo = replace_attribute(Derived, "method", lambda self: "ours")
    theirs = replace_attribute(Derived, "method", lambda self: "theirs")
    undo()
    assert Derived().method() == "theirs"
    theirs()
    assert Derived().method() == "ours"
    undo()
    assert Derived().method() == "base"


def test_what_is_not_there_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError, match="absent"):
        replace_attribute(Derived, "absent", 1)
    assert not hasattr(Derived, "absent")


def test_of_hooks_that_fail_halfway_none_is_left() -> None:
    def hooks() -> Iterator[Uninstall]:
        yield replace_attribute(Derived, "method", lambda self: "ours")
        yield replace_attribute(Derived, "static", lambda: "ours")
        yield replace_attribute(Derived, "absent", 1)

    with pytest.raises(AttributeError, match="absent"):
        in_reverse(hooks())
    assert (Derived().method(), Derived().static()) == ("base", "static")
