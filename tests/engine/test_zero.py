"""ZeRO against a single process: whatever is set, the weights after some steps are the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import VOCABULARY, Small, batches, build, reference
from ranks import Ranks

from dsprof.engine.comm import Comm, open_comm
from dsprof.engine.hooks import Hooks, Span, subscribe
from dsprof.engine.lane import CpuLane
from dsprof.engine.zero import Comms, Zero, ZeroSettings
from dsprof.engine.zero.fetch import FetchSettings

STEPS, ACCUMULATE = 3, 2
LARGE = 10**9
SIZES = {
    "one bucket": (LARGE, LARGE, FetchSettings(LARGE, LARGE, LARGE), 0),
    "some": (1000, 500, FetchSettings(2000, 3000, 1500), 100),
    "each alone": (1, 1, FetchSettings(0, 1, 0), 0),
}
"""Name -> reduce and gather buckets, fetching, persistence threshold."""


def open_comms(hooks: Hooks) -> Comms:
    ranks = list(range(dist.get_world_size()))
    return Comms(
        open_comm(ranks, lambda: CpuLane("gradients", hooks)), open_comm(ranks, lambda: CpuLane("parameters", hooks))
    )


def settings(stage: int, overlap: bool, sizes: str) -> ZeroSettings:
    reduce, gather, fetch, persistence = SIZES[sizes]
    return ZeroSettings(
        stage, reduce, gather, overlap, param_persistence_threshold=persistence, fetch=fetch
    )


def train(model: Small, zero: Zero, optimizer: torch.optim.Optimizer, data: torch.Tensor, rank: int) -> None:
    for step in data:
        for number, microbatch in enumerate(step):
            zero.last_microbatch = number + 1 == len(step)
            (model(microbatch[rank]) / len(step)).backward()
            zero.finish_backward()
        torch._foreach_mul_(zero.collect(), zero.reducer.after)
        optimizer.step()
        zero.publish()
        zero.finish_publish()
        zero.clear()


def masters(zero: Zero) -> list[torch.nn.Parameter]:
    return [p.master for p in zero.trainable if p.master is not None]


def whole(zero: Zero) -> dict[str, torch.Tensor]:
    """The model's parameters, gathered."""
    zero.gatherer.bring([p for p in zero.params if not p.resident], LARGE)
    return {p.name: p.param.detach().clone() for p in zero.params}


def job(rank: int, chosen: ZeroSettings, kind: dict[str, Any], dtype: torch.dtype, adam: bool) -> float:
    """The largest difference to the reference after training."""
    hooks = Hooks()
    comms = open_comms(hooks)
    model = build(dtype, **kind)
    zero = Zero(model, chosen, comms, hooks)
    make = (lambda params: torch.optim.AdamW(params, lr=1e-2)) if adam else (lambda params: torch.optim.SGD(params, lr=0.5))
    data = batches(STEPS, ACCUMULATE, dist.get_world_size())
    train(model, zero, make(masters(zero)), data, rank)
    expected = build(dtype, **kind)
    reference(expected, make, data)
    found = whole(zero)
    return max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())


@pytest.mark.parametrize(
    ("world_size", "stage", "overlap", "sizes"),
    [case for n, case in enumerate(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (True, False), SIZES)) if n % 2 == 0],
)
def test_any_stage_trains_to_the_reference(ranks: Ranks, world_size: int, stage: int, overlap: bool, sizes: str) -> None:
    for recompute in (False, True):
        for difference in ranks.run(
            world_size, job, settings(stage, overlap, sizes), {"recompute": recompute}, torch.float64, False
        ):
            assert difference < 1e-12
