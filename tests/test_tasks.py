"""Whose arrival each rank's wait depends on."""

from __future__ import annotations

from itertools import product

import numpy as np

from dsprof.analyzer.graph.tasks import EVERYONE, OWN, Tasks


def test_views_of_many_are_those_of_each() -> None:
    needs, roots, ranks = ("all", "handed", "root", "to-root", "none"), (-1, 0, 2), range(4)
    rows = list(product(needs, roots))
    words, numbers = np.full(len(rows), "", object), np.zeros(len(rows), np.int64)
    kinds = np.array([need for need, _ in rows], object)
    root = np.array([root for _, root in rows])
    tasks = Tasks(words, words, numbers > 0, numbers, kinds, root, numbers.astype(float), numbers, numbers, numbers)
    row, rank = (np.array(one) for one in zip(*product(range(len(rows)), ranks), strict=True))
    every = [tasks.view(a, b) for a, b in zip(row.tolist(), rank.tolist(), strict=True)]
    assert tasks.views(row, rank).tolist() == every
    assert {EVERYONE, OWN + 1, OWN + 2} <= set(every)
