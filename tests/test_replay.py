"""The step graph and its replay, on graphs written by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import COMPUTE, graph_of, steps_of

from dsprof.analyzer.finding import Gain
from dsprof.analyzer.graph import longest_path
from dsprof.analyzer.graph.evaluation_order import Cyclic
from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.replay import replay, replay_all
from dsprof.analyzer.graph.step_graph import PARTS, CrossStepEdges, StepGraph, Task
from dsprof.analyzer.graph.validate import HeldOut, check, contradicted
from dsprof.analyzer.price.attribution import attribute
from dsprof.analyzer.price.calibration import ModelError, with_model_error
from dsprof.analyzer.whatif import Refused, apply
from dsprof.analyzer.whatif.merge import Merge
from dsprof.analyzer.whatif.rebucket import Rebucket
from dsprof.analyzer.whatif.select import Communications
from dsprof.analyzer.whatif.work import Change, LessWork, ScaleWork

FREE = Task("0", workers=None)
ONE_AT_A_TIME = Task("0", workers=1)


def step_ms(graph: StepGraph) -> list[float]:
    return [round(float(ms), 9) for ms in replay(graph).durations]


def test_a_collective_begins_when_its_last_rank_is_there() -> None:
    graph = graph_of(steps_of(["5 I0 3 W0 2", "9 I0 1 W0 2"], [4]))
    assert replay(graph).end[:, 0].tolist() == [15, 15]  # 9 + 4 + 2


def test_a_wait_for_what_has_ended_costs_nothing() -> None:
    assert step_ms(graph_of(steps_of(["5 I0 30 W0 2", "9 I0 30 W0 2"], [4]))) == [39.0]  # mean of 37 and 41


def test_two_workers_serve_a_lane_in_order() -> None:
    """Ten, two and five ms, issued at once: the third begins when the second has ended."""
    tasks = [Task("0")] * 3
    assert step_ms(graph_of(steps_of(["I0 I1 I2 W0,1,2"], [10, 2, 5], tasks))) == [10.0]
    assert step_ms(graph_of(steps_of(["I0 I1 I2 W0,1,2"], [10, 2, 9], tasks))) == [11.0]
    one = [ONE_AT_A_TIME] * 3
    assert step_ms(graph_of(steps_of(["I0 I1 I2 W0,1,2"], [10, 2, 9], one))) == [21.0]
    free = [FREE] * 3
    assert step_ms(graph_of(steps_of(["I0 I1 I2 W0,1,2"], [10, 2, 9], free))) == [10.0]


def test_two_workers_are_served_as_a_simulation_does() -> None:
    luck = random.Random(0)
    for _ in range(200):
        transfers = [luck.choice([1.0, 2.0, 5.0, 50.0, 100.0]) for _ in range(luck.randint(1, 12))]
        program = " ".join(f"I{c}" for c in range(len(transfers))) + " W" + ",".join(map(str, range(len(transfers))))
        free = [0.0, 0.0]
        for ms in transfers:
            free[free.index(min(free))] += ms
        assert step_ms(graph_of(steps_of([program], transfers))) == [pytest.approx(max(free))]


def test_linked_tasks_share_the_link_after_their_latency() -> None:
    """Latencies of 1 ms overlap, the bytes of the two do not: 1 + 5 + 5."""
    linked = [Task("0", linked=True)] * 2
    assert step_ms(graph_of(steps_of(["I0 I1 W0,1"], [1, 1], linked, wires=[5, 5]))) == [11.0]


def test_operations_that_wait_for_one_another_are_refused() -> None:
    with pytest.raises(Cyclic):
        replay(graph_of(steps_of(["W0 1 I1", "W1 1 I0"], [1, 1], [FREE, FREE])))


def test_steps_follow_one_another() -> None:
    """Rank 1 is 4 ms slower; only the third step ends with a collective. Until then rank 0 runs ahead."""
    alone = steps_of(["6", "10"], steps=3)
    graph = graph_of(alone)
    assert replay(graph).end.tolist() == [[6, 12, 18], [10, 20, 30]]
    assert replay(graph).start.tolist() == [[0, 6, 12], [0, 10, 20]]


def test_what_delays_a_step_is_made_good_in_the_next_that_waits() -> None:
    """Each rank is late by 4 ms in every other step, in turn; they meet once in two steps, so nobody waits."""
    steps = steps_of(["6", "6"], steps=4)
    work = steps.work.copy()
    work[0, ::2, COMPUTE] += 4
    work[1, 1::2, COMPUTE] += 4
    assert replay(graph_of(steps.with_costs(work=work))).end[:, -1].tolist() == [32, 32]


def test_a_task_of_the_step_before_is_waited_for_across_steps() -> None:
    """Gathered in one step (12 ms), used in the next, 5 ms into it: 2 + 12 - 6 - 5 = 3 ms of each step are waiting."""
    steps = steps_of(["5 O0 1 I0 0"], [9], [FREE], steps=5, outside=1)
    count = len(steps.numbers)
    cross_step_edges = CrossStepEdges(
        source_template=np.zeros(count - 1, np.int64),
        source=np.full(count - 1, steps.structure.segments),  # the task
        source_column=np.arange(count - 1),
        target_template=np.zeros(count - 1, np.int64),
        target=np.zeros(count - 1, np.int64),
        target_column=np.arange(1, count),
    )
    graph = graph_of(steps, cross_step_edges)
    # The first waits for nothing; the others until 9 ms after the end of the one before, then 1 ms.
    assert step_ms(graph) == [6.0, 10.0, 10.0, 10.0, 10.0]
    faster = graph.with_templates((steps.with_costs(transfer=steps.transfer - 2),))
    assert step_ms(faster) == [6.0, 8.0, 8.0, 8.0, 8.0]


def test_a_rank_may_issue_in_the_step_before() -> None:
    """Rank 1 sends at the end of a step what rank 0 receives in the next."""
    steps = steps_of(["1 I0 W0 1", "10"], [2], [FREE], steps=3, outside=1, arrivals=[(0, 0)])
    cross_step_edges = CrossStepEdges(
        np.zeros(2, np.int64), np.full(2, 3), np.arange(2), np.zeros(2, np.int64), np.zeros(2, np.int64),
        np.arange(1, 3),
    )  # fmt: skip
    graph = graph_of(steps, cross_step_edges)
    assert steps.structure.segments == 4  # of rank 0: to the issue, to the wait, to the end; of rank 1 one
    # Step 0: 1 + 2 + 1. From then on rank 0 waits for the end of rank 1's step before: 10 + 2 + 1 = 13, 23.
    assert replay(graph).end.tolist() == [[4, 13, 23], [10, 20, 30]]


def reference_ms(graph: StepGraph) -> np.ndarray:
    """The end of each thread's step, [T, N], operation by operation: a slow, plain reference of one shape."""
    (steps,) = graph.templates
    structure = steps.structure
    segments = structure.segments
    start = np.zeros(structure.threads)
    found = []
    free: dict[str, list[float]] = {}
    for column in range(len(steps.numbers)):
        end: dict[int, float] = {}
        waits: dict[int, list[int]] = {}
        for a, b in zip(structure.edges.source.tolist(), structure.edges.target.tolist(), strict=True):
            waits.setdefault(b, []).append(a)
        lanes: dict[str, list[int]] = {}
        for c, task in enumerate(structure.tasks):
            if task.workers is not None:
                lanes.setdefault(task.lane, []).append(c)
        begun: dict[str, int] = {}
        while len(end) < segments + len(structure.tasks):
            for w in range(segments):
                before = w - 1 if w and structure.thread[w] == structure.thread[w - 1] else None
                needed = [*waits.get(w, []), *([] if before is None else [before])]
                if w not in end and all(n in end for n in needed):
                    begin = max((end[n] for n in needed), default=-np.inf)
                    begin = max(begin, start[structure.thread[w]]) if before is None else begin
                    end[w] = begin + steps.work[w, column].sum()
            for c, task in enumerate(structure.tasks):
                o = segments + c
                if o in end or not all(n in end for n in waits.get(o, [])):
                    continue
                arrived = max(end[n] for n in waits[o])
                if task.workers is None:
                    end[o] = arrived + steps.transfer[c, column]
                    continue
                if lanes[task.lane][begun.get(task.lane, 0)] != c:
                    continue
                begun[task.lane] = begun.get(task.lane, 0) + 1
                workers = free.setdefault(task.lane, [-np.inf] * task.workers)
                first = workers.index(min(workers))
                end[o] = workers[first] = max(arrived, workers[first]) + steps.transfer[c, column]
        start = np.array([end[int(w)] for w in structure.plan.last])
        found.append(start)
    return np.stack(found, axis=1)


@pytest.mark.parametrize("seed", range(25))
def test_replay_is_what_a_plain_simulation_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random jobs of several groups and messages, over steps that follow one another; by levels and by the loop."""
    luck = random.Random(seed)
    threads, groups = luck.randint(1, 4), luck.randint(1, 3)
    count = luck.randint(1, 12)
    lanes = [luck.randrange(groups) for _ in range(count)]
    workers = [luck.choice([1, 2, None]) for _ in range(groups)]
    tasks = [Task(str(lane), workers=workers[lane]) for lane in lanes]
    programs = []
    for _ in range(threads):
        points: list[str] = []
        open_tasks: list[int] = []
        for c in range(count):
            points += [str(luck.randint(0, 9)), f"I{c}"]
            open_tasks.append(c)
            while open_tasks and luck.random() < 0.5:
                points += [str(luck.randint(0, 3)), f"W{open_tasks.pop(luck.randrange(len(open_tasks)))}"]
        if open_tasks and luck.random() < 0.7:
            points.append("W" + ",".join(map(str, open_tasks)))
        programs.append(" ".join([*points, str(luck.randint(0, 5))]))
    steps = steps_of(programs, [luck.randint(1, 20) for _ in range(count)], tasks, steps=luck.randint(1, 6))
    noise = np.random.default_rng(seed)
    steps = steps.with_costs(
        work=steps.work * noise.uniform(0.5, 1.5, (*steps.work.shape[:2], 1)),
        transfer=steps.transfer * noise.uniform(0.5, 1.5, steps.transfer.shape),
    )
    graph = graph_of(steps)
    expected = reference_ms(graph)
    assert replay(graph).end == pytest.approx(expected, abs=1e-6)
    monkeypatch.setattr(longest_path, "NARROW", 0 if seed % 2 else 1e9)
    assert replay(graph).end == pytest.approx(expected, abs=1e-6)


def test_graphs_that_differ_in_costs_are_replayed_together() -> None:
    graph = graph_of(steps_of(["5 I0 3 W0 2", "9 I0 1 W0 2"], [4], steps=3))
    variants = [apply(graph, [ScaleWork({"compute": factor})]) for factor in (1.0, 2.0, 0.5)]
    assert [float(of.durations.mean()) for of in replay_all(variants)] == [15.0, 26.0, 9.5]


# --- what-ifs -----------------------------------------------------------------------------------


def removal(thread: int, ms: float, steps: int, threads: int = 2, beyond: bool = False) -> Change:
    removed = np.zeros((threads, steps))
    removed[thread] = ms
    return Change({"compute": removed}, where_beyond_peers=beyond)


def test_what_mending_a_straggler_gains() -> None:
    graph = graph_of(steps_of(["5 I0 3 W0 2", "9 I0 1 W0 2"], [4], steps=4))
    peer_groups = [np.array([True, True])]
    changed = apply(graph, [LessWork("the slow rank", removal(1, 4, 4, beyond=True), peer_groups)])
    # Rank 1's four ms go from before the issue, where it is slower: 5 + 4 + 2.
    assert step_ms(changed) == [11.0] * 4


def test_what_a_loader_that_two_ranks_share_costs() -> None:
    """Rank 0 loads for both, 8 ms, and broadcasts in 1; then both compute, 20 and 14 ms, and reduce in 2.

    With workers that leave 1 ms of loading, steps are 7 ms shorter on both ranks, though rank 1 loads nothing; with a
    straggler mended instead (rank 0's 6 ms more), 6 ms shorter; with both, 13.
    """
    batch, reduce = Task("0", "broadcast batch", workers=None), Task("1", "all_reduce gradient")
    steps = steps_of(["8 I0 W0 20 I1 W1", "I0 W0 14 I1 W1"], [1, 2], [batch, reduce], steps=5)
    work = steps.work.copy()
    work[0, :, PARTS.index("data")], work[0, :, COMPUTE] = work[0, :, COMPUTE], 0
    graph = graph_of(steps.with_costs(work=work))
    assert step_ms(graph) == [31.0] * 5
    loading, compute = np.zeros((2, 5)), np.zeros((2, 5))
    loading[0], compute[0] = 7.0, 6.0
    peer_groups = [np.array([True, True])]
    workers = LessWork("loading", Change({"data": loading}), peer_groups)
    assert step_ms(apply(graph, [workers])) == [24.0] * 5
    straggler = LessWork("the slow rank", Change({"compute": compute}, where_beyond_peers=True), peer_groups)
    assert step_ms(apply(graph, [straggler])) == [25.0] * 5
    assert step_ms(apply(graph, [straggler, workers])) == [18.0] * 5


def test_what_is_shared_out_sums_to_the_whole() -> None:
    """Both ranks are slow: mending one alone gains nothing, both 4 ms."""
    graph = graph_of(steps_of(["9 I0 W0", "9 I0 W0"], [4], steps=4))
    peer_groups = [np.array([True, True])]
    faults = {f"rank {r}": LessWork(f"rank {r}", removal(r, 4, 4), peer_groups) for r in (0, 1)}
    found = attribute(graph, faults)
    assert {name: ms.tolist() for name, ms in found.alone.items()} == {"rank 0": [0] * 4, "rank 1": [0] * 4}
    assert {name: ms.tolist() for name, ms in found.shares.items()} == {"rank 0": [2] * 4, "rank 1": [2] * 4}
    assert (found.before - found.left).tolist() == [4] * 4
    assert found.error == {"rank 0": 0.0, "rank 1": 0.0}


def test_of_many_faults_orders_are_sampled_and_still_sum() -> None:
    threads = 9
    graph = graph_of(steps_of(["9 I0 W0 2"] * threads, [4], steps=3))
    peer_groups = [np.ones(threads, bool)]
    faults = {
        f"rank {r}": LessWork(f"rank {r}", removal(r, 1.0 + 0.1 * r, 3, threads), peer_groups) for r in range(threads)
    }
    found = attribute(graph, faults)
    whole = found.before - found.left
    assert sum(found.shares.values()) == pytest.approx(whole)
    # Only together do they gain: each is the last in a ninth of the orders.
    assert max(float(ms.mean()) for ms in found.shares.values()) < 0.6 * float(whole.mean())
    assert all(0 < error < 0.5 for error in found.error.values())


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ("B 1 I0 W0 1 I1 W0,1", "a rank waits for collectives before its last gradients are issued"),  # ZeRO 1 and 2
        ("B 1 I0 B 1 I1 W0,1", "gradients are reduced in several backwards of a step"),
        ("B 1 I0 I2 1 I1 W0,1", "other collectives are issued among those of the gradients"),
        ("I2 B W2 1 I0 I1 W0,1", "a rank waits for collectives before its last gradients are issued"),
        ("1 I0 1 I1 W0,1", "gradients are reduced where no backward was seen to begin before"),
        ("B 1 I0 1 I1 W0,1", None),
    ],
)
def test_why_gradients_cannot_be_cut_anew(points: str, reason: str | None) -> None:
    tasks = [Task("0", gradient=True), Task("0", gradient=True), Task("0")]
    used = [task for i, task in enumerate(tasks) if f"I{i}" in points]
    steps = steps_of([points], [1.0] * len(used), used)
    link = Link(1.0, 0.0, True)
    if reason is None:
        assert step_ms(apply(graph_of(steps), [Rebucket((2,), link)])) == [3.0]  # 2 of backward, then 1
        return
    with pytest.raises(Refused, match=f"gradients in 1 buckets: {reason}"):
        apply(graph_of(steps), [Rebucket((2,), link)])


def test_smaller_buckets_overlap_with_the_backward() -> None:
    """20 ms of backward, 16 bytes at 1 ms each: in one piece 36 ms; in four, the last four bytes come after it."""
    steps = steps_of(["10 B 20 I0 W0 1", "10 B 20 I0 W0 1"], [16.0], sizes=[16.0])
    link = Link(0.0, 1.0, True)
    assert step_ms(graph_of(steps)) == [47.0]
    changed = apply(graph_of(steps), [Rebucket((4, 4, 4, 4), link)])
    assert step_ms(changed) == [35.0]  # 10 + 20 + 4 + 1


def test_neighbouring_gathers_in_one_pay_the_latency_once() -> None:
    """Two gathers of 3 ms latency and 1 ms of bytes each, one after the other: 8 ms; in one 3 + 2."""
    gather = Task("0", "all_gather parameter", workers=1)
    steps = steps_of(["1 I0 W0 1 I1 W1 1"] * 2, [4.0, 4.0], [gather] * 2, sizes=[1.0, 1.0])
    assert step_ms(graph_of(steps)) == [11.0]
    link = Link(3.0, 1.0, True)
    gathers = Communications(purposes=("parameter",))
    assert step_ms(apply(graph_of(steps), [Merge(gathers, link, together=1)])) == [11.0]
    assert step_ms(apply(graph_of(steps), [Merge(gathers, link, together=2)])) == [8.0]


# --- trust --------------------------------------------------------------------------------------


def test_an_edge_that_measured_times_contradict_is_counted() -> None:
    steps = steps_of(["5 I0 3 W0 2"], [4], steps=2)
    began = np.array([[0.0, 0.0], [5.0, 5.0], [9.0, 8.0]])  # in the second step it went on before its task had ended
    graph = graph_of(replace(steps, measured=replace(steps.measured, began=began, ended=np.array([[9.0, 9.0]]))))
    assert contradicted(graph) == 0.5
    assert contradicted(graph, clock_error_ms=1.5) == 0.0


def measured_as_replayed(graph: StepGraph) -> StepGraph:
    found = replay(graph)
    return replace(graph, duration=found.end - found.start)


def test_whole_steps_predict_others_where_means_of_costs_do_not() -> None:
    """Rank 0 or rank 1 is slow by 8 ms, in turn: each step takes 19 ms, though the mean costs of both would take 15."""
    steps = steps_of(["5 I0 W0", "5 I0 W0"], [6], steps=16)
    work = steps.work.copy()
    work[0, ::2, COMPUTE] += 8
    work[3, 1::2, COMPUTE] += 8
    graph = measured_as_replayed(graph_of(steps.with_costs(work=work)))
    found = check(graph)
    assert found.error < 1e-9
    assert found.held_out == HeldOut(pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))
    assert found.refusal is None


def test_halves_that_differ_widen_what_is_told_and_very_different_ones_refuse_it() -> None:
    steps = steps_of(["5 I0 3 W0 2", "9 I0 1 W0 2"], [4], steps=16)
    few = np.where(np.arange(16) % 8 == 3, 60.0, 1.0)[None, :, None]  # two steps of sixteen take most of the time
    found = check(measured_as_replayed(graph_of(steps.with_costs(work=steps.work * few))))
    assert found.held_out is not None
    assert found.held_out.missed < 0.05
    assert found.held_out.differs > 0.25
    assert found.refusal is not None
    assert "one half of the steps misses what the other half takes by" in found.refusal
    assert found.refusal.endswith("profile many more steps, on a machine that has nothing else to do"), (
        "not 10,000 times"
    )


def test_what_held_out_steps_miss_is_part_of_every_interval() -> None:
    gain = Gain(10.0, 10.0, 9.0, 11.0)
    none = ModelError(of_gain=0.0, of_step=0.0, busy=0.0)
    assert with_model_error(gain, none, 100.0, 0.0, held_out=HeldOut(0.0, 0.0)) == gain
    wider = with_model_error(gain, none, 100.0, 0.0, held_out=HeldOut(missed=0.03, differs=0.4))
    half = float(np.hypot(1.0, np.hypot(3.0, 4.0)))
    assert (wider.low, wider.high) == (pytest.approx(10 - half), pytest.approx(10 + half))
