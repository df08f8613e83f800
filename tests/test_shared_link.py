"""Transfers that are under way on one link at once, and what is told of the link from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from graphs import graph_of, steps_of
from test_match import comm, run_of, table

from dsprof.analyzer.align.link_shares import link_shares
from dsprof.analyzer.align.match import match_collectives
from dsprof.analyzer.graph.link import Link, fit_link
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import StepGraph, Task
from dsprof.analyzer.graph.transfers_at_once import transfers_at_once
from dsprof.analyzer.rules.comm.gradient_division import ReducedGroup
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.communications import ScaleLink, link_of_group
from dsprof.analyzer.whatif.select import Communications

MB = 1 << 20
ONE_MB_A_MS = 1 / MB


def test_shares_of_a_link() -> None:
    """The first is alone for 10, then with the second for 20, which goes on alone for 10; on another link there is one
    at the same time, and one that takes no time."""
    shares = link_shares(np.array([0, 0, 1, 1]), np.array([0, 10, 5, 7]), np.array([30, 40, 25, 7]))
    assert shares.tolist() == [20 / 30, 20 / 30, 1.0, 1.0]


def test_three_at_once() -> None:
    shares = link_shares(np.zeros(3, np.int64), np.array([0.0, 0.0, 0.0]), np.array([9.0, 9.0, 9.0]))
    assert shares.tolist() == [1 / 3] * 3


def test_large_ones_share_what_they_take_together_by_their_bytes() -> None:
    """As two buckets over 24 MB/s were seen to: the first is through before the second, which began 22 ms later. Of
    small ones, and of those beside a small one, each has the same share."""
    begin, end, link = np.array([0.0, 22.5]), np.array([44.3, 99.3]), np.zeros(2, np.int64)
    size = np.array([1_052_672.0, 1_315_840.0])
    shares = link_shares(link, begin, end, size)
    assert (shares * (end - begin)).sum() == pytest.approx(99.3)
    assert shares * (end - begin) / size == pytest.approx([99.3 / size.sum()] * 2)
    alike = link_shares(link, begin, end)
    assert link_shares(link, begin, end, size / 10) == pytest.approx(alike)
    assert link_shares(link, begin, end, np.array([1_052_672.0, 8.0])) == pytest.approx(alike)


def test_large_ones_have_the_link_while_they_are_the_only_ones() -> None:
    """The first was alone for 99, and the second for 10, whatever their bytes; of three that touch, each most of its
    time. On the other link there is one. What they took together is divided whole."""
    begin, end = np.array([0.0, 99.0, 0.0]), np.array([100.0, 109.0, 50.0])
    shares = link_shares(np.array([0, 0, 1]), begin, end, np.array([MB, 10 * MB, MB], float))
    assert shares * (end - begin) == pytest.approx([99, 10, 50])
    begin, end = np.array([0.0, 99.0, 198.0]), np.array([100.0, 199.0, 299.0])
    shares = link_shares(np.zeros(3, np.int64), begin, end, np.array([MB, MB, 8 * MB], float))
    assert shares * (end - begin) == pytest.approx([99, 98.5, 100.5], abs=1)
    assert (shares * (end - begin)).sum() == pytest.approx(299)


def test_bytes_of_collectives_of_two_kinds_are_not_compared() -> None:
    """An all-reduce moves twice what a gather does."""
    link, begin, end, size = np.zeros(2, np.int64), np.array([0.0, 0.0]), np.array([30.0, 20.0]), np.full(2, float(MB))
    assert link_shares(link, begin, end, size, np.array([0, 1])) * end == pytest.approx([20, 10])
    assert link_shares(link, begin, end, size) * end == pytest.approx([15, 15])


def test_collectives_of_one_group_share_its_link() -> None:
    """As they are matched: of two workers' the time that each had the link for itself; NCCL runs one at a time."""
    rows = table(*(comm(rank, "all_reduce", 10 * seq, 30 + 10 * seq, seq) for rank in (0, 1) for seq in (0, 1)))
    assert match_collectives(rows, run_of([0, 1]))[["transfer_ns", "alone_ns"]].to_numpy().tolist() == [[30, 20]] * 2
    run = run_of([0, 1])
    run.groups["0"]["backend"] = "nccl"
    assert match_collectives(rows, run)[["transfer_ns", "alone_ns"]].to_numpy().tolist() == [[30, 30], [10, 10]]


def test_bytes_take_as_long_as_they_had_the_link_for() -> None:
    """Two of 4 MB at once, 8 ms each, over a link of 1 MB a ms; and where small ones of 2 ms tell the latency."""
    alike = pd.DataFrame({"bytes": [4 * MB] * 6, "transfer_ns": [8_000_000] * 6, "alone_ns": [4_000_000] * 6})
    assert fit_link(alike).ms_per_byte == pytest.approx(ONE_MB_A_MS)
    assert fit_link(alike.drop(columns="alone_ns")).ms_per_byte == pytest.approx(2 * ONE_MB_A_MS)
    small = pd.DataFrame({"bytes": [8] * 6, "transfer_ns": [2_000_000] * 6, "alone_ns": [2_000_000] * 6})
    large = alike.assign(transfer_ns=10_000_000, alone_ns=5_000_000)
    link = fit_link(pd.concat([small, large], ignore_index=True))
    assert link.fitted
    assert link.latency_ms == pytest.approx(2.0, rel=0.01)
    assert link.ms_per_byte == pytest.approx(ONE_MB_A_MS, rel=0.01)


def at_once(*transfers: tuple[float, float, float], steps: int = 8, apart: float = 10_000) -> pd.DataFrame:
    """(MB, begin, end in ms) of each, in every step."""
    megabytes, begin, end = map(np.array, zip(*transfers, strict=True))
    share = link_shares(np.zeros(len(end), np.int64), begin, end)
    return pd.concat([
        pd.DataFrame({
            "bytes": megabytes * MB, "transfer_ns": 1e6 * (end - begin), "alone_ns": 1e6 * (end - begin) * share,
            "end_ns": 1e6 * (end + apart * step), "step": step, "group": "0",
        })
        for step in range(steps)
    ])  # fmt: skip


def test_unequal_transfers_at_once_are_told_by_what_they_take_together() -> None:
    """As measured on gloo over a link of 40 MB/s: the smaller one ends later, as it began later. By the part of the
    time that each had it would take longer than the larger one, as if bytes took no time at all."""
    table = at_once((1.2, 0.0, 73.0), (0.4, 6.5, 84.0))
    assert table["alone_ns"].iloc[1] > table["alone_ns"].iloc[0]
    link = fit_link(table)
    assert not link.fitted
    assert link.latency_ms == 0
    assert link.ms_per_byte == pytest.approx(84 / (1.6 * MB))
    assert link.largest == 1.2 * MB


def test_a_loss_that_is_reduced_alone_tells_the_latency_beside_what_others_take_together() -> None:
    link = fit_link(at_once((1.2, 0.0, 73.0), (0.4, 6.5, 84.0), (8 / MB, 90.0, 91.0)))
    assert link.fitted
    assert link.latency_ms == pytest.approx(1.0, rel=0.01)
    assert link.ms_per_byte == pytest.approx(83 / (1.6 * MB), rel=0.03)


def test_of_messages_in_between_it_is_not_known_whether_bytes_are_free() -> None:
    assert not fit_link(at_once((0.24, 0.0, 30.0), (0.1, 1.0, 34.0))).fitted


@pytest.mark.parametrize("table", [at_once((1, 0.0, 1.0)).iloc[:0], at_once((0, 0.0, 1.0))], ids=["none", "no bytes"])
def test_nothing_was_moved(table: pd.DataFrame) -> None:
    size, ms, largest = transfers_at_once(table)
    assert (len(size), len(ms), largest) == (0, 0, 0)
    assert not fit_link(table).fitted


def shared(
    sizes_mb: list[float], latency_ms: float, ms_per_mb: float, apart_ms: float
) -> list[tuple[float, float, float]]:
    """Transfers that begin one after another, two of them at a time, each with its latency, while which others move;
    their bytes share the link."""
    left = [[latency_ms, size * ms_per_mb] for size in sizes_mb]
    begin, end, now, tick = [0.0] * len(left), [0.0] * len(left), 0.0, 0.01
    waiting, running = list(range(len(left))), list[int]()
    while waiting or running:
        while waiting and len(running) < 2 and now >= apart_ms * waiting[0]:
            begin[waiting[0]] = now
            running.append(waiting.pop(0))
        moving = [one for one in running if left[one][0] <= 0]
        for one in running:
            if one in moving:
                left[one][1] -= tick / len(moving)
            else:
                left[one][0] -= tick
        now += tick
        for one in [one for one in running if left[one][1] <= 0]:
            end[one] = now
            running.remove(one)
    return list(zip(sizes_mb, begin, end, strict=True))


@pytest.mark.parametrize(
    ("sizes", "latency_ms", "ms_per_mb", "apart_ms"),
    [
        ([1.0, *[25.0] * 4], 2.0, 10.0, 30.0),
        ([0.1 + 0.05 * (at * 7 % 29) for at in range(30)], 0.6, 1.0, 0.5),
        ([0.01 + 0.02 * (at * 11 % 29) for at in range(30)], 0.3, 25.0, 2.0),
    ],
    ids=["large buckets", "tensors over a fast link", "tensors over a slow link"],
)
def test_a_chain_of_unequal_transfers_tells_latency_and_bandwidth(
    sizes: list[float], latency_ms: float, ms_per_mb: float, apart_ms: float
) -> None:
    """All of a step's are one unbroken time, of one size: each by itself tells more."""
    link = fit_link(at_once(*shared(sizes, latency_ms, ms_per_mb, apart_ms)))
    assert link.fitted
    assert link.latency_ms == pytest.approx(latency_ms, rel=0.35)
    assert link.ms_per_byte == pytest.approx(ms_per_mb / MB, rel=0.35)


def test_small_messages_at_once_are_latency() -> None:
    """Bytes of messages of 4 and 16 KB are free, whether several are under way or not."""
    link = fit_link(at_once((4 / 1024, 0.0, 3.0), (16 / 1024, 1.0, 4.0), (4 / 1024, 3.0, 6.0)))
    assert link.latency_ms == pytest.approx(3.0, rel=0.2)
    assert link.ms_per_byte * 16 * 1024 < 0.3


def test_what_is_at_once_and_what_is_alone_tell_latency_and_bandwidth() -> None:
    """Latency of 2 ms, 1 MB a ms: two of 4 MB at once pass while each other's latency does."""
    size, ms, largest = transfers_at_once(at_once((4, 0.0, 10.0), (4, 0.0, 10.0), (1, 20.0, 23.0)))
    assert sorted(zip((size / MB).tolist(), ms.tolist(), strict=True)) == [(1.0, 3.0)] * 8 + [(8.0, 10.0)] * 8
    assert largest == 4 * MB


def test_a_moment_that_comes_once_and_what_is_not_known_tell_nothing() -> None:
    usual = at_once((4, 0.0, 10.0), (4, 0.0, 10.0), (1, 20.0, 23.0))
    odd = at_once((64, 0.0, 50.0), steps=1).assign(step=99)
    size, _, largest = transfers_at_once(pd.concat([usual, odd]))
    assert (size.max(), largest) == (8 * MB, 4 * MB)
    nobody_knows = usual.assign(end_ns=np.nan)
    assert len(transfers_at_once(nobody_knows)[0]) == len(transfers_at_once(usual.drop(columns="end_ns"))[0]) == 24


def test_transfers_that_touch_and_those_of_other_steps_and_groups_are_not_at_once() -> None:
    """Steps may have clocks of their own, as where a graph tells when they ended."""
    table = at_once((4, 0.0, 8.0), (4, 8.0 - 1e-6, 16.0), apart=0.0)
    both = pd.concat([table, table.assign(group="1")])
    assert transfers_at_once(both)[0].tolist() == pytest.approx([4 * MB] * 32, rel=1e-3)


def two_reductions(purpose: str = "gradient") -> StepGraph:
    """A backward of 20 ms issues two reductions of 20 MB, at 10 and at 20 ms. Over a link of 1 MB a ms the first is
    alone for 10 ms, and with the second one from 20 to 40, which ends at 50."""
    task = Task("0", f"all_reduce {purpose}", gradient=purpose == "gradient", workers=2)
    steps = steps_of(["B 10 I0 10 I1 W0,1 5"] * 2, [30.0, 30.0], [task] * 2, sizes=[20.0 * MB] * 2)
    ended = np.array([[40.0], [50.0]])
    return graph_of(replace(steps, measured=replace(steps.measured, ended=ended)))


def test_half_of_the_bytes_share_the_link_too() -> None:
    """10 ms each: the first has ended when the second is issued, which ends at 30."""
    graph = two_reductions()
    assert replay(graph).durations.tolist() == [55.0]
    link = link_of_group(graph, "0")
    assert link.ms_per_byte == pytest.approx(ONE_MB_A_MS)
    assert replay(apply(graph, [ScaleLink(bandwidth=2.0, link=link)])).durations == pytest.approx([35.0])


@pytest.mark.parametrize("latency_ms", [0.0, 1.0, 4.0, 15.0])
def test_nearly_the_same_link_changes_nearly_nothing(latency_ms: float) -> None:
    """Whatever of the 30 ms that each takes is latency, which nobody shares."""
    link = Link(latency_ms, (20.0 - latency_ms) / (20 * MB), True)
    for times in (0.9999, 1.0001):
        changed = apply(two_reductions(), [ScaleLink(bandwidth=times, link=link)])
        assert replay(changed).durations == pytest.approx([55.0], rel=0.01)


def test_transfers_with_much_latency_stay_as_they_were_measured() -> None:
    """Two at once of 12 ms, of which 4 are latency: with twice the bandwidth each takes 8."""
    task = Task("0", "all_reduce gradient", gradient=True, workers=2)
    steps = steps_of(["B 10 I0 I1 W0,1 5"] * 2, [12.0] * 2, [task] * 2, sizes=[4.0 * MB] * 2)
    graph = graph_of(replace(steps, measured=replace(steps.measured, ended=np.array([[22.0], [22.0]]))))
    link = Link(4.0, 2 * ONE_MB_A_MS, True)
    assert replay(apply(graph, [ScaleLink(bandwidth=2.0, link=link)])).durations == pytest.approx([23.0])


def test_two_changes_of_one_link() -> None:
    """Both alike keep what is latency and what is bytes; graphs of one link are replayed together."""
    graph, link = two_reductions(), Link(1.0, 19.0 / (20 * MB), True)
    slower = ScaleLink(latency=2.0, bandwidth=0.5)
    both = apply(graph, [slower, ScaleLink(latency=3.0, link=link)])
    assert replay(both).durations[0] > replay(apply(graph, [slower])).durations[0] + 2
    one, other = (apply(graph, [ScaleLink(bandwidth=times, link=link)]) for times in (2.0, 4.0))
    assert one.templates[0].structure is other.templates[0].structure
    assert one.templates[0].structure is not graph.templates[0].structure


def test_a_link_that_changes_in_some_steps_leaves_the_others() -> None:
    graph, link = two_reductions(), link_of_group(two_reductions(), "0")
    elsewhere = ScaleLink(bandwidth=2.0, link=link, steps=frozenset({7}))
    assert replay(apply(graph, [elsewhere])).durations.tolist() == [55.0]


def test_gradients_that_are_waited_for_one_by_one_stay_as_they_were_measured() -> None:
    """15 ms of work lie between the two waits, so it matters when the first of them ends: at half of 30 ms, 25."""
    task = Task("0", "all_reduce gradient", gradient=True, workers=2)
    steps = steps_of(["B 10 I0 10 I1 W0 15 W1 5"] * 2, [30.0] * 2, [task] * 2, sizes=[20.0 * MB] * 2)
    graph = graph_of(replace(steps, measured=replace(steps.measured, ended=np.array([[40.0], [50.0]]))))
    faster = ScaleLink(bandwidth=2.0, link=link_of_group(graph, "0"))
    assert replay(graph).durations.tolist() == [60.0]
    assert replay(apply(graph, [faster])).durations == pytest.approx([45.0])


def test_what_is_waited_for_one_by_one_stays_as_it_was_measured() -> None:
    """Of parameters it matters when each ends: both take half as long."""
    faster = ScaleLink(bandwidth=2.0, latency=0.5, of=Communications(purposes=("parameter",)))
    assert replay(apply(two_reductions("parameter"), [faster])).durations == pytest.approx([40.0])


def test_gradients_of_a_job_that_states_no_tensors_are_divided_in_few_pieces() -> None:
    """However large they are: 4 GiB, at 64 KiB each at least where buckets are large, at 4 KiB where they are not."""
    group = ReducedGroup((1 << 30,) * 4, Link(0.0, 1e-6, False), float(4 << 30), ())
    assert len(group.packed(1 << 20)) == 4096
    assert len(replace(group, total_bytes=float(1 << 20)).packed(0)) == 256
