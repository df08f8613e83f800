"""What a knob's values hold of each rank's memory: `dsprof whatif` and `dsprof fix` say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import Job

from dsprof.analyzer.memory.rank_memory import RankMemory, in_words, most
from dsprof.analyzer.memory.use_by_step import MemoryUse
from dsprof.analyzer.study import study
from dsprof.cli import main
from dsprof.knobs.memory import MEMORY, NOTHING, has_memory, memory_with
from dsprof.knobs.questions import answer_questions, read_questions
from dsprof.knobs.registry import find
from dsprof.reports.answers import render
from dsprof.run import RunFolder, RunInfo

MIB = 1 << 20
ELEMENTS = 10 * MIB
PARTS = {"parameters": 20 * MIB, "gradients": 20 * MIB, "optimizer_states": 60 * MIB, "activations": 40 * MIB}
USES = [
    MemoryUse(rank, "cuda.0", (200 + rank) * MIB, 256 * MIB, 300 * MIB, None, 0, 0, PARTS) for rank in range(4)
]  # fmt: skip
DDP = {"gradient_bytes": [8 * MIB, 2 * MIB], "gradient_as_bucket_view": False, "bucket_cap_mb": 25.0}
FSDP = {"version": 2, "units": 8, "bytes": 80 * MIB, "reshard_after_forward": True}


def configured(zero: dict[str, Any], stage: int = 2, dialect: str = "deepspeed") -> dict[str, Any]:
    content = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **zero},
    }
    sharded = ELEMENTS // (4 if stage else 1)
    model = [{"elements": ELEMENTS, "largest": MIB, "rank": rank} for rank in range(4)]
    optimizer = [{"elements": sharded, "rank": rank} for rank in range(4)]
    return {
        "config": [{"dialect": dialect, "content": content, "rank": rank} for rank in range(4)],
        **({"trained": model} if dialect == "dsprof" else {"optimizer": optimizer}),
    }


def more(facts: dict[str, list[dict[str, Any]]], **knobs: Any) -> float | None:
    """MiB that rank 0 would take more."""
    named = {key.replace("__", "."): value for key, value in knobs.items()}
    memory = memory_with(named, USES, facts, 4)
    return (memory[0].then - memory[0].now) / MIB if memory else None


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"ddp__bucket_cap_mb": 1}, 0),  # all buckets together are the gradients
        ({"ddp__gradient_as_bucket_view": True}, -10),
        ({"ddp__gradient_as_bucket_view": False}, 0),
        ({"ddp__gradient_as_bucket_view": True, "gc__freeze": True}, -10),
    ],
)
def test_of_ddp(knobs: dict[str, Any], expected: float) -> None:
    assert more({"ddp": [{**DDP, "rank": rank} for rank in range(4)]}, **knobs) == expected


def test_of_two_models_both_count() -> None:
    two = [{**DDP, "number": number, "rank": rank} for number in (1, 2) for rank in range(4)]
    assert more({"ddp": two}, ddp__gradient_as_bucket_view=True) == -20
    two[-1]["gradient_as_bucket_view"] = two[0]["gradient_as_bucket_view"] = True
    assert more({"ddp": two}, ddp__gradient_as_bucket_view=True) is None  # one of them has it already


@pytest.mark.parametrize(
    ("made", "then", "expected"),
    [
        (["fused"], True, 20),
        (["foreach"], True, 0),
        (["foreach"], False, -20),
        (["foreach", "fused"], False, None),
        ([None], True, None),  # torch chooses foreach on a GPU, unless the script says foreach=False
        ([], True, None),
    ],
)
def test_of_the_optimizer(made: list[str | None], then: bool, expected: float | None) -> None:
    facts = [{"number": at, "implementation": one, "rank": rank} for at, one in enumerate(made) for rank in range(4)]
    assert more({"optimizer": facts}, optimizer__foreach=then) == expected


def test_of_an_optimizer_on_the_host_that_says_nothing() -> None:
    (first, *_) = memory_with({"optimizer.foreach": True}, [replace(use, place="host") for use in USES], {}, 4)
    assert first.then - first.now == 20 * MIB


def test_ranks_that_were_not_captured_count() -> None:
    facts = configured({"reduce_bucket_size": MIB}, 1)
    (only,) = memory_with({"zero_optimization.stage": 2}, USES[:1], facts, 4)
    assert only.then - only.now == -15 * MIB


def test_ranks_of_unequal_memory_hold_their_shares() -> None:
    """Of 160 MiB of gradients, masters and moments a half, a quarter, a quarter, nothing, and not a quarter each.
    As much of a bucket of all gradients, 20 MiB, is what arrives of it."""
    facts = configured({}, 2, "dsprof")
    found = memory_with({"heterogeneous.memory": [80, 40, 40, None]}, USES, facts, 4)
    assert [rank.then - rank.now for rank in found] == [45 * MIB, 0, 0, -45 * MIB]
    assert memory_with({"heterogeneous.memory": "measure"}, USES, facts, 4) == ()
    assert memory_with({"heterogeneous.memory": [80, 40]}, USES, facts, 4) == ()  # of another job
    assert memory_with({"heterogeneous.memory": [None] * 4}, USES, facts, 4) == ()  # which no job can have


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        # Of 67.5 MiB, when the second unit computes, the third is gathered and the first reduced (30), activations are
        # 35 of 40 and gradients 2.5 of 20, and 130 at the end of forward: eight units, what the last came in, and 40.
        ({"fsdp2__reshard_after_forward": False}, 62.5),
        (
            {"fsdp2__reshard_after_forward": 2},
            37.5,
        ),  # 105 when the first is through: eight halves, the next, its gradients twice, 35
        ({"fsdp2__reshard_after_forward": True}, 0),
        ({"fsdp2__forward_prefetch": 3}, 20),
        ({"fsdp2__backward_prefetch": 0}, -10),
        ({"fsdp2__forward_prefetch": 100}, 60),  # the six beside the one that computes and the next
        # 100: three units of 20, the second of which is half through, with its gradients of 10, and 25 and 5 MiB.
        ({"fsdp2__modules_per_unit": 2}, 32.5),
        ({"fsdp2__modules_per_unit": 4}, 72.5),  # 140 when the first is through: the next, its gradients twice, and 20
        ({"fsdp2__modules_per_unit": 8}, 132.5),  # 200, at the end of forward: all, what they came in, and 40
        ({"fsdp2__modules_per_unit": 100}, 132.5),
    ],
)
def test_of_fsdp2(knobs: dict[str, Any], expected: float) -> None:
    assert more({"fsdp": [FSDP]}, **knobs) == expected


def test_of_fsdp2_that_stays_whole_larger_units_add_gradients() -> None:
    whole = {"fsdp": [{**FSDP, "reshard_after_forward": False}]}
    assert more(whole, fsdp2__modules_per_unit=4) == 30
    assert more(whole, fsdp2__forward_prefetch=3) == 0


@pytest.mark.parametrize(
    ("zero", "stage", "knobs", "expected"),
    [
        ({"reduce_bucket_size": MIB}, 2, {"reduce_bucket_size": 4 * MIB}, 6),
        ({"reduce_bucket_size": MIB, "overlap_comm": True}, 2, {"reduce_bucket_size": 4 * MIB}, 12),
        ({"reduce_bucket_size": MIB}, 2, {"overlap_comm": True}, 2),
        ({"reduce_bucket_size": MIB}, 2, {"overlap_comm": True, "reduce_bucket_size": 4 * MIB}, 14),
        ({"reduce_bucket_size": MIB}, 2, {"stage": 1}, 15),  # gradients whole, 20 MiB, and not a quarter
        ({"reduce_bucket_size": MIB}, 1, {"stage": 2}, -15),
        ({"reduce_bucket_size": MIB}, 0, {"stage": 1}, -90 + 2),  # 120 MiB of states by four, and a bucket
        ({"allgather_bucket_size": MIB}, 2, {"allgather_bucket_size": 4 * MIB}, 0),  # it gathers in place
        ({"stage3_prefetch_bucket_size": 0}, 3, {"stage3_prefetch_bucket_size": 3 * MIB}, 6),
        ({"stage3_prefetch_bucket_size": 0}, 3, {"stage3_prefetch_bucket_size": 10**9}, 20),  # there is no more
        ({"stage3_max_live_parameters": 2 * MIB}, 3, {"stage3_prefetch_bucket_size": 10**9}, 0),
        ({}, 2, {"offload_optimizer": {"device": "cpu"}}, -30 - 5),
        ({}, 3, {"offload_param.device": "cpu"}, -5),
    ],
)
def test_of_deepspeed(zero: dict[str, Any], stage: int, knobs: dict[str, Any], expected: float) -> None:
    """10 Mi elements in bf16 on four ranks: 20 MiB of parameters, as much of gradients, 120 of Adam's states."""
    named = {f"zero_optimization__{key}": value for key, value in knobs.items()}
    assert more(configured(zero, stage), **named) == pytest.approx(expected)


def test_of_fsdp2_in_mixed_precision() -> None:
    """80 MiB of float32 compute as 40, in units of which the largest has 10."""
    mixed = {"fsdp": [{**FSDP, "param_dtype": "bfloat16", "gathered": 40 * MIB, "largest": 10 * MIB}]}
    # 67.5: the second of four computes, the first is reduced, the third gathered from a quarter of it; 30 and 5 MiB.
    assert more(mixed, fsdp2__reshard_after_forward=False) == 90 - 67.5
    assert (
        more(mixed, fsdp2__modules_per_unit=2) == 85 - 67.5
    )  # units of 20, one beside the next, a quarter of it, and 40


def test_of_fsdp2_what_computing_takes_is_what_was_measured() -> None:
    """Of a peak of 200 MiB, 100 last from step to step: 32.5 more than 67.5 are of computing, which changes nothing of
    what is kept whole: 130 at the end of forward, 120 and 32.5 when backward begins."""
    uses = [replace(USES[0], between=100 * MIB)]
    (rank,) = memory_with({"fsdp2.reshard_after_forward": False}, uses, {"fsdp": [FSDP]}, 4)
    assert rank.then - rank.now == (152.5 - 100) * MIB


def test_of_fsdp2_units_are_as_they_are_listed() -> None:
    """Two frozen units of 10 MiB save nothing for backward; of the third, 20 MiB, half is trained; the last is the
    model's own. Backward begins with 20 that compute, 10 that are gathered, 5 of its own and 40 MiB of activations;
    forward ends with 20, what they came in, 5 and 40: 85. Whole: 20 more."""
    listed = [[10 * MIB, 0], [10 * MIB, 0], [20 * MIB, 10 * MIB], [5 * MIB, 5 * MIB]]
    assert more({"fsdp": [{**FSDP, "units": 4, "of_units": listed}]}, fsdp2__reshard_after_forward=False) == 20


def test_of_fsdp2_a_model_may_have_no_unit_of_its_own() -> None:
    """Four units of 10 MiB are then all freed after forward, as four are whose sizes are not listed one by one."""
    equal = {**FSDP, "units": 4, "bytes": 40 * MIB, "gathered": 40 * MIB, "largest": 10 * MIB}
    listed = {**equal, "of_units": [[10 * MIB, 10 * MIB]] * 4}
    taken = [
        more({"fsdp": [fact]}, fsdp2__reshard_after_forward=False)
        for fact in (equal, {**listed, "root": False}, {**listed, "root": True})
    ]
    assert taken[0] == taken[1] > taken[2]


def test_a_larger_micro_batch_takes_more_for_gradients_of_activations() -> None:
    """Of a peak of 200 MiB 100 last and 40 are activations: of the rest 2 are the largest gradient, and 58 double."""
    uses = [replace(use, between=100 * MIB) for use in USES[:1]]
    (rank,) = memory_with({"train_micro_batch_size_per_gpu": 8}, uses, configured({}, 2, "dsprof"), 4)
    assert rank.then - rank.now == (40 + 58) * MIB


def test_where_the_step_was_the_peak_the_rest_is_not_of_backward() -> None:
    """Gradients are summed in bf16 and become fp32 in the step: 10 MiB of a quarter of 10 Mi elements, 110 of the peak
    of 112. Backward, with 1 MiB of activations and no known rest, would have to grow by more before it is the peak."""
    facts = configured({"allgather_bucket_size": 1, "overlap_comm": False}, 2, "dsprof")
    for fact in facts["config"]:
        fact["content"]["data_types"] = {"grad_accum_dtype": "bf16"}
    parts = {**PARTS, "activations": MIB}
    uses = [replace(USES[0], peak=112 * MIB, between=100 * MIB, parts=parts)]
    (rank,) = memory_with({"train_micro_batch_size_per_gpu": 8}, uses, facts, 4)
    assert rank.then == rank.now


def test_buckets_close_with_the_parameter_that_reaches_their_size() -> None:
    """Of ten parameters of a Mi, buckets of 4 Mi and of 3.5 Mi are the same."""
    facts = configured({"reduce_bucket_size": 4 * MIB, "overlap_comm": False}, 2, "dsprof")
    for fact in facts["trained"]:
        fact["of_parameters"] = [MIB] * 10
    assert more(facts, zero_optimization__reduce_bucket_size=7 * MIB // 2) == 0


@pytest.mark.parametrize(
    ("zero", "stage", "knobs", "expected"),
    [
        # Buckets of 4 Mi and half of the largest parameter, of which three are on their way with overlap; scratch of a
        # quarter, as sums are wider than what travels.
        ({"reduce_bucket_size": 4 * MIB, "overlap_comm": False}, 2, {"reduce_bucket_size": 2 * MIB}, -4 * 1.25),
        # Parameters whole, 20 MiB, become a quarter, and at most 2 Mi elements whole; a Mi is gathered ahead.
        (
            {"allgather_bucket_size": 10**9, "stage3_prefetch_bucket_size": MIB, "stage3_max_live_parameters": 2 * MIB,
             "overlap_comm": False},
            2, {"stage": 3}, -15 + 4 + 2 - 20,
        ),
    ],
)  # fmt: skip
def test_of_the_engine(zero: dict[str, Any], stage: int, knobs: dict[str, Any], expected: float) -> None:
    named = {f"zero_optimization__{key}": value for key, value in knobs.items()}
    assert more(configured(zero, stage, "dsprof"), **named) == pytest.approx(expected)


def test_micro_batches_of_the_engine_are_added_up_whole_before_stage_2() -> None:
    """10 Mi elements in fp32: 40 MiB, in stage 1 and not in stage 2."""
    facts = configured({"reduce_bucket_size": MIB}, 1, "dsprof")
    for fact in facts["config"]:
        fact["content"]["gradient_accumulation_steps"] = 4
    assert more(facts, zero_optimization__stage=2) == pytest.approx(-40)


def test_what_is_frozen_is_sharded_as_well() -> None:
    """10 Mi elements that are trained and 100 Mi that are not, in bf16: of 220 MiB a quarter, 1 Mi whole at once and
    none ahead; 20 MiB are no longer gathered after the step."""
    zero = {
        "allgather_bucket_size": 10**9, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": MIB,
    }  # fmt: skip
    facts = configured(zero, 2, "dsprof")
    for fact in facts["trained"]:
        fact["frozen"] = 100 * MIB
    assert more(facts, zero_optimization__stage=3) == pytest.approx(-220 * 3 / 4 + 2 - 20)


def test_a_rank_that_had_nothing_of_what_is_sharded_gets_its_part() -> None:
    facts = configured({"allgather_bucket_size": 1, "reduce_bucket_size": 1}, 2, "dsprof")
    for fact in facts["config"]:
        fact["content"]["heterogeneous"] = {"memory": [1, 1, 1, None]}
    found = memory_with({"zero_optimization.stage": 1}, USES, facts, 4)
    assert [rank.then - rank.now for rank in found] == [0, 0, 0, 0]  # stage 1 of the engine keeps as much
    equal = memory_with({"heterogeneous.memory": None}, USES, facts, 4)
    assert equal[3].then - equal[3].now == pytest.approx(160 * MIB / 4 + MIB * 2 / 4, rel=1e-6)


def test_what_is_offloaded_from_host_memory_stays_there() -> None:
    on_host = [replace(use, place="host") for use in USES]
    for key in ("offload_optimizer", "offload_param"):
        (first, *_) = memory_with({f"zero_optimization.{key}": {"device": "cpu"}}, on_host, configured({}, 3), 4)
        assert first.then == first.now


def test_a_micro_batch_twice_as_large_takes_twice_the_activations() -> None:
    assert more(configured({}), train_micro_batch_size_per_gpu=8) == 40
    assert more(configured({}), train_micro_batch_size_per_gpu=1) == -30


def test_smaller_micro_batches_of_a_batch_that_stays_are_added_up() -> None:
    """Activations of 40 MiB halve; two micro-batches have a sum, 40 MiB in fp32, where one has none."""
    facts = configured({"allgather_bucket_size": 1, "reduce_bucket_size": 1}, 1, "dsprof")
    for fact in facts["config"]:
        fact["content"]["train_batch_size"] = 16
    assert more(facts, train_micro_batch_size_per_gpu=2) == pytest.approx(-20 + 40)


def test_what_is_not_known_is_not_told() -> None:
    assert more({}, ddp__gradient_as_bucket_view=True) is None
    assert more({}, zero_optimization__stage=3) is None
    assert more(configured({}), zero_optimization__stage=3, loader__num_workers=4) is None
    assert more({}, gc__freeze=True) is None
    assert memory_with({"optimizer.foreach": True}, [], {}, 0) == ()
    for filled_in in ("auto", None):
        assert more(configured({}), train_micro_batch_size_per_gpu=filled_in) is None
    assert more(configured({}), zero_optimization__reduce_bucket_size="auto") is None
    two_engines = {kind: [*facts, *facts] for kind, facts in configured({}).items()}
    assert more(two_engines, zero_optimization__stage=3) is None
    pipelined = {**configured({}, 1), "pipeline": [{"rank": rank} for rank in range(4)]}
    assert more(pipelined, zero_optimization__stage=0) is None


def test_each_key_is_one() -> None:
    assert all(find(key).key == key for key in (*MEMORY, *NOTHING))
    assert not any(map(has_memory, NOTHING))


def test_the_rank_that_would_take_most_is_told_and_whether_it_fits() -> None:
    memory = memory_with({"optimizer.foreach": True}, USES, {"optimizer": [{"implementation": "fused"}]}, 4)
    worst = most(memory)
    assert worst == RankMemory(3, "cuda.0", 203 * MIB, 223 * MIB, 300 * MIB)
    assert in_words(worst) == "203 MiB -> 223 MiB (rank 3)"
    too_much = RankMemory(3, "cuda.0", 203 * MIB, 323 * MIB, 300 * MIB)
    assert in_words(too_much) == "203 MiB -> 323 MiB (rank 3, more than the 300 MiB there are)"
    assert not too_much.fits


def test_what_ifs_tell_it_even_of_what_is_not_predicted() -> None:
    fact = {"fact": "ddp", "rank": 0, "site": "train.py:9", "gradient_as_bucket_view": False, "gradient_bytes": [MIB]}
    whole = study(Job(steps=24, facts=[fact, {**fact, "rank": 1}]).trace())
    whole = replace(whole, memory_uses=tuple(USES[:2]))
    questions = read_questions([], ["compute=0.5"], ["ddp.gradient_as_bucket_view=true"], [], "RUN")
    alone, view, both = answer_questions(whole, questions).rows
    assert alone.memory == ()
    assert view.gain is None
    assert "`dsprof fix RUN --set ddp.gradient_as_bucket_view=true --verify` measures it" in view.reason
    assert [one.then - one.now for one in view.memory] == [-MIB, -MIB] == [one.then - one.now for one in both.memory]
    said = render(answer_questions(whole, questions)).splitlines()
    at = said.index("most memory of a rank")
    assert said[at + 1].split() == ["ddp.gradient_as_bucket_view=true", "201", "MiB", "->", "200", "MiB", "(rank", "1)"]


def test_fixes_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    info = RunInfo(id="run", name="train", command=["dsprof", "run", "train.py"], status=0)
    info.facts = [{"fact": "ddp", "rank": rank, **DDP} for rank in range(4)]
    run.write_info(info)
    run.findings_json.write_text(json.dumps({"findings": [], "memory_use": [use.to_dict() for use in USES]}))
    assert main(["fix", str(run.path), "--set", "ddp.gradient_as_bucket_view=true"]) == 0
    assert "   memory 203 MiB -> 193 MiB (rank 3)\n" in capsys.readouterr().out
