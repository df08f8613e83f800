"""comm.redundant-gather: parameters that are freed and gathered again, on made-up jobs of two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from findings import of
from meshes import Call, MeshJob, Phase, Program, Wait, Work

from dsprof.analyzer import analyze
from dsprof.analyzer.memory.free import SURELY_HELD

MIB = 1 << 20


def job(*, ms: float = 5.0, kept: bool = False, micro: int = 1, parameters: int = MIB, fsdp: int = 2) -> MeshJob:
    """Four units of 8 MiB, 8.1 ms each to gather, one ahead; `ms` of forward in each and twice as much of backward."""

    def units(ms: float, gathers: bool) -> tuple[Any, ...]:
        calls = [Call("w", "all_gather", 8 * MIB, "parameter", f"unit {i}") for i in range(4)]
        parts: list[Any] = [calls[0]] if gathers else []
        for i in range(4):
            parts += [calls[i + 1]] if gathers and i < 3 else []
            parts += [Wait(f"unit {i}")] if gathers else []
            parts += [Work(ms)]
        return tuple(parts)

    def program(rank: int, step: int) -> Program:
        found: list[Any] = []
        for part in range(micro):
            reduced = (Call("w", "reduce_scatter", 16384, "gradient"),) if part == micro - 1 else ()
            found += [
                Phase("forward", units(ms, not kept or part == 0)),
                Phase("backward", (Work(0.1), *units(2 * ms, not kept), *reduced)),
            ]
        return *found, Phase("optimizer", (Work(1),))

    facts = [
        {"fact": "fsdp", "version": fsdp, "units": 4, "site": "/home/me/train.py:30", "rank": rank} for rank in (0, 1)
    ]
    return MeshJob(2, {"w": ((0, 1), "")}, program, latency_ms=0.1, facts=facts, parameters=parameters)


@pytest.mark.plants("comm.redundant-gather")
def test_parameters_that_could_be_kept_from_forward_to_backward() -> None:
    planted = job()
    found = of(analyze(planted.trace()), "comm.redundant-gather")
    assert found is not None
    assert found.is_problem
    assert found.title.startswith("32.0 MiB of parameters are gathered 2 times in each step")
    assert dict(found.fixes[0].knobs) == {"fsdp2.reshard_after_forward": False}
    assert found.fixes[0].title.startswith(
        "fully_shard(reshard_after_forward=False) (train.py:30): each rank then holds"
    )
    true = planted.step_ms() - job(kept=True).step_ms()
    assert found.gain.ms == pytest.approx(true, rel=0.1)
    assert found.gain.low <= true <= found.gain.high


def test_of_micro_batches_each_but_the_first_gathers_for_nothing() -> None:
    planted = job(micro=2)
    found = of(analyze(planted.trace()), "comm.redundant-gather")
    assert found is not None
    assert "set_reshard_after_backward(False) in all micro-batches but the last" in found.fixes[0].title
    assert found.fixes[0].knobs == ()
    assert found.gain.ms == pytest.approx(planted.step_ms() - job(micro=2, kept=True).step_ms(), rel=0.1)


def test_fsdp1_has_another_word_for_it() -> None:
    found = of(analyze(job(fsdp=1).trace()), "comm.redundant-gather")
    assert found is not None
    assert "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP" in found.fixes[0].title


def of_deepspeed(**zero: Any) -> MeshJob:
    """The same of ZeRO stage 3, with a configuration that has this in its section."""
    content = {"zero_optimization": {"stage": 3, **zero}}
    facts = [
        fact
        for rank in (0, 1)
        for fact in (
            {"fact": "deepspeed", "zero_stage": 3, "rank": rank},
            {"fact": "config", "dialect": "deepspeed", "content": content, "rank": rank},
        )
    ]
    return replace(job(ms=1.0), facts=facts)


def test_of_stage_3_a_lower_stage_keeps_them() -> None:
    found = of(analyze(of_deepspeed().trace()), "comm.redundant-gather")
    assert found is not None
    assert found.fixes[0].title == "zero_optimization.stage: 2: each rank then always holds all parameters, 32.0 MiB"
    assert dict(found.fixes[0].knobs) == {"zero_optimization.stage": 2}


def in_two_dimensions(planted: MeshJob) -> MeshJob:
    """Each of the four units of 8 MiB is gathered in both, as experts and the rest of a model are."""
    once = planted.program

    def program(rank: int, step: int) -> Program:
        def of_both(part: Any) -> list[Any]:
            if isinstance(part, Phase):
                return [replace(part, parts=tuple(one for inner in part.parts for one in of_both(inner)))]
            groups = (f"a{rank // 2}", f"b{rank % 2}")
            if isinstance(part, Call):
                return [replace(part, group=of, later=part.later and f"{part.later} {of}") for of in groups]
            return [Wait(f"{part.later} {of}") for of in groups] if isinstance(part, Wait) else [part]

        return [one for part in once(rank, step) for one in of_both(part)]

    pairs = {"a0": (0, 1), "a1": (2, 3), "b0": (0, 2), "b1": (1, 3)}
    facts = [{**fact, "rank": rank} for rank in range(4) for fact in planted.facts if fact["rank"] == 0]
    groups = {name: (ranks, "") for name, ranks in pairs.items()}
    both = replace(planted, ranks=4, groups=groups, program=program, facts=facts)
    both.slower = lambda group, number: 2.0 if group in ("b0", "b1") else 1.0  # so that both are waited for
    return both


def test_of_stage_3_in_two_dimensions_it_is_said_once() -> None:
    both = in_two_dimensions(of_deepspeed())
    found = [one for one in analyze(both.trace()).findings if one.code == "comm.redundant-gather"]
    assert [one.title[:41] for one in found] == ["64.0 MiB of parameters are gathered 2 tim"]
    assert dict(found[0].fixes[0].knobs) == {"zero_optimization.stage": 2}


def test_of_fsdp2_in_two_dimensions_it_is_said_once_and_all_of_it_has_to_fit() -> None:
    """One setting keeps the parameters of both: 64 MiB on each rank."""
    both = in_two_dimensions(job(ms=1.0))
    found = [one for one in analyze(both.trace()).findings if one.code == "comm.redundant-gather"]
    assert [one.title[:41] for one in found] == ["64.0 MiB of parameters are gathered 2 tim"]
    assert dict(found[0].fixes[0].knobs) == {"fsdp2.reshard_after_forward": False}
    both.capacity = round(4 * ((1 << 30) + 40 * MIB) / SURELY_HELD)
    assert of(analyze(both.trace()), "comm.redundant-gather") is None


def test_where_the_setting_is_not_told_what_keeping_them_saves_is() -> None:
    """A first backward, of a loss of its own, gathers the last of eight units only."""

    def units(numbers: Sequence[int], ms: float) -> tuple[Any, ...]:
        return tuple(
            part
            for i in numbers
            for part in (Call("w", "all_gather", 4 * MIB, "parameter", f"unit {i}"), Wait(f"unit {i}"), Work(ms))
        )

    def program(rank: int, step: int) -> Program:
        reduced = Call("w", "reduce_scatter", 16384, "gradient")
        return (
            Phase("forward", units(range(8), 1.0)),
            Phase("backward", (Work(0.1), *units([7], 2.0))),
            Phase("backward", (Work(0.1), *units(range(8), 2.0), reduced)),
            Phase("optimizer", (Work(1),)),
        )

    found = of(analyze(replace(job(ms=1.0), program=program).trace()), "comm.redundant-gather")
    assert found is not None
    assert found.title.startswith("32.0 MiB of parameters are gathered 2.1 times in each step")


def test_a_lower_stage_does_not_take_offloaded_parameters() -> None:
    found = of(analyze(of_deepspeed(offload_param={"device": "cpu"}).trace()), "comm.redundant-gather")
    assert found is not None
    assert found.fixes[0].knobs == ()
    assert [(entry["op"], entry["path"]) for entry in found.fixes[0].patch] == [
        ("replace", "/zero_optimization/stage"), ("remove", "/zero_optimization/offload_param"),
    ]  # fmt: skip


@pytest.mark.parametrize("planted", [job(kept=True), job(ms=40.0)], ids=["kept already", "hidden"])
def test_what_gathers_no_more_than_it_needs(planted: MeshJob) -> None:
    analysis = analyze(planted.trace())
    assert of(analysis, "comm.redundant-gather") is None
    assert "comm.redundant-gather" in analysis.passed


def test_parameters_that_an_optimizer_changed_in_between_have_to_be_gathered_again() -> None:
    """As those of a GAN's discriminator are: gathered for its own step, changed, and gathered for the generator's."""
    planted = job(kept=True)
    once = planted.program

    def program(rank: int, step: int) -> Program:
        return tuple(
            replace(part, inputs=1 + half) if isinstance(part, Phase) and part.name == "optimizer" else part
            for half in (0, 1)
            for part in once(rank, step)
        )

    planted.program = program
    analysis = analyze(planted.trace())
    assert analysis.step_is == "an iteration of 2 optimizer steps: 1 of optimizer 1, 1 of optimizer 2"
    assert of(analysis, "comm.redundant-gather") is None
    assert "comm.redundant-gather" in analysis.passed


def test_without_knowing_the_memory_it_is_not_judged() -> None:
    analysis = analyze(job(parameters=0).trace())
    assert of(analysis, "comm.redundant-gather") is None
    assert "parameters are gathered 2.0 times in a step" in analysis.not_judged["comm.redundant-gather"]


@pytest.mark.parametrize(("spare", "proposed"), [(30, False), (34, True)])
def test_only_what_surely_fits_is_proposed(spare: int, proposed: bool) -> None:
    """Two ranks would keep 32 MiB each, on a host that has `spare` MiB for each below what may be in use."""
    planted = job()
    planted.capacity = round(2 * ((1 << 30) + spare * MIB) / SURELY_HELD)
    assert (of(analyze(planted.trace()), "comm.redundant-gather") is not None) == proposed
