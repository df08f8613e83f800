"""What-ifs on graphs written by hand, in every order; and pipelines against what is published of their schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final

import closed_form
import numpy as np
import pytest
from graphs import COMPUTE, graph_of, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_layout import costs

from dsprof.analyzer.graph.chains import LAUNCH, SYNC
from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import PARTS, StepGraph, Task
from dsprof.analyzer.layout import Assumed, Layout
from dsprof.analyzer.layout.relayout import Relayout
from dsprof.analyzer.rules.registry import all_rules
from dsprof.analyzer.whatif import Refused, WhatIf, apply
from dsprof.analyzer.whatif.communications import MoreCommunication, ScaleLink, WithoutCommunications
from dsprof.analyzer.whatif.device_work import DeviceWork
from dsprof.analyzer.whatif.even_segments import EvenSegments
from dsprof.analyzer.whatif.faster_hosts import FasterHosts
from dsprof.analyzer.whatif.fetching import DeepSpeedFetching, FetchedBy, GatheredWhole, OwnFetching
from dsprof.analyzer.whatif.lowering import Lower, Stages
from dsprof.analyzer.whatif.merge import Merge
from dsprof.analyzer.whatif.needless import GatheredOnce, InLastBackward, WithoutBuffers
from dsprof.analyzer.whatif.overlapped_messages import OverlappedMessages
from dsprof.analyzer.whatif.prefetched import Prefetched
from dsprof.analyzer.whatif.rebucket import Rebucket, reduced_in_backwards
from dsprof.analyzer.whatif.schedule import Reschedule, makespan, schedule_graph
from dsprof.analyzer.whatif.select import Communications
from dsprof.analyzer.whatif.typical import Typical
from dsprof.analyzer.whatif.waited_for import WaitedFor
from dsprof.analyzer.whatif.without_flows import TransfersAtOnce, WithoutFlows
from dsprof.analyzer.whatif.work import Change, EvenRanks, LessWork, ScaleWork
from dsprof.engine import schedule

GATHER = Task("0", "all_gather parameter", workers=1)
REDUCE = Task("0", "all_reduce gradient", gradient=True, workers=1)
GATHERS = Communications(purposes=("parameter",))


def gathers() -> list[str]:
    """Three layers of 5 ms, whose parameters are gathered when they are needed."""
    return ["I0 W0 5 I1 W1 5 I2 W2 5"] * 2


def test_a_faster_link() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    assert replay(graph).durations.tolist() == [27.0]
    assert replay(apply(graph, [ScaleLink(0.5, 2.0, GATHERS)])).durations.tolist() == [21.0]


def test_latency_and_bandwidth_apart() -> None:
    """Transfers of 1, 2 and 4 bytes at 1 ms a byte, after 2 ms each: 13 ms, and 15 of work."""
    steps = steps_of(gathers(), [3.0, 4.0, 6.0], [GATHER] * 3, sizes=[1.0, 2.0, 4.0])
    graph = graph_of(steps)
    assert replay(graph).durations.tolist() == [28.0]
    assert replay(apply(graph, [ScaleLink(latency=0.5)])).durations == pytest.approx([25.0])
    assert replay(apply(graph, [ScaleLink(bandwidth=2.0)])).durations == pytest.approx([24.5])
    alike = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    with pytest.raises(Refused, match=r"process group 0 moves \(all of one size, .* change both alike"):
        apply(alike, [ScaleLink(latency=0.5)])


def test_gathers_that_are_not_needed() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER, REDUCE, GATHER]))
    assert replay(apply(graph, [WithoutCommunications(GATHERS)])).durations.tolist() == [19.0]


def test_gradients_reduced_in_the_last_of_two_backwards() -> None:
    """Twice 5 ms forward and 6 of backward, after which 4 of reducing are waited for."""
    graph = graph_of(steps_of(["5 B 6 I0 W0 5 B 6 I1 W1 1"] * 2, [4.0] * 2, [REDUCE] * 2))
    assert replay(graph).durations.tolist() == [31.0]
    last = InLastBackward(Communications(purposes=("gradient",)))
    assert replay(apply(graph, [last])).durations.tolist() == [27.0]
    whole = graph_of(steps_of(["5 B 6 I0 I1 W0,1 1"] * 2, [4.0] * 2, [REDUCE] * 2))
    assert replay(apply(whole, [last])).durations.tolist() == replay(whole).durations.tolist()


def test_buffers_that_are_not_broadcast() -> None:
    """2 ms of loading and 3 of packing, 4 of the first broadcast, 1 of packing, 4 of the second, 3 of unpacking, 9 of
    forward."""
    buffers = Task("0", "broadcast buffer", workers=1)
    graph = graph_of(steps_of(["5 I0 W0 1 I1 W1 12"] * 2, [4.0] * 2, [buffers] * 2))
    assert replay(graph).durations.tolist() == [26.0]
    without = WithoutBuffers(Communications(purposes=("buffer",)), np.full((2, 1), 3.0))
    assert replay(apply(graph, [without])).durations.tolist() == [11.0]


def test_gathers_that_are_prefetched_by_one_layer() -> None:
    """The second is issued where the first was: it waits for the link until 4, and is there at 8, in time for 9."""
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    assert replay(apply(graph, [Prefetched(GATHERS, 1)])).durations.tolist() == [19.0]


def test_what_ifs_compose() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    both = apply(apply(graph, [Prefetched(GATHERS, 1)]), [ScaleLink(2.0, 0.5)])
    # 8 for the first; the second is there at 16 > 13; the third, issued at 8, at 24 > 21.
    assert replay(both).durations.tolist() == [29.0]
    assert replay(apply(both, [ScaleWork({"compute": 2.0})])).durations.tolist() == [38.0]


def test_a_norm_that_is_reduced_too() -> None:
    """All gather 4 + 5 ms a layer; then 3 ms more before the last layer's work."""
    steps = steps_of(gathers(), [4.0] * 3, [GATHER] * 3)
    last = steps.structure.plan.last.tolist()
    norm, place = Task("1", "all_reduce norm", workers=1), {thread: (end - 1, end) for thread, end in enumerate(last)}
    graph = graph_of(steps)
    added = apply(graph, [MoreCommunication("a norm", norm, place, transfer=3.0)])
    assert replay(added).durations.tolist() == [27.0]  # beside the gather, which takes longer
    slow = apply(graph, [MoreCommunication("a norm", norm, place, transfer=6.0)])
    assert replay(slow).durations.tolist() == [29.0]


def test_ranks_that_do_the_same_take_the_same() -> None:
    graph = graph_of(steps_of(["5 I0 W0 1", "9 I0 W0 1", "2 I0 W0 1"], [4], steps=2), follow=False)
    evened = apply(graph, [EvenRanks([np.array([True, True, False]), np.array([False, False, True])])])
    work = [steps.work.sum(axis=(0, 2)).tolist() for steps in evened.templates]
    assert work == [[19.0, 19.0]]  # 8 + 8 + 3
    assert replay(evened).durations == pytest.approx([11.2 + (8 / 6 + 8 / 10 + 1) / 3] * 2)  # come at 6.67, 7.2 and 2


@pytest.mark.parametrize(
    ("together", "in_advance", "step_ms"), [(1, True, 55), (2, False, 73), (2, True, 63), (4, True, 82)]
)
def test_a_merged_reduction_is_waited_for_where_the_next_merged_one_is(
    together: int, in_advance: bool, step_ms: float
) -> None:
    """Of FSDP2 on a device: each of four blocks of 10 ms has its gradients reduced, 1 ms and 10 ms of bytes, when the
    reduction before is over. Two at a time: issued at 20 and 40, of 21 ms each, on one link: 62, and 1 to the end; were
    the first waited for where the third of the four was issued, the last block would begin at 41. All at once: issued
    at 40, of 41 ms."""
    tasks = [Task("0", "reduce_scatter gradient", gradient=True, workers=1)] * 4
    program = "B 10 I0 10 W0 0 I1 10 W1 0 I2 10 W2 0 I3 0 W3 1"
    graph = graph_of(steps_of([program], [1.0] * 4, tasks, wires=[10.0] * 4, sizes=[10.0] * 4))
    scatters = Communications(kinds=("reduce_scatter gradient",))
    cut = apply(graph, [Merge(scatters, Link(1.0, 1.0, True), together, in_advance=in_advance)])
    assert replay(cut).durations == pytest.approx([step_ms])


# --- in either order ----------------------------------------------------------------------------

RANKS, STEPS = 4, 6
NORM = Task("1", "all_reduce norm", workers=1)
PARTS_OF_TWO = [(stage, op) for stage in range(2 * RANKS) for op in "FB"]
BUCKET = Task("0", "all_reduce gradient", gradient=True)
GRADIENTS = Communications(purposes=("gradient",))
PEERS = [np.array([True, True, False, False]), np.array([False, False, True, True])]
LINK = Link(0.5, 0.1, True)


def data_parallel() -> StepGraph:
    """Four ranks load, go forward with two gathers, backward with three buckets, and reduce a norm; each step's costs
    differ, and rank 3 is slow."""
    program = "2 I0 W0 3 I1 W1 4 B 6 I2 5 I3 4 I4 W2,3,4 1 I5 W5 2"
    tasks = [GATHER, GATHER, BUCKET, BUCKET, BUCKET, NORM]
    steps = steps_of([program] * RANKS, [2, 3, 3, 4, 6, 1], tasks, steps=STEPS, sizes=[8, 16, 16, 32, 64, 1])
    draw = np.random.default_rng(5)
    work = steps.work * draw.uniform(0.8, 1.2, (*steps.work.shape[:2], 1))
    first = np.searchsorted(steps.structure.thread, np.arange(RANKS))
    work[first, :, PARTS.index("data")], work[first, :, COMPUTE] = work[first, :, COMPUTE], 0
    work[steps.structure.thread == 3] *= 1.3
    return graph_of(steps.with_costs(work=work, transfer=steps.transfer * draw.uniform(0.8, 1.2, (6, STEPS))))


def pipeline() -> StepGraph:
    return schedule_graph(
        schedule.make_plan("gpipe", RANKS, 4), lambda action: np.linspace(1.0, 2.0, STEPS) * (1 + action.stage % 3),
        lag=0.2, steps=STEPS,
    )  # fmt: skip


def on_devices() -> StepGraph:
    """Four ranks' devices, then their hosts, each of which launches three kernels and waits for the second. Four tasks
    of each rank are flows; then the devices reduce a bucket."""
    flows = [Task(kind, kind, workers=None) for kind in (LAUNCH, LAUNCH, LAUNCH, SYNC)]
    each = [4 * rank for rank in range(RANKS)]
    devices = [f"W{f} 5 W{f + 1} 5 I{f + 3} W{f + 2} 5 I16 {'W16 ' * 6}1" for f in each]  # 12 segments
    hosts = [f"3 I{f} 3 I{f + 1} 1 W{f + 3} 3 I{f + 2} 1" for f in each]
    steps = steps_of([*devices, *hosts], [0.1] * 16 + [2.0], [*flows * RANKS, BUCKET], steps=STEPS)
    return replace(graph_of(steps), ranks=(*range(RANKS), *range(RANKS)), leads=RANKS)


def test_a_faster_host_and_one_that_does_not_wait() -> None:
    """The first kernel begins at 3.1 and ends at 8.1, the second at 13.1; then the host goes on, launches the third at
    16.2 (with the delays of its flows: 13.2 + 3 + 0.1 = 16.3), which ends at 21.3; 2 to reduce, 1 after it."""
    graph = on_devices()
    assert replay(graph).durations[0] == pytest.approx(24.3)
    assert replay(apply(graph, [FasterHosts(0.5)])).durations[0] == pytest.approx(1.6 + 10 + 0.1 + 1.6 + 5 + 3)
    assert replay(apply(graph, [WithoutFlows(SYNC)])).durations[0] == pytest.approx(3.1 + 15 + 3)
    assert replay(apply(graph, [WithoutFlows(SYNC), FasterHosts(0.5)])).durations[0] == pytest.approx(1.6 + 15 + 3)
    assert replay(apply(graph, [TransfersAtOnce()])).durations[0] == pytest.approx(24.3 - 2)
    with pytest.raises(Refused, match=r"launching x 0\.5: no rank has a device whose chain is known beside its host's"):
        apply(data_parallel(), [FasterHosts(0.5)])


def test_hosts_launch_less_of_what_their_devices_do_not_do() -> None:
    """Half of the 16 ms that a device computes: its host has half of its launches left to do, or all of them."""
    graph, half = on_devices(), {"compute": np.full((RANKS, STEPS), 8.0)}
    both, device = (LessWork("half", Change(half, launches=launches), PEERS) for launches in (True, False))
    halved = DeviceWork(np.full(RANKS, 0.5))
    expected = replay(apply(graph, [halved, FasterHosts(0.5)])).durations
    assert replay(apply(graph, [both])).durations == pytest.approx(expected)
    assert replay(apply(graph, [device])).durations == pytest.approx(replay(apply(graph, [halved])).durations)


def less(what: str, part: str, ms: float, rank: int, beyond: bool = False) -> LessWork:
    removed = np.zeros((RANKS, STEPS))
    removed[rank] = ms
    return LessWork(what, Change({part: removed}, where_beyond_peers=beyond), PEERS)


WHAT_IFS: Final[Sequence[Callable[[], WhatIf]]] = (
    lambda: less("pause.gc", "compute", 0.7, 1),
    lambda: LessWork("both", Change({"optimizer": np.full((RANKS, STEPS), 0.3)}, launches=True), PEERS),
    lambda: less("rank.straggler", "compute", 3.0, 3, beyond=True),
    lambda: less("data.stall", "data", 1.5, 0),
    lambda: less("more input", "compute", -1.0, 2),
    lambda: EvenRanks(PEERS),
    lambda: EvenRanks(PEERS, parts=("data",)),
    lambda: EvenSegments([(0, 1), (2, 3)]),
    lambda: Typical((1, 2)),
    lambda: ScaleWork({"compute": 0.5}),
    lambda: ScaleWork({"compute": 2.0, "data": 0.1}, ranks=(1, 3)),
    lambda: FasterHosts(0.5),
    lambda: DeviceWork(np.array([1.2, 0.9, 1.0, 1.1])),
    lambda: WithoutFlows(SYNC),
    lambda: WithoutFlows(LAUNCH),
    lambda: TransfersAtOnce(),
    lambda: ScaleLink(latency=0.25, of=Communications(groups=("0",))),
    lambda: ScaleLink(bandwidth=10.0, of=Communications(groups=("0",))),
    lambda: ScaleLink(0.5, 2.0, GRADIENTS),
    lambda: WithoutCommunications(Communications(purposes=("norm",))),
    lambda: WithoutCommunications(GRADIENTS),
    lambda: MoreCommunication("a barrier", Task("2", "barrier"), {r: (12 * r + 10, 12 * r + 11) for r in range(4)}, 1),
    lambda: InLastBackward(GRADIENTS),
    lambda: WithoutBuffers(GATHERS, np.full((RANKS, STEPS), 0.4)),
    lambda: Prefetched(Communications(kinds=("all_gather parameter",)), ahead=2),
    lambda: Prefetched(GATHERS, 1),
    lambda: Prefetched(GATHERS, 2),
    lambda: Prefetched(GATHERS, 1, "forward"),
    lambda: GatheredOnce(GATHERS),
    lambda: FetchedBy(GATHERS, LINK, OwnFetching(16.0, 1e9, 1e9), 1),
    lambda: FetchedBy(GATHERS, LINK, DeepSpeedFetching(1e9, 1e9, 1e9), 1),
    lambda: FetchedBy(GATHERS, LINK, GatheredWhole(), 1),
    lambda: WaitedFor(GRADIENTS, 0),
    lambda: WaitedFor(GRADIENTS, 1),
    lambda: Merge(GATHERS, LINK, together=2),
    lambda: Merge(GRADIENTS, LINK, most_bytes=50),
    lambda: Rebucket((112,), LINK, 0.1),
    lambda: Rebucket((8,) * 14, LINK, 0.1),
    lambda: Reschedule(schedule.make_plan("1f1b", RANKS, 4)),
    lambda: Reschedule(schedule.make_plan("zero-bubble", RANKS, 4)),
    lambda: Lower(),
    lambda: OverlappedMessages(),
    lambda: Relayout(costs(), Layout(pp=2, dp=2, zero=1, micro_batches=3), Assumed()),
    lambda: Lower(schedule.make_plan("1f1b", RANKS, 7)),
    lambda: Lower(schedule.make_plan("zero-bubble", RANKS, 3), Stages({(1, "F"): 0.5, (1, "B"): 0.7})),
    lambda: Lower(schedule.make_plan("interleaved", RANKS, 8, 2), Stages(dict.fromkeys(PARTS_OF_TWO, 0.5))),
)  # fmt: skip
"""All what-ifs that there are."""


def outcome(graph: StepGraph, *calls: Sequence[WhatIf]) -> list[object] | str:
    """Everything that a graph consists of after these were applied, those of each call at once; or that one of them was
    refused."""
    try:
        for whatifs in calls:
            graph = apply(graph, whatifs)
    except Refused as refused:
        names = {one.name for whatifs in calls for one in whatifs}
        return "refused" if refused.name in names and refused.why else f"refused without a name: {refused}"
    found: list[object] = [[one.name for one in graph.applied]]
    for steps in graph.templates:
        structure = steps.structure
        found += [structure.ids.tolist(), structure.tasks, structure.thread.tolist(), structure.action.tolist()]
        found.append(sorted(zip(structure.edges.source.tolist(), structure.edges.target.tolist(), strict=True)))
        found += [of.tobytes() for of in (steps.work, steps.transfer, steps.wire, steps.size)]
        found += [seen.tobytes() for seen in vars(steps.measured).values()]
    return [*found, replay(graph).durations.tolist()]


def test_every_what_if_there_is_is_drawn() -> None:
    def below(kind: type[WhatIf]) -> set[type[WhatIf]]:
        return {kind, *(one for sub in kind.__subclasses__() for one in below(sub))}

    assert all_rules()  # what-ifs of theirs are there too
    assert {type(make()) for make in WHAT_IFS} == below(WhatIf) - {WhatIf}
    done = [[outcome(graph, [make()]) for make in WHAT_IFS] for graph in (data_parallel(), pipeline(), on_devices())]
    assert [sum(one != "refused" for one in of_graph) for of_graph in done] == [38, 40, 35]


@pytest.mark.parametrize("make_graph", [data_parallel, pipeline, on_devices])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_two_what_ifs_give_the_same_in_either_order_or_are_refused(
    make_graph: Callable[[], StepGraph], data: st.DataObject
) -> None:
    graph = make_graph()
    one, other = (data.draw(st.sampled_from(WHAT_IFS))() for _ in range(2))
    together = outcome(graph, [one, other])
    assert together == outcome(graph, [other, one])
    if "refused" not in (outcome(graph, [one]), outcome(graph, [other])):  # either is possible by itself
        assert together == outcome(graph, [one], [other]) == outcome(graph, [other], [one])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_three_too_and_what_no_one_changes_stays(data: st.DataObject) -> None:
    graph = data_parallel()
    chosen = [make() for make in data.draw(st.lists(st.sampled_from(WHAT_IFS), min_size=3, max_size=3, unique=True))]
    found = [outcome(graph, order) for order in permutations(chosen)]
    if isinstance(found[0], str):
        assert all(isinstance(one, str) for one in found)
        return
    assert all(one == found[0] for one in found)
    changed, (before,) = apply(graph, chosen), graph.templates
    (after,) = changed.templates
    assert changed.origin is graph
    assert len(set(after.structure.ids.tolist())) == len(after.structure.ids)
    # What is there under its number is what it was: of the same rank, of the same kind, measured at the same time.
    was = {number: place for place, number in enumerate(before.structure.ids.tolist())}
    segments, count = after.structure.segments, before.structure.segments
    for place, number in enumerate(after.structure.ids.tolist()):
        if number not in was:
            continue
        if place < segments:
            assert after.structure.thread[place] == before.structure.thread[was[number]]
            assert after.began[place].tolist() == before.began[was[number]].tolist()
        else:
            assert after.structure.tasks[place - segments].kind == before.structure.tasks[was[number] - count].kind


def test_what_goes_of_measured_work_goes_of_it_in_other_buckets_too() -> None:
    """20 ms of backward, 16 bytes at 1 ms each, in four buckets: 35 ms. Without 8 ms of the work: the bytes take
    longer than what is left of the backward."""
    graph = graph_of(steps_of(["10 B 20 I0 W0 1"] * RANKS, [16.0], sizes=[16.0], steps=STEPS))
    four = Rebucket((4, 4, 4, 4), Link(0.0, 1.0, True))
    assert replay(apply(graph, [four])).durations == pytest.approx([35.0] * STEPS)
    removed = np.full((RANKS, STEPS), 31 * 0.4)  # 40 % of 10 + 20 + 1
    slimmer = LessWork("a fault", Change({"compute": removed}), PEERS)
    for order in ([four, slimmer], [slimmer, four]):
        changed = apply(apply(graph, order[:1]), order[1:])
        (steps,) = changed.templates
        assert steps.work.sum(axis=(0, 2)) == pytest.approx([RANKS * 31 * 0.6] * STEPS)
        assert steps.structure.tasks == (Task("0", gradient=True, linked=True),) * 4
        # 6 of forward, 3 until the first bucket is ready, 16 for the bytes, 0.6.
        assert replay(changed).durations == pytest.approx([6 + 3 + 16 + 0.6] * STEPS)


def test_two_divisions_of_the_same_gradients_are_refused_by_name() -> None:
    once = apply(data_parallel(), [Rebucket((112,), LINK)])
    with pytest.raises(Refused, match=r"gradients in 2 buckets: it does not go together with gradients in 1 buckets"):
        apply(once, [Rebucket((56, 56), LINK)])
    with pytest.raises(Refused, match=r"without pause\.gc: this is applied already"):
        apply(apply(once, [WHAT_IFS[0]()]), [WHAT_IFS[0]()])


def test_buckets_of_each_process_group_by_themselves() -> None:
    """Ranks 0 and 1 reduce in group a, ranks 2 and 3 in group b: other buckets of a leave b as it is."""
    a, b = Task("a", "all_reduce gradient", gradient=True), Task("b", "all_reduce gradient", gradient=True)
    steps = steps_of(["B 20 I0 W0 1"] * 2 + ["B 30 I1 W1 1"] * 2, [16.0, 8.0], [a, b], sizes=[16.0, 8.0])
    graph = graph_of(steps)
    link = Link(0.0, 1.0, True)
    assert replay(graph).end[:, 0].tolist() == [37.0, 37.0, 39.0, 39.0]
    first = apply(graph, [Rebucket((4,) * 4, link, group="a")])
    assert replay(first).end[:, 0].tolist() == [25.0, 25.0, 39.0, 39.0]
    both = apply(first, [Rebucket((4, 4), link, group="b")])
    assert replay(both).end[:, 0].tolist() == [25.0, 25.0, 35.0, 35.0]
    with pytest.raises(Refused, match="gradients are reduced by 2 process groups"):
        apply(graph, [Rebucket((4,) * 4, link)])


def test_buckets_of_each_backward_by_themselves() -> None:
    """A critic's 16 bytes and then a generator's 8: each in pieces of 4, 4 ms after its backward is over."""
    gradients = Task("0", "all_reduce gradient", gradient=True)
    graph = graph_of(steps_of(["B 20 I0 W0 1 B 10 I1 W1 1"] * 2, [16.0, 8.0], [gradients] * 2, sizes=[16.0, 8.0]))
    assert list(reduced_in_backwards(graph.templates[0], "0").items()) == [(1, [0]), (2, [1])]
    link = Link(0.0, 1.0, True)
    critic, generator = (
        Rebucket((4,) * 4, link, group="0", backward=1), Rebucket((4, 4), link, group="0", backward=2)
    )  # fmt: skip
    assert replay(graph).durations == pytest.approx([56.0])  # 20 + 16 + 1, 10 + 8 + 1
    assert replay(apply(graph, [critic])).durations == pytest.approx([44.0])
    for order in ([critic, generator], [generator, critic]):
        assert replay(apply(graph, order)).durations == pytest.approx([40.0])
    with pytest.raises(Refused, match="no gradients are reduced in these steps"):
        apply(graph, [replace(critic, backward=3)])
    with pytest.raises(Refused, match="it does not go together with gradients of group 0 in backward 1"):
        apply(graph, [critic, replace(generator, backward=1)])


def test_another_schedule_of_the_same_actions() -> None:
    plans = [schedule.make_plan(name, 3, 6) for name in ("gpipe", "1f1b")]
    taken = {"F": [1.0, 2.5, 1.2], "B": [2.0, 4.0, 3.0]}
    graphs = [schedule_graph(plan, lambda action: taken[action.op][action.stage]) for plan in plans]
    changed = apply(graphs[0], [Reschedule(plans[1])])
    assert makespan(changed) == pytest.approx(makespan(graphs[1]))
    with pytest.raises(Refused, match="schedule zero-bubble: it does not run the actions that gpipe runs"):
        apply(graphs[0], [Reschedule(schedule.make_plan("zero-bubble", 3, 6))])
    with pytest.raises(Refused, match="which action of which schedule these steps consist of is not known"):
        apply(data_parallel(), [Reschedule(plans[1])])


# --- schedules ----------------------------------------------------------------------------------


def cost(forward: float, backward: float, weight: float, splits: bool) -> dict[str, float]:
    return {"F": forward, "B": backward if splits else backward + weight, "W": weight}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16), (3, 12)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (0.7, 1.1, 0.7)])
def test_pipelines_take_what_the_papers_say(
    name: str, ranks: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    forward, backward, weight = times
    virtual = 2 if name == "interleaved" and microbatches % ranks == 0 else 1
    plan = schedule.make_plan(name, ranks, microbatches, virtual)
    of = cost(*times, plan.splits)
    graph = schedule_graph(plan, lambda action: np.array([1.0, 2.0]) * of[action.op], steps=2)
    idle = closed_form.bubble_time(name, ranks, microbatches, forward, backward, weight, virtual)
    step = idle + virtual * microbatches * (forward + backward + weight)
    assert makespan(graph) == pytest.approx([step, 2 * step], rel=1e-9)
    assert makespan(graph)[0] == pytest.approx(schedule.simulate(plan, lambda action: of[action.op]).makespan, rel=1e-9)


def test_gpipe_with_stages_that_differ() -> None:
    forward, backward = [1.0, 2.5, 1.2], [2.0, 4.0, 3.0]
    plan = schedule.make_plan("gpipe", 3, 6)
    taken = {"F": forward, "B": backward}
    graph = schedule_graph(plan, lambda action: taken[action.op][action.stage])
    assert makespan(graph)[0] == pytest.approx(closed_form.gpipe_makespan(forward, backward, 6), rel=1e-9)


def test_transfers_of_a_pipeline_hold_nobody_up() -> None:
    """Two stages, one micro-batch: F, lag, F, B, lag, B."""
    graph = schedule_graph(schedule.make_plan("1f1b", 2, 1), lambda action: 3.0, lag=0.5)
    assert makespan(graph).tolist() == [13.0]
