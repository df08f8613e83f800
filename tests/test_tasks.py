"""Whose arrival each rank's wait depends on."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from dsprof.analyzer.align.match import BOTH_SIDES
from dsprof.analyzer.graph.tasks import EVERYONE, OWN, Tasks


def tasks_with(kinds: np.ndarray[Any, Any], root: np.ndarray[Any, Any]) -> Tasks:
    """Of which each needs what `kinds` says."""
    words, numbers = np.full(len(kinds), "", object), np.zeros(len(kinds), np.int64)
    sizes, trees = numbers.astype(float), np.full(len(kinds), None, object)
    return Tasks(words, words, numbers > 0, numbers, kinds, root, sizes, numbers, numbers, numbers, numbers, trees)


def test_which_are_shared_is_found_once_for_all() -> None:
    """It is asked of each task: to look through all of them for one took half of the analysis of a large trace."""
    needs = [*BOTH_SIDES, "tree", "root", "to-root", "none"]
    tasks = tasks_with(np.array(needs, object), np.full(len(needs), -1))
    assert tasks.shared.tolist() == [*[True] * len(BOTH_SIDES), False, False, False, False]
    assert tasks.shared is tasks.shared
    assert tasks.take(np.array([0, len(needs) - 1])).shared.tolist() == [True, False]


def test_views_of_many_are_those_of_each() -> None:
    needs, roots, ranks = ("all", "handed", "tree", "root", "to-root", "none"), (-1, 0, 2), range(4)
    rows = list(product(needs, roots))
    tasks = tasks_with(np.array([need for need, _ in rows], object), np.array([root for _, root in rows]))
    row, rank = (np.array(one) for one in zip(*product(range(len(rows)), ranks), strict=True))
    every = [tasks.view(a, b) for a, b in zip(row.tolist(), rank.tolist(), strict=True)]
    assert tasks.views(row, rank).tolist() == every
    assert {EVERYONE, OWN + 1, OWN + 2} <= set(every)


def test_along_a_tree_each_rank_has_an_end_of_its_own() -> None:
    """Of four ranks, of which the first sends: who is held up by whom."""
    tasks = tasks_with(np.array(["tree"], object), np.array([0]))
    tasks.holds_up[0] = {0: (0, 1, 2, 3), 1: (0, 1, 3), 2: (0, 2), 3: (1, 3)}
    assert [tasks.view(0, rank) for rank in range(4)] == [OWN, OWN + 1, OWN + 2, OWN + 3]
    assert tasks.views_of(0, 3, 4) == (OWN + 1, OWN + 3)
    assert tasks.views_of(0, 7, 8) == (OWN + 7,)  # that is in no group of it
