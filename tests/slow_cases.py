"""Which cases of a test are for `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")


def slow_but(quick: Iterable[Case], among: Iterable[Case]) -> list[ParameterSet]:
    """All cases, each a value or a tuple of several, for `pytest.mark.parametrize`: slow but for the quick ones, which
    must be among them."""
    cases, kept = list(among), list(quick)
    assert [case for case in kept if case not in cases] == []
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=[] if case in kept else [pytest.mark.slow])
        for case in cases
    ]
