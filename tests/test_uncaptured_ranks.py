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
        # The last of one host and the first of the next one: either may be on either.
        ("AAAABBBB", 8, (3, 4), [(0, 1, 2), (5, 6, 7)], [2, 2]),
        ("AAAABBBB", 8, (4, 5, 6, 7), [(0, 1, 2, 3)], [4]),
        ("ABABABAB", 8, (5,), [(0, 2, 4, 6), (1, 3, 7)], [1, 1]),
        ("A", 8, (), [(0,)], [7]),
        # Two sets of cores on each host.
        ("AAAABBBB", 8, (5,), [(0, 1), (2, 3), (4,), (6, 7)], [0, 0, 1, 0]),
        ("AAAA", 6, (), [(0, 1), (2, 3)], [2, 2]),
        # A core for each rank.
        ("AAAABBBB", 8, (5, 6), [(0,), (1,), (2,), (3,), (4,), (7,)], [0] * 6),
        ("AA", 2, (), [], []),
    ],
    ids=["none", "between", "first of a host", "either host", "a host", "dealt", "others of the host", "a smaller set",
         "sets as large", "pinned", "no set"],
)  # fmt: skip
def test_they_run_where_their_neighbours_do(
    hosts: str, world_size: int, missing: tuple[int, ...], sets: list[tuple[int, ...]], wanted: list[int]
) -> None:
    assert uncaptured_on(run_of(hosts, world_size, missing), sets) == wanted
