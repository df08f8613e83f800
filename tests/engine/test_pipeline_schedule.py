"""Pipeline schedules: literal plans, the papers' formulas, and a second, naive way to run and to simulate a plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import closed_form
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsprof.engine.config.parallel import PipelineConfig
from dsprof.engine.schedule import (
    SCHEDULES,
    Action,
    Plan,
    ScheduleError,
    check,
    make_plan,
    peak_activations,
    render,
    simulate,
    with_transfers,
)
from dsprof.engine.schedule.check import in_order

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 24)
TIME = st.floats(0.01, 100.0)
VIRTUAL = {"interleaved": (1, 2, 3, 4)}
EVERY = [(schedule, virtual) for schedule in SCHEDULES for virtual in VIRTUAL.get(schedule, (1,))]
QUICK = settings(max_examples=60, deadline=None)


def parse(text: str) -> tuple[Action, ...]:
    """Actions as they are written: `F3@1`."""
    actions = []
    for word in text.split():
        name, stage = word.split("@")
        op = name.rstrip("0123456789")
        actions.append(Action(op, int(stage), int(name[len(op) :])))
    return tuple(actions)


def plan_of(*ranks: str, microbatches: int, schedule: str = "mine", virtual_stages: int = 1) -> Plan:
    return Plan(schedule, len(ranks), microbatches, virtual_stages, tuple(map(parse, ranks)))


def written(plan: Plan, rank: int) -> str:
    return " ".join(map(str, plan.actions[rank]))


def cost_of(**times: float) -> Callable[[Action], float]:
    return lambda action: times[action.op]


# --- the plans ----------------------------------------------------------------------------------


def test_gpipe() -> None:
    assert make_plan("gpipe", 2, 3) == plan_of(
        "F0@0 F1@0 F2@0 B0@0 B1@0 B2@0", "F0@1 F1@1 F2@1 B0@1 B1@1 B2@1", microbatches=3, schedule="gpipe"
    )


def test_one_f_one_b() -> None:
    assert make_plan("1f1b", 3, 4) == plan_of(
        "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0",
        "F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1",
        "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2",
        microbatches=4,
        schedule="1f1b",
    )


def test_one_f_one_b_with_fewer_microbatches_than_stages() -> None:
    assert make_plan("1f1b", 4, 2) == plan_of(
        "F0@0 F1@0 B0@0 B1@0", "F0@1 F1@1 B0@1 B1@1", "F0@2 F1@2 B0@2 B1@2", "F0@3 B0@3 F1@3 B1@3",
        microbatches=2, schedule="1f1b",
    )  # fmt: skip


def test_interleaved() -> None:
    assert make_plan("interleaved", 2, 4, 2) == plan_of(
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0",
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1",
        microbatches=4,
        schedule="interleaved",
        virtual_stages=2,
    )


def test_interleaved_with_a_microbatch_too_few_is_the_plan_of_the_multiple_without_it() -> None:
    whole, fewer = make_plan("interleaved", 2, 4, 2), make_plan("interleaved", 2, 3, 2)
    for rank in range(2):
        assert fewer.actions[rank] == tuple(a for a in whole.actions[rank] if a.microbatch < 3)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_interleaved_with_one_stage_a_rank_is_1f1b(microbatches: int) -> None:
    assert make_plan("interleaved", 3, microbatches) == replace(
        make_plan("1f1b", 3, microbatches), schedule="interleaved"
    )


def test_zero_bubble() -> None:
    assert make_plan("zero-bubble", 3, 4) == plan_of(
        "F0@0 F1@0 F2@0 B0@0 W0@0 F3@0 B1@0 W1@0 B2@0 W2@0 B3@0 W3@0",
        "F0@1 F1@1 B0@1 F2@1 B1@1 W0@1 F3@1 B2@1 W1@1 B3@1 W2@1 W3@1",
        "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 W0@2 F3@2 B3@2 W1@2 W2@2 W3@2",
        microbatches=4,
        schedule="zero-bubble",
    )


def test_only_zero_bubble_splits_the_backward() -> None:
    assert [name for name in SCHEDULES if make_plan(name, 2, 2).splits] == ["zero-bubble"]


def test_stages_are_dealt_out_in_turn() -> None:
    plan = make_plan("interleaved", 3, 3, 2)
    assert plan.stages == 6
    assert [plan.owner(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    stages = [sorted({action.stage for action in actions}) for actions in plan.actions]
    assert stages == [[0, 3], [1, 4], [2, 5]]


def test_schedules_have_the_names_of_the_configuration() -> None:
    assert set(get_args(PipelineConfig.model_fields["schedule"].annotation)) == set(SCHEDULES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1F1B1", 2, 2), 'there is no pipeline schedule "1F1B1"; write one of gpipe, 1f1b, '),
        (("zb", 2, 2), "; write one of gpipe, 1f1b, interleaved, zero-bubble; did you mean 'zero-bubble'?"),
        (("zerobubble", 2, 2), "did you mean 'zero-bubble'?"),
        (("1f1bb", 2, 2), "did you mean '1f1b'?"),
        (("1f1b", 0, 2), "ranks is 0; a pipeline needs at least 1"),
        (("1f1b", 2, -1), "microbatches is -1; a pipeline needs at least 1"),
        (("interleaved", 2, 2, 0), "virtual_stages is 0; a pipeline needs at least 1"),
        (("gpipe", 2, 2, 2), 'write virtual_stages 1, or the schedule "interleaved"'),
    ],
)
def test_what_there_is_no_plan_for(arguments: tuple[str, int, int], says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make_plan(*arguments)
    assert says in str(caught.value)


# --- transfers ----------------------------------------------------------------------------------


def test_a_receive_is_right_before_what_needs_it_and_a_send_right_after_what_makes_it() -> None:
    plan = with_transfers(make_plan("1f1b", 3, 2))
    assert written(plan, 0) == "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0"
    assert written(plan, 1) == (
        "RECV_F0@1 F0@1 SEND_F0@1 RECV_F1@1 F1@1 SEND_F1@1 RECV_B0@1 B0@1 SEND_B0@1 RECV_B1@1 B1@1 SEND_B1@1"
    )
    assert written(plan, 2) == "RECV_F0@2 F0@2 B0@2 SEND_B0@2 RECV_F1@2 F1@2 B1@2 SEND_B1@2"


def test_weight_gradients_stay_where_they_are() -> None:
    assert written(with_transfers(make_plan("zero-bubble", 2, 1)), 1) == "RECV_F0@1 F0@1 B0@1 SEND_B0@1 W0@1"


def test_the_last_rank_sends_to_the_first_between_two_virtual_stages() -> None:
    plan = with_transfers(make_plan("interleaved", 2, 1, 2))
    assert written(plan, 1) == ("RECV_F0@1 F0@1 SEND_F0@1 RECV_F0@3 F0@3 B0@3 SEND_B0@3 RECV_B0@1 B0@1 SEND_B0@1")


def test_one_rank_sends_nothing_to_itself() -> None:
    plan = make_plan("interleaved", 1, 3, 4)
    assert with_transfers(plan) == plan


def test_transfers_that_are_there_are_placed_anew() -> None:
    plan = make_plan("1f1b", 3, 4)
    assert with_transfers(with_transfers(plan)) == with_transfers(plan)


def test_the_two_ends_of_a_transfer() -> None:
    send, receive = Action("SEND_F", 1, 5), Action("RECV_F", 2, 5)
    assert (send.partner, receive.partner) == (receive, send)
    send, receive = Action("SEND_B", 2, 5), Action("RECV_B", 1, 5)
    assert (send.partner, receive.partner) == (receive, send)


# --- every plan ---------------------------------------------------------------------------------


@QUICK
@given(st.sampled_from(EVERY), RANKS, MICROBATCHES)
def test_every_plan_is_whole_and_can_finish(kind: tuple[str, int], ranks: int, microbatches: int) -> None:
    schedule, virtual = kind
    plan = make_plan(schedule, ranks, microbatches, virtual)
    check(plan)
    check(with_transfers(plan))
    assert len(simulate(plan, cost_of(F=1, B=1, W=1)).times) == sum(map(len, plan.actions))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual"), EVERY)
def test_every_plan_of_any_size_is_whole_and_can_finish(schedule: str, virtual: int) -> None:
    for ranks in (*range(1, 9), 16):
        for microbatches in range(1, 25):
            check(make_plan(schedule, ranks, microbatches, virtual))


@QUICK
@given(st.sampled_from(EVERY), RANKS, MICROBATCHES, TIME, TIME, TIME)
def test_bubble_of_balanced_stages_is_the_closed_form(
    kind: tuple[str, int], ranks: int, microbatches: int, f: float, b: float, w: float
) -> None:
    schedule, virtual = kind
    if virtual > 1:
        microbatches = ranks * (1 + microbatches // 8)
    plan = make_plan(schedule, ranks, microbatches, virtual)
    simulation = simulate(plan, cost_of(F=f, B=b, W=w) if plan.splits else cost_of(F=f, B=b + w))
    idle = closed_form.bubble_time(schedule, ranks, microbatches, f, b, w, virtual)
    assert [simulation.idle(rank) for rank in range(ranks)] == pytest.approx([idle] * ranks, rel=1e-9, abs=1e-9)
    part = closed_form.bubble_fraction(schedule, ranks, microbatches, f, b, w, virtual)
    assert simulation.bubble == pytest.approx(part, abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual", "times", "fraction"),
    [
        ("gpipe", 1, (1, 2), 3 / 11),
        ("1f1b", 1, (5, 0.5), 3 / 11),
        ("interleaved", 2, (1, 2), 3 / 19),
        ("interleaved", 4, (3, 1), 3 / 35),
    ],
)
def test_published_fractions(schedule: str, virtual: int, times: tuple[float, float], fraction: float) -> None:
    # p = 4, m = 8: (p-1) / (m+p-1), with v stages a rank (p-1) / (vm+p-1).
    plan = make_plan(schedule, 4, 8, virtual)
    assert simulate(plan, cost_of(F=times[0], B=times[1])).bubble == pytest.approx(fraction, abs=1e-12)
    assert closed_form.bubble_fraction(schedule, 4, 8, *times, virtual_stages=virtual) == pytest.approx(fraction)


@pytest.mark.parametrize(("f", "b", "w", "idle"), [(1, 1, 1, 3), (4, 5, 3, 18), (2, 2, 1, 9)])
def test_published_bubble_of_zero_bubble(f: float, b: float, w: float, idle: float) -> None:
    # p = 4, m = 8: (p-1)(F+B-W), where 1F1B has (p-1)(F+B+W).
    simulation = simulate(make_plan("zero-bubble", 4, 8), cost_of(F=f, B=b, W=w))
    assert [simulation.idle(rank) for rank in range(4)] == [idle] * 4
    assert closed_form.bubble_time("zero-bubble", 4, 8, f, b, w) == idle
    assert closed_form.bubble_time("1f1b", 4, 8, f, b, w) == 3 * (f + b + w)


@QUICK
@given(st.lists(st.tuples(TIME, TIME), min_size=1, max_size=8), MICROBATCHES)
def test_gpipe_with_stages_that_take_different_times(times: list[tuple[float, float]], microbatches: int) -> None:
    forward, backward = zip(*times, strict=True)
    plan = make_plan("gpipe", len(times), microbatches)
    simulation = simulate(plan, lambda action: (forward if action.op == "F" else backward)[action.stage])
    expected = closed_form.gpipe_makespan(forward, backward, microbatches)
    assert simulation.makespan == pytest.approx(expected, rel=1e-9)


def test_gpipe_makespan_by_hand() -> None:
    # sum f = 6, max f = 3; sum b = 9, max b = 4; m = 5.
    assert closed_form.gpipe_makespan([1, 3, 2], [3, 2, 4], 5) == 6 + 4 * 3 + 9 + 4 * 4


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "virtual", "most"),
    [
        ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
        ("1f1b", 4, 8, 1, [4, 3, 2, 1]),
        ("1f1b", 4, 2, 1, [2, 2, 2, 1]),
        ("zero-bubble", 4, 8, 1, [4, 3, 2, 1]),
        ("interleaved", 4, 8, 2, [11, 9, 7, 5]),
        ("interleaved", 4, 4, 2, [8, 8, 7, 5]),
    ],
)
def test_most_activations_held(schedule: str, ranks: int, microbatches: int, virtual: int, most: list[int]) -> None:
    assert peak_activations(make_plan(schedule, ranks, microbatches, virtual)) == most
    assert closed_form.peak_activations(schedule, ranks, microbatches, virtual) == most


@QUICK
@given(st.sampled_from(EVERY), RANKS, MICROBATCHES)
def test_activations_held_are_as_published(kind: tuple[str, int], ranks: int, microbatches: int) -> None:
    schedule, virtual = kind
    published = microbatches if virtual == 1 else -(-microbatches // ranks) * ranks
    held = peak_activations(make_plan(schedule, ranks, microbatches, virtual))
    most = closed_form.peak_activations(schedule, ranks, published, virtual)
    if published == microbatches:
        assert held == most
    else:  # a plan with fewer micro-batches than the one it is made from
        assert all(here <= there for here, there in zip(held, most, strict=True))


@QUICK
@given(st.integers(2, 8), st.integers(2, 24), TIME, TIME, TIME)
def test_zero_bubble_is_faster_than_1f1b_at_the_same_peak(
    ranks: int, microbatches: int, f: float, b: float, w: float
) -> None:
    split, whole = make_plan("zero-bubble", ranks, microbatches), make_plan("1f1b", ranks, microbatches)
    assert simulate(split, cost_of(F=f, B=b, W=w)).makespan < simulate(whole, cost_of(F=f, B=b + w)).makespan
    assert peak_activations(split) == peak_activations(whole)
    # Counted until W, every rank holds as many as 1F1B's first, which holds most.
    assert peak_activations(split, until="W") == [max(peak_activations(whole))] * ranks


def test_closed_forms_are_given_only_where_they_hold() -> None:
    with pytest.raises(ValueError, match="for a multiple of 4 micro-batches; simulate interleaved with 6"):
        closed_form.bubble_time("interleaved", 4, 6, 1, 1, virtual_stages=2)
    with pytest.raises(ValueError, match='nothing is published here of a schedule "mine"'):
        closed_form.peak_activations("mine", 4, 8)


# --- check --------------------------------------------------------------------------------------

WRONG = [
    (("F0@0 B0@0 F1@0", "F0@1 B0@1 F1@1 B1@1"), "B1@0 of rank 0 is missing"),
    (("F0@0 F0@0 B0@0 F1@0 B1@0", "F0@1 B0@1 F1@1 B1@1"), "F0@0 is there 2 times, on ranks 0, 0"),
    (("F0@0 B0@0 F1@0 B1@0 F1@1", "F0@1 B0@1 B1@1"), "F1@1 is on rank 0, and stage 1 on 1"),
    (("F0@0 B0@0 F1@0 B1@0 F2@0", "F0@1 B0@1 F1@1 B1@1"), "F2@0 of rank 0 is none of this plan's actions"),
    (("F0@0 B0@0 F1@0 B1@0 F0@2", "F0@1 B0@1 F1@1 B1@1"), "F0@2 of rank 0 is none of this plan's actions"),
    (("F0@0 B0@0 F1@0 B1@0", "F0@1 B0@1 F1@1 B1@1 W0@1"), "W0@0 of rank 0 is missing"),
    (("F0@0 SEND_F0@0 B0@0 F1@0 B1@0", "F0@1 B0@1 F1@1 B1@1"), "RECV_F0@1 of rank 1 is missing"),
]


@pytest.mark.parametrize(("ranks", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_plan_that_is_not_whole(ranks: tuple[str, str], says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(plan_of(*ranks, microbatches=2))
    assert str(caught.value).startswith('pipeline plan "mine" of 2 ranks and 2 micro-batches is not whole:\n  ')
    assert says in str(caught.value)


def test_a_plan_without_the_actions_of_a_rank() -> None:
    plan = replace(make_plan("1f1b", 3, 2), ranks=4)
    with pytest.raises(ScheduleError, match="has the actions of 3 ranks; give it a tuple for each rank"):
        check(plan)


def test_many_faults_are_told_in_part() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(replace(make_plan("1f1b", 2, 20), microbatches=30))
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[1], lines[-1]) == (18, "  F20@0 of rank 0 is missing", "  and 24 more")


def test_a_backward_before_its_forward() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(plan_of("F0@0 B0@0", "B0@1 F0@1", microbatches=1))
    assert str(caught.value) == (
        'pipeline plan "mine" of 2 ranks and 1 micro-batches can never finish:\n'
        "  rank 1 did nothing, waits at B0@1 for F0@1 which it does later itself\n"
        "  rank 0 did SEND_F0@0, waits at RECV_B0@0 for SEND_B0@1 of rank 1\n"
        "  cycle: rank 1 -> rank 1"
    )


def test_weight_gradients_before_the_backward() -> None:
    with pytest.raises(ScheduleError, match="rank 0 did F0@0, waits at W0@0 for B0@0 which it does later itself"):
        check(plan_of("F0@0 W0@0 B0@0", microbatches=1))


def test_a_receive_after_what_needs_it() -> None:
    plan = plan_of("F0@0 SEND_F0@0 RECV_B0@0 B0@0", "F0@1 RECV_F0@1 B0@1 SEND_B0@1", microbatches=1)
    with pytest.raises(ScheduleError, match="waits at F0@1 for RECV_F0@1 which it does later itself"):
        check(plan)


def test_ranks_that_wait_for_each_other() -> None:
    # The first rank wants a gradient before it sends the activations that the second wants first.
    plan = plan_of("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1", "F0@2 B0@2 F1@2 B1@2", microbatches=2)
    dump = (
        'pipeline plan "mine" of 3 ranks and 2 micro-batches can never finish:\n'
        "  rank 0 did SEND_F0@0, waits at RECV_B0@0 for SEND_B0@1 of rank 1\n"
        "  rank 1 did SEND_F0@1, waits at RECV_F1@1 for SEND_F1@0 of rank 0\n"
        "  rank 2 did SEND_B0@2, waits at RECV_F1@2 for SEND_F1@1 of rank 1\n"
        "  cycle: rank 0 -> rank 1 -> rank 0"
    )
    with pytest.raises(ScheduleError) as caught:
        check(plan)
    assert str(caught.value) == dump
    with pytest.raises(ScheduleError, match="rank 0 did F0@0, waits at B0@0 for B0@1 of rank 1"):
        simulate(plan, cost_of(F=1, B=1))


def test_a_dump_of_many_ranks_begins_with_the_cycle() -> None:
    good = with_transfers(make_plan("1f1b", 40, 2))
    # Rank 30 wants a gradient first.
    stuck = sorted(good.actions[30], key=lambda action: "B" not in action.op)
    with pytest.raises(ScheduleError) as caught:
        check(replace(good, actions=(*good.actions[:30], tuple(stuck), *good.actions[31:])))
    lines = str(caught.value).splitlines()
    assert len(lines) == 19
    assert "rank 30 did nothing, waits at RECV_B0@30 for SEND_B0@31 of rank 31" in lines[1]
    assert lines[-2:] == ["  and 24 more", "  cycle: rank 30 -> rank 31 -> rank 30"]


def test_sends_that_are_received_in_another_order_need_buffers() -> None:
    plan = plan_of("F0@0 F1@0 B0@0 B1@0", "F1@1 F0@1 B0@1 B1@1", microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        check(plan)
    assert str(caught.value) == (
        'pipeline plan "mine" of 2 ranks and 2 micro-batches can never finish:\n'
        "  rank 0 did F0@0, waits at SEND_F0@0 for SEND_F1@0 which it does later itself\n"
        "  rank 1 did nothing, waits at RECV_F1@1 for SEND_F1@0 of rank 0\n"
        "  cycle: rank 0 -> rank 0\n"
        "  It could if sends were buffered: some are not in the order of their receives."
    )
    assert simulate(plan, cost_of(F=1, B=1)).makespan == 7


def test_interleaving_with_a_last_group_that_is_simply_shorter_could_never_finish() -> None:
    """Why what is missing of the last group is left out of a full plan: 4 ranks, 5 micro-batches, 3 stages each."""

    def of(rank: int) -> tuple[Action, ...]:
        walk = {
            op: [
                Action(op, rank + 4 * part, m)
                for group in (range(4), range(4, 5))
                for part in (range(3) if op == "F" else reversed(range(3)))
                for m in group
            ]
            for op in "FB"
        }
        ahead = min(8 + 2 * (3 - rank), 15)
        steady = [action for pair in zip(walk["F"][ahead:], walk["B"], strict=False) for action in pair]
        return (*walk["F"][:ahead], *steady, *walk["B"][15 - ahead :])

    with pytest.raises(ScheduleError, match="cycle: rank 0 -> rank 3 -> rank 0"):
        check(Plan("mine", 4, 5, 3, tuple(map(of, range(4)))))


def finishes(plan: Plan, buffered: bool) -> bool:
    """Run a plan with transfers, a rank at a time and again and again, with messages in mailboxes."""
    at = [0] * plan.ranks
    posted: dict[tuple[str, int], list[Action]] = {}
    for actions in plan.actions:
        for action in actions:
            if action.op.startswith("RECV"):
                posted.setdefault((action.op, action.stage), []).append(action)
    done: set[Action] = set()
    mail: set[Action] = set()

    def can(action: Action) -> bool:
        op, stage, m = action
        if op.startswith("SEND"):
            queue = posted[action.partner.op, action.partner.stage]
            return Action(op[-1], stage, m) in done and (buffered or queue[0] == action.partner)
        if op.startswith("RECV"):
            return action.partner in mail
        if op == "W":
            return Action("B", stage, m) in done
        if op == "B" and Action("F", stage, m) not in done:
            return False
        end, step = (0, -1) if op == "F" else (plan.stages - 1, 1)
        came = Action(op, stage + step, m) if plan.ranks == 1 else Action(f"RECV_{op}", stage, m)
        return stage == end or came in done

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            if at[rank] < len(actions) and can(actions[at[rank]]):
                action = actions[at[rank]]
                done.add(action)
                if action.op.startswith("SEND"):
                    mail.add(action)
                    posted[action.partner.op, action.partner.stage].remove(action.partner)
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in plan.actions]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EVERY), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.randoms())
def test_check_refuses_exactly_what_a_naive_run_gets_stuck_in(
    kind: tuple[str, int], ranks: int, microbatches: int, swaps: int, chance: random.Random
) -> None:
    plan = with_transfers(make_plan(kind[0], ranks, microbatches, min(kind[1], 2)))
    actions = [list(each) for each in plan.actions]
    for _ in range(swaps):
        each = chance.choice(actions)
        if chance.random() < 0.5:
            at = chance.randrange(len(each) - 1)
            each[at], each[at + 1] = each[at + 1], each[at]
        else:  # two micro-batches in all that a rank does
            one, other = chance.randrange(microbatches), chance.randrange(microbatches)
            renamed = {one: other, other: one}
            each[:] = [action._replace(microbatch=renamed.get(action.microbatch, action.microbatch)) for action in each]
    plan = replace(plan, actions=tuple(map(tuple, actions)))
    if finishes(plan, buffered=False):
        check(plan)
    else:
        with pytest.raises(ScheduleError, match="can never finish") as caught:
            check(plan)
        assert ("could if sends were buffered" in str(caught.value)) == finishes(plan, buffered=True)


def test_the_work_of_checking_and_simulating_is_linear() -> None:
    for schedule in SCHEDULES:
        plan = make_plan(schedule, 16, 128)
        calls: Counter[Action] = Counter()

        def needs(action: Action, plan: Plan = plan, calls: Counter[Action] = calls) -> tuple[Action, ...]:
            calls[action] += 1
            return plan.needs(action)

        assert sum(1 for _ in in_order(plan, needs)) == sum(map(len, plan.actions))
        assert max(calls.values()) <= 3  # once, and once more for each of two that it waited for


# --- simulate -----------------------------------------------------------------------------------


def test_a_simulation_by_hand() -> None:
    # 2 ranks, F takes 1, B 2, a transfer 0.5.
    simulation = simulate(make_plan("1f1b", 2, 2), cost_of(F=1, B=2), lag=0.5)
    assert {str(action): times for action, times in simulation.times.items()} == {
        "F0@0": (0, 1), "F1@0": (1, 2), "F0@1": (1.5, 2.5), "B0@1": (2.5, 4.5), "F1@1": (4.5, 5.5),
        "B1@1": (5.5, 7.5), "B0@0": (5.0, 7.0), "B1@0": (8.0, 10.0),
    }  # fmt: skip
    assert simulation.makespan == 10
    assert simulation.busy_times == (6, 6)
    assert [simulation.idle(rank) for rank in range(2)] == [4, 4]
    assert simulation.bubble == pytest.approx(0.4)


def test_stages_of_one_rank_hand_over_at_once() -> None:
    simulation = simulate(make_plan("interleaved", 1, 2, 3), cost_of(F=1, B=1), lag=100.0)
    assert (simulation.makespan, simulation.bubble) == (12, 0)


def test_actions_that_take_no_time() -> None:
    assert simulate(make_plan("gpipe", 2, 2), cost_of(F=0, B=0)).bubble == 0


def naive_ends(plan: Plan, cost: Callable[[Action], float], lag: Callable[[int, int], float]) -> dict[Action, float]:
    """The ends of all actions: too early at first, then later and later until nothing is too early."""
    before = {later: earlier for actions in plan.actions for earlier, later in pairwise(actions)}
    ends = dict.fromkeys((action for actions in plan.actions for action in actions), 0.0)
    while True:
        moved = False
        for action in ends:
            op, stage, m = action
            arrivals = [0.0, ends[before[action]] if action in before else 0.0]
            source = {"F": stage - 1, "B": stage + 1}.get(op)
            if source is not None and 0 <= source < plan.stages:
                away = source % plan.ranks != stage % plan.ranks
                arrivals.append(ends[Action(op, source, m)] + (lag(source, stage) if away else 0.0))
            if op != "F":
                arrivals.append(ends[Action("F" if op == "B" else "B", stage, m)])
            end = max(arrivals) + cost(action)
            moved |= end != ends[action]
            ends[action] = end
        if not moved:
            return ends


@QUICK
@given(st.sampled_from(EVERY), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_a_simulation_agrees_with_a_naive_one(
    kind: tuple[str, int], ranks: int, microbatches: int, seed: int, lags: bool
) -> None:
    chance = random.Random(seed)
    plan = make_plan(kind[0], ranks, microbatches, kind[1])
    costs = {action: chance.uniform(0.1, 3) for actions in plan.actions for action in actions}
    each = {(a, a + d): chance.uniform(0, 2) * lags for a in range(plan.stages) for d in (-1, 1)}
    simulation = simulate(plan, costs.__getitem__, lambda source, target: each[source, target])
    ends = naive_ends(plan, costs.__getitem__, lambda source, target: each[source, target])
    assert {action: end for action, (_, end) in simulation.times.items()} == ends
    assert simulation.makespan == max(ends.values())
    busy = [sum(costs[action] for action in actions) for actions in plan.actions]
    assert simulation.busy_times == pytest.approx(busy)


def test_transfers_in_a_plan_are_the_lag() -> None:
    plan = make_plan("zero-bubble", 3, 5)
    cost = cost_of(F=1, B=1, W=1)
    assert simulate(with_transfers(plan), cost, 0.25) == simulate(plan, cost, 0.25)


def test_lag_of_two_stages() -> None:
    seen = set()

    def lag(source: int, target: int) -> float:
        seen.add((source, target))
        return 0.0

    simulate(make_plan("interleaved", 2, 2, 2), cost_of(F=1, B=1), lag)
    assert seen == {(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)}


@QUICK
@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 4), TIME, TIME)
def test_interleaving_takes_no_longer_with_a_microbatch_less(
    ranks: int, groups: int, virtual: int, f: float, b: float
) -> None:
    spans = [
        simulate(make_plan("interleaved", ranks, m, virtual), cost_of(F=f, B=b)).makespan
        for m in range(1, groups * ranks + 1)
    ]
    assert all(fewer <= more * (1 + 1e-12) for fewer, more in pairwise(spans))


@QUICK
@given(st.sampled_from(EVERY), RANKS, MICROBATCHES)
def test_a_step_takes_at_least_its_work_and_the_way_there_and_back(
    kind: tuple[str, int], ranks: int, microbatches: int
) -> None:
    plan = make_plan(kind[0], ranks, microbatches, kind[1])
    assume(plan.ranks > 1)
    simulation = simulate(plan, cost_of(F=1, B=2, W=1))
    assert simulation.makespan >= max(3 * plan.stages, (4 if plan.splits else 3) * microbatches * kind[1])


# --- render -------------------------------------------------------------------------------------


def test_a_timeline() -> None:
    plan = make_plan("1f1b", 2, 2)
    assert render(plan, simulate(plan, cost_of(F=1, B=2)), width=36) == (
        "rank 0   F0==F1==........B0======....B1======\nrank 1   ....F0==B0======F1==B1======........"
    )


def test_a_timeline_of_virtual_stages_with_names_cut_off() -> None:
    plan = with_transfers(make_plan("interleaved", 2, 2, 2))
    assert render(plan, simulate(plan, cost_of(F=1, B=2)), width=30) == (
        "rank 0   F0F1F0F1....B0@2..B1@2B0@0B1@0\nrank 1   ..F0F1F0B0@3F1B1@3B0@1B1@1...."
    )
