"""Ranks with different configurations or models, or that run different modules: an error on each, before a wrong number
or a time-out."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
from engines import configuration
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.comm import deadlock
from dsprof.engine.comm.deadlock import Front, Post, stuck
from dsprof.engine.hooks import DEADLOCK, Span


def message(model: nn.Module, config: dict[str, Any]) -> str:
    try:
        ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ValueError as error:
        return str(error)
    return ""


# --- different configurations


def different_configurations(rank: int) -> list[str]:
    mine = (
        configuration(2 if rank else 0), configuration(gradient_clipping=0.5 + rank),
        configuration(gradient_accumulation_steps=3 + rank),
        configuration(pipeline={"schedule": "gpipe" if rank else "1f1b"}),
        configuration(wall_clock_breakdown=bool(rank)),
    )  # fmt: skip
    return [message(nn.Linear(4, 4), config) for config in mine]


def test_ranks_with_different_configurations_are_told_at_once(ranks: Ranks) -> None:
    """But for what each rank reports."""
    expected = [
        f"initialize: the ranks have different configurations, first in {key}: rank 0 has {first}, and rank 1 has "
        f"{second}: pass the same one on every rank"
        for key, first, second in (
            ("zero_optimization.stage", 0, 2), ("gradient_clipping", 0.5, 1.5),
            ("train_batch_size", 12, 16), ("pipeline.schedule", '"1f1b"', '"gpipe"'),
        )
    ]  # fmt: skip
    assert ranks.run(2, different_configurations) == [[*expected, ""]] * 2


# --- different models


class Mixed(nn.Module):
    def __init__(self, difference: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(5 if difference == "shape" else 4, 4, bias=False)
        self.register_buffer("scale", torch.ones(2 if difference == "buffer" else 1))
        if difference == "name":
            self.other = self.second
            del self.second
        elif difference == "dtype":
            self.second.double()
        elif difference == "frozen":
            self.second.requires_grad_(False)
        elif difference == "more":
            self.third = nn.Linear(1, 1, bias=False)


def different_models(rank: int, stage: int) -> dict[str, str]:
    kinds = ("none", "shape", "name", "dtype", "frozen", "more", "buffer")
    return {kind: message(Mixed(kind if rank == 1 else ""), configuration(stage)) for kind in kinds}


def test_ranks_with_different_models_are_told_at_once(ranks: Ranks) -> None:
    def text(first: str, second: str) -> str:
        return (
            f"initialize: the ranks have different models, first where rank 0 has {first}, and rank 1 has {second}: "
            "build the same one on every rank, from the same arguments, with the same parameters frozen"
        )

    expected = {
        "none": "",
        "shape": text("second.weight [4, 4] float32", "second.weight [4, 5] float32"),
        "name": text("second.weight [4, 4] float32", "other.weight [4, 4] float32"),
        "dtype": text("second.weight [4, 4] float32", "second.weight [4, 4] float64"),
        "frozen": text("second.weight [4, 4] float32", "second.weight [4, 4] float32, frozen"),
        "more": text("the buffer scale [1] float32", "third.weight [1, 1] float32"),
        "buffer": text("the buffer scale [1] float32", "the buffer scale [2] float32"),
    }
    assert ranks.run(2, different_models, 2) == [expected] * 2


def different_parts(rank: int) -> tuple[str, str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6 if rank == 3 else 8))
    tensor = message(model, configuration(tensor_parallel={"autotp_size": 2}))
    layers = [nn.Linear(8, 8), nn.Linear(8, 6 if rank == 3 else 8)]
    return tensor, message(ds.PipelineModule(layers, num_stages=2), configuration(pipeline={"stages": 2}))


def test_every_rank_is_told_of_a_difference_in_any_part(ranks: Ranks) -> None:
    """The first rank of the second stage is 2: those of the first have other layers, and are told all the same."""
    have = "0, 1, 2 have 1.weight [8, 8] float32, and rank 3 has 1.weight [6, 8] float32"
    for tensor, pipeline in ranks.run(4, different_parts):
        assert f"the ranks have different models, first where ranks {have}" in tensor
        assert "models on the pipeline stage 1, first where rank 2 has 1.weight [8, 8] float32, and rank 3" in pipeline


# --- different modules


class Branches(nn.Module):
    """Between two layers that all ranks run, `taken` of the branches: of 8 x 8 elements, and one of 8 x 24."""

    def __init__(self, taken: list[str]) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.before, self.left, self.right = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.wide, self.after = nn.Linear(8, 24, bias=False), nn.Linear(8, 1, bias=False)
        self.taken = taken

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for name in self.taken:
            x = x + getattr(self, name)(x)[:, :8]
        y: Tensor = self.after(x).mean()
        return y


def branches(rank: int, taken: list[list[str]], zero: dict[str, Any], first: list[str]) -> tuple[str, bool, float]:
    """The error of a training whose ranks take the same branches at first, whether weights changed, and seconds."""
    model = Branches(first or taken[rank])
    config = configuration(3, zero={"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, **zero})
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.ones(2, 8)
    steps = 2 if first else 0
    for _ in range(steps):
        engine.backward(engine(x))
        engine.step()
    model.taken = taken[rank]
    shards = [param.shard.clone() for param in engine.zero.params]
    began = time.monotonic()
    try:
        with mock.patch.object(deadlock, "PATIENCE_S", 0.2):
            for _ in range(2):
                engine.backward(engine(x))
                engine.step()
    except RuntimeError as error:
        same = all(torch.equal(old, new.shard) for old, new in zip(shards, engine.zero.params, strict=True))
        return str(error), same, time.monotonic() - began
    engine.destroy()
    return "", False, 0.0


WAITS = "ZeRO stage 3: the ranks ran different modules, and now wait for each other: "
TRAINED = ["left", "right", "wide"]


BRANCHES: dict[str, tuple[list[list[str]], dict[str, Any], str]] = {
    "equal sizes": (
        [["left"], ["right"]], {}, "rank 0 waits for the parameter left.weight; rank 1 waits for the parameter right"
    ),
    "unequal sizes": (
        [["left"], ["wide"]], {}, "rank 0 waits for the parameter left.weight; rank 1 waits for the parameter wide"
    ),
    "one takes none": (
        [["wide"], []], {}, "rank 0 waits for the parameter wide.weight; rank 1 waits for the parameter after"
    ),
    "prefetched": ([TRAINED, ["left"]], {"stage3_prefetch_bucket_size": 1000}, ""),
}  # fmt: skip
"""What each rank takes, settings, and what is said."""


@pytest.mark.parametrize(
    ("kind", "after_steps"),
    slow_but(
        [("equal sizes", False), ("unequal sizes", True), ("one takes none", False), ("prefetched", True)],
        among=itertools.product(BRANCHES, (False, True)),
    ),
)
def test_ranks_that_take_different_branches(ranks: Ranks, kind: str, after_steps: bool) -> None:
    """In `make test` each kind either at first or after steps that all took alike."""
    taken, zero, waits = BRANCHES[kind]
    first = TRAINED if after_steps else []
    found = ranks.run(2, branches, taken, zero, first)
    assert len({text for text, _, _ in found}) == 1
    for text, same, seconds in found:
        assert text.startswith(WAITS + waits)
        assert "all must run the same modules in the same order" in text
        assert same
        assert seconds < 60  # that of the group's timeout, in which nobody waited here


def test_three_ranks_of_which_one_takes_another_branch(ranks: Ranks) -> None:
    found = ranks.run(3, branches, [["left"], ["left"], ["right"]], {}, [])
    waits = "rank 0 waits for the parameter left.weight; rank 1 waits for the parameter left.weight; rank 2 waits for"
    assert [text.startswith(WAITS + waits) for text, _, _ in found] == [True] * 3


class Marks:
    """The steps that marks for deadlocks say."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin(self, span: Span) -> None:
        pass

    def end(self, span: Span) -> None:
        if span.name.startswith(DEADLOCK):
            self.steps.append(span.step)


def steps_of_marks(rank: int) -> list[int]:
    model = Branches(["left"])
    config = configuration(3, zero={"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0})
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    marks = Marks()
    engine.hooks.subscribe(marks)
    x = torch.ones(2, 8)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    model.taken = [["left"], ["right"]][rank]
    with mock.patch.object(deadlock, "PATIENCE_S", 0.2), pytest.raises(RuntimeError, match="now wait for each other"):
        engine.backward(engine(x))
    return marks.steps


def test_the_mark_for_a_deadlock_is_of_the_step_that_it_is_in(ranks: Ranks) -> None:
    assert ranks.run(2, steps_of_marks) == [[2], [2]]


def test_what_broadcasts_mix_does_not_reach_the_weights(ranks: Ranks) -> None:
    """They have no tags."""
    found = ranks.run(2, branches, [["left"], ["right"]], {"allgather_partitions": False}, [])
    for text, same, _ in found:
        assert "mixed up, first where rank 0 wanted left.weight, and rank 1 wanted right.weight" in text
        assert same


def slow(rank: int) -> list[float]:
    """One rank is late, in forward and before the step, and nobody minds."""
    model = Branches(["left"])
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=configuration(3))[0]
    looked = []
    original = deadlock.DeadlockWatch._posts

    def posts(watch: deadlock.DeadlockWatch) -> dict[int, Post]:
        looked.append(1)
        return original(watch)

    with (
        mock.patch.object(deadlock, "PATIENCE_S", 0.05),
        mock.patch.object(deadlock, "LOOK_S", 0.02),
        mock.patch.object(deadlock.DeadlockWatch, "_posts", posts),
    ):
        for _ in range(2):
            time.sleep(0.3 * rank)
            loss = engine(torch.ones(2, 8))
            time.sleep(0.3 * (1 - rank))
            engine.backward(loss)
            engine.step()
    engine.destroy()
    return [float(len(looked)), float(engine.get_global_grad_norm() or 0)]


def test_a_rank_that_is_late_is_waited_for(ranks: Ranks) -> None:
    (looked, norm), (_, other) = ranks.run(2, slow)
    assert looked > 0
    assert norm == other > 0


# --- what is proved by posts


def post(kind: str, **fronts: tuple[int, int | None, int]) -> Post:
    """`fronts`: how many were begun, the oldest, and its tag; of three ranks."""
    return Post(kind, {name: Front([0, 1, 2], *numbers) for name, numbers in fronts.items()})


def test_what_is_certain_of_who_waits_for_whom() -> None:
    at_p = post("p", p=(5, 4, 7), g=(3, None, 0))
    assert stuck({0: at_p, 1: at_p, 2: at_p}) == set()  # on its way
    assert stuck({0: at_p}) == set()  # the others may still come
    other = post("p", p=(5, 4, 8), g=(3, None, 0))
    assert stuck({0: at_p, 1: at_p, 2: other}) == {0, 1, 2}  # another content
    waits_g = post("g", p=(4, None, 0), g=(4, 3, 0))
    assert stuck({0: at_p, 1: waits_g}) == {0, 1}  # neither has begun the other's
    later = post("g", p=(5, None, 0), g=(4, 3, 0))
    assert stuck({0: at_p, 1: later}) == set()  # it has begun it, and so rank 0 will go on
    behind = post("p", p=(5, 3, 6), g=(3, None, 0))
    assert stuck({0: at_p, 1: behind}) == set()
    assert stuck({0: at_p, 1: behind, 2: post("g", p=(3, None, 0), g=(4, 3, 0))}) == {0, 1, 2}  # through another
    assert Post.load(at_p.dump()).dump() == at_p.dump()
