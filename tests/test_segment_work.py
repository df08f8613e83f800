"""The work of segments, held part by part, and links whose bytes larger transfers tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsprof.analyzer.graph import segment_work
from dsprof.analyzer.graph.link import Link, capped
from dsprof.analyzer.graph.segment_work import copy_work, no_work, part_without, take_work, work_without
from dsprof.analyzer.graph.step_graph import PARTS


@pytest.mark.parametrize("shape", [(5, 3, len(PARTS)), (0, 3, 2), (4, 0, 2), (4, 3, 1)])
def test_a_copy_is_the_same_and_another(shape: tuple[int, int, int]) -> None:
    work = no_work(*shape)
    assert work.shape == shape
    assert not work.any()
    work[..., 0] = np.arange(work[..., 0].size).reshape(shape[:2]) - 2.0
    copied = copy_work(work)
    assert np.array_equal(copied, work)
    copied[...] = 100.0
    assert not (work == 100.0).any()


def test_each_part_lies_together_and_so_do_those_of_a_copy() -> None:
    for work in (no_work(5, 3, len(PARTS)), copy_work(np.ones((5, 3, len(PARTS))))):
        assert all(work[..., part].flags.c_contiguous for part in range(len(PARTS)))


def test_bytes_take_no_longer_than_in_much_larger_transfers() -> None:
    link = Link(1.0, 1e-5, True, largest=1 << 16)
    found = capped(link, 1 << 16, 1e-6, 1 << 21)
    assert found.transfer_ms(np.array(1 << 16)) == pytest.approx(link.transfer_ms(np.array(1 << 16)))
    assert (found.ms_per_byte, found.largest) == (1e-6, 1 << 21)
    assert capped(link, 1 << 16, 2e-5, math.inf) is link


def test_many_numbers_are_held_in_half_the_room_and_so_are_those_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_work, "MANY", 14)
    assert [no_work(5, steps, len(PARTS)).dtype for steps in (2, 3)] == [np.float64, np.float32]
    assert (
        copy_work(no_work(5, 3, len(PARTS))).dtype
        == take_work(no_work(5, 3, len(PARTS)), np.array([1])).dtype
        == np.float32
    )


def test_what_is_taken_from_work_is_told_part_by_part_and_of_all_of_it() -> None:
    """One after the other, and never more than there is."""
    work = no_work(4, 2, 3)
    work[..., 0] = [[5, 5], [4, 4], [3, 3], [-1, -1]]
    work[..., 2] = 1.0
    first = {0: (np.array([0, 2]), np.array([[1.0, 2.0], [9.0, 1.0]]))}
    second = {0: (np.array([0]), np.array([[1.0, 1.0]])), 2: (np.array([3]), np.array([[0.5, -0.5]]))}
    left = work_without(work, (first, second))
    assert left[..., 0].tolist() == [[3, 2], [4, 4], [0, 2], [0, 0]]
    assert not left[..., 1].any()
    assert left[..., 2].tolist() == [[1, 1], [1, 1], [1, 1], [0.5, 1.5]]
    for part in range(3):
        assert np.array_equal(part_without(work, part, (first, second)), left[..., part])
    assert work[0, 0, 0] == 5.0, "it is another"
    assert work_without(work, ()) is work
    assert np.shares_memory(part_without(work, 2, (first,)), work), "of a part of which nothing goes there is no copy"
