"""Each kind of collective has a link of its own, and a modelled transfer ends with the last rank that has it all."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.graph.link import Link, fit_link
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import WAKE_UP_DELAY, StepGraph, Task
from dsprof.analyzer.rules.comm.dimensions import Domain
from dsprof.analyzer.rules.comm.fetched_parameters import links_of_shards
from dsprof.analyzer.rules.comm.possible_links import Links, links_around, links_of_kinds, with_latency
from dsprof.analyzer.whatif import WhatIf, apply
from dsprof.analyzer.whatif.communications import ScaleLink
from dsprof.analyzer.whatif.merge import Merge
from dsprof.analyzer.whatif.rebucket import Rebucket
from dsprof.analyzer.whatif.select import Communications

MB = 1_000_000.0
KB = 1_000.0
GATHER, SCATTER, LOSS = ("all_gather", "parameter"), ("reduce_scatter", "gradient"), ("all_reduce", "loss")
REDUCE = ("all_reduce", "gradient")


def domain(*moved: tuple[tuple[str, str], float, float], groups: dict[str, str] | None = None) -> Domain:
    """Of a group: name and purpose, bytes and ms of what it moves, in each of four steps. groups: name -> its group,
    where there are others of the same ranks."""
    rows = [
        {"group": (groups or {}).get(name, "0"), "name": name, "purpose": purpose, "bytes": size,
         "transfer_ns": 1e6 * ms, "alone_ns": 1e6 * ms, "step": step, "ranks": 2}
        for step in range(4) for (name, purpose), size, ms in moved
    ]  # fmt: skip
    return Domain(None, "", pd.DataFrame(rows), alone=True)


def of_kind(links: Links, name: str, purpose: str) -> Link:
    return links[Communications(kinds=(f"{name} {purpose}",), groups=("0",))]


def test_a_scatter_that_takes_twice_as_long_as_a_gather() -> None:
    """As over a link of 40 MB/s on gloo, which reduces all of it for each rank's part."""
    links = links_of_kinds(
        domain((GATHER, 0.02 * MB, 1.5), (GATHER, 2 * MB, 51), (SCATTER, 0.02 * MB, 2.0), (SCATTER, 2 * MB, 101))
    )
    assert of_kind(links, *GATHER).ms_per_byte == pytest.approx(25 / MB, rel=0.01)
    assert of_kind(links, *SCATTER).ms_per_byte == pytest.approx(50 / MB, rel=0.01)
    assert of_kind(links, *GATHER).latency_ms == pytest.approx(1.0, rel=0.01)


def test_another_group_of_the_same_ranks_tells_the_latency_of_gathers_of_one_size() -> None:
    """As dsprof's engine has them, whose gathers and scatters are of groups of their own."""
    groups = {"all_gather": "1"}

    def gathers(*moved: tuple[tuple[str, str], float, float]) -> Link:
        of_shards = links_of_shards(domain(*moved, groups=groups))
        return of_shards[Communications(kinds=("all_gather parameter",), groups=("1",))][0]

    told = gathers((GATHER, 250 * KB, 6.5), (SCATTER, 1250 * KB, 31.5))
    assert told.fitted
    assert (told.latency_ms, told.ms_per_byte * MB) == pytest.approx((0.25, 25.0), rel=0.05)
    # Scatters that move twice the bytes are on no line with gathers.
    assert not gathers((GATHER, 250 * KB, 6.5), (SCATTER, 1250 * KB, 63)).fitted


def test_another_kind_tells_the_latency_of_what_is_all_of_one_size() -> None:
    alike = links_of_kinds(domain((GATHER, 0.2 * MB, 3), (GATHER, 2 * MB, 21), (SCATTER, 4 * MB, 41)))
    assert of_kind(alike, *SCATTER).latency_ms == pytest.approx(1.0, rel=0.01)  # one line fits all
    apart = links_of_kinds(domain((GATHER, 0.2 * MB, 3), (GATHER, 2 * MB, 21), (SCATTER, 2 * MB, 61)))
    scatters = of_kind(apart, *SCATTER)
    assert scatters.fitted
    assert (scatters.latency_ms, scatters.ms_per_byte * MB) == pytest.approx((1.0, 30.0), rel=0.01)
    alone = links_of_kinds(domain((SCATTER, 2 * MB, 61)))
    assert not of_kind(alone, *SCATTER).fitted


@pytest.mark.parametrize(("latency_ms", "then"), [(0.2, 0.2), (0.9, 0.0), (0.0, 0.0)])
def test_most_of_what_takes_long_is_no_borrowed_latency(latency_ms: float, then: float) -> None:
    link = with_latency(Link(0.0, 1 / MB, False), latency_ms, MB)
    assert link.latency_ms == pytest.approx(then)
    assert link.fitted == (then > 0)
    assert link.transfer_ms(np.array(MB)) == pytest.approx(1.0)


def test_how_large_those_are_that_are_meant() -> None:
    moved = domain((GATHER, MB, 1), (SCATTER, 3 * MB, 1), (LOSS, 4, 1))
    assert moved.median_bytes(Communications()) == MB
    assert moved.median_bytes(Communications(kinds=("reduce_scatter gradient",))) == 3 * MB
    assert moved.median_bytes(Communications(purposes=("gradient",))) == 3 * MB
    assert np.isnan(moved.median_bytes(Communications(groups=("1",))))


@pytest.mark.parametrize(
    ("size", "ms", "on_device", "is_latency"),
    [
        (0.5 * MB, 105, False, False),
        (0.5 * MB, 8, False, True),
        (0.004 * MB, 30, False, True),
        (0.5 * MB, 30, True, True),
    ],
)
def test_nothing_waits_for_its_latency_for_long(size: float, ms: float, on_device: bool, is_latency: bool) -> None:
    link = fit_link(domain((SCATTER, size, ms)).table, on_device=on_device)
    assert (link.latency_ms > ms / 2) == is_latency
    assert link.transfer_ms(np.array(size)) == pytest.approx(ms)
    assert not link.fitted


@pytest.mark.parametrize("alone_ms", [4.0, 9.9, 11.0, 20.0])
def test_how_long_it_takes_is_asked_of_what_shared_the_link(alone_ms: float) -> None:
    table = domain((SCATTER, 0.5 * MB, 30)).table.assign(alone_ns=1e6 * alone_ms)
    link = fit_link(table)
    assert link.latency_ms == 0
    assert link.transfer_ms(np.array(0.5 * MB)) == pytest.approx(alone_ms)
    assert links_around(link, 0.5 * MB)[-1].latency_ms == pytest.approx(alone_ms)  # it may be latency all the same


def test_a_latency_below_what_the_fit_misses_may_be_the_bytes() -> None:
    link = Link(2.0, 25 / MB, True, spread=0.1, largest=2 * MB)
    *_, of_bytes = links_around(link, 2 * MB)
    assert links_around(link, 2 * MB, 16 * MB)[:-1] == links_around(link, 2 * MB)  # the last is of larger ones only
    assert of_bytes.latency_ms == 0
    assert of_bytes.transfer_ms(np.array(2 * MB)) == pytest.approx(link.transfer_ms(np.array(2 * MB)))
    assert all(one.latency_ms > 0 for one in links_around(link, 0.1 * MB))


def unequal(program: str, late_ms: float = 15.0, besides_ms: float = 0.0, kinds: tuple[str, ...] = ()) -> StepGraph:
    """Two ranks of this program, whose two communications the first rank has after 38 ms, and the second one so much
    later; besides, that one is woken so late."""
    named = [Task("0", kind, gradient="gradient" in kind) for kind in kinds or ("all_gather parameter",) * 2]
    steps = steps_of([program] * 2, (38.0, 38.0), named, sizes=(2 * MB, 2 * MB))
    second = steps.structure.of_thread(1)
    for task, segment in steps.structure.waits.tolist():
        if second.start <= segment < second.stop:
            steps.work[segment, :, WAKE_UP_DELAY] = steps.began[segment] = late_ms + besides_ms
            steps.last[task] = late_ms
    return graph_of(steps, follow=False)


def duration(graph: StepGraph, *whatifs: WhatIf) -> float:
    """The mean of both ranks, ms."""
    return float(replay(apply(graph, whatifs)).durations[0])


LINK = Link(1.0, 26 / MB, True)  # 53 ms of 2 MB: as long as the second rank waits
BY_BYTES = Link(0.0, 53 / (2 * MB), True)
GATHERS, SCATTERS = (Communications(kinds=(" ".join(kind),)) for kind in (GATHER, SCATTER))
IN_TURN, TOGETHER = "1 I0 0 W0 10 I1 0 W1 10", "1 I0 1 I1 0 W0,1 10"


@pytest.mark.parametrize("late_ms", [0.0, 5.0, 15.0])
def test_a_transfer_that_is_modelled_ends_once(late_ms: float) -> None:
    """Whatever the second rank waits for longer than the first is not waited for once more behind the modelled
    transfer."""
    gathers = unequal(IN_TURN, late_ms)
    assert duration(gathers) == pytest.approx(1 + 38 + late_ms + 10 + 38 + late_ms / 2 + 10)
    assert duration(gathers, Merge(GATHERS, LINK, together=1)) == pytest.approx(1 + 2 * (53 + 10))
    assert duration(gathers, Merge(GATHERS, LINK, together=2)) == pytest.approx(1 + 1 + 104 + 2 * 10)


@pytest.mark.parametrize("ms_per_mb", [10.0, 26.0, 60.0])
def test_who_is_woken_late_besides_still_is_over_any_link(ms_per_mb: float) -> None:
    merged = Merge(GATHERS, Link(1.0, ms_per_mb / MB, True), together=1)
    took = 1 + 2 * ms_per_mb
    assert duration(unequal(IN_TURN, 15.0, 3.0), merged) == pytest.approx(1 + took + 3 + 10 + took + 1.5 + 10)


def test_what_two_kinds_have_in_common_goes_once() -> None:
    """One wait for a gather and a scatter, which were both there after 15 of the 18 ms."""
    both = unequal(TOGETHER, 15.0, 3.0, kinds=("all_gather parameter", "reduce_scatter gradient"))
    merges = [Merge(of, Link(53.0, 0.0, True), together=1) for of in (GATHERS, SCATTERS)]
    # The two have the link in turn, after a latency of 53 ms each.
    assert duration(both, *merges) == pytest.approx(1 + 1 + 53 + 1.5 + 10)


def test_other_buckets_end_once_too() -> None:
    buckets = unequal(f"B {TOGETHER}", kinds=("all_reduce gradient",) * 2)
    one, two = (duration(buckets, Rebucket(sizes, LINK, 0.0)) for sizes in ((4_000_000,), (2_000_000, 2_000_000)))
    assert one == pytest.approx(1 + 1 + 1 + 104 + 10)
    assert two == pytest.approx(1 + 1 + 104 + 10)  # the first begins a ms earlier


@pytest.mark.parametrize("times", [2.0, 0.5])
def test_half_the_bytes_come_to_the_last_rank_in_half_the_time(times: float) -> None:
    changed = ScaleLink(bandwidth=times, of=GATHERS, link=BY_BYTES)
    in_turn, both = duration(unequal(IN_TURN), changed), duration(unequal(TOGETHER), changed)
    assert in_turn == pytest.approx(1 + 53 / times + 10 + 38 / times + 7.5 / times + 10)
    assert both == pytest.approx(1 + 1 + 38 / times + 7.5 / times + 10)  # once, though two are waited for


def test_a_link_that_is_slower_in_all() -> None:
    slower = ScaleLink(latency=3.0, bandwidth=1 / 3)
    assert duration(unequal(IN_TURN), slower) == pytest.approx(1 + 3 * 53 + 10 + 3 * 38 + 3 * 7.5 + 10)


def test_a_modelled_transfer_of_half_the_bytes() -> None:
    """In either order: what was taken out of the wait for the last rank is not there to be halved."""
    modelled, fewer = Merge(GATHERS, BY_BYTES, together=1), ScaleLink(bandwidth=2.0, of=GATHERS, link=BY_BYTES)
    for whatifs in ((modelled, fewer), (fewer, modelled)):
        assert duration(unequal(IN_TURN), *whatifs) == pytest.approx(1 + 2 * (26.5 + 10))


def test_what_another_kind_comes_late_with_stays_late() -> None:
    """One wait for a gather and a scatter, both of which come to the second rank 15 ms later than to the first."""
    both = unequal(TOGETHER, kinds=("all_gather parameter", "reduce_scatter gradient"))
    of_gathers, of_both = (ScaleLink(bandwidth=2.0, of=of, link=BY_BYTES) for of in (GATHERS, Communications()))
    assert duration(both, of_gathers) == pytest.approx(duration(both))
    assert duration(both, of_both) == pytest.approx(1 + 1 + 19 + 7.5 / 2 + 10)
    assert duration(both, Merge(GATHERS, Link(38.0, 0.0, True), together=1)) == pytest.approx(duration(both))


@pytest.mark.parametrize("times", [2.0, 0.5])
def test_what_had_ended_when_the_last_rank_came(times: float) -> None:
    graph = unequal(IN_TURN)
    for steps in graph.templates:
        steps.transfer[:] = 0.0
    changed = ScaleLink(bandwidth=times, of=GATHERS, link=BY_BYTES)
    assert duration(graph, changed) == pytest.approx(1 + 15 / times + 10 + 7.5 / times + 10)


def test_no_what_if_writes_to_what_was_measured() -> None:
    graph = unequal(IN_TURN)
    before = duration(graph)
    fewer = ScaleLink(bandwidth=2.0, of=GATHERS, link=BY_BYTES)
    assert duration(graph, fewer) < before
    assert duration(graph, fewer, Merge(GATHERS, BY_BYTES, together=1)) < before
    assert duration(graph) == before


def test_what_goes_through_buffers_does_not_make_the_bytes_of_all_else_cheap() -> None:
    """All-reduces over a link of 40 MB/s that a buffer of 32 KiB lies before: 10 KiB took 0.5 ms, and not 0.9."""
    seen = ((40, 0.66), (1024, 0.46), (10 * KB, 0.49), (256 * KB, 13.0))
    link = fit_link(domain(*((REDUCE, size, ms) for size, ms in seen)).table)
    assert link.transfer_ms(np.array(256.0 * KB)) == pytest.approx(13.0, rel=0.15)
    assert link.latency_ms == pytest.approx(0.5, abs=0.2)
