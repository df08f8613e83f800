"""On whose cores ranks run that were not captured."""

from __future__ import annotations

import pytest

from dsprof.analyzer.budget.uncaptured_ranks import uncaptured_on
from dsprof.run import RankInfo, RunInfo


def run_of(hosts: str, world_size: int, missing: tuple[int, ...]) -> RunInfo:
    """hosts: a letter for the host of each rank."""
    ranks = [
        RankInfo(rank, 0, host, rank, f"rank{rank}", True, 0, 0, 0, 0, 0, True)
        for rank, host in enumerate(hosts)
        if rank not in missing
    ]
    return RunInfo(id="job", name="job", command=[], world_size=world_size, ranks=ranks)


@pytest.mark.parametrize(
    ("hosts", "world_size", "missing", "sets", "wanted"),
    [
        ("AAAABBBB", 8, (), [(0, 1, 2, 3), (4, 5, 6, 7)], [0, 0]),
        ("AAAABBBB", 8, (5,), [(0, 1, 2, 3), (4, 6, 7)], [0, 1]),
        ("AAAABBBB", 8, (4,), [(0, 1, 2, 3), (5, 6, 7)], [0, 1]),
        ("AAAABBBB", 8, (3, 4), [(0, 1, 2), (5, 6, 7)], [1, 1]),
        # Four hosts of four or two of six.
        ("AAAABBBBCCCC", 12, (4, 5, 6, 7), [(0, 1, 2, 3), (8, 9, 10, 11)], [2, 2]),
        ("AAAABBBBCCCCDDDD", 16, (4, 5, 6, 7), [(0, 1, 2, 3), (8, 9, 10, 11), (12, 13, 14, 15)], [0, 0, 0]),
        ("AABB", 4, (1, 3), [(0,), (2,)], [1, 1]),
        ("ABABABAB", 8, (5,), [(0, 2, 4, 6), (1, 3, 7)], [0, 1]),
        ("ABABABAB", 8, (1, 3, 5), [(0, 2, 4, 6), (7,)], [0, 3]),
        ("ABBAABBA", 9, (2, 3), [(0, 4, 7), (1, 5, 6)], [2, 2]),
        ("A", 8, (), [(0,)], [7]),
        # Two sets of cores on each host.
        ("AAAABBBB", 8, (5,), [(0, 1), (2, 3), (4,), (6, 7)], [0, 0, 1, 0]),
        ("AAAABBBB", 8, (5, 6, 7), [(0, 1), (2, 3), (4,)], [0, 0, 1]),
        ("AAAA", 6, (), [(0, 1), (2, 3)], [2, 2]),
        # A core for each rank.
        ("AAAABBBB", 8, (5, 6), [(0,), (1,), (2,), (3,), (4,), (7,)], [0] * 6),
        ("AABB", 4, (1,), [(0,), (2,), (3,)], [0, 0, 0]),
        ("AA", 2, (), [], []),
    ],
    ids=["none", "between", "first of a host", "of either host", "a host", "a host of four", "half of each", "in turn",
         "most of one in turn", "in no order", "others of the host", "a smaller set", "a set not seen", "sets as large",
         "pinned", "pinned on another host", "no set"],
)  # fmt: skip
def test_they_run_where_their_neighbours_do(
    hosts: str, world_size: int, missing: tuple[int, ...], sets: list[tuple[int, ...]], wanted: list[int]
) -> None:
    assert uncaptured_on(run_of(hosts, world_size, missing), sets) == wanted
