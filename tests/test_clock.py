"""One clock for all hosts, from when collectives ended on them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.align.clock import _collectives_of_hosts, _Ends, _ways, find_clocks, find_jumps
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS

MS, S = 1_000_000, 1_000_000_000


def run_of(*hosts: str) -> RunInfo:
    ranks = [RankInfo(rank, 0, host, 100 + rank, "", True, 0, 0, 0, 0, 0, True) for rank, host in enumerate(hosts)]
    return RunInfo(id="run", name="run", command=[], world_size=len(hosts), ranks=ranks)


def ended(rank: int, group: str, ends: list[int]) -> pd.DataFrame:
    """All-reduces of one rank, each of 1 ms; issued 1 ms before they began."""
    data = {
        "rank": rank, "restart": 0, "step": range(len(ends)), "kind": "comm", "name": "all_reduce",
        "start_ns": np.array(ends, np.int64) - MS, "dur_ns": MS, "issue_ns": np.array(ends, np.int64) - 2 * MS,
        "group": group, "seq": range(len(ends)), "source": "measured",
    }  # fmt: skip
    return pd.DataFrame(data).reindex(columns=list(COLUMNS))


def align(rows: pd.DataFrame, run: RunInfo) -> tuple[pd.DataFrame, float, list[str]]:
    """The rows on one clock, its error in microseconds, and warnings."""
    clocks = find_clocks(rows, run)
    return clocks.correct(rows), clocks.error_us, list(clocks.warnings)


def table(*parts: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True).astype(COLUMNS)


def starts(rows: pd.DataFrame, rank: int) -> list[int]:
    found: list[int] = rows.loc[rows["rank"] == rank, "start_ns"].tolist()
    return found


def test_without_drift_a_host_is_off_by_the_median() -> None:
    rows = table(
        ended(0, "0", [10 * MS, 20 * MS, 30 * MS]),
        ended(1, "0", [5 * S + 10 * MS, 5 * S + 20 * MS + 4_000, 5 * S + 30 * MS]),
    )
    rows.loc[4, "arrival_ns"] = 5 * S + 19 * MS
    aligned, error_us, warnings = align(rows, run_of("a", "b"))
    assert starts(aligned, 0) == [9 * MS, 19 * MS, 29 * MS]
    assert starts(aligned, 1) == [9 * MS, 19 * MS + 4_000, 29 * MS]
    assert aligned["arrival_ns"].dropna().tolist() == [19 * MS]
    assert aligned["issue_ns"].tolist()[3:] == [8 * MS, 18 * MS + 4_000, 28 * MS]
    assert aligned["dur_ns"].tolist() == [MS] * 6
    # Of so few the farthest from the median, and what a clock may drift by in 20 ms.
    assert error_us == pytest.approx(4 + 1)
    assert warnings == []


def test_a_host_is_joined_through_another() -> None:
    rows = table(
        ended(0, "ab", [10 * MS, 20 * MS, 30 * MS]),
        ended(1, "ab", [2 * S + 10 * MS, 2 * S + 20 * MS + 1_000, 2 * S + 30 * MS + 3_000]),
        ended(1, "bc", [2 * S + 15 * MS, 2 * S + 25 * MS, 2 * S + 35 * MS]),
        ended(2, "bc", [7 * S + 15 * MS, 7 * S + 25 * MS + 2_000, 7 * S + 35 * MS + 6_000]),
    )
    aligned, error_us, warnings = align(rows, run_of("a", "b", "c"))
    # b is 2 s and 1 us ahead of a; c is 5 s and 2 us ahead of b.
    assert starts(aligned, 1)[:3] == [9 * MS - 1_000, 19 * MS, 29 * MS + 2_000]
    assert starts(aligned, 2) == [14 * MS - 3_000, 24 * MS - 1_000, 34 * MS + 3_000]
    assert error_us == pytest.approx((2 + 1) + (4 + 1), abs=0.01)  # us, of each way between two
    assert warnings == []


def test_of_two_ways_the_one_with_more_collectives_is_taken() -> None:
    many = [i * MS for i in range(1, 65)]
    rows = table(
        ended(0, "all", [MS]),
        ended(2, "all", [MS + 9_000]),
        ended(0, "ab", many),
        ended(1, "ab", many),
        ended(1, "bc", many),
        ended(2, "bc", many),
    )
    aligned, _, _ = align(rows, run_of("a", "b", "c"))
    assert starts(aligned, 2)[-1] == 63 * MS


def test_a_host_that_is_joined_through_none_is_named() -> None:
    rows = table(ended(0, "ab", [MS]), ended(1, "ab", [MS]), ended(2, "c", [S]))
    aligned, _, warnings = align(rows, run_of("a", "b", "c"))
    assert starts(aligned, 2) == [S - MS]
    assert warnings == [
        "host c: no collective shared with a, directly or through other hosts, so its clock could not be aligned"
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_ways_to_all_hosts_are_the_shortest(seed: int) -> None:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    draw = np.random.default_rng(seed)
    took_part = draw.random((12, 40)) < draw.choice([0.05, 0.1, 0.3, 0.9])
    took_part[:, 0] |= draw.random(12) < 0.5
    has = csr_array(took_part.astype(float))
    shared = (has @ has.T).tocoo()
    every = csr_array((1 / np.sqrt(shared.data), shared.coords), shape=(12, 12))
    wanted = dijkstra(every, indices=0)
    found = {0: 0.0}
    for host, before in _ways([np.flatnonzero(of_host) for of_host in took_part]):
        found[host] = found[before] + 1 / np.sqrt((took_part[host] & took_part[before]).sum())
    assert sorted(found) == np.flatnonzero(np.isfinite(wanted)).tolist()
    assert [found[host] for host in sorted(found)] == pytest.approx([wanted[host] for host in sorted(found)])


def test_of_many_hosts_that_share_all_collectives_no_pairs_are_looked_at() -> None:
    tracemalloc.start()
    ways = _ways([np.arange(8)] * 2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(ways) == [(host, 0) for host in range(1, 2000)]
    assert peak < 2_000_000, "a number for each pair of 2,000 hosts takes 32 MB"


@pytest.mark.parametrize("ppm", [50, -50])
def test_a_clock_that_drifts_is_aligned_all_along(ppm: int) -> None:
    """100 s, a collective every 100 ms, whose ends are 20 us apart by chance: unaligned, 5 ms."""
    draw = np.random.default_rng(0)
    true = np.arange(1, 1001) * 100 * MS
    late = draw.integers(-20_000, 20_000, len(true))
    there = true + 3600 * S + true * ppm // 1_000_000 + late
    rows = table(ended(0, "0", true.tolist()), ended(1, "0", there.tolist()))
    aligned, error_us, _ = align(rows, run_of("a", "b"))
    apart = np.array(starts(aligned, 1)) - np.array(starts(aligned, 0))
    assert np.abs(apart).max() < 50_000
    assert np.abs(apart - late).max() < 7_000
    assert 30 <= error_us < 50  # one may leave all of them later by as much as they scatter, three times 10
    # A millisecond of b on the clock of a.
    assert aligned["dur_ns"].astype("int64").tolist()[1000:] == pytest.approx([MS - ppm] * 1000, abs=2)


@pytest.mark.parametrize("collectives", [12, 40])
def test_the_error_that_is_stated_is_a_bound(collectives: int) -> None:
    """Hosts of four ranks up to 50 ms and 50 ppm apart, whose paths are unequal by up to 60 us: in 19 of 20 jobs at
    least no clock is farther off, anywhere in the run."""
    held = 0
    for seed in range(20):
        draw = np.random.default_rng([collectives, seed])
        true = np.sort(draw.integers(0, 6 * S, collectives)) + 10 * S
        offset, drift = draw.uniform(-50e6, 50e6, 3), draw.uniform(-50e-6, 50e-6, 3)
        offset[0] = drift[0] = 0.0
        parts = []
        for rank in range(12):
            end = true + draw.uniform(7_500, 60_000) * draw.random(collectives)
            seen = end + offset[rank // 4] + (end - 10 * S) * drift[rank // 4]
            parts.append(ended(rank, "0", np.rint(seen).astype(np.int64).tolist()))
        clocks = find_clocks(table(*parts), run_of(*(host for host in "abc" for _ in range(4))))
        moments = np.linspace(10 * S, 16 * S, 20)
        worst = 0.0
        for host in (1, 2):
            shown = pd.DataFrame(
                {"rank": 4 * host, "start_ns": np.rint(moments + offset[host] + (moments - 10 * S) * drift[host])}
            ).reindex(columns=list(COLUMNS))
            shown = shown.assign(restart=0, step=0).astype(COLUMNS)
            worst = max(worst, float(np.abs(clocks.correct(shown)["start_ns"] - moments).max()) / 1e3)
        held += worst <= clocks.error_us
        assert clocks.error_us < 150
    assert held >= 19


def test_drifts_add_up_along_the_way() -> None:
    true = np.arange(1, 1001) * 100 * MS
    b, c = true + true * 20 // 1_000_000, true + true * 50 // 1_000_000 + 5 * S
    rows = table(*(ended(rank, group, ends.tolist()) for rank, group, ends in
                   ((0, "ab", true), (1, "ab", b), (1, "bc", b), (2, "bc", c))))  # fmt: skip
    aligned, _, _ = align(rows, run_of("a", "b", "c"))
    assert np.abs(np.array(starts(aligned, 2)) - np.array(starts(aligned, 0))).max() < 1_000


def test_scatter_is_not_taken_for_drift() -> None:
    draw = np.random.default_rng(1)
    true = np.arange(1, 1001) * 100 * MS
    late = draw.integers(-500_000, 500_000, len(true))
    rows = table(ended(0, "0", true.tolist()), ended(1, "0", (true + late).tolist()))
    aligned, _, _ = align(rows, run_of("a", "b"))
    apart = np.array(starts(aligned, 1)) - np.array(starts(aligned, 0))
    assert set((late - apart).tolist()) == {int(np.median(late))}


def test_a_jump_is_not_taken_for_drift() -> None:
    """Over 10,000 s, half a second is no more than a quartz may be off."""
    true = np.arange(1, 1001) * 10 * S
    rows = table(ended(0, "0", true.tolist()), ended(1, "0", (true + (true > 5000 * S) * S // 2).tolist()))
    aligned, _, _ = align(rows, run_of("a", "b"))
    moved_us, (warning,) = find_jumps(aligned)
    assert moved_us == 500_000
    assert warning.startswith("rank 1: its clock moves by +0.5 s against the others' in step 500")


def test_what_follows_at_once_still_does_on_another_clock() -> None:
    """Phases that touch must not overlap by a nanosecond: one would be inside of the other."""
    true = np.arange(1, 1001) * 100 * MS
    phases = ended(1, "0", (true + 33 * MS).tolist()).assign(kind="phase", name="forward", group=None, dur_ns=100 * MS)
    drifting = (true + true * 50 // 1_000_000).tolist()
    rows = table(ended(0, "0", true.tolist()), ended(1, "0", drifting), phases)
    aligned, _, _ = align(rows, run_of("a", "b"))
    mine = aligned[aligned["kind"] == "phase"]
    assert mine["start_ns"].diff().dropna().tolist() == mine["dur_ns"].astype("int64").tolist()[:-1]


def test_a_restarted_rank_keeps_its_host() -> None:
    rows = table(ended(0, "0", [MS, 2 * MS]), ended(1, "0", [S + MS, S + 2 * MS]))
    run = run_of("a", "b")
    run.ranks.append(replace(run.ranks[1], restart=1))
    assert starts(align(rows, run)[0], 1) == [0, MS]


def test_what_a_host_has_is_a_part_of_what_all_have() -> None:
    """A copy of all of it for each host took 1.4 GB of 1,250 hosts."""
    hosts, each = 6, 5
    key = np.repeat(np.arange(each), hosts)
    rank = np.tile(np.arange(hosts), each)
    ends = _Ends(key, rank, np.zeros_like(key), 100 * key + rank)
    found = _collectives_of_hosts(ends, np.arange(hosts), np.arange(hosts))
    assert [keys.tolist() for keys, _ in found] == [list(range(each))] * hosts
    assert [end.tolist() for _, end in found] == [[100 * one + host for one in range(each)] for host in range(hosts)]
    assert len({id(keys.base) for keys, _ in found}) == 1
