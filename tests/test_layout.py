"""Layouts lowered to the graph of a replica's ranks: closed forms, what replicas exchange, and the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_layout import ONCE, OPTIMIZER, B, F, costs
from made_up_pipeline import MadeUpPipeline
from synthetic import Job

from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.layout import Assumed, Layout, Wire, layout_costs, step_of
from dsprof.analyzer.layout.held_bytes import HeldBytes, activations_at_once
from dsprof.analyzer.layout.relayout import LayoutWanted, effect_of
from dsprof.analyzer.layout.stage_work import stage_work
from dsprof.analyzer.layout.step_lowered import MOST_MICROBATCHES, lowered
from dsprof.analyzer.memory.rank_memory import most
from dsprof.analyzer.memory.use_by_step import MemoryUse
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.stage_costs import WeightShare
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif import Refused, apply
from dsprof.analyzer.whatif.work import ScaleWork
from dsprof.analyzer.work.fixed_part import UNTOLD
from dsprof.engine.schedule import Action, dual_pipe_v, make_plan, peak_activations, simulate
from dsprof.knobs import KnobError
from dsprof.knobs.layouts import read_layout
from dsprof.knobs.memory import memory_with
from dsprof.plan.layouts import Wanted
from dsprof.plan.network import Network
from dsprof.plan.ranked import Search, variants

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("dualpipe-v", 2))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_without_communication(stages: int, schedule: str) -> None:
    """(m + p - 1) (F + B) / p, what is done once, and the rank's part of the optimizer."""
    found = step_of(costs(), Layout(pp=stages, micro_batches=8, schedule=schedule))
    assert found == pytest.approx((8 + stages - 1) * (F + B) / stages + ONCE + OPTIMIZER / stages, rel=1e-9)


def test_zero_bubble_and_interleaved() -> None:
    """ZB-H1's bubble is (p - 1) (F + B - W), of a backward that is half W; that of v parts is v times smaller."""
    stages, f, b = 4, F / 4, B / 8
    zero = step_of(costs(), Layout(pp=stages, micro_batches=8, schedule="zero-bubble"))
    assert zero == pytest.approx(8 * (f + 2 * b) + (stages - 1) * f + ONCE + OPTIMIZER / stages, rel=1e-9)
    parts = step_of(costs(), Layout(pp=stages, micro_batches=8, schedule="interleaved", chunks=2))
    assert parts == pytest.approx((8 + (stages - 1) / 2) * (F + B) / 4 + ONCE + OPTIMIZER / stages, rel=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_dual_pipe_v_of_layers(share: float) -> None:
    """As its simulation has it, in which W is a share of those backwards alone that are in two parts."""
    plan = dual_pipe_v(2, 9)
    split = plan.split

    def cost(action: Action) -> float:
        if action.op == "F":
            return F / 4
        return B / 4 * {"W": share, "B": 1 - share if action[1:] in split else 1.0}[action.op]

    told = costs(weight=WeightShare(typical=share))
    found = step_of(told, Layout(pp=2, micro_batches=9, schedule="dualpipe-v", chunks=2))
    assert found == pytest.approx(simulate(plan, cost).makespan + ONCE + OPTIMIZER / 2, rel=1e-9)


def test_of_dual_pipe_v_each_stage_reduces_after_its_last_backward() -> None:
    """With replicas, over a link that hides nothing: the two stages of a rank take as long as those of 1F1B's one."""
    slow = costs(Wire(0.0, 1e-3, 2, 0.1))
    two, one = (
        step_of(slow, Layout(pp=2, dp=2, micro_batches=4, schedule=name, chunks=chunks))
        for name, chunks in (("dualpipe-v", 2), ("1f1b", 1))
    )
    assert two == pytest.approx(one, rel=0.01)


def test_weight_gradients_that_may_be_nothing_widen_what_puts_them_off() -> None:
    """ZB-H1 of backwards without weight gradients is 1F1B; where they were timed the interval ends at what was seen."""
    search, layout = Search(costs(), Network(8)), Layout(pp=4, micro_batches=8)
    plain, put_off = (search.ranked(replace(layout, schedule=name), 1.0) for name in ("1f1b", "zero-bubble"))
    assert put_off.ms < plain.ms <= put_off.high
    timed = Search(costs(weight=WeightShare(0.5, 0.45, 0.55, measured=True)), Network(8))
    assert timed.ranked(replace(layout, schedule="zero-bubble"), 1.0).high < put_off.high


def test_a_search_tries_dual_pipe_v_where_there_are_layers_and_micro_batches_for_it() -> None:
    def tried(pp: int, count: int) -> set[str]:
        base = Layout(pp=pp, micro_batches=count)
        return {one.schedule for one in variants(costs(), base, Wanted())}

    assert tried(2, 4) == {"1f1b", "gpipe", "zero-bubble", "interleaved", "dualpipe-v"}
    assert "dualpipe-v" not in tried(2, 3)
    assert "dualpipe-v" not in tried(8, 32)  # 16 stages of 8 layers
    assert tried(1, 8) == {"1f1b"}


def test_a_reduction_is_hidden_but_for_its_last_piece() -> None:
    """16 MB pass the ring of an all-reduce of 8 MB. At 0.5 ms each quarter hides under 5 ms of backward, the last one
    is waited for; at 8 ms each all but the first piece of backward are."""
    step = 8 * (F + B) + ONCE + OPTIMIZER
    small, large = (Wire(0.0, quarter * 4 / 16e6, 2, 0.1) for quarter in (0.5, 8.0))
    layout = Layout(dp=2, micro_batches=8)
    assert step_of(costs(small), layout) == pytest.approx(step + 0.5, rel=1e-9)
    assert step_of(costs(large), layout) == pytest.approx(step + 4 * 8.0 - 3 * B / 4, rel=1e-9)


def test_what_the_stages_of_zero_exchange() -> None:
    """A byte takes 1 ns on the ring: 8 MB take 8 ms. Stage 1 reduces half as much as stage 0 and gathers parameters
    after the optimizer, whose half it has; stage 2 reduces with each micro-batch, beside the next one's forward."""
    wire = Wire(0.0, 1e-6, 2, 0.1)
    layout = Layout(dp=2, micro_batches=8)
    step = 8 * (F + B) + ONCE
    assert step_of(costs(wire), replace(layout, zero=1)) == pytest.approx(step + 2.0 + OPTIMIZER / 2 + 8.0, rel=1e-9)
    assert step_of(costs(wire), replace(layout, zero=2)) == pytest.approx(step + 2.0 + OPTIMIZER / 2 + 8.0, rel=1e-9)


def test_stage_3_waits_for_gathers_that_take_longer_than_what_they_hide_under() -> None:
    """A quarter of the parameters takes 4 ms, a quarter of a forward 2.5, of a backward 5. So forwards wait for
    gathers, and backwards hide them but for what follows a forward."""
    wire = Wire(0.0, 16 / 8e6, 2, 0.1)
    found = step_of(costs(wire), Layout(dp=2, micro_batches=8, zero=3))
    assert found > 8 * (4 * 4.0 + B) + ONCE
    assert found < 8 * (4 * 4.0 + B + 5.0) + ONCE + 16.0


def test_activations_computed_again_take_a_forward_more() -> None:
    layout = Layout(dp=2, micro_batches=8)
    assert step_of(costs(), replace(layout, recompute=True)) - step_of(costs(), layout) == pytest.approx(8 * F)
    again = costs(ran=replace(layout, recompute=True), recompute_ms=F, taken={(0, "F"): F, (0, "B"): B + F})
    assert step_of(again, again.ran) - step_of(again, layout) == pytest.approx(8 * F)


def test_of_a_run_that_computes_a_part_again_only_that_part_is_saved() -> None:
    """A quarter of forward: without, each micro-batch takes so much less; of uneven stages each what is its own, and no
    backward less than nothing."""
    ran = Layout(dp=2, micro_batches=8, recompute=True)
    partly = costs(ran=ran, recompute_ms=F / 4, taken={(0, "F"): F, (0, "B"): B + F / 4})
    assert step_of(partly, ran) == pytest.approx(8 * (F + B + F / 4) + ONCE + OPTIMIZER)
    assert step_of(partly, ran) - step_of(partly, replace(ran, recompute=False)) == pytest.approx(8 * F / 4)
    assert "25 % of forward is computed again, as in the run" in effect_of(partly, replace(ran, micro_batches=4)).notes
    taken = {(0, "F"): 2.0, (0, "B"): 6.0, (1, "F"): 18.0, (1, "B"): 54.0}
    uneven = costs(ran=replace(ran, pp=2), recompute_ms=10.0, taken=taken, layers=None, model_bytes=(4e6, 4e6))
    assert stage_work(uneven, 2).backward == pytest.approx((4.0, 36.0))
    assert min(stage_work(replace(uneven, taken={**taken, (0, "B"): 1.0}), 2).backward) == 0.0


def test_many_micro_batches_take_as_long_as_if_all_were_lowered() -> None:
    for layout in (
        Layout(pp=4, dp=2, zero=1, micro_batches=2 * MOST_MICROBATCHES + 3),
        Layout(pp=2, micro_batches=2 * MOST_MICROBATCHES, schedule="interleaved", chunks=2),
        Layout(pp=4, micro_batches=MOST_MICROBATCHES + 1, schedule="zero-bubble"),
    ):
        one = costs(Wire(0.1, 1e-6, 2, 0.1))
        whole = float(replay(lowered(one, layout, steps=np.ones(1))).durations[0])
        assert step_of(one, layout) == pytest.approx(whole, rel=1e-3)


def test_steps_differ_as_they_were_measured_to() -> None:
    found = replay(lowered(costs(), Layout(dp=2, micro_batches=8), steps=np.array([0.9, 1.1]))).durations
    assert found[1] / found[0] == pytest.approx(1.1 / 0.9)


def test_stages_of_layers_and_of_what_was_not_timed() -> None:
    assert stage_work(costs(), 4).forward == pytest.approx((F / 4,) * 4)
    assert stage_work(costs(layers=None), 4).backward == pytest.approx((B / 4,) * 4)
    with pytest.raises(NotJudged, match="16 stages for 8 layers; each needs one"):
        stage_work(costs(), 16)
    two = costs(
        ran=Layout(pp=2, micro_batches=8), layers=None, model_bytes=(6e6, 2e6),
        taken={(0, "F"): 6.0, (0, "B"): 12.0, (1, "F"): 4.0, (1, "B"): 8.0},
    )  # fmt: skip
    assert stage_work(two, 1).forward == pytest.approx((10.0,))
    assert stage_work(two, 4).model_bytes == pytest.approx((3e6, 3e6, 1e6, 1e6))
    with pytest.raises(NotJudged, match="3 stages can be told from the 2 that ran only with what each layer takes"):
        stage_work(two, 3)


def test_no_layout_is_faster_than_what_it_is_pruned_by() -> None:
    """Else the search could leave out the best."""
    one = costs(Wire(0.1, 1e-6, 2, 0.1))
    search = Search(one, Network(8))
    for pp in (1, 2, 4, 8):
        for dp in (1, 2, 4):
            for schedule, chunks in SCHEDULES:
                if pp * chunks > 8 or (pp == 1 and schedule != "1f1b"):
                    continue
                for zero in (0, 1, 3):
                    layout = Layout(pp=pp, dp=dp, zero=zero, micro_batches=8, schedule=schedule, chunks=chunks)
                    assert search.at_least(layout) <= search.step_ms(layout) + 1e-9, layout.says


def test_a_network_is_only_crossed_by_groups_that_do_not_fit_in_a_node() -> None:
    one = costs(Wire(0.0, 1e-6, 2, 0.1), activation_bytes=0.0)
    search, alone = Search(one, Network(4, gb_s=0.1)), Search(one, Network(64))
    inside = Layout(pp=2, dp=4, micro_batches=8)
    assert search.step_ms(inside) == pytest.approx(alone.step_ms(inside))
    across = Layout(pp=1, dp=8, micro_batches=8)
    assert search.step_ms(across) > 1.2 * alone.step_ms(across)


def test_assumptions_widen_the_interval() -> None:
    search = Search(costs(), Network(8))
    told, guessed = (search.ranked(Layout(dp=4, micro_batches=4, micro_batch=size), 1.0) for size in (1.0, 2.0))
    assert told.low <= told.ms <= told.high
    assert guessed.high - guessed.low > 2 * (told.high - told.low)
    assert step_of(costs(), Layout(micro_batch=2.0), Assumed(fixed=UNTOLD.least)) == pytest.approx(
        60 + ONCE + OPTIMIZER
    )


def test_what_is_not_asked_stays_as_it_ran() -> None:
    wanted = LayoutWanted(zero_stage=2, dp=4, recompute="full")
    assert wanted.says == "dp=4 zero-stage=2 recompute=full"
    assert wanted.layout(costs()) == Layout(dp=4, zero=2, micro_batches=8, recompute=True)


@pytest.mark.parametrize(
    ("wanted", "more", "says"),
    [
        (LayoutWanted(recompute="selective"), {}, "was not timed by itself; ask with --recompute full or none"),
        (LayoutWanted(offload="none"), {}, "nothing is offloaded in this run"),
        (LayoutWanted(offload="optimizer"), {}, "is only told by a run that offloads"),
        (LayoutWanted(tp=2), {"activation_bytes": None}, "what tensor parallelism would exchange is not known"),
        (LayoutWanted(tp=2), {"layers": None}, "run again with --level full"),
        (LayoutWanted(pp=16), {}, "16 stages for 8 layers; each needs one"),
        (LayoutWanted(pp=2), {"layers": None}, "are told by what each layer takes, which was not timed"),
        (LayoutWanted(dp=1, zero_stage=2), {}, "there is nothing that ZeRO could share"),
        (LayoutWanted(zero_stage=1), {"model_bytes": ()}, "how large the model is was not recorded"),
        (LayoutWanted(pp=2, chunks=2), {}, '"1f1b" knows one stage a rank'),
    ],
)
def test_layouts_that_cannot_be_told(wanted: LayoutWanted, more: dict[str, object], says: str) -> None:
    with pytest.raises(NotJudged, match=says):
        wanted.layout(costs(**more))


def test_what_the_model_lacks_of_the_measured_step_is_in_every_layout() -> None:
    """A step of 300 ms of which the model knows 245: with twice the replicas and twice the batch it takes 300 ms."""
    one = costs(step_ms=300.0)
    effect = effect_of(one, Layout(dp=4, micro_batches=8))
    graph = lowered(one, one.ran)
    now, then = (float(replay(apply(graph, whatifs)).durations.mean()) for whatifs in (effect.now, effect.then))
    assert (now, then) == pytest.approx((300.0, 300.0))
    assert effect.per_batch == 2.0


def test_another_layout_is_asked_about_by_itself() -> None:
    effect = effect_of(costs(), Layout(dp=4, micro_batches=8))
    with pytest.raises(Refused, match="another layout is a model of the whole step"):
        apply(lowered(costs(), Layout()), [*effect.then, ScaleWork({"compute": 0.5})])


def test_each_rank_is_held_against_its_own_peak() -> None:
    """Replicas need not take as much as each other: what stays of one is not what stays of another."""
    parts = {"parameters": 32 << 20, "gradients": 32 << 20, "optimizer_states": 64 << 20}
    uses = [MemoryUse(rank, "host", (400 - 100 * rank) << 20, 0, 0, None, 0, 0, parts) for rank in range(2)]
    measured = replace(study(Job(buckets=(32 << 20,), jitter=0.0).trace()), memory_uses=uses)
    same = LayoutWanted(zero_stage=0).memory(measured)
    assert [(one.now, one.then) for one in same] == [(use.peak, use.peak) for use in uses]
    sharded = LayoutWanted(zero_stage=2).memory(measured)
    assert [one.then - one.now for one in sharded] == [pytest.approx(-48 << 20)] * 2
    assert most(sharded) == sharded[0]


@pytest.mark.parametrize(("memory", "shares"), [([80, 40], (2 / 3, 1 / 3)), ([1, None], (1, 0)), (None, (0.5, 0.5))])
def test_ranks_of_unequal_memory_hold_their_shares_in_another_layout_too(
    memory: list[float | None] | None, shares: tuple[float, float]
) -> None:
    """Of dsprof's engine, which shards gradients with the states: from stage 1 to 3 parameters go, but for a share."""
    content = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "allgather_bucket_size": 1},
        "heterogeneous": {"memory": memory},
    }  # fmt: skip
    parts = {"parameters": 32 << 20, "gradients": 16 << 20, "optimizer_states": 32 << 20}
    uses = [MemoryUse(rank, "host", (400 - 100 * rank) << 20, 0, 0, None, 0, 0, parts) for rank in range(2)]
    job = Job(buckets=(32 << 20,), jitter=0.0, facts=[{"fact": "config", "dialect": "dsprof", "content": content}])
    measured = replace(study(job.trace()), memory_uses=uses)
    same, sharded = (LayoutWanted(zero_stage=stage).memory(measured) for stage in (1, 3))
    assert [(one.now, one.then) for one in same] == [(use.peak, use.peak) for use in uses]
    first, second = (one.then - one.now for one in sharded)
    assert second - first == pytest.approx((shares[1] - shares[0]) * (32 << 20), abs=1)
    content["heterogeneous"] = {"memory": "measure"}
    assert LayoutWanted(zero_stage=3).memory(replace(study(job.trace()), memory_uses=uses)) == ()


def test_a_stage_as_a_layout_takes_as_much_as_the_same_stage_as_a_knob() -> None:
    """On two ranks of dsprof's engine that communicate in host memory: what arrives from the other counts, too. Sums of
    micro-batches are those of the layout, which the file has none of."""
    content = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    facts = [
        {"fact": "config", "dialect": "dsprof", "content": content},
        *({"fact": "trained", "elements": 8 << 20, "largest": 1 << 20, "frozen": 4 << 20, "rank": rank}
          for rank in range(2)),
    ]  # fmt: skip
    parts = {"parameters": 32 << 20, "gradients": 16 << 20, "optimizer_states": 32 << 20}
    uses = [MemoryUse(rank, "host", 400 << 20, 0, 0, None, 0, 0, parts) for rank in range(2)]
    job = Job(buckets=(32 << 20,), jitter=0.0, facts=facts)
    measured = replace(study(job.trace()), memory_uses=uses)
    for stage in (0, 1, 3):
        knob = memory_with({"zero_optimization.stage": stage}, uses, measured.facts, 2)
        layout = LayoutWanted(zero_stage=stage).memory(measured)
        changes = [[(one.then - one.now) / 2**20 for one in found] for found in (layout, knob)]
        assert changes[0] == pytest.approx(changes[1], abs=1e-3), stage
    held = HeldBytes(measured, layout_costs(measured))
    one, two = (held.of(Layout(dp=2, zero=1, micro_batches=count)) for count in (1, 2))
    assert one is not None
    assert two is not None
    assert two[0].states - one[0].states == 32 << 20


def test_how_it_is_typed() -> None:
    nothing = dict.fromkeys(
        ("pp", "dp", "tp", "zero_stage", "recompute", "offload", "schedule", "micro_batches", "chunks", "boundaries")
    )
    assert read_layout(**nothing) is None
    assert read_layout(**{**nothing, "schedule": "gpipe"}) is None
    vpp = read_layout(**{**nothing, "pp": 4, "schedule": "VPP"})
    assert vpp == LayoutWanted(pp=4, schedule="interleaved", chunks=2)
    dual = read_layout(**{**nothing, "pp": 4, "schedule": "DualPipeV"})
    assert dual == LayoutWanted(pp=4, schedule="dualpipe-v", chunks=2)
    for word, says in (
        ({"recompute": "some"}, "--recompute some: write one of none, selective, full"),
        ({"pp": 2, "boundaries": "0,4,8"}, "another layout's stages are divided by their layers"),
        ({"pp": 2, "schedule": "gpip"}, "did you mean gpipe?"),
    ):
        with pytest.raises(KnobError, match=says):
            read_layout(**{**nothing, **word})


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4)]
)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_activations_that_ranks_hold_at_once_are_those_of_the_whole_plan(
    schedule: str, chunks: int, stages: int
) -> None:
    """Of any number of micro-batches: GPipe holds all of them."""
    for count in (stages, 4 * stages, 8 * stages, 20 * stages):
        whole = make_plan(schedule, stages, count, chunks)
        layout = Layout(pp=stages, schedule=schedule, chunks=chunks, micro_batches=count)
        assert activations_at_once(layout) == peak_activations(whole, "B"), count


def test_activations_of_dual_pipe_v() -> None:
    """Of many micro-batches no more than of twice as many as there are stages."""
    for count in (8, 40, 100):
        layout = Layout(pp=4, schedule="dualpipe-v", chunks=2, micro_batches=count)
        assert activations_at_once(layout) == peak_activations(dual_pipe_v(4, count), "B"), count


def test_messages_whose_sizes_were_not_told_take_what_they_took() -> None:
    """As in traces of other tools: none is said to be empty, and none to take no time."""
    job = MadeUpPipeline(stages=2, bytes=None, link=lambda source, target: 6.0)
    found = layout_costs(study(job.trace()))
    assert found.activation_bytes is None
    assert found.stages.ms(0.0, 2) == pytest.approx(6.0, rel=0.01)
    told = layout_costs(study(job.with_(bytes=1 << 20).trace()))
    four = Layout(pp=4, micro_batches=8)
    assert step_of(found, four) == pytest.approx(step_of(told, four), rel=0.01)
    (note,) = [note for note in effect_of(found, four).notes if "hand on" in note]
    assert note.endswith("was not seen: messages between stages are taken to take as long as in the run")
