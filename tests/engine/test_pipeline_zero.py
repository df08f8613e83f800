"""Pipelines whose replicas shard gradients and parameters: what each action reduces, holds, and may leave out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import watch_peak
from pipeline_models import MICROBATCHES, batches, configuration, examples, module, reference, start, weights
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn

from dsprof.engine.pipe import PipelineModule, TiedLayerSpec

WIDTH = 8


@contextmanager
def sent_bytes(group: dist.ProcessGroup | None) -> Iterator[list[int]]:
    """Bytes of each message that this rank sends in `group` within the block, but for flags."""
    found: list[int] = []
    isend = dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is group:
            found.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counting):
        yield found


def settings(schedule: str, stage: int, **zero: Any) -> dict[str, Any]:
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"pipeline": {"schedule": schedule}, "zero_optimization": {"stage": stage, **sharded, **zero}}


# --- every parameter has to have a gradient


def strict_job(rank: int, schedule: str, stage: int) -> dict[str, Tensor]:
    """Stages of the pipeline, each of two replicas; a parameter without a gradient is an error."""
    virtual = 2 if schedule == "interleaved" else 1
    model = module(2, virtual_stages=virtual).double()
    small = {"reduce_bucket_size": 300} if stage == 2 else {}
    engine = start(model, configuration(**settings(schedule, stage, ignore_unused_parameters=False, **small)))
    mesh = engine.parallel.mesh
    for step in batches(mesh.dp):
        engine.train_batch(iter(examples(step[:, mesh.dp_rank])))
    found = weights(engine)
    engine.destroy()
    return found


SCHEDULES = ("1f1b", "interleaved", "zero-bubble")


@pytest.mark.parametrize(
    ("schedule", "stage"),
    slow_but([("1f1b", 1), ("interleaved", 2), ("zero-bubble", 3)], among=itertools.product(SCHEDULES, (1, 2, 3))),
)
def test_a_pipeline_whose_parameters_are_all_used_is_not_refused(ranks: Ranks, schedule: str, stage: int) -> None:
    """In `make test` each schedule and each stage once; test_parallel_matrix.py has their pairs, without the check."""
    expected = reference(2)
    for found in ranks.run(4, strict_job, schedule, stage):
        for name, value in found.items():
            assert (value - expected[name]).abs().max().item() < 1e-9, name


class Spare(nn.Linear):
    """A layer with a parameter that its forward leaves out of all micro-batches but the first `used`."""

    def __init__(self, used: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.used = used
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        return y * self.spare if self.calls <= self.used else y


def spare_job(rank: int, schedule: str, stage: int, used: int, ignore: bool) -> str:
    layers = [nn.Linear(WIDTH, WIDTH), Spare(used), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    virtual = 2 if schedule == "interleaved" else 1
    model = PipelineModule(
        layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform", virtual_stages=virtual
    )
    engine = start(model, configuration(**settings(schedule, stage, ignore_unused_parameters=ignore)))
    data = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * MICROBATCHES
    try:
        engine.train_batch(iter(data))
    except RuntimeError as error:
        return str(error)
    engine.destroy()
    return "trained"


@pytest.mark.parametrize(
    ("schedule", "stage"),
    slow_but([("1f1b", 2), ("interleaved", 3), ("zero-bubble", 2)], among=itertools.product(SCHEDULES, (2, 3))),
)
def test_a_parameter_that_a_micro_batch_leaves_out_is_named(ranks: Ranks, schedule: str, stage: int) -> None:
    """Whether no micro-batch of a step uses it, or the later ones do not. In `make test` each schedule in one stage."""
    for used in (0, 1):
        found = ranks.run(4, spare_job, schedule, stage, used, False)
        assert all("1 parameters got no gradient" in said and "the first: 1.spare" in said for said in found), found
    assert ranks.run(4, spare_job, schedule, stage, 0, True) == ["trained"] * 4


# --- what is sent


def wire_job(rank: int, stage: int, virtual: int) -> tuple[int, int, list[float]]:
    """Bytes of gradients that a step of this rank sends, and elements that it has; the losses of the steps."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]
    model = PipelineModule(
        layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform", virtual_stages=virtual
    )
    zero = settings("interleaved", stage, reduce_bucket_size=10**6)
    engine = start(model, configuration(**zero))
    generator = torch.Generator().manual_seed(rank % 2)
    data = [
        (torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator))
        for _ in range(MICROBATCHES)
    ]
    losses = [engine.train_batch(iter(data)).item()]
    with sent_bytes(engine.zero.comms[0].group) as sent:
        losses.append(engine.train_batch(iter(data)).item())
    size = sum(param.numel for param in engine.zero.params)
    engine.destroy()
    return sum(sent), size, losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_sends_the_gradients_of_its_own_stage(ranks: Ranks, stage: int) -> None:
    """Each micro-batch's gradients go to the other replica once, half of each, however many stages a rank has."""
    losses = set()
    for virtual in (1, 2, 4):
        for sent, size, values in ranks.run(4, wire_job, stage, virtual):
            gradients = MICROBATCHES * size // 2 * 4
            flags = MICROBATCHES * (size // WIDTH**2 + virtual) * 4
            assert sent == gradients + flags
            losses.add(tuple(round(value, 6) for value in values))
    assert len(losses) == 1


# --- what is held


class Frozen(nn.Linear):
    """A layer that is not trained, and whose weight a function uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.weight.requires_grad_(False)


def shared(layer: nn.Linear, x: Tensor) -> Tensor:
    return x.tanh() @ layer.weight


def live_job(rank: int, schedule: str) -> tuple[int, dict[str, int]]:
    """Elements of parameters that are whole at most, and after each kind of action."""
    torch.manual_seed(3)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        TiedLayerSpec("projection", Frozen, forward_fn=shared),
        *(nn.Linear(WIDTH, WIDTH) for _ in range(5)),
        TiedLayerSpec("projection", Frozen, forward_fn=shared),
    ]
    model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    limit = {"stage3_max_live_parameters": 2 * WIDTH**2, "stage3_prefetch_bucket_size": 0}
    engine = start(model, configuration(**settings(schedule, 3, **limit)))
    data = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * MICROBATCHES
    engine.train_batch(iter(data))
    live = watch_peak(engine.zero.fetcher)
    after: dict[str, int] = defaultdict(int)

    class Listener:
        def begin(self, span: Any) -> None: ...

        def end(self, span: Any) -> None:
            if span.kind == "pipe":
                after[span.name] = max(after[span.name], live.live)

    stop = engine.hooks.subscribe(Listener())
    engine.train_batch(iter(data))
    stop()
    peak = live.peak
    engine.destroy()
    return peak, dict(after)


def test_weights_are_given_back_after_the_backward_that_used_them(ranks: Ranks) -> None:
    """What is not trained, too, and those whose own gradients are computed later and do not need them."""
    for peak, after in ranks.run(4, live_job, "zero-bubble"):
        assert peak <= 2 * WIDTH**2 + 2 * WIDTH
        assert after["B"] == after["W"] == 0
