"""ZeRO against a single process: whatever is set, the weights after some steps are the same."""

from __future__ import annotations

import itertools
import time
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import ALONE, stored_bytes, watch_peak
from models import Small, batches, build, reference
from ranks import Ranks
from slow_cases import slow_but
from spans import comms as sent
from spans import names, recorded
from torch.utils.checkpoint import checkpoint

from dsprof.engine.comm.comm import Comm, open_comm
from dsprof.engine.comm.lane import CpuLane, LaneTicket
from dsprof.engine.config import Config, ZeroConfig
from dsprof.engine.hooks import Hooks, Purpose
from dsprof.engine.zero import Comms, Zero
from dsprof.engine.zero.gather import Gatherer
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.shares import Partition, equal

STEPS, ACCUMULATE = 3, 2
LARGE = 10**9
SIZES = {
    "one bucket": (LARGE, LARGE, (LARGE, LARGE, LARGE), 0),
    "some": (1000, 500, (2000, 3000, 1500), 100),
    "each alone": (1, 1, (0, 1, 0), 0),
}
"""Name -> reduce and gather buckets, fetching, persistence threshold."""


def open_comms(hooks: Hooks) -> Comms:
    ranks = list(range(dist.get_world_size()))
    return Comms(
        open_comm([ranks], lambda: CpuLane("gradients", hooks)),
        open_comm([ranks], lambda: CpuLane("parameters", hooks)),
    )


def fetch_settings(prefetch: int, live: int, reuse: int) -> dict[str, Any]:
    return {
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
    }


def settings(stage: int, overlap: bool, sizes: str) -> Config:
    reduce, gather, fetch, persistence = SIZES[sizes]
    return zero_config(stage, reduce, gather, overlap, persistence, fetch_settings(*fetch))


def zero_config(stage: int, reduce: int, gather: int, overlap: bool, persistence: int, fetch: dict[str, Any]) -> Config:
    section = ZeroConfig.model_validate({
        "stage": stage, "reduce_bucket_size": reduce, "allgather_bucket_size": gather, "overlap_comm": overlap,
        "stage3_param_persistence_threshold": persistence, **fetch,
    })  # fmt: skip
    return Config(zero_optimization=section)


def train(model: Small, zero: Zero, optimizer: torch.optim.Optimizer, data: torch.Tensor, rank: int) -> None:
    for step in data:
        for number, microbatch in enumerate(step):
            zero.begin_backward(last=number + 1 == len(step))
            (model(microbatch[rank]) / len(step)).backward()
            zero.finish_backward()
        zero.reducer.collect()
        torch._foreach_mul_(
            [master.grad for master in masters(zero) if master.grad is not None], zero.reducer.postscale
        )
        optimizer.step()
        zero.gatherer.publish(zero.trainable)
        zero.gatherer.drain()
        zero.reducer.rebuild_buckets()
        zero.reducer.clear()


def masters(zero: Zero) -> list[torch.nn.Parameter]:
    return [p.master for p in zero.trainable if p.master is not None]


def whole(zero: Zero) -> dict[str, torch.Tensor]:
    """The model's parameters, gathered."""
    zero.gatherer.gather([p for p in zero.params if not p.resident], LARGE)
    return {p.name: p.param.detach().clone() for p in zero.params}


def job(rank: int, chosen: Config, kind: dict[str, Any], dtype: torch.dtype, adam: bool) -> float:
    """The largest difference to the reference after training."""
    hooks = Hooks()
    comms = open_comms(hooks)
    model = build(dtype, **kind)
    zero = Zero(model, chosen, comms, hooks)
    make = (
        (lambda params: torch.optim.AdamW(params, lr=1e-2))
        if adam
        else (lambda params: torch.optim.SGD(params, lr=0.5))
    )
    data = batches(STEPS, ACCUMULATE, dist.get_world_size())
    train(model, zero, make(masters(zero)), data, rank)
    expected = build(dtype, **kind)
    reference(expected, make, data)
    found = whole(zero)
    return max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())


MATRIX = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (True, False), SIZES, (False, True)))


def check(ranks: Ranks, world_size: int, stage: int, overlap: bool, sizes: str, recompute: bool) -> None:
    chosen = settings(stage, overlap, sizes)
    for difference in ranks.run(world_size, job, chosen, {"recompute": recompute}, torch.float64, False):
        assert difference < 1e-12


@pytest.mark.parametrize(
    "case",
    [(2, 0, True, "each alone", False), (3, 1, False, "some", True), (2, 2, True, "one bucket", False),
     (3, 3, True, "some", True), (2, 3, False, "each alone", False)],
    ids=str,
)  # fmt: skip
def test_any_stage_trains_to_the_reference(ranks: Ranks, case: tuple[int, int, bool, str, bool]) -> None:
    """To the last digit; test_training_matrix.py has all pairs of settings."""
    check(ranks, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_combination_trains_to_the_reference(ranks: Ranks, case: tuple[int, int, bool, str, bool]) -> None:
    check(ranks, *case)


# --- gradients that come in parts


class Recomputing(torch.nn.Module):
    """Runs one layer `times` times, each of which a backward within the backward recomputes."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.again, self.last = (torch.nn.Linear(6, 6) for _ in range(3))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda x: torch.tanh(self.again(x)), x, use_reentrant=True)
        return self.last(x).square().mean()


def in_parts(rank: int, chosen: Config, times: list[int], accumulate: int) -> float:
    """The largest difference to one process that runs all ranks' models."""
    hooks = Hooks()
    model = Recomputing(times[rank]).double()
    zero = Zero(model, chosen, open_comms(hooks), hooks)
    data = torch.randn(STEPS, accumulate, len(times), 3, 6, generator=torch.Generator().manual_seed(2)).double()
    train(model, zero, torch.optim.SGD(masters(zero), lr=0.3), data, rank)
    expected = Recomputing(0).double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3)
    for step in data:
        for microbatch in step:
            for other, count in enumerate(times):
                expected.times = count
                (expected(microbatch[other]) / (accumulate * len(times))).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = whole(zero)
    return max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())


@pytest.mark.parametrize(
    ("stage", "sizes"),
    slow_but(
        [(0, "one bucket"), (1, "each alone"), (2, "one bucket"), (3, "each alone")],
        among=itertools.product((0, 1, 2, 3), ("one bucket", "each alone")),
    ),
)
def test_parts_of_a_gradient_that_come_after_its_bucket_was_sent(ranks: Ranks, stage: int, sizes: str) -> None:
    """On one rank of two, or not in the last micro-batch; the other's layer runs once, or not at all. (In stage 3 ranks
    must run the same modules.) In `make test` each stage with one size of buckets."""
    same, different = [([2, 2], 1), ([3, 3], 2)], [([3, 1], 1), ([0, 2], 1), ([3, 1], 2)]
    for times, accumulate in same if stage == 3 else same + different:
        for difference in ranks.run(2, in_parts, settings(stage, True, sizes), times, accumulate):
            assert difference < 1e-12


# --- stage 3 frees what it does not use


def lives(rank: int, limit: int) -> tuple[int, int, int, int]:
    """Most elements live, those of the largest module, bytes of storage after a step and after an evaluation."""
    hooks = Hooks()
    model = build(odd=False)
    fetch = fetch_settings(10_000, limit, 10_000)
    reduce, gather, _, _ = SIZES["some"]
    chosen = zero_config(3, reduce, gather, True, 0, fetch)
    zero = Zero(model, chosen, open_comms(hooks), hooks)
    live = watch_peak(zero.fetcher)
    optimizer = torch.optim.SGD(masters(zero), lr=0.1)
    data = batches(STEPS, 1, 2)
    train(model, zero, optimizer, data, rank)
    after_step = sum(map(stored_bytes, zero.params))
    with torch.no_grad():
        model(data[0, 0, rank])
    after_eval = sum(map(stored_bytes, zero.params))
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return live.peak, largest, after_step, after_eval


@pytest.mark.parametrize("limit", [900, 1500, 4000])
def test_stage_3_holds_no_more_than_it_may(ranks: Ranks, limit: int) -> None:
    for peak, largest, after_step, after_eval in ranks.run(2, lives, limit):
        assert 0 < largest <= peak <= limit
        assert after_step == after_eval == 0


# --- on a modelled link, time goes where the settings say


class Sleeping(torch.nn.Module):
    """A layer whose forward and backward take `ms` each, as far as the host can tell."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(100, 100, bias=False)
        self.ms = ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        y: torch.Tensor = self.linear(x)
        y.register_hook(lambda grad: time.sleep(self.ms / 1e3))  # type: ignore[func-returns-value]
        return y


def on_a_link(rank: int, chosen: Config) -> tuple[float, list[str]]:
    """Milliseconds of forward and backward of five sleeping layers, and the names of gradients' collectives."""
    hooks = Hooks()
    everyone = list(range(dist.get_world_size()))
    link = 40_000 / 0.020  # the weights of a layer take 20 ms
    comms = Comms(
        open_comm([everyone], lambda: CpuLane("gradients", hooks, link)),
        open_comm([everyone], lambda: CpuLane("parameters", hooks, link)),
    )
    model = torch.nn.Sequential(*(Sleeping(20) for _ in range(5)))
    zero = Zero(model, chosen, comms, hooks)
    optimizer = torch.optim.SGD(masters(zero), lr=0.0)
    taken = []
    for _ in range(3):
        with recorded() as spans:
            dist.barrier()
            begin = time.perf_counter()
            zero.begin_backward(last=True)
            model(torch.ones(1, 100)).sum().backward()
            zero.finish_backward()
            taken.append(1e3 * (time.perf_counter() - begin))
        zero.reducer.collect()
        optimizer.step()
        zero.gatherer.publish(zero.trainable)
        zero.gatherer.drain()
        zero.reducer.clear()
    return min(taken[1:]), names(sent(spans, "gradient"))


@pytest.mark.alone
def test_buckets_overlap_and_prefetch_move_time_on_a_link(ranks: Ranks) -> None:
    """Sleeping: 5 x 20 forward, 5 x 20 backward; each layer's communication takes 20. No host makes it shorter than
    that; a busy one makes it longer, so that what must be short may try again."""

    def ms(stage: int, bucket: int, overlap: bool, prefetch: int = 0, below: float = inf) -> tuple[float, int]:
        fetch = fetch_settings(prefetch, LARGE, 0)
        chosen = zero_config(stage, bucket, LARGE, overlap, 0, fetch)
        least = inf
        for _ in range(8):
            found = ranks.run(2, on_a_link, chosen)
            least = min(least, max(taken for taken, _ in found))
            if least < below:
                break
        return least, len(found[0][1])

    blocking, buckets = ms(1, 10_000, overlap=False)
    assert buckets == 5
    overlapped, buckets = ms(1, 10_000, overlap=True, below=250)
    assert buckets == 5
    late, buckets = ms(1, LARGE, overlap=True)
    assert buckets == 1
    assert blocking >= 300  # all five reductions stand in the way
    assert overlapped < 250  # only the last one does: 220, if sleeping were exact
    assert late >= 300  # one bucket, sent when backward is over
    fetching, _ = ms(3, 10_000, overlap=True)
    prefetching, _ = ms(3, 10_000, overlap=True, prefetch=30_000, below=290)
    assert fetching >= 380  # nine gathers stand in the way: the first layer's backward needs no weight
    assert prefetching < 290


# --- gathers that are several communications


class FirstBroadcastFails(Comm):
    """Of two ranks; what the lane runs after a failure may still succeed."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.size = 2

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: Purpose) -> LaneTicket:
        ticket = LaneTicket(Hooks(), "broadcast", {"purpose": purpose}, None)
        ticket.error = ConnectionError("of the first") if source == 0 else None
        ticket.finish()
        return ticket


def test_an_error_of_any_broadcast_is_raised() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    sharded = ShardedParam("weight", param, Partition(8, equal(2)), 0, ALONE, persistent=False, index=0)
    sharded.release()
    gatherer = Gatherer(FirstBroadcastFails(), ZeroConfig(allgather_partitions=False))
    with pytest.raises(ConnectionError, match="of the first"):
        gatherer.gather([sharded], 8)
