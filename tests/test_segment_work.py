"""The work of segments, held part by part, and links whose bytes larger transfers tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsprof.analyzer.graph import segment_work
from dsprof.analyzer.graph.link import Link, capped
from dsprof.analyzer.graph.segment_work import copy_work, no_work, take_work
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
    for work in (no_work(5, 3), copy_work(np.ones((5, 3, len(PARTS))))):
        assert all(work[..., part].flags.c_contiguous for part in range(len(PARTS)))


def test_bytes_take_no_longer_than_in_much_larger_transfers() -> None:
    link = Link(1.0, 1e-5, True, largest=1 << 16)
    found = capped(link, 1 << 16, 1e-6, 1 << 21)
    assert found.transfer_ms(np.array(1 << 16)) == pytest.approx(link.transfer_ms(np.array(1 << 16)))
    assert (found.ms_per_byte, found.largest) == (1e-6, 1 << 21)
    assert capped(link, 1 << 16, 2e-5, math.inf) is link


def test_many_numbers_are_held_in_half_the_room_and_so_are_those_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_work, "MANY", 14)
    assert [no_work(5, steps).dtype for steps in (2, 3)] == [np.float64, np.float32]
    assert copy_work(no_work(5, 3)).dtype == take_work(no_work(5, 3), np.array([1])).dtype == np.float32
