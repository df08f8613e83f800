"""Processes that are ranks of one job after the other do not keep what jobs leave."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from ranks import MANY, RankFailed, Ranks

_KEPT: list[Any] = []


def leave(rank: int, groups: int, kept: bool) -> int:
    """Process groups as garbage that refers to itself, or for good; the number of the process."""
    made: list[Any] = [dist.new_group() for _ in range(groups)]
    made.append(made)
    if kept:
        _KEPT.append(made)
    return os.getpid()


def test_a_rank_is_replaced_when_groups_live_on_in_it(ranks: Ranks) -> None:
    before = ranks.run(2, leave, MANY, False)
    assert ranks.run(2, leave, MANY, True) == before
    after = ranks.run(2, leave, 0, False)
    assert not set(after) & set(before)
    assert ranks.run(2, leave, 0, False) == after


def unsendable(rank: int) -> Any:
    return (lambda: None) if rank else os.getpid()


def test_a_result_that_cannot_be_sent_fails_the_job_and_not_the_rank(ranks: Ranks) -> None:
    before = ranks.run(2, leave, 0, False)
    with pytest.raises(RankFailed, match=r"rank 1:(.|\n)*pickle"):
        ranks.run(2, unsendable)
    assert ranks.run(2, leave, 0, False) == before
