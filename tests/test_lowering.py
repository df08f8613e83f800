"""Lowering a pipeline's plan: against closed forms, against the simulation, and against what real steps took."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import closed_form
import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import PARTS, StepGraph, Task
from dsprof.analyzer.stage_costs import WeightShare, divided_alike, stage_ms, weight_share
from dsprof.analyzer.whatif import Refused, apply
from dsprof.analyzer.whatif.lowering import Lower, Stages
from dsprof.analyzer.whatif.lowering.messages import by_table, overlapped
from dsprof.analyzer.whatif.schedule import makespan, schedule_graph
from dsprof.analyzer.whatif.work import ScaleWork
from dsprof.engine import schedule
from dsprof.engine.partition import balance
from dsprof.engine.schedule import Action

F, B = 3.0, 5.0


def ran(name: str = "1f1b", ranks: int = 3, microbatches: int = 4, virtual: int = 1, lag: float = 0.0) -> StepGraph:
    """Steps of a pipeline whose stages take the same."""
    plan = schedule.make_plan(name, ranks, microbatches, virtual)
    return schedule_graph(plan, lambda action: {"F": F, "B": B, "W": B}[action.op], lag, steps=2)


@pytest.mark.parametrize("was", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("name", "microbatches", "virtual"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("1f1b", 12, 1), ("gpipe", 2, 1), ("1f1b", 1, 1), ("interleaved", 6, 2),
     ("interleaved", 9, 4)],
)  # fmt: skip
def test_other_plans_take_what_is_published_of_them(was: str, name: str, microbatches: int, virtual: int) -> None:
    plan = schedule.make_plan(name, 3, microbatches, virtual)
    parts = Stages({(stage, op): 1 / virtual for stage in range(plan.stages) for op in "FB"})
    lowered = apply(ran(was), [Lower(plan, parts)])
    bubble = closed_form.bubble_time(name, 3, microbatches, F / virtual, B / virtual, 0.0, virtual)
    assert makespan(lowered) == pytest.approx([microbatches * (F + B) + bubble] * 2, rel=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.6])
@pytest.mark.parametrize("microbatches", [3, 4, 7])
def test_a_backward_that_is_divided(share: float, microbatches: int) -> None:
    plan = schedule.make_plan("zero-bubble", 3, microbatches)
    lowered = apply(ran(), [Lower(plan, Stages(weight_share=share))])
    bubble = closed_form.bubble_time("zero-bubble", 3, microbatches, F, (1 - share) * B, share * B)
    assert makespan(lowered) == pytest.approx([microbatches * (F + B) + bubble] * 2, rel=1e-9)


def test_weight_gradients_take_what_they_took_where_they_were_put_off() -> None:
    """Stage 0 makes none; of the others they are 1 of 5 ms. With no such backward they may be nothing, or much."""
    plan = schedule.make_plan("zero-bubble", 3, 4)
    took = schedule_graph(plan, lambda action: {"F": F, "B": 4.0, "W": 1.0 if action.stage else 0.0}[action.op])
    found = weight_share(took)
    assert (found.typical, found.least, found.most) == pytest.approx((2 / 14, 0.0, 1 / 5))
    assert found.says == "weight gradients take 14 % of a backward, as where it ran in two parts"
    some = schedule_graph(schedule.dual_pipe_v(2, 6), lambda action: {"F": F, "B": 3.0, "W": 1.0}[action.op])
    assert weight_share(some).typical == pytest.approx(1 / 4)
    assert weight_share(ran()) == WeightShare(0.5, 0.0, 0.6, measured=False)


def test_a_backward_that_was_divided_is_whole_again() -> None:
    lowered = apply(ran("zero-bubble"), [Lower(schedule.make_plan("1f1b", 3, 4))])
    assert makespan(lowered) == pytest.approx([4 * (F + 2 * B) + 2 * (F + 2 * B)] * 2, rel=1e-9)
    merged = apply(ran("interleaved", 3, 6, 2), [Lower(schedule.make_plan("1f1b", 3, 6), Stages({
        (stage, op): 2.0 for stage in range(3) for op in "FB"}))])  # fmt: skip
    assert makespan(merged) == pytest.approx([8 * 2 * (F + B)] * 2, rel=1e-9)


@pytest.mark.parametrize("lag", [0.0, 0.7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_stages_that_differ_and_transfers(name: str, lag: float) -> None:
    """What each stage and micro-batch takes by itself, in whichever order."""
    draw = Random(3)
    taken = {Action(op, s, m): draw.uniform(1, 4) for op in "FBW" for s in range(4) for m in range(5)}
    wanted = schedule.make_plan(name, 4, 5)
    was = schedule.make_plan("zero-bubble" if wanted.splits else "gpipe", 4, 5)
    lowered = apply(schedule_graph(was, taken.__getitem__, lag), [Lower(wanted)])
    assert makespan(lowered)[0] == pytest.approx(schedule.simulate(wanted, taken.__getitem__, lag).makespan, rel=1e-9)


def test_the_plan_that_ran_is_what_there_was() -> None:
    for graph in (ran(lag=0.3), ran("interleaved", 3, 6, 2), ran("zero-bubble")):
        lowered = apply(graph, [Lower()])
        (was,), (now,) = graph.templates, lowered.templates
        assert sorted(now.structure.ids.tolist()) == was.structure.ids.tolist()
        assert now.work.tolist() == was.work.tolist()
        assert replay(lowered).durations.tolist() == replay(graph).durations.tolist()


def test_with_what_else_is_changed() -> None:
    """Computation that takes half as long, in another schedule."""
    plan = schedule.make_plan("1f1b", 3, 9)
    for order in ([ScaleWork({"compute": 0.5}), Lower(plan)], [Lower(plan), ScaleWork({"compute": 0.5})]):
        assert makespan(apply(ran(), order)) == pytest.approx([11 * (F + B) / 2] * 2, rel=1e-9)


# --- DualPipeV, whose first rank has the first and the last stage


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dual_pipe_v_is_what_torch_runs(ranks: int, more: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    names = {"FORWARD": "F", "BACKWARD_INPUT": "B", "FULL_BACKWARD": "B", "BACKWARD_WEIGHT": "W"}
    plan = schedule.dual_pipe_v(ranks, 2 * ranks + more)
    torchs = object.__new__(ScheduleDualPipeV)
    torchs.pp_group_size, torchs._n_microbatches = ranks, 2 * ranks + more
    for rank, actions in enumerate(plan.actions):
        wanted = [
            Action(names[one.computation_type.name], one.stage_index, one.microbatch_index)
            for action in torchs._calculate_single_rank_operations(rank)
            for one in action.sub_actions or (action,)
        ]
        assert list(actions) == wanted
    assert plan.places_its_actions


@pytest.mark.parametrize(("ranks", "more"), [(1, 3), (2, 0), (2, 1), (3, 4), (4, 1)])
def test_messages_of_dual_pipe_v_are_asked_for_and_sent_as_torch_does(ranks: int, more: int) -> None:
    """By torch's own table: `RECV_F` stands where a receive is posted, `SEND_F` where a result is sent."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _add_send_recv

    plan = schedule.dual_pipe_v(ranks, 2 * ranks + more)
    torchs = object.__new__(ScheduleDualPipeV)
    torchs.pp_group_size, torchs._n_microbatches = ranks, 2 * ranks + more
    computed = {rank: torchs._calculate_single_rank_operations(rank) for rank in range(ranks)}
    table = _add_send_recv(computed, plan.owner, plan.stages)
    asked, sent = {}, {}
    for rank, actions in table.items():
        done = 0
        for action in actions:
            kind, _, op = action.computation_type.name.partition("_")
            if kind == "RECV":
                asked[Action(op, action.stage_index, action.microbatch_index)] = done
            elif kind == "SEND":
                sent[Action(op, action.stage_index, action.microbatch_index)] = plan.actions[rank][done - 1]
            else:
                done += len(action.sub_actions or (action,))
    assert by_table(plan) == asked
    assert {action: overlapped(plan).get(action, action) for action in sent} == sent


def test_in_plans_that_are_not_v_shaped_nothing_is_sent_late() -> None:
    assert overlapped(schedule.make_plan("interleaved", 2, 6, 2)) == {}


def test_of_dual_pipe_v_neighbours_on_one_rank_send_nothing() -> None:
    plan = schedule.dual_pipe_v(2, 4)
    assert [plan.owner(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert plan.transfers(Action("F", 1, 0)) == (Action("RECV_F", 1, 0), None)
    assert plan.transfers(Action("F", 2, 0)) == (None, Action("SEND_F", 2, 0))
    assert plan.transfers(Action("B", 3, 0)) == (None, Action("SEND_B", 3, 0))
    assert plan.transfers(Action("W", 1, 0)) == (None, None)


def test_dual_pipe_v_takes_as_many_micro_batches_as_stages() -> None:
    with pytest.raises(ValueError, match=r"3 micro-batches on 2 ranks: .* write 4 or more"):
        schedule.dual_pipe_v(2, 3)


@pytest.mark.parametrize("lag", [0.0, 0.4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 7), (3, 6), (4, 11)])
def test_dual_pipe_v_from_1f1b(ranks: int, microbatches: int, lag: float) -> None:
    """As long as its simulation, in which W is half of what is divided and all of the rest is in B."""
    plan = schedule.dual_pipe_v(ranks, microbatches)

    def cost(action: Action) -> float:
        if action.op == "F":
            return F / 2
        return B / 4 if action[1:] in plan.split else B / 2

    parts = Stages({(stage, op): 0.5 for stage in range(plan.stages) for op in "FB"}, weight_share=0.5)
    lowered = apply(ran("1f1b", ranks, microbatches, lag=lag), [Lower(plan, parts)])
    assert makespan(lowered) == pytest.approx([schedule.simulate(plan, cost, lag).makespan] * 2, rel=1e-9)


@pytest.mark.parametrize("was", ["interleaved", "dualpipe-v"])
def test_stages_that_other_ranks_hold_take_what_they_took(was: str) -> None:
    """As many stages, of which the second half changes ranks: in a V the last stage is the first rank's."""
    takes = [1.0, 2.0, 3.0, 10.0]
    in_a_v, in_turns = schedule.dual_pipe_v(2, 6), schedule.make_plan("interleaved", 2, 6, 2)
    ran_plan, plan = (in_turns, in_a_v) if was == "interleaved" else (in_a_v, in_turns)

    def cost(of: schedule.Plan, action: Action) -> float:
        """A backward takes twice as long, or as long in each of two parts."""
        whole = action.op == "B" and action[1:] not in of.split
        return takes[action.stage] * (2 if whole else 1)

    graph = schedule_graph(ran_plan, lambda action: cost(ran_plan, action), steps=2)
    (stages,) = divided_alike(ran_plan, plan, stage_ms(graph))
    lowered = apply(graph, [Lower(plan, stages)])
    assert makespan(lowered) == pytest.approx(
        [schedule.simulate(plan, lambda action: cost(plan, action), 0.0).makespan] * 2, rel=1e-9
    )


def test_dual_pipe_v_that_ran() -> None:
    plan = schedule.dual_pipe_v(3, 7)
    graph = schedule_graph(plan, lambda action: {"F": F, "B": B, "W": B / 3}[action.op], 0.2, steps=2)
    assert replay(apply(graph, [Lower()])).durations.tolist() == replay(graph).durations.tolist()
    whole = Stages({(stage, op): 2.0 for stage in range(3) for op in "FB"})
    lowered = apply(schedule_graph(plan, lambda action: F, steps=2), [Lower(schedule.make_plan("gpipe", 3, 7), whole)])
    assert makespan(lowered)[0] >= 7 * 4 * F


# --- prologues, epilogues, other tasks -------------------------------------------------------------

SEND = "send_recv pipeline"


def two_replicas() -> StepGraph:
    """Two pipelines of two stages and two micro-batches, which load 2 ms before and step 3 ms after; the replicas of
    each stage reduce gradients, 4 ms, in the last backward."""
    down = [Task(f"1 {a}>{b}", SEND, workers=None) for a, b in ((0, 1), (2, 3)) for _ in range(2)]
    up = [Task(f"1 {b}>{a}", SEND, workers=None) for a, b in ((0, 1), (2, 3)) for _ in range(2)]
    reduce = [Task(group, "all_reduce gradient", gradient=True) for group in ("dp0", "dp1")]

    def first(p: int) -> str:
        d, u = 2 * p, 4 + 2 * p
        return f"2 A 5 E 0 I{d} 0 A 5 E 0 I{d + 1} I{u} 0 W{u} 0 A 10 E 0 I{u + 1} 0 W{u + 1} 0 A 10 I8 0 E W8 3"

    def second(p: int) -> str:
        d, u = 2 * p, 4 + 2 * p
        return f"2 I{d} 0 W{d} 0 A 5 E 0 A 10 E 0 I{u} I{d + 1} 0 W{d + 1} 0 A 5 E 0 A 10 I9 0 E 0 I{u + 1} W9 3"

    acts = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)]]
    return graph_of(
        steps_of([first(0), second(0), first(1), second(1)], [0.0] * 8 + [4.0, 4.0], [*down, *up, *reduce], steps=2,
                 actions=[*acts, *acts]),
        follow=False,
    )  # fmt: skip


def test_what_lies_before_and_after_and_beside() -> None:
    """Load 2; F 5, 5; stage 1's first backward ends at 7 + 5 + 10 = 22, stage 0's at 32; stage 1's second forward ends
    at 27, its backward at 37, stage 0's last at 47; the gradients are there at 51, and 3 to step: 54."""
    graph = two_replicas()
    assert replay(graph).end[0].tolist() == [54.0, 54.0]
    same = apply(graph, [Lower()])
    assert replay(same).end.tolist() == replay(graph).end.tolist()
    # Two more micro-batches are 15 ms more each; gradients are still reduced once.
    more = apply(graph, [Lower(schedule.make_plan("1f1b", 2, 4))])
    assert replay(more).end[0].tolist() == [84.0, 84.0]
    (steps,) = more.templates
    assert sum(task.gradient for task in steps.structure.tasks) == 2
    gpipe = apply(graph, [Lower(schedule.make_plan("gpipe", 2, 4))])
    assert replay(gpipe).end[0].tolist() == [84.0, 84.0]
    # F, B and W of 5 each. Stage 1 begins at 7 and is through with two micro-batches at 37, and so is stage 0, which
    # waits from 12 to 17 for the first gradients; 4 to reduce them, 3 to step.
    split = apply(graph, [Lower(schedule.make_plan("zero-bubble", 2, 2))])
    assert replay(split).end[:, 0].tolist() == [44.0] * 4


def test_parts_of_the_first_and_last_stage_load_once() -> None:
    """Every forward of both stages waits 7 ms for its input or its targets; a second part of the model on each rank
    does not, so a rank still waits for four."""
    (steps,) = ran("1f1b", 2, 4).templates
    work = steps.work.copy()
    work[steps.structure.action == "F", :, PARTS.index("data")] = 7.0
    plan = schedule.make_plan("interleaved", 2, 4, 2)
    graph = replace(ran("1f1b", 2, 4), templates=(steps.with_costs(work=work),))
    (lowered,) = apply(graph, [Lower(plan)]).templates
    waits = [lowered.work[lowered.structure.thread == rank, 0, PARTS.index("data")].sum() for rank in range(2)]
    assert waits == [4 * 7.0] * 2


def test_more_micro_batches_than_two_load_each() -> None:
    """The first one's input was there before the schedule began, as where a loop takes a batch before it steps."""
    (steps,) = ran("1f1b", 2, 2).templates
    work = steps.work.copy()
    second = (steps.structure.action == "F") & (steps.structure.place[:, 1] == 1) & (steps.structure.place[:, 0] == 0)
    work[second, :, PARTS.index("data")] = 7.0
    graph = replace(ran("1f1b", 2, 2), templates=(steps.with_costs(work=work),))
    (lowered,) = apply(graph, [Lower(schedule.make_plan("1f1b", 2, 8))]).templates
    assert lowered.work[:, 0, PARTS.index("data")].sum() == 7 * 7.0


def test_what_is_no_plan_is_refused() -> None:
    whole = ran()
    with pytest.raises(Refused, match=r"^schedule 1f1b: the plan is of 4 ranks, and the pipeline that ran of 3$"):
        apply(whole, [Lower(schedule.make_plan("1f1b", 4, 4))])
    broken = schedule.Plan("mine", 3, 4, 1, schedule.make_plan("1f1b", 3, 4).actions[::-1])
    with pytest.raises(Refused, match=r"^schedule mine: .*is not whole"):
        apply(whole, [Lower(broken)])
    with pytest.raises(Refused, match=r"no actions of a pipeline's schedule .* were recorded in its steps"):
        apply(graph_of(steps_of(["5 I0 W0 1"] * 2, [1.0])), [Lower()])
    missing = graph_of(steps_of(["A 5 E A 5 E"] * 2, actions=[[("F", 1, 0), ("B", 1, 0)]] * 2))
    with pytest.raises(Refused, match="of the pipeline's stages these were captured: 1; the steps of all are needed"):
        apply(missing, [Lower()])
    once = graph_of(steps_of(["A 5 E A 5 E A 5 E"], actions=[[("F", 0, 0), ("F", 0, 1), ("B", 0, 0)]]))
    with pytest.raises(Refused, match="not every stage runs one forward and one backward of every micro-batch"):
        apply(once, [Lower()])
    with pytest.raises(Refused, match="both say in which order the pipeline's actions run"):
        apply(whole, [Lower(), Lower(schedule.make_plan("gpipe", 3, 4))])


# --- boundaries ------------------------------------------------------------------------------------


def test_divisions_are_as_good_as_the_best_of_all() -> None:
    """1,000 drawn chains: no division has a lighter heaviest part."""
    draw = Random(11)
    for _ in range(1000):
        layers = draw.randint(2, 9)
        parts = draw.randint(1, layers)
        costs = [draw.choice([0.0, draw.random(), float(draw.randint(1, 9))]) for _ in range(layers)]
        every = (
            max(sum(costs[a:b]) for a, b in zip((0, *inner), (*inner, layers), strict=True))
            for inner in combinations(range(1, layers), parts - 1)
        )
        bounds = balance(costs, parts)
        found = max(sum(costs[a:b]) for a, b in pairwise(bounds))
        assert found == pytest.approx(min(every), rel=1e-12, abs=1e-12)
