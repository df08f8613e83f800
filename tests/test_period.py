"""Iterations of several optimizers: the pattern in which they take turns, and what is out of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsprof.trace.derive.period import EXCEPTIONS, iteration_ends, rarest_regular

LETTERS = "DGXY"


def iterations(letters: str) -> list[str] | None:
    """The units of each iteration; None if nothing repeats."""
    found = iteration_ends(np.array([LETTERS.index(letter) for letter in letters], np.int64))
    if found is None:
        return None
    starts = [0, *(found[:-1] + 1).tolist()]
    return [letters[start : end + 1] for start, end in zip(starts, found.tolist(), strict=True)]


@pytest.mark.parametrize("pattern", ["D", "DG", "GD", "DDDDDG", "DDGDX", "DG" * 3 + "X", "D" * 12 + "G" * 12])
def test_the_shortest_pattern_is_found_and_begins_where_the_run_does(pattern: str) -> None:
    assert iterations(pattern * 5) == [pattern] * 5
    cut = pattern * 5 + pattern[:-1]
    assert iterations(cut) == [pattern] * 5


def test_two_repetitions_are_enough_and_one_is_not() -> None:
    assert iterations("DG") is None
    assert iterations("DGD") is None
    assert iterations("DGDG") == ["DG", "DG"]


def test_a_step_that_was_skipped_or_made_twice_does_not_move_the_others() -> None:
    whole = "DDDDDG"
    assert iterations(whole * 10 + "DDDDG" + whole * 10) == [whole] * 10 + ["DDDDG"] + [whole] * 10
    assert iterations(whole * 10 + "D" + whole * 10) == [whole] * 10 + ["D" + whole] + [whole] * 9
    assert iterations(whole * 10 + "DDXDDG" + whole * 10) == [whole] * 10 + ["DDXDDG"] + [whole] * 10
    assert iterations("DG" * 20 + "D" + "DG" * 20) == ["DG"] * 20 + ["D"] + ["DG"] * 20


def test_what_comes_before_the_pattern_stands_for_itself() -> None:
    assert iterations("XX" + "DG" * 30) == ["XX"] + ["DG"] * 30
    assert iterations("XXX" + "DG" * 40) == ["X"] * 3 + ["DG"] * 40


def test_rare_steps_of_another_optimizer_are_exceptions_not_a_period() -> None:
    letters = ("D" * 49 + "G") * 4
    assert iterations(letters) == list(letters)


def test_too_many_exceptions_are_no_pattern() -> None:
    assert iterations("DDG" + "DG" * 3 + "DDDG" + "DG" * 2 + "DDG") is None


def ends_of_rarest(letters: str) -> list[int] | None:
    steps = np.array([[letter == other for letter in letters] for other in LETTERS])
    found = rarest_regular(steps)
    return None if found is None else found.tolist()


def test_the_rarest_regular_optimizer_ends_iterations() -> None:
    assert ends_of_rarest("DDDGDDGDDDDGDDDG") == [3, 6, 11, 15]
    assert ends_of_rarest("DDDGDDGDDDDGDDDGD") == [3, 6, 11, 15]
    assert ends_of_rarest("DDXDGDDGDDDDGDDDG") == [4, 7, 12, 16]
    assert ends_of_rarest("DDDXDDD") is None


def test_where_it_was_not_stepped_for_long_the_others_stand_for_themselves() -> None:
    warming_up = "D" * 10
    assert ends_of_rarest(warming_up + "DDGDGDDGDDG") == [*range(10), 12, 14, 17, 20]
    assert ends_of_rarest("DDGDGDDGDDG" + warming_up) == [2, 4, 7, 10, *range(11, 21)]


@given(st.text(LETTERS, min_size=1, max_size=8), st.integers(3, 20), st.data())
def test_any_pattern_that_repeats_is_found(pattern: str, times: int, data: st.DataObject) -> None:
    letters = pattern * times + pattern[: data.draw(st.integers(0, len(pattern) - 1))]
    length = (pattern * 2).index(pattern, 1)  # the pattern may itself be a repetition
    assert iterations(letters) == [pattern[:length]] * (len(letters) // length)


@given(st.text(LETTERS, max_size=200))
def test_iterations_are_in_order_and_rarely_out_of_the_pattern(letters: str) -> None:
    found = iterations(letters)
    if found is not None:
        assert all(found)
        assert letters.startswith("".join(found))
        usual = max(set(found), key=found.count)
        others = sum(len(item) - len(usual) * item.endswith(usual) for item in found)
        assert others <= EXCEPTIONS * len(letters)
    rarest = ends_of_rarest(letters)
    if rarest is not None:
        assert rarest == sorted(set(rarest))
        assert rarest[0] >= 0
        assert rarest[-1] < len(letters)
