"""Pipelines take the time that their simulation says: layers that sleep, so that the cores do not matter."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from pipeline_models import start
from ranks import Ranks
from spans import recorded
from torch import Tensor, nn

from dsprof.engine.pipe import PipelineModule
from dsprof.engine.pipe.split_backward import later
from dsprof.engine.schedule import Action, make_plan, simulate

pytestmark = pytest.mark.alone

UNIT: Final = 0.05
"""Seconds of a layer's forward; its backward takes two, one for its inputs and one for its weights. Long beside a
message, which takes up to a millisecond of a slow host."""
MICROBATCHES: Final = 4
STEPS: Final = 5


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, seconds = ctx.weight, ctx.seconds

        def weights() -> None:
            time.sleep(seconds)
            torch.autograd.backward([weight], [torch.ones_like(weight)])

        time.sleep(seconds)
        later(weights)
        return grads[0], None, None


class Sleeps(nn.Module):
    """A layer that takes `seconds` for each of its three parts."""

    def __init__(self, seconds: float = UNIT) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self.seconds)
        return y


Step = tuple[dict[Action, float], float, float]
"""Seconds of each action of a rank; of the whole from its first to its last; and of waiting for others among that."""
StepsOf = Callable[[str, int, tuple[float, ...]], list[list[Step]]]


def timed(rank: int, schedule: str, virtual: int, seconds: tuple[float, ...]) -> list[Step]:
    model = PipelineModule(
        [Sleeps(each) for each in seconds], 2, loss_fn=nn.functional.mse_loss, partition_method="uniform",
        virtual_stages=virtual,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "pipeline": {"schedule": schedule},
    }  # fmt: skip
    engine = start(model, config)
    data = [(torch.ones(2, 4, requires_grad=True), torch.ones(2, 4))] * MICROBATCHES
    engine.train_batch(iter(data))
    steps: list[Step] = []
    for _ in range(STEPS):
        with recorded() as spans:
            engine.train_batch(iter(data))
        actions = [span for span in spans if span.kind == "pipe"]
        begin, end = min(span.start_ns for span in actions), max(span.end_ns or 0 for span in actions)
        waits = [s for s in spans if s.kind == "wait" and s.peer is not None and begin <= s.start_ns <= end]
        taken = {Action(span.name, span.stage, span.microbatch): span.dur_ns / 1e9 for span in actions}
        steps.append((taken, (end - begin) / 1e9, sum(span.dur_ns for span in waits) / 1e9))
    engine.destroy()
    return steps


@pytest.fixture(scope="module")
def steps_of(ranks: Ranks) -> StepsOf:
    """`timed` of two ranks, each once."""
    return functools.cache(functools.partial(ranks.run, 2, timed))


@pytest.mark.parametrize(
    ("schedule", "virtual", "seconds"),
    [
        pytest.param("gpipe", 1, (UNIT, UNIT), marks=pytest.mark.slow),
        ("1f1b", 1, (UNIT, UNIT)),
        pytest.param("1f1b", 1, (UNIT, 2 * UNIT), marks=pytest.mark.slow),
        ("interleaved", 2, (UNIT / 2,) * 4),
        ("zero-bubble", 1, (UNIT, UNIT)),
    ],
)
def test_bubbles_are_those_of_the_simulation(
    steps_of: StepsOf, schedule: str, virtual: int, seconds: tuple[float, ...]
) -> None:
    """Within 3 % of the step, given what each action took: a busy host makes sleeps longer, too."""
    plan = make_plan(schedule, 2, MICROBATCHES, virtual)
    errors: list[list[float]] = [[], []]
    for steps in zip(*steps_of(schedule, virtual, seconds), strict=True):
        taken = {action: each for step in steps for action, each in step[0].items()}
        assert len(taken) == sum(map(len, plan.actions))
        expected = simulate(plan, taken.__getitem__)
        for rank, (_, length, waited) in enumerate(steps):
            times = [expected.times[action] for action in plan.actions[rank]]
            bubble = times[-1][1] - times[0][0] - expected.busy_times[rank]
            errors[rank].append((waited - bubble) / length)
    for each in errors:
        assert abs(statistics.median(each)) < 0.03


def test_a_zero_bubble_step_is_shorter_than_1f1b(steps_of: StepsOf) -> None:
    """By the bubble: (p - 1)(F + B + W) against (p - 1)(F + B - W), at equal memory."""
    plain, split = (
        statistics.median(length for _, length, _ in steps_of(schedule, 1, (UNIT, UNIT))[0])
        for schedule in ("1f1b", "zero-bubble")
    )
    assert plain - split == pytest.approx(2 * UNIT, rel=0.4)
