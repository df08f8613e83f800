"""Each kind of collective has a link of its own, and a modelled transfer ends with the last rank that has it all."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import WAKE_UP_DELAY, StepGraph, Task
from dsprof.analyzer.rules.comm.dimensions import Domain
from dsprof.analyzer.rules.comm.possible_links import Links, links_around, links_of_kinds, rows_of
from dsprof.analyzer.whatif import WhatIf, apply
from dsprof.analyzer.whatif.communications import ScaleLink
from dsprof.analyzer.whatif.merge import Merge
from dsprof.analyzer.whatif.rebucket import Rebucket
from dsprof.analyzer.whatif.select import Communications

MB = 1_000_000.0
GATHER, SCATTER, LOSS = ("all_gather", "parameter"), ("reduce_scatter", "gradient"), ("all_reduce", "loss")


def domain(*moved: tuple[tuple[str, str], float, float]) -> Domain:
    """Of a group: name and purpose, bytes and ms of what it moves, in each of four steps."""
    rows = [
        {"group": "0", "name": name, "purpose": purpose, "bytes": size, "transfer_ns": 1e6 * ms, "alone_ns": 1e6 * ms,
         "step": step, "ranks": 2}
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


def test_another_kind_tells_the_latency_of_what_is_all_of_one_size() -> None:
    alike = links_of_kinds(domain((GATHER, 0.2 * MB, 3), (GATHER, 2 * MB, 21), (SCATTER, 4 * MB, 41)))
    assert of_kind(alike, *SCATTER).latency_ms == pytest.approx(1.0, rel=0.01)  # one line fits all
    apart = links_of_kinds(domain((GATHER, 0.2 * MB, 3), (GATHER, 2 * MB, 21), (SCATTER, 2 * MB, 61)))
    scatters = of_kind(apart, *SCATTER)
    assert scatters.fitted
    assert (scatters.latency_ms, scatters.ms_per_byte * MB) == pytest.approx((1.0, 30.0), rel=0.01)
    alone = links_of_kinds(domain((SCATTER, 2 * MB, 61)))
    assert not of_kind(alone, *SCATTER).fitted


def test_which_rows_are_meant() -> None:
    table = domain((GATHER, MB, 1), (SCATTER, MB, 1), (LOSS, 4, 1)).table
    assert rows_of(Communications(), table).all()
    assert set(table["name"][rows_of(Communications(kinds=("all_gather parameter",)), table)]) == {"all_gather"}
    assert set(table["name"][rows_of(Communications(purposes=("gradient", "loss")), table)]) == {
        "reduce_scatter", "all_reduce",
    }  # fmt: skip
    assert not rows_of(Communications(groups=("1",)), table).any()


def test_a_latency_below_what_the_fit_misses_may_be_the_bytes() -> None:
    link = Link(2.0, 25 / MB, True, spread=0.1)
    *_, of_bytes = links_around(link, 2 * MB)
    assert of_bytes.latency_ms == 0
    assert of_bytes.transfer_ms(np.array(2 * MB)) == pytest.approx(link.transfer_ms(np.array(2 * MB)))
    assert all(one.latency_ms > 0 for one in links_around(link, 0.1 * MB))


def unequal(kind: str, late_ms: float = 15.0) -> StepGraph:
    """Two ranks wait for two communications one after the other, each of which the first rank has after 38 ms and the
    second one so much later."""
    gradient = kind == "reduce_scatter gradient"
    tasks = [Task("0", kind, gradient=gradient)] * 2
    steps = steps_of(["1 I0 0 W0 10 I1 0 W1 10"] * 2, (38.0, 38.0), tasks, sizes=(2 * MB, 2 * MB))
    second = steps.structure.of_thread(1)
    for segment in sorted(set(steps.structure.waits[:, 1].tolist())):
        if second.start <= segment < second.stop:
            steps.work[segment, :, WAKE_UP_DELAY] = late_ms
    return graph_of(steps, follow=False)


def duration(graph: StepGraph, *whatifs: WhatIf) -> float:
    return float(replay(apply(graph, whatifs)).durations[0])


LINK = Link(1.0, 26 / MB, True)  # 53 ms of 2 MB: as long as the second rank waits


@pytest.mark.parametrize("late_ms", [0.0, 5.0, 15.0])
def test_a_transfer_that_is_modelled_ends_once(late_ms: float) -> None:
    """Whatever the second rank waits for longer than the first is not waited for once more behind the modelled
    transfer."""
    gathers = unequal("all_gather parameter", late_ms)
    assert duration(gathers) == pytest.approx(1 + 38 + late_ms + 10 + 38 + late_ms / 2 + 10)  # the mean of both
    of = Communications(kinds=("all_gather parameter",))
    assert duration(gathers, Merge(of, LINK, together=1)) == pytest.approx(1 + 2 * (53 + 10))
    assert duration(gathers, Merge(of, LINK, together=2)) == pytest.approx(1 + 1 + 104 + 2 * 10)


def test_who_is_woken_late_besides_still_is() -> None:
    gathers = unequal("all_gather parameter", 18.0)
    merged = Merge(Communications(kinds=("all_gather parameter",)), LINK, together=1)
    assert duration(gathers, merged) == pytest.approx(1 + 53 + 3 + 10 + 53 + 1.5 + 10)


def test_other_buckets_end_once_too() -> None:
    steps = steps_of(
        ["B 1 I0 1 I1 0 W0,1 10"] * 2, (38.0, 38.0), [Task("0", "all_reduce gradient", gradient=True)] * 2,
        sizes=(2 * MB, 2 * MB),
    )  # fmt: skip
    (last,) = {segment for _, segment in steps.structure.waits.tolist() if steps.structure.thread[segment] == 1}
    steps.work[last, :, WAKE_UP_DELAY] = 15.0
    graph = graph_of(steps, follow=False)
    one, two = (duration(graph, Rebucket(sizes, LINK, 0.0)) for sizes in ((4_000_000,), (2_000_000, 2_000_000)))
    assert one == pytest.approx(2 + 1 + 104 + 10)
    assert two == pytest.approx(
        2 + 104 + 10
    )  # the first begins a ms earlier, and its latency is over when it has moved


def test_half_the_bytes_come_to_the_last_rank_in_half_the_time() -> None:
    gathers = unequal("all_gather parameter")
    of = Communications(kinds=("all_gather parameter",))
    by_bytes = Link(0.0, 53 / (2 * MB), True)
    half, twice = (duration(gathers, ScaleLink(bandwidth=times, of=of, link=by_bytes)) for times in (2.0, 0.5))
    assert half == pytest.approx(1 + 26.5 + 10 + 19 + 7.5 / 2 + 10)
    assert twice == pytest.approx(1 + 106 + 10 + 76 + 30 / 2 + 10)
