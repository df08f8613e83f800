"""comm.slow-link: a group whose collectives take longer than those of its peers, on made-up jobs of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Work

from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Evidence
from dsprof.analyzer.rules.comm import slow_link
from dsprof.analyzer.rules.comm.slow_link import SlowLink, slow_links
from dsprof.analyzer.rules.run.slow_chain import slower_transfers
from dsprof.analyzer.study import study

PAIRS = {"r0": ((0, 1), ""), "r1": ((2, 3), "")}
REPLICAS = {"c0": ((0, 2), ""), "c1": ((1, 3), "")}


def job(
    slower: Mapping[str, float],
    *,
    hosts: tuple[str, ...] = (),
    mib: Mapping[str, float] | None = None,
    slow_rank: int | None = None,
    seldom: bool = False,
    spell: tuple[int, int] | None = None,
    turns: Mapping[str, int] | None = None,
) -> MeshJob:
    """2 x 2: layers are shared in rows, gradients of 4 MiB reduced in columns, all waited for at once. mib: of the
    gradients of some groups; seldom: a third of what is slow is not; spell: it is so in
    these steps alone; turns: group -> in which of three steps it is so alone."""

    def times_as_long(group: str, number: int) -> float:
        if turns is not None and group in turns and number // 2 % 3 != turns[group]:
            return 1.0
        if spell is not None and not spell[0] <= number // (2 if group in REPLICAS else 4) <= spell[1]:
            return 1.0
        return 1.0 if seldom and number % 3 == 0 else slower.get(group, 1.0)

    def program(rank: int, step: int) -> Program:
        row, column = f"r{rank // 2}", f"c{rank % 2}"
        size = int((mib or {}).get(column, 4.0) * 2**20)
        times = 1.5 if rank == slow_rank else 1.0
        layers = [
            part for _ in range(4) for part in (Work(5 * times), Call(row, "all_reduce", 8192, "tensor-parallel"))
        ]
        reduced = [part for _ in range(2) for part in (Work(20 * times), Call(column, "all_reduce", size, "gradient"))]
        return Phase("forward", tuple(layers)), Phase("backward", tuple(reduced)), Phase("optimizer", (Work(2),))

    return MeshJob(4, {**PAIRS, **REPLICAS}, program, steps=24, latency_ms=0.2, slower=times_as_long, hosts=hosts)


@pytest.mark.plants("comm.slow-link")
def test_the_group_whose_link_is_slow_is_named_with_what_its_peers_take() -> None:
    slow = job({"c1": 5.0}, hosts=("a", "b", "c", "d"))
    first = analyze(slow.trace()).findings[0]
    assert (first.code, first.where.ranks, first.where.dimension) == ("comm.slow-link", (1, 3), "dp")
    assert first.title.startswith("ranks 1, 3 (tp 1): all_reduce of 4.00 MiB takes 21.0 ms, and 4.20 ms over the links")
    assert first.fixes[0].title.startswith(
        "the network between b and d: which interface it goes over (GLOO_SOCKET_IFNAME)"
    )
    true = slow.step_ms() - job({}, hosts=("a", "b", "c", "d")).step_ms()
    assert first.gain.ms == pytest.approx(true, rel=0.1)
    assert first.gain.low <= true <= first.gain.high


@pytest.mark.plants("comm.slow-link")
def test_a_link_that_is_slow_for_a_while_is_named_with_when() -> None:
    slow = job({"c1": 5.0}, hosts=("a", "b", "c", "d"), spell=(8, 14))
    analysis = analyze(slow.trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks, first.where.steps) == ("comm.slow-link", (1, 3), (8, 14))
    assert first.title.startswith(
        "ranks 1, 3 (tp 1): all_reduce of 4.00 MiB takes 21.0 ms from step 8 to 14, and 4.20 ms over the links"
    )
    assert Evidence("when", "transient: from step 8 to 14", "") in first.evidence
    # Of the steps that are judged, 7 are slow.
    judged = analysis.steps_judged
    a_slow_step = job({"c1": 5.0}).step_ms() - job({}).step_ms()
    assert first.gain.ms == pytest.approx(a_slow_step * 7 / judged, rel=0.15)


@pytest.mark.plants("comm.slow-link")
def test_links_that_are_slow_in_turn_are_each_named_with_when() -> None:
    analysis = analyze(job({"c0": 5.0, "c1": 5.0}, turns={"c0": 0, "c1": 1}).trace())
    links = [one for one in analysis.findings if one.code == "comm.slow-link"]
    assert sorted(one.where.ranks for one in links) == [(0, 2), (1, 3)]
    assert analysis.findings[0].code == "comm.slow-link"
    judged = analysis.steps_judged
    a_slow_step = job({"c1": 5.0}).step_ms() - job({}).step_ms()
    for one in links:
        struck = sum(step % 3 == (0 if one.where.ranks == (0, 2) else 1) for step in range(24 - judged, 24))
        when = f"in {struck} of {judged} steps, in turn with other links"
        assert f"takes 21.0 ms {when}, and 4.20 ms over" in one.title
        assert Evidence("when", f"rotating: {when}", "") in one.evidence
        assert one.gain.ms == pytest.approx(a_slow_step * struck / judged, rel=0.15)


@pytest.mark.plants("comm.slow-link")
def test_groups_of_a_host_that_are_all_slow_have_one_link() -> None:
    """Eight ranks on two hosts, whose layers are shared in pairs. Mending one pair's saves nothing: the other waits."""
    pairs = {f"r{row}": ((2 * row, 2 * row + 1), "") for row in range(4)}
    columns = {f"c{column}": (tuple(range(column, 8, 2)), "") for column in (0, 1)}

    def program(rank: int, step: int) -> Program:
        layers = [part for _ in range(8) for part in (Work(5), Call(f"r{rank // 2}", "all_reduce", 8192))]
        reduced = (Call(f"c{rank % 2}", "all_reduce", 2**20, "gradient"),)
        return Phase("forward", tuple(layers)), Phase("backward", reduced), Phase("optimizer", (Work(2),))

    def of(slow: tuple[str, ...]) -> MeshJob:
        return MeshJob(
            8, {**pairs, **columns}, program, steps=24, hosts=(*("a",) * 4, *("b",) * 4), latency_ms=0.2,
            slower=lambda group, number: 20.0 if group in slow else 1.0,
        )  # fmt: skip

    links = [one for one in analyze(of(("r2", "r3")).trace()).findings if one.code == "comm.slow-link"]
    assert [one.where.ranks for one in links] == [(4, 5, 6, 7)]
    assert links[0].title.endswith("; 2 groups on these hosts are slow")
    true = of(("r2", "r3")).step_ms() - of(()).step_ms()
    assert links[0].gain.ms == pytest.approx(true, rel=0.1)
    alone = [one for one in analyze(of(("r2",)).trace()).findings if one.code == "comm.slow-link"]
    assert [one.where.ranks for one in alone] == [(4, 5)]


@pytest.mark.parametrize("spell", [(8, 14), None], ids=["for a while", "all along"])
def test_who_wants_cores_while_it_is_slow_has_no_slow_link(spell: tuple[int, int] | None) -> None:
    """Ranks 1 and 3 wait for a core for 8 % of a step in those steps in which they are slow, and in no others."""
    of_job = study(job({"c1": 5.0}, spell=spell).trace())
    first, last = spell or of_job.step_range
    then = (of_job.step_numbers >= first) & (of_job.step_numbers <= last)
    wanted = np.outer(np.isin(of_job.ranks, (1, 3)), then) * 0.08 * of_job.step_ms

    def links(**gauges: np.ndarray) -> list[tuple[int, ...]]:
        spent = SimpleNamespace(spent=lambda gauge: gauges[gauge])
        return [link.ranks for link in slow_links(replace(of_job, load=object(), gauges=spent))]

    assert links(core_wait_seconds=0 * wanted) == [(1, 3)]
    assert links(core_wait_seconds=wanted) == []


def test_what_a_slow_device_communicates_more_slowly_may_be_saved_with_it() -> None:
    """Both groups of rank 3 are twice as slow as those without it: so much more may be saved if it is its device."""
    slow = job({"r1": 2.0, "c1": 2.0})
    of_job = study(slow.trace())
    gain = slower_transfers(of_job, (3,))
    assert gain is not None
    assert gain.ms == pytest.approx(slow.step_ms() - job({}).step_ms(), rel=0.1)
    assert slower_transfers(of_job, (0,)) is None
    assert slower_transfers(study(job({}, slow_rank=3).trace()), (3,)) is None


def test_ranks_that_are_on_two_hosts_while_their_peers_are_on_one() -> None:
    first = analyze(job({"r1": 40.0}, hosts=("a", "a", "a", "b")).trace()).findings[0]
    assert (first.code, first.where.ranks) == ("comm.slow-link", (2, 3))
    assert first.fixes[0].title == (
        "order the ranks so that ranks 2-3 are on one host, as their peers are: they are on a and b"
    )


def test_what_clocks_of_two_hosts_can_be_apart_is_no_slow_link() -> None:
    """A collective lasts from the last rank's arrival, by its clock, to the last end, by another's."""
    known = study(job({"c1": 5.0}, hosts=("a", "b", "c", "d")).trace())  # 21.0 ms, and 4.20 ms elsewhere
    for apart_ms, found in ((5.0, 1), (10.0, 0)):
        unsure = replace(known, aligned=replace(known.aligned, clock_error_us=1000 * apart_ms))
        assert len(slow_links(unsure)) == found


@pytest.mark.parametrize(
    "planted",
    [
        job({}),
        job({"c0": 5.0, "c1": 5.0}),  # all alike: how slow the link is, and not which
        job({}, mib={"c1": 20.0}),  # five times as many bytes
        job({}, slow_rank=3),
        job({"c1": 1.3}),
        job({"c1": 5.0}, seldom=True),  # mostly, as on busy cores
        job({"c1": 5.0}, seldom=True, spell=(8, 14)),
        job({"c0": 5.0, "c1": 5.0}, spell=(8, 14)),  # for a while, and all alike
        job({"c1": 5.0}, spell=(8, 10)),  # too few steps to tell
        job({"c1": 5.0}, mib={"c1": 8.0}),  # of other sizes: nothing is the same
        job({"c1": 5.0}, mib={"c0": 0.0, "c1": 0.0}),  # not told, as in tables of times alone
    ],
    ids=[
        "healthy",
        "all slow",
        "more bytes",
        "slow rank",
        "a little",
        "mostly",
        "mostly for a while",
        "all slow for a while",
        "three steps",
        "other sizes",
        "sizes not told",
    ],
)
def test_what_is_no_slow_link(planted: MeshJob) -> None:
    analysis = analyze(planted.trace())
    assert of(analysis, "comm.slow-link") is None
    assert "comm.slow-link" in analysis.passed


def test_where_nothing_elsewhere_is_alike_a_group_is_compared_with_those_beside_it() -> None:
    """One of two ways between the same hosts is slow, and what moves between the other two is of another size."""
    groups = {"a": ((0, 2), ""), "b": ((1, 3), ""), "c": ((4, 6), ""), "d": ((5, 7), "")}

    def program(rank: int, step: int) -> Program:
        group, size = ("ab"[rank % 2], 4 << 20) if rank < 4 else ("cd"[rank % 2], 8 << 20)
        return (
            Phase("forward", (Work(20),)),
            Phase(
                "backward", tuple(p for _ in range(2) for p in (Work(20), Call(group, "all_reduce", size, "gradient")))
            ),
            Phase("optimizer", (Work(2),)),
        )

    hosts = ("x", "x", "y", "y", "v", "v", "w", "w")
    slow = MeshJob(8, groups, program, steps=24, latency_ms=0.2, hosts=hosts,
                   slower=lambda group, number: 3.0 if group == "a" else 1.0)  # fmt: skip
    assert [(one.group, one.ranks) for one in slow_links(study(slow.trace()))] == [("a", (0, 2))]


def test_groups_on_the_same_hosts_that_are_slow_in_other_steps_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        slow_link, "_on_hosts", lambda study, domain: {frozenset("xy"): ["a", "b"], frozenset("vw"): ["c"]}
    )
    monkeypatch.setattr(slow_link, "hosts_of", lambda study, ranks: "xy")
    domain = SimpleNamespace(groups=("a", "b", "c"))
    one = SlowLink(domain, "a", (0, 2), 3.0, "all_reduce", 1e6, 30.0, 10.0, 500.0, np.arange(5), True)  # type: ignore[arg-type]
    apart = [one, replace(one, group="b", ranks=(1, 3), steps=np.arange(10, 15))]
    together = [one, replace(one, group="b", ranks=(1, 3))]
    made = [slow_link._by_hosts(None, links) for links in (apart, together)]  # type: ignore[arg-type]
    assert [len(links) for links in made] == [2, 1]
